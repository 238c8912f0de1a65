"""Random state as a function of a seed and a position: of the default generators, for a sample or a batch."""

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
    number = seed_for(seed, *place)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def generator_of(seed: int, *place: Any) -> torch.Generator:
    """A generator of torch's for the CPU that depends on a seed and a place alone, as ``seed_generators`` has them."""
    return torch.Generator().manual_seed(seed_for(seed, *place))


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """Leave the default generators as they were, whatever is drawn inside."""
    states = _states()
    try:
        yield
    finally:
        _set_states(states)


class SeededIterator:
    """An iterator that draws from the default generators, given generators of its own: of a seed and a place."""

    def __init__(self, iterator: Iterator[Any], seed: int, *place: Any) -> None:
        self._iterator = iterator
        with preserve_rng():
            seed_generators(seed, *place)
            self._states = _states()

    def __iter__(self) -> SeededIterator:
        return self

    def __next__(self) -> Any:
        with preserve_rng():
            _set_states(self._states)
            try:
                return next(self._iterator)
            finally:
                self._states = _states()


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def seed_for(seed: int, *place: Any) -> int:
    """A number of 63 bits, as ``seed_generators`` seeds with."""
    # 63 bits, which every generator takes; a hash, so that neighbours have nothing in common.
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
