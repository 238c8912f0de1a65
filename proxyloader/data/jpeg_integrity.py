"""JPEG integrity: whether a scan is complete, which a GPU's decoders take for granted. Checked once for each sample.

NOTE [ Damaged scans ]
Where a scan ends before the image does, libjpeg (and Pillow, and DALI on the CPU) paints the rest grey. The decoders of
a GPU leave there whatever was in that memory before, such as part of another picture, and report nothing. So before a
JPEG goes to a GPU for the first time its scan is read through on the CPU, as libjpeg reads it and strictly; that takes
0.6 to 0.9 ms. A damaged one goes to Pillow, then and in later epochs. The main process remembers which sample is which,
by its index: a dataset that opens other files for the same index is looked at the first time only. (A file that was
sound, and does not end as a JPEG any more, is looked at again: it may have been cut off meanwhile.)

Images are looked at when the dataset has given its sample, in the thread that asked for it. So it does not matter in
which threads the dataset opens them, and what other loaders of the process read meanwhile.

Damage in the later scans of a progressive JPEG may be such that libjpeg does not notice it, and a GPU makes of it what
Pillow does not. No engine decodes those, and most of the work is to read their scans (three quarters of
Pillow's and more, ``parts.jsonl``), which is looking at them. So all of them go to Pillow.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .encoded_image import EncodedImage
from .jpeg_header import JpegHeader, count_scans
from .placeholders import image_calls_in


class ScanStatus(enum.IntEnum):
    """What is known of the scans of a sample's images."""

    UNKNOWN = 0
    SOUND = 1
    DAMAGED = 2
    UNCHECKED = 3  # and nobody is to look, or to remember


class IntegrityTable:
    """What is known of each sample of a dataset. Main process.

    Args:
        size: of the dataset; indices that are no whole numbers below it stay unknown.
    """

    def __init__(self, size: int) -> None:
        self._known: NDArray[np.uint8] = np.zeros(size, np.uint8)

    def of(self, indices: Sequence[Any]) -> bytes | None:
        """One ``ScanStatus`` for each index; None where all are sound."""
        try:
            known = self._known[_numbers(indices)]
        except IndexError:
            return bytes(len(indices))
        return None if (known == ScanStatus.SOUND).all() else known.tobytes()

    def note(self, indices: Sequence[Any], damaged: Sequence[Any]) -> None:
        """The samples of these indices were looked at, and those were found damaged."""
        with contextlib.suppress(IndexError):
            numbers = _numbers(indices)
            self._known[numbers] = np.where(np.isin(numbers, _numbers(damaged)), ScanStatus.DAMAGED, ScanStatus.SOUND)


def _numbers(indices: Sequence[Any]) -> NDArray[np.int64]:
    numbers = np.asarray(indices if len(indices) else np.empty(0, np.int64))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise IndexError("the indices are no whole numbers")
    return numbers


def leave_to_pillow(sample: Any, known: int) -> bool:
    """Decode with Pillow, of a sample's images, those whose scans DALI is not to be given. Worker.

    Args:
        sample: as the dataset gave it.
        known: the ``ScanStatus`` of its images.

    Returns:
        A scan was damaged, which is to be remembered.

    Raises:
        ImageError: Pillow cannot decode it either.
    """
    found_damage = False
    for call in image_calls_in(sample):
        image = call.image
        if image.header is not None and _is_for_pillow(image, image.header, known):
            # The limit was held when it was opened.
            call.take(EncodedImage.by_pillow(image.data, image.path, max_pixels=image.height * image.width))
            found_damage |= not image.header.is_progressive
    return found_damage


def _is_for_pillow(image: EncodedImage, header: JpegHeader, known: int) -> bool:
    if header.is_progressive:  # its scans were counted when it was opened
        return known != ScanStatus.UNCHECKED
    if known in (ScanStatus.SOUND, ScanStatus.DAMAGED):
        return known == ScanStatus.DAMAGED
    return not any(count_scans(image.data, header)) or (known == ScanStatus.UNKNOWN and not is_whole(image.data))


def is_whole(data: bytes) -> bool:
    """libjpeg-turbo reads the JPEG without a complaint."""
    import simplejpeg

    try:
        # An eighth of the size in grey, which leaves little to do but reading the scan.
        simplejpeg.decode_jpeg(data, "GRAY", fastdct=True, fastupsample=True, min_height=1, min_width=1, min_factor=8)
    except ValueError:
        return False
    return True
