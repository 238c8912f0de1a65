"""Random state of the default generators as a function of a seed and a position, for a sample or a batch."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int, *place: Any) -> None:
    """Seed torch's CPU generator and those of NumPy and Python with ``derive_seed`` of the same arguments."""
    number = derive_seed(seed, *place)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def make_generator(seed: int, *place: Any) -> torch.Generator:
    """Return a CPU generator seeded with ``derive_seed`` of the same arguments."""
    return torch.Generator().manual_seed(derive_seed(seed, *place))


@contextlib.contextmanager
def preserve_rng(states: tuple[Any, ...] = ()) -> Iterator[None]:
    """Restore the default generators when the context ends. ``states``: from ``get_rng_states``, to set them before."""
    before = get_rng_states()
    try:
        if states:
            set_rng_states(states)
        yield
    finally:
        set_rng_states(before)


def get_rng_states() -> tuple[Any, ...]:
    """Return the states of torch's default generator, NumPy and Python."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def set_rng_states(states: tuple[Any, ...]) -> None:
    """Set the default generators to states from ``get_rng_states``, or only torch's to the first of them."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        np.random.set_state(states[1])
        random.setstate(states[2])


class SeededIterator(Iterator[Any]):
    """An iterator that draws from its own states of the default generators, initialized with ``seed_generators``."""

    def __init__(self, iterator: Iterator[Any], seed: int, *place: Any) -> None:
        self._iterator = iterator
        with preserve_rng():
            seed_generators(seed, *place)
            self._states = get_rng_states()

    def __next__(self) -> Any:
        with preserve_rng(self._states):
            try:
                return next(self._iterator)
            finally:
                self._states = get_rng_states()


def derive_seed(seed: int, *place: Any) -> int:
    """Derive a 63-bit seed from a seed and the ``repr`` of a position, such as (epoch, index)."""
    # Every generator accepts 63 bits. Hashing makes the seeds of neighboring positions unrelated.
    return int.from_bytes(hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest(), "little") >> 1
