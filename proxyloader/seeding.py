"""Random numbers that depend on a seed and a place alone: of the default generators, for a sample or a batch."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int, *place: Any) -> None:
    """Seed the generators that datasets draw from: torch's for the CPU, numpy's and Python's.

    Args:
        seed: the loader's.
        place: what is to be drawn for, such as (epoch, index); told apart by their ``repr``.
    """
    number = _number(seed, place)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the default generators as they were, whatever is drawn inside."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _number(seed: int, place: tuple[Any, ...]) -> int:
    # 63 bits, which every generator takes; a hash, so that neighbours have nothing in common.
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
