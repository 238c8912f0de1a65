"""JPEG files: header, kind, size and soundness. Runs where the dataset runs.

NOTE [ Damaged scans ]
If a scan ends before the image does, and the end marker follows, libjpeg paints the rest grey, and so do Pillow and
DALI on the CPU. The decoders of a GPU leave the previous contents of that memory, such as part of another image, and
report nothing. Therefore a JPEG is checked on the CPU before it is sent to a GPU, and Pillow decodes a damaged one.

The check reads the markers between and behind the scans, which finds each truncated file that was not given an end
marker again. Before a GPU it also searches the scans for a run of zeros, as in a lost block of a disk. A plain area of
a picture may have one, too, so libjpeg then decodes the scan and decides. This finds nearly all files in which blocks
are zeros or hold other data than pictures. No check finds all damage, as many changes give a valid scan of another
picture. The figures are in ``benchmarks/results/scan_checks.jsonl``.

NOTE [ When errors are raised ]
With the stock loader a dataset meets the error of a damaged file in ``Image.open``, or where it decodes the image, as
in ``convert``. It may catch the error and return something else, and no transform has drawn random numbers for the file
yet. So whether Pillow raises an error must be known before an image is handed on undecoded. Entropy-coded data causes
no errors in libjpeg, only warnings. Everything else that can fail is in the marker segments. Therefore Pillow decodes
the skeleton of a file: all of its segments that Pillow or libjpeg read, around an image of 8 x 8 pixels without
entropy-coded data. That takes some 40 µs. The skeletons of most baseline files in a dataset are equal, and results are
cached.
"""

from __future__ import annotations

import functools
import io
import struct
import threading
from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import jpeg_factory

JPEG_START = b"\xff\xd8\xff"
JPEG_END = b"\xff\xd9"

ZERO_RUN = bytes(64)
"""A run of zeros that a lost block leaves."""

# Baseline, extended and progressive Huffman frames, which libjpeg and the GPU's decoders decode alike. Lossless,
# hierarchical and arithmetic frames are left to Pillow, which decodes some of them and raises for the others.
_DECODED_ALIKE = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_RGB_COMPONENT_IDS = b"RGB"
_NO_SAMPLING = 0x11
_BEFORE_SCANS = frozenset({0xC4, 0xCC, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE}) | _DECODED_ALIKE | _OTHER_FRAMES
_BETWEEN_SCANS = frozenset({0xC4, 0xDA, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
_TABLES = frozenset({0xC4, 0xCC, 0xDA, 0xDB, 0xDD})
_ALL_COEFFICIENTS = (1 << 64) - 1
_NO_SCAN_OF_DC = 1 << 256  # above all bits that a byte can name
_MAX_SIDE_PX = 65_500
"""Maximum side of an image in libjpeg."""

_SKELETON_SIZE = b"\0\x08\0\x08"

_MAX_CACHED_BYTES = 2048
"""Maximum size of a skeleton in the cache. Longer ones have EXIF data, which hardly two files share."""


class JpegHeader(NamedTuple):
    """Properties of a JPEG file that its header gives before the first scan.

    Attributes:
        height, width: in pixels, as stored. The EXIF orientation is not applied, as in torchvision.
        matches_pillow: whether DALI's decoders and Pillow give the same RGB for this file, as far as the header tells.
        is_progressive: whether the scans refine each other.
        first_scan: offset of the first scan, in bytes.
        component_ids: one byte for each component.
        skeleton: the segments up to the first scan's header; see NOTE [ When errors are raised ].
    """

    height: int
    width: int
    matches_pillow: bool
    is_progressive: bool
    first_scan: int
    component_ids: bytes
    skeleton: bytes

    @property
    def is_grey(self) -> bool:
        return len(self.component_ids) == 1


class Scans(NamedTuple):
    """The scans of a JPEG: their number, the end of the JPEG in bytes, and the tables and headers between them."""

    number: int
    end: int
    skeleton: bytes


class _Checks(threading.local):
    """How JPEGs that this thread opens are checked.

    Attributes:
        damaged: number of damaged JPEGs that this process has found, in all threads, as a dataset may have some.
        are_passed: whether the samples passed the checks in an earlier epoch, so that the costly ones are skipped.
        find_zeros: whether to search for lost blocks, which only a GPU decodes in another way than Pillow.
    """

    damaged: ClassVar[int] = 0
    are_passed = False
    find_zeros = True


checks = _Checks()


def read_jpeg_header(data: bytes | memoryview) -> JpegHeader | None:
    """Read size and kind of a JPEG from its marker segments (ITU T.81, annex B); None if they are not valid.

    Args:
        data: content of the file, whole or truncated.
    """
    at, end = 2, len(data)
    frame: tuple[int, int, bool, bytes, bool] | None = None
    adobe_transform = None
    has_density = False
    skeleton = [JPEG_START[:2]]
    while at + 4 <= end:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        length = data[at + 2] << 8 | data[at + 3]
        after = at + 2 + length
        if length < 2 or after > end:
            return None
        if marker in _TABLES:
            skeleton.append(bytes(data[at:after]))
            if marker == 0xDA:
                if frame is None or not 0 < frame[0] <= _MAX_SIDE_PX or not 0 < frame[1] <= _MAX_SIDE_PX:
                    return None
                height, width, alike, ids, progressive = frame
                alike = alike and adobe_transform != 0  # 0: the three components are RGB, not YCbCr
                return JpegHeader(height, width, alike, progressive, at, ids, b"".join(skeleton))
        elif marker in _DECODED_ALIKE or marker in _OTHER_FRAMES:
            if length < 8 or frame is not None:
                return None
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            if length != 8 + 3 * components:
                return None
            ids = bytes(data[at + 10 : after : 3])
            alike = marker in _DECODED_ALIKE and bits == 8 and components in (1, 3) and ids != _RGB_COMPONENT_IDS
            if components == 1 and data[at + 11] != _NO_SAMPLING:
                alike = False  # meaningless in a grey image, but the GPU's decoders apply it
            frame = height, width, alike, ids, marker == 0xC2
            skeleton += bytes(data[at : at + 5]), _SKELETON_SIZE, bytes(data[at + 9 : after])
        elif marker not in _BEFORE_SCANS:
            return None  # see NOTE [ Headers that DALI cannot parse ] in dali/api.py
        elif marker in _READ_BY_PILLOW:
            content = bytes(data[at + 4 : at + 18])
            if marker == 0xEE and length >= 14 and content.startswith(b"Adobe"):
                adobe_transform = content[11]
            if _is_read(marker, content) and not (has_density and marker == 0xE1):
                skeleton.append(bytes(data[at:after]))
                has_density |= marker == 0xE0 and content[7:8] in (b"\1", b"\2") and len(content) >= 12
        at = after
    return None


_READ_BY_PILLOW = frozenset({0xE0, 0xE1, 0xE2, 0xED, 0xEE})


def _is_read(marker: int, content: bytes) -> bool:
    """Return whether Pillow or libjpeg parse an application segment that starts with these 14 bytes, or all it has."""
    if marker == 0xE1:  # for the density, if there is none in a JFIF segment
        return content.startswith(b"Exif\0\0")
    if marker == 0xE2:
        return content.startswith(b"MPF\0") or (content.startswith(b"ICC_PROFILE\0") and len(content) < 14)
    return marker != 0xED or content.startswith(b"Photoshop 3.0\0")


def read_scans(data: bytes | memoryview, header: JpegHeader) -> Scans | None:
    """Read through all scans of a JPEG. This takes longer than reading the header.

    Args:
        data: the data that the header was read from. Other data may follow the JPEG.

    Returns:
        The scans; None if decoders may differ, so that only Pillow decides: a marker is misplaced, coefficients come
        twice or are missing, or the file is truncated. libjpeg interpolates missing coefficients.
    """
    array = np.frombuffer(data, np.uint8)
    is_marker = array[:-1] == 0xFF
    np.logical_and(is_marker, array[1:], out=is_marker)  # 0: a stuffed byte
    missing = dict.fromkeys(header.component_ids, _ALL_COEFFICIENTS | _NO_SCAN_OF_DC)
    scans, restarts, at = 0, 0, header.first_scan
    skeleton = []
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
            if marker in _TABLES and at > header.first_scan:
                skeleton.append(bytes(data[at:end]))
            at = end
        elif marker == 0xD9 and not any(missing.values()):
            return Scans(scans, at + 2, b"".join(skeleton))
        else:
            break
    return None


def _scan_brings_something_new(header: bytes | memoryview, missing: dict[int, int], progressive: bool) -> bool:
    """Remove the coefficients of a scan from ``missing``, which has a bit for each of the 64 of a component, and
    another one until a scan has brought its DC coefficients.

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
        if first == 0:
            missing[component] &= ~_NO_SCAN_OF_DC
        elif missing[component] & _NO_SCAN_OF_DC:
            return False  # AC coefficients before DC, which GPUs decode in another way
        if bits & 15 == 0:  # the least significant bit
            missing[component] &= ~band
    return True


def is_sound(data: bytes | memoryview, header: JpegHeader, scans: Scans) -> bool:
    """Return whether Pillow decodes a JPEG without an error, and a GPU as Pillow does.

    See NOTE [ When errors are raised ] and NOTE [ Damaged scans ].
    """
    skeleton = header.skeleton + scans.skeleton + JPEG_END
    is_common = not scans.skeleton and len(skeleton) <= _MAX_CACHED_BYTES
    accepted = _accepts(skeleton) if is_common else _accepts.__wrapped__(skeleton)
    if not accepted or checks.are_passed or not checks.find_zeros:
        return accepted
    data = bytes(data)
    if data.find(ZERO_RUN, header.first_scan) < 0:
        return True
    return not header.is_progressive and not find_damage(data)  # libjpeg may miss damage in the later scans


def still_passes(header: JpegHeader) -> bool:
    """Return whether a baseline JPEG whose sample has passed the checks passes them again.

    It may be another file than in the first epoch, so Pillow must accept its segments, which mostly are in the cache.
    """
    skeleton = header.skeleton + JPEG_END
    return len(skeleton) > _MAX_CACHED_BYTES or _accepts(skeleton)


@functools.lru_cache(maxsize=1024)
def _accepts(skeleton: bytes) -> bool:
    """Return whether Pillow decodes a JPEG, whatever ``ImageFile.LOAD_TRUNCATED_IMAGES`` is."""
    try:
        image = jpeg_factory(io.BytesIO(skeleton))
        decoder = Image._getdecoder(image.mode, "jpeg", image.tile[0][3])
        decoder.setimage(Image.new(image.mode, image.size).im, (0, 0, *image.size))
        consumed, code = decoder.decode(skeleton)
    except MemoryError:
        raise  # which says nothing of the file, and must not be cached
    except Exception:  # each format raises its own exceptions, also that of EXIF data
        return False
    return consumed < 0 and code >= 0


def find_damage(data: bytes) -> str:
    """Return libjpeg-turbo's first warning about a JPEG; "" if there is none."""
    import simplejpeg

    try:
        # Grey at an eighth of the size, so that most of the time is spent on reading the scan.
        simplejpeg.decode_jpeg(data, "GRAY", fastdct=True, fastupsample=True, min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        return str(error)
    return ""
