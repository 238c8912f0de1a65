"""Scan checks: what is known of the scans of each sample, which is checked when it is read for the first time. Worker.

What is found is recorded by the index of the sample, in memory that the workers share. If a dataset opens other files
for the same index, only the first is checked. That each one ends as a JPEG is looked at in every epoch, when it is
opened, by ``EncodedImage.of_jpeg``.

Images that the dataset opens with Pillow or torchvision are checked where it reads them: see NOTE [ Checked where it is
read ]. Others are checked after the dataset has returned the sample, in the thread that requested it.
"""

from __future__ import annotations

import contextlib
import enum
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.dataset import length_of
from ..data.encoded_image import EncodedImage
from ..data.image_calls import image_calls_in
from ..data.jpeg_header import JpegHeader
from ..data.jpeg_integrity import ScanChecker, has_whole_structure
from ..data.read_check import is_never_checked, was_checked
from .arena import Arena


class ScanStatus(enum.IntEnum):
    """What is known of the scans of the images of a sample."""

    UNKNOWN = 0
    SOUND = 1
    DAMAGED = 2
    UNCHECKED = 3  # not to be checked or recorded


_STATUSES = tuple(ScanStatus)


class IntegrityTable:
    """The ``ScanStatus`` of each sample of a dataset, in memory that workers share; see NOTE [ Damaged scans ].

    Indices that are not integers below ``size`` stay unknown.
    """

    def __init__(self, size: int, is_strict: bool = False) -> None:
        self.checker = ScanChecker(is_strict)
        self._size = size
        self._own = np.zeros(0, np.uint8)
        self._shared: Arena | None = None
        try:
            self._shared = Arena(1, size) if size else None
        except OSError:  # no shared memory: each process checks what it reads
            self._own = np.zeros(size, np.uint8)

    @classmethod
    def for_dataset(cls, dataset: Any, is_strict: bool, before: IntegrityTable | None) -> IntegrityTable:
        """Return the table of an earlier epoch if its check is the same, otherwise a new one."""
        if before is not None and before.checker.is_strict == is_strict:
            return before
        return cls(length_of(dataset) or 0, is_strict)

    @property
    def _known(self) -> NDArray[np.uint8]:
        return self._own if self._shared is None else self._shared.memory(0, self._size)[: self._size]

    def of(self, index: Any) -> ScanStatus:
        try:
            return _STATUSES[int(self._known[operator.index(index)])]
        except (IndexError, TypeError):
            return ScanStatus.UNKNOWN

    def are_sound(self, indices: Sequence[Any]) -> bool:
        """Return whether the images of all these indices are known to be sound."""
        try:
            return bool((self._known[[operator.index(index) for index in indices]] == ScanStatus.SOUND).all())
        except (IndexError, TypeError):
            return False

    def note(self, index: Any, is_damaged: bool) -> None:
        with contextlib.suppress(IndexError, TypeError):
            self._known[operator.index(index)] = ScanStatus.DAMAGED if is_damaged else ScanStatus.SOUND


def leave_to_pillow(sample: Any, known: ScanStatus, checker: ScanChecker | None) -> bool:
    """Decode with Pillow those images of a sample that must not be sent to DALI.

    Args:
        checker: checks what is unknown; None only where ``known`` is UNCHECKED.

    Returns:
        Whether a damaged scan was found, which must be recorded.

    Raises:
        ImageError: Pillow cannot decode the image either.
    """
    found_damage = False
    for call in image_calls_in(sample):
        image = call.image
        if image.header is not None and _is_for_pillow(image, image.header, known, checker):
            # The limit of pixels was checked when the image was opened.
            call.take(EncodedImage.by_pillow(image.data, image.path, max_pixels=image.height * image.width))
            found_damage |= not is_never_checked(image.header, checker)
    return found_damage


def _is_for_pillow(image: EncodedImage, header: JpegHeader, known: ScanStatus, checker: ScanChecker | None) -> bool:
    if is_never_checked(header, checker):
        return True
    if was_checked(image, checker):
        return False
    if known in (ScanStatus.SOUND, ScanStatus.DAMAGED):
        return known == ScanStatus.DAMAGED
    if checker is None:
        return not has_whole_structure(image.data, header)
    return not checker.is_sound(image.data, header)
