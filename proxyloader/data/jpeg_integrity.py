"""JPEG integrity: whether a scan is complete, which a GPU's decoders do not check. Checked once for each sample.

NOTE [ Damaged scans ]
If a scan ends before the image does, libjpeg paints the rest grey, and so do Pillow and DALI on the CPU. The decoders
of a GPU leave the previous contents of that memory, such as part of another image, and report nothing. Therefore the
scan of a JPEG is read on the CPU, as libjpeg reads it and strictly, before the JPEG is sent to a GPU for the first
time. This takes 0.6 to 0.9 ms. A damaged JPEG is decoded by Pillow, then and in later epochs. The result is recorded
by the index of the sample, in memory that the workers share (``workers/fetch.py``). If a dataset opens other files for
the same index, only the first is checked. There is one exception: a file that was sound, and no longer ends as a JPEG,
is checked again, because it may have been truncated.

Images are checked after the dataset has returned the sample, in the thread that requested it. Therefore it does not
matter in which threads the dataset opens them, or what other loaders of the process read meanwhile.

libjpeg may miss damage in the later scans of a progressive JPEG, and a GPU then decodes them differently from Pillow.
The JPEG engines do not decode progressive JPEGs, and most of the work is to read their scans, which is what a check
does: at least three quarters of Pillow's time, ``parts.jsonl``. Therefore Pillow decodes all of them.
"""

from __future__ import annotations

import enum
from typing import Any

from .encoded_image import EncodedImage
from .image_calls import image_calls_in
from .jpeg_header import JpegHeader, count_scans


class ScanStatus(enum.IntEnum):
    """What is known of the scans of the images of a sample."""

    UNKNOWN = 0
    SOUND = 1
    DAMAGED = 2
    UNCHECKED = 3  # not to be checked or recorded


def leave_to_pillow(sample: Any, known: ScanStatus) -> bool:
    """Decode with Pillow those images of a sample that must not be sent to DALI. Worker.

    Returns:
        Whether a damaged scan was found, which must be recorded.

    Raises:
        ImageError: Pillow cannot decode the image either.
    """
    found_damage = False
    for call in image_calls_in(sample):
        image = call.image
        if image.header is not None and _is_for_pillow(image, image.header, known):
            # The limit of pixels was checked when the image was opened.
            call.take(EncodedImage.by_pillow(image.data, image.path, max_pixels=image.height * image.width))
            found_damage |= not image.header.is_progressive
    return found_damage


def _is_for_pillow(image: EncodedImage, header: JpegHeader, known: ScanStatus) -> bool:
    if header.is_progressive:  # its scans were checked when it was opened
        return known != ScanStatus.UNCHECKED
    if known in (ScanStatus.SOUND, ScanStatus.DAMAGED):
        return known == ScanStatus.DAMAGED
    return not any(count_scans(image.data, header)) or (known == ScanStatus.UNKNOWN and not is_whole(image.data))


def is_whole(data: bytes) -> bool:
    """Return whether libjpeg-turbo reads the JPEG without a warning."""
    import simplejpeg

    try:
        # Grey at an eighth of the size, so that most of the time is spent on reading the scan.
        simplejpeg.decode_jpeg(data, "GRAY", fastdct=True, fastupsample=True, min_height=1, min_width=1, min_factor=8)
    except ValueError:
        return False
    return True
