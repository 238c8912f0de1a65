"""The check of a JPEG that is decoded late, where the dataset reads it. Runs where the dataset runs.

NOTE [ Checked where it is read ]
With the stock loader a dataset meets the error of a damaged file where it decodes the image, as in ``convert``. It may
catch the error, and return something else. So a JPEG that is decoded late is checked there. If it is damaged, Pillow
or torchvision decodes it at once, as the stock loader does, and raises what it raises. What is checked later, before a
batch is sent (``workers/scan_checks.py``), is what came another way, such as an ``EncodedImage`` of the dataset's own.
"""

from __future__ import annotations

import threading
from typing import ClassVar

from .encoded_image import EncodedImage
from .jpeg_header import JpegHeader
from .jpeg_integrity import ScanChecker, has_whole_structure


class _Reading(threading.local):
    """What the dataset reads in this thread.

    Attributes:
        found: number of damaged images that were found in this process, in all threads, as a dataset may have some.
        is_known: whether the images are known to be sound, as they were checked in an earlier epoch.
        checker: checks the others; None: their structure alone is looked at.
    """

    found: ClassVar[int] = 0
    is_known = False
    checker: ScanChecker | None = None
    _found_before = 0

    def begin(self, is_known: bool, checker: ScanChecker | None) -> None:
        self.is_known, self.checker, self._found_before = is_known, checker, _Reading.found

    @property
    def has_found_damage(self) -> bool:
        """Whether a damaged image was found since the beginning."""
        return self._found_before != _Reading.found


reading = _Reading()


def is_sound(image: EncodedImage) -> bool:
    """Return whether a JPEG may be decoded late. If not, it is decoded where this is asked."""
    checker, header = reading.checker, image.header
    if header is None:
        return True
    if is_never_checked(header, checker):
        return False
    if reading.is_known or was_checked(image, checker):
        return True
    if checker is None:
        sound = has_whole_structure(image.data, header)
    else:
        sound = checker.is_sound(image.data, header)
    if sound:
        vars(image)["checked"] = _thoroughness(checker)
    else:
        _Reading.found += 1
    return sound


def was_checked(image: EncodedImage, checker: ScanChecker | None) -> bool:
    """Return whether a check as thorough as the checker's has found a JPEG to be sound."""
    return image.checked >= _thoroughness(checker)


def is_never_checked(header: JpegHeader, checker: ScanChecker | None) -> bool:
    """Return whether the strict check leaves an image to Pillow, as libjpeg may miss damage in its later scans."""
    return header.is_progressive and checker is not None and checker.is_strict


def _thoroughness(checker: ScanChecker | None) -> int:
    return 1 if checker is None else 3 if checker.is_strict else 2
