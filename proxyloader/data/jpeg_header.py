"""JPEG headers: size, kind, and number of scans. Runs in the worker."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import numpy as np

JPEG_START = b"\xff\xd8\xff"
JPEG_END = b"\xff\xd9"

# Baseline, extended and progressive Huffman frames, which libjpeg and the GPU's decoders decode alike. Lossless,
# hierarchical and arithmetic frames are left to Pillow, which decodes some of them and raises for the others.
_DECODED_ALIKE = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_RGB_COMPONENT_IDS = b"RGB"
_NO_SAMPLING = 0x11
_BEFORE_SCANS = frozenset({0xC4, 0xCC, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE}) | _DECODED_ALIKE | _OTHER_FRAMES
_BETWEEN_SCANS = frozenset({0xC4, 0xDA, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
_ALL_COEFFICIENTS = (1 << 64) - 1
_SCAN_HEADER = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")


class JpegHeader(NamedTuple):
    """Properties of a JPEG file that its header gives before the first scan.

    Attributes:
        height, width: in pixels, as stored. The EXIF orientation is not applied, as in torchvision.
        as_pillow: whether DALI's decoders and Pillow give the same RGB for this file, as far as the header tells.
        is_progressive: whether the scans refine each other.
        first_scan: offset of the first scan, in bytes.
        component_ids: one byte for each component.
    """

    height: int
    width: int
    as_pillow: bool
    is_progressive: bool
    first_scan: int
    component_ids: bytes

    @property
    def is_grey(self) -> bool:
        return len(self.component_ids) == 1


def read_jpeg_header(data: bytes | memoryview) -> JpegHeader | None:
    """Read size and kind of a JPEG from its marker segments (ITU T.81, annex B); None if they are not valid.

    Args:
        data: content of the file, whole or truncated.
    """
    at, end = 2, len(data)
    frame: tuple[int, int, bool, bytes, bool] | None = None
    adobe_transform = None
    while at + 4 <= end:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if length < 2 or at + 2 + length > end:
            return None
        if marker in _DECODED_ALIKE or marker in _OTHER_FRAMES:
            if length < 8 or frame is not None:
                return None
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            if length < 8 + 3 * components:
                return None
            ids = bytes(data[at + 10 : at + 10 + 3 * components : 3])
            alike = marker in _DECODED_ALIKE and bits == 8 and components in (1, 3) and ids != _RGB_COMPONENT_IDS
            if components == 1 and data[at + 11] != _NO_SAMPLING:
                alike = False  # meaningless in a grey image, but the GPU's decoders apply it
            frame = height, width, alike, ids, marker == 0xC2
        elif marker in (0xE0, 0xEE) and length < 9 and bytes(data[at + 4 : at + 8]) in (b"JFIF", b"Adob"):
            return None  # Pillow reads a version from it
        elif marker == 0xEE and length >= 14 and bytes(data[at + 4 : at + 9]) == b"Adobe":
            adobe_transform = data[at + 15]
        elif marker == 0xDB and not _has_whole_tables(data, at + 4, at + 2 + length):
            return None
        elif marker not in _BEFORE_SCANS and marker != 0xDA:
            return None  # see NOTE [ What DALI cannot parse ] in dali/api.py
        elif marker == 0xDA:
            if frame is None or 0 in frame[:2]:
                return None
            height, width, alike, ids, progressive = frame
            alike = alike and adobe_transform != 0  # 0: the three components are RGB, not YCbCr
            return JpegHeader(height, width, alike, progressive, at, ids)
        at += 2 + length
    return None


def _has_whole_tables(data: bytes | memoryview, at: int, end: int) -> bool:
    """Return whether the quantization tables of a segment are whole, which Pillow asks for."""
    while at < end:
        at += 129 if data[at] >> 4 else 65
    return at == end


def count_scans(data: bytes | memoryview, header: JpegHeader) -> tuple[int, int]:
    """Read through all scans of a JPEG. This takes longer than reading the header.

    Args:
        data: the data that the header was read from.

    Returns:
        The number of scans, and the end of the JPEG in bytes; other data may follow. (0, 0) if decoders may differ, so
        that only Pillow decides: a marker is misplaced, coefficients come twice or are missing, or the file is
        truncated. libjpeg interpolates missing coefficients.
    """
    array = np.frombuffer(data, np.uint8)
    is_marker = array[:-1] == 0xFF
    np.logical_and(is_marker, array[1:], out=is_marker)  # 0: a stuffed byte
    missing = dict.fromkeys(header.component_ids, _ALL_COEFFICIENTS)
    scans, restarts, at = 0, 0, header.first_scan
    while at < len(is_marker):
        at += int(is_marker[at:].argmax())
        marker = data[at + 1] if is_marker[at] else 0
        if marker == 0xFF:  # fill byte
            at += 1
        elif 0xD0 <= marker <= 0xD7 and marker & 7 == restarts & 7:
            restarts, at = restarts + 1, at + 2
        elif marker in _BETWEEN_SCANS and any(missing.values()):
            end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            if marker == 0xDA:
                if not _scan_brings_something_new(data[at + 4 : end], missing, header.is_progressive):
                    break
                scans, restarts = scans + 1, 0
            if end < at + 4:
                break
            at = end
        elif marker == 0xD9 and not any(missing.values()):
            return scans, at + 2
        else:
            break
    return 0, 0


def _scan_brings_something_new(header: bytes | memoryview, missing: dict[int, int], progressive: bool) -> bool:
    """Remove the coefficients of a scan from ``missing``, which has one bit for each of the 64 of a component.

    Return False if the scan is not valid, or brings a coefficient again.
    """
    if not header or len(header) != 4 + 2 * header[0]:
        return False
    first, last, bits = header[-3:]
    if first > last or (not progressive and (first, last, bits) != (0, 63, 0)):
        return False
    band = (2 << last) - (1 << first)
    for component in header[1:-3:2]:
        if missing.get(component, 0) & band != band:
            return False
        if bits & 15 == 0:  # the least significant bit
            missing[component] &= ~band
    return True


def count_scan_headers(data: bytes) -> int:
    """Return how many byte sequences look like the header of a scan, in a JPEG of any kind."""
    return len(_SCAN_HEADER.findall(data))
