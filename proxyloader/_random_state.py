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
    """Seed torch's CPU generator and those of NumPy and Python with ``seed_for`` of the same arguments."""
    number = seed_for(seed, *place)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def generator_of(seed: int, *place: Any) -> torch.Generator:
    """Return a CPU generator seeded with ``seed_for`` of the same arguments."""
    return torch.Generator().manual_seed(seed_for(seed, *place))


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the default generators when the context ends."""
    states = states_now(beside_torch=True)
    try:
        yield
    finally:
        set_states(states)


@contextlib.contextmanager
def drawing_from(states: tuple[Any, ...]) -> Iterator[None]:
    """Set the default generators to earlier ``states_now``, and restore them when the context ends."""
    with preserve_rng():
        set_states(states)
        yield


def states_now(beside_torch: bool) -> tuple[Any, ...]:
    """Return the state of torch's default generator; if ``beside_torch``, also those of NumPy and Python."""
    state = torch.default_generator.get_state()
    return (state, np.random.get_state(), random.getstate()) if beside_torch else (state,)


def set_states(states: tuple[Any, ...]) -> None:
    """Set the default generators to earlier ``states_now``."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        np.random.set_state(states[1])
        random.setstate(states[2])


class SeededIterator:
    """An iterator that draws from its own states of the default generators, initialized with ``seed_generators``."""

    def __init__(self, iterator: Iterator[Any], seed: int, *place: Any) -> None:
        self._iterator = iterator
        with preserve_rng():
            seed_generators(seed, *place)
            self._states = states_now(beside_torch=True)

    def __iter__(self) -> SeededIterator:
        return self

    def __next__(self) -> Any:
        with drawing_from(self._states):
            try:
                return next(self._iterator)
            finally:
                self._states = states_now(beside_torch=True)


def seed_for(seed: int, *place: Any) -> int:
    """Derive a 63-bit seed from a seed and the ``repr`` of a position, such as (epoch, index)."""
    # Every generator accepts 63 bits. Hashing makes the seeds of neighboring positions unrelated.
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
