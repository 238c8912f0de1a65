"""Samples whose JPEGs passed the checks in an earlier epoch, in memory shared by the workers. Worker.

Samples are recorded by index. If a dataset later opens other files for the same index, their scans are not searched for
lost blocks. Their segments and their end are checked in every epoch, by ``EncodedImage.of_jpeg``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.jpeg import checks
from .arena import Arena


class PassedSamples:
    """The indices of samples whose JPEGs are sound; see NOTE [ Damaged scans ].

    Indices that are not integers below ``size`` never count as passed.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._own = np.zeros(0, np.uint8)
        self._shared: Arena | None = None
        try:
            self._shared = Arena(1, size) if size else None
        except OSError:  # no shared memory: each process checks what it reads
            self._own = np.zeros(size, np.uint8)

    @property
    def _passed(self) -> NDArray[np.uint8]:
        return self._own if self._shared is None else self._shared.memory(0, self._size)[: self._size]

    def has_all(self, indices: Sequence[Any]) -> bool:
        try:
            return bool(self._passed[[operator.index(index) for index in indices]].all())
        except (IndexError, TypeError):
            return False

    def add(self, indices: Sequence[Any]) -> None:
        with contextlib.suppress(IndexError, TypeError):
            self._passed[[operator.index(index) for index in indices]] = 1


@contextlib.contextmanager
def checking(passed: PassedSamples | None, indices: Sequence[Any]) -> Iterator[None]:
    """Context for reading samples: skip the checks that all of them have passed, or record that all pass.

    ``passed`` is None if no GPU decodes the JPEGs, or lost blocks are not searched for.
    """
    checks.find_zeros = passed is not None
    checks.are_passed = are_passed = passed is not None and passed.has_all(indices)
    damaged = checks.damaged
    try:
        yield
    finally:
        checks.find_zeros, checks.are_passed = True, False  # the collate_fn may read other files
    if passed is not None and not are_passed and damaged == checks.damaged:
        passed.add(indices)
