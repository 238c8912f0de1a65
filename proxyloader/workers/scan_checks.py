"""PassedSamples: samples whose JPEGs passed the checks in an earlier epoch, in shared memory. Worker.

Samples are recorded by index. If a dataset later opens other files for the same index, their scans are not searched for
lost blocks. ``EncodedImage`` checks segments and the end of a file in every epoch.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.jpeg import checks
from .arena import Arena


class PassedSamples:
    """The indices of samples whose JPEGs are sound; see NOTE [ Damaged scans ].

    Indices other than integers below ``size`` never count as passed.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._local = np.zeros(0, np.uint8)
        self._shared: Arena | None = None
        try:
            self._shared = Arena(1, size) if size else None
        except OSError:  # no shared memory; each process checks the files that it reads
            self._local = np.zeros(size, np.uint8)

    @property
    def _passed(self) -> memoryview:
        return (self._local if self._shared is None else self._shared.memory(0, self._size)[: self._size]).data

    def has_all(self, indices: Sequence[Any]) -> bool:
        passed = self._passed
        try:
            return all(passed[operator.index(index)] for index in indices)
        except (IndexError, TypeError):
            return False

    def add(self, indices: Sequence[Any]) -> None:
        passed = self._passed
        with contextlib.suppress(IndexError, TypeError):
            for index in indices:
                passed[operator.index(index)] = 1


class checking:
    """Context for reading samples: skip the checks if all have passed before, or record that all pass.

    ``passed`` is None if no GPU decodes the JPEGs, or ``check_scans`` is False. A class, because it is entered for each
    sample.
    """

    def __init__(self, passed: PassedSamples | None, indices: Sequence[Any]) -> None:
        self._passed, self._indices = passed, indices

    def __enter__(self) -> None:
        checks.find_zeros = self._passed is not None
        checks.already_passed = self._are_passed = self._passed is not None and self._passed.has_all(self._indices)
        self._damaged = checks.damaged

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        checks.find_zeros, checks.already_passed = True, False  # the collate_fn may read other files
        if kind is None and self._passed is not None and not self._are_passed and self._damaged == checks.damaged:
            self._passed.add(self._indices)
