"""JPEG integrity: whether the scan of a JPEG is complete, which a GPU's decoders do not check.

NOTE [ Damaged scans ]
If a scan ends before the image does, and the end marker follows, libjpeg paints the rest grey, and so do Pillow and
DALI on the CPU. Without an end marker Pillow raises an error; ``EncodedImage.of_jpeg`` sees that. The decoders of a GPU
leave the previous contents of that memory, such as part of another image, and report nothing. Therefore a JPEG is
checked on the CPU before it is sent to a GPU for the first time, and Pillow decodes a damaged one.

The default check takes about 0.1 ms. It looks at the markers between and behind the scans, and for a run of zeros. Then
libjpeg reads the header and the start of the scan, which needs sound tables. So the check finds each file that was
truncated and not given an end marker again, and nearly all in which blocks are zeros or hold other data than pictures.
A picture with a plain area may have a run of zeros, too, so the strict check decides then.

The strict check reads the scan as libjpeg does, and takes about 1 ms. It also finds most of the files in which a
few bytes changed or are missing. No check finds all of them, as many changes give a valid scan of another picture.
``benchmarks/results/scan_checks.jsonl`` has the figures.

libjpeg may miss damage in the later scans of a progressive JPEG, and a GPU then decodes them differently from Pillow. A
strict check of them would take at least three quarters of Pillow's time (``parts.jsonl``). So with strict checks Pillow
decodes all of them. The default check takes about 0.5 ms for them, and finds the same as of others: each file that was
truncated, as a scan is missing or its end marker is. CUDA decodes what it takes for sound.
"""

from __future__ import annotations

from .jpeg_header import JpegHeader, count_scans
from .jpeg_verdicts import VerdictFile, fingerprint_of

LOST = bytes(64)
"""A run of zeros that a lost block leaves."""

START_BYTES = 64
"""How much of a scan libjpeg reads for the tables of a JPEG."""

CUT = "Premature end of JPEG file"
"""libjpeg's warning about a JPEG that has been cut."""


class ScanChecker:
    """Checks whether the scan of a JPEG is complete.

    Args:
        is_strict: read each scan as libjpeg does. What is found is kept; see NOTE [ Verdict file ].
    """

    def __init__(self, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._verdicts = VerdictFile.of_user(create=is_strict)

    def is_sound(self, data: bytes, header: JpegHeader) -> bool:
        """Return the verdict that is kept of a JPEG, or check it."""
        has_lost_blocks = data.find(LOST, header.first_scan) >= 0
        if header.is_progressive and has_lost_blocks:
            return False  # libjpeg may not have noticed them when it gave a verdict
        fingerprint = fingerprint_of(data) if self._verdicts is not None else 0
        known = self._verdicts.is_sound(fingerprint) if self._verdicts is not None else None
        if known is not None:
            return known
        if not has_whole_structure(data, header):
            return False
        if not self.is_strict and not has_lost_blocks:
            return damage_of(data[: header.first_scan + START_BYTES]) in ("", CUT)
        is_sound = not damage_of(data)
        if self._verdicts is not None:
            self._verdicts.note(fingerprint, is_sound)
        return is_sound


def has_whole_structure(data: bytes, header: JpegHeader) -> bool:
    """Return whether the markers between and behind the scans are as they should be."""
    return any(count_scans(data, header))


def damage_of(data: bytes) -> str:
    """Return libjpeg-turbo's first warning about a JPEG; "" if there is none."""
    import simplejpeg

    try:
        # Grey at an eighth of the size, so that most of the time is spent on reading the scan.
        simplejpeg.decode_jpeg(data, "GRAY", fastdct=True, fastupsample=True, min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        return str(error)
    return ""
