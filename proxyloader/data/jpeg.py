"""JPEG files: header, kind, size and integrity. Runs where the dataset runs.

NOTE [ Damaged scans ]
If the scan of a JPEG ends early but is followed by an end marker, libjpeg fills the remaining pixels with gray. GPU
decoders leave the previous contents of their memory there, such as parts of another image, and report nothing. So a
JPEG is checked on the CPU before it is sent to a GPU, and Pillow decodes damaged ones.

The check parses the markers between and after the scans, which detects every truncated file without a new end marker.
For a GPU, it also searches the scans for a run of zeros, as left by a lost disk block. Uniform image areas may contain
such runs as well, so libjpeg then decodes the scan to decide. No check detects all damage, because many changes result
in a valid scan of a different image. For figures, see ``benchmarks/results/scan_checks.jsonl``.

NOTE [ When errors are raised ]
With the stock loader, ``Image.open`` or a call such as ``convert`` raises the error of a damaged file. The dataset may
catch it and return something else, before any transform has drawn random numbers. So whether Pillow raises an error
must be known before an undecoded image is returned. Entropy-coded data only causes warnings in libjpeg; all errors come
from marker segments. So Pillow decodes the skeleton of a file: all segments that Pillow or libjpeg parses, for an image
of 8 x 8 pixels without entropy-coded data. This takes about 40 µs. Most baseline files of a dataset have the same
skeleton, and results are cached.
"""

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

# Baseline, extended and progressive Huffman frames, for which libjpeg and GPU decoders agree. Lossless, hierarchical
# and arithmetic frames are left to Pillow, which decodes some of them and raises an error for others.
_SUPPORTED_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_NO_SAMPLING = 0x11
_BEFORE_SCANS = frozenset({0xC4, 0xCC, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE}) | _SUPPORTED_FRAMES | _OTHER_FRAMES
_BETWEEN_SCANS = frozenset({0xC4, 0xDA, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
_TABLES = frozenset({0xC4, 0xCC, 0xDA, 0xDB, 0xDD})
_PARSED_BY_PILLOW = frozenset({0xE0, 0xE1, 0xE2, 0xED, 0xEE})
_ALL_COEFFICIENTS = (1 << 64) - 1
_NO_DC_SCAN = 1 << 256  # above all bits that a byte can address
_MAX_SIDE_PX = 65_500  # of libjpeg
_SKELETON_SIZE = b"\0\x08\0\x08"

_MAX_CACHED_BYTES = 2048
"""Maximum size of a cached skeleton. Longer ones contain EXIF data, which differs between files."""


class JpegHeader(NamedTuple):
    """Properties of a JPEG file given by its header, which precedes the first scan."""

    height: int  # in pixels, as stored. The EXIF orientation is not applied, as in torchvision
    width: int
    matches_pillow: bool  # whether DALI and Pillow decode the file to the same RGB values, according to its header
    is_progressive: bool
    first_scan: int  # its offset, in bytes
    component_ids: bytes
    skeleton: bytes  # the segments up to the header of the first scan; see NOTE [ When errors are raised ]


class Scans(NamedTuple):
    """The end of a JPEG in bytes, and the tables and headers between its scans."""

    end: int
    skeleton: bytes


class _Checks(threading.local):
    """How this thread checks JPEGs."""

    damaged: ClassVar[int] = 0  # number of damaged JPEGs found by all threads of this process
    already_passed = False  # whether the samples passed the checks in an earlier epoch, so that costly ones are skipped
    find_zeros = True  # whether to search for lost blocks, which only GPUs decode differently from Pillow


checks = _Checks()


def read_jpeg_header(data: bytes | memoryview) -> JpegHeader | None:
    """Parse the marker segments of a JPEG (ITU T.81, annex B). Return None if they are invalid."""
    pos, end = 2, len(data)
    frame: tuple[int, int, bool, bytes, bool] | None = None
    adobe_transform = None
    has_density = False
    skeleton = [JPEG_START[:2]]
    while pos + 4 <= end:
        if data[pos] != 0xFF:
            return None
        marker = data[pos + 1]
        if marker == 0xFF:  # fill byte
            pos += 1
            continue
        length = data[pos + 2] << 8 | data[pos + 3]
        segment_end = pos + 2 + length
        if length < 2 or segment_end > end:
            return None
        if marker in _TABLES:
            skeleton.append(bytes(data[pos:segment_end]))
            if marker == 0xDA:
                if frame is None or not 0 < frame[0] <= _MAX_SIDE_PX or not 0 < frame[1] <= _MAX_SIDE_PX:
                    return None
                height, width, matches, ids, progressive = frame
                matches = matches and adobe_transform != 0  # 0 means RGB instead of YCbCr
                return JpegHeader(height, width, matches, progressive, pos, ids, b"".join(skeleton))
        elif marker in _SUPPORTED_FRAMES or marker in _OTHER_FRAMES:
            if length < 8 or frame is not None:
                return None
            bits, height, width, components = struct.unpack_from(">BHHB", data, pos + 4)
            if length != 8 + 3 * components:
                return None
            ids = bytes(data[pos + 10 : segment_end : 3])
            matches = marker in _SUPPORTED_FRAMES and bits == 8 and components in (1, 3) and ids != b"RGB"
            # The sampling factors of a single component are meaningless, but GPU decoders apply them.
            matches &= components != 1 or data[pos + 11] == _NO_SAMPLING
            frame = height, width, matches, ids, marker == 0xC2
            skeleton += bytes(data[pos : pos + 5]), _SKELETON_SIZE, bytes(data[pos + 9 : segment_end])
        elif marker not in _BEFORE_SCANS:
            return None  # see NOTE [ Headers that DALI cannot parse ] in dali/api.py
        elif marker in _PARSED_BY_PILLOW:
            content = bytes(data[pos + 4 : pos + 18])
            if marker == 0xEE and length >= 14 and content.startswith(b"Adobe"):
                adobe_transform = content[11]
            if _is_parsed(marker, content) and not (has_density and marker == 0xE1):
                skeleton.append(bytes(data[pos:segment_end]))
                has_density |= marker == 0xE0 and content[7:8] in (b"\1", b"\2") and len(content) >= 12
        pos = segment_end
    return None


def _is_parsed(marker: int, content: bytes) -> bool:
    """Return whether Pillow or libjpeg parses an application segment with these first 14 bytes."""
    if marker == 0xE1:  # contains the density if there is no JFIF segment
        return content.startswith(b"Exif\0\0")
    if marker == 0xE2:
        return content.startswith(b"MPF\0") or (content.startswith(b"ICC_PROFILE\0") and len(content) < 14)
    return marker != 0xED or content.startswith(b"Photoshop 3.0\0")


def read_scans(data: bytes | memoryview, header: JpegHeader) -> Scans | None:
    """Parse all scans of a JPEG, which other data may follow.

    Return None if decoders may differ, because a marker is misplaced, coefficients are repeated or missing, or the file
    is truncated. libjpeg interpolates missing coefficients.
    """
    array = np.frombuffer(data, np.uint8)
    is_marker = array[:-1] == 0xFF
    np.logical_and(is_marker, array[1:], out=is_marker)  # 0: a stuffed byte
    missing = dict.fromkeys(header.component_ids, _ALL_COEFFICIENTS | _NO_DC_SCAN)
    restarts, pos = 0, header.first_scan
    skeleton = []
    while pos < len(is_marker):
        pos += int(is_marker[pos:].argmax())
        marker = data[pos + 1] if is_marker[pos] else 0
        if marker == 0xFF:  # fill byte
            pos += 1
        elif 0xD0 <= marker <= 0xD7 and marker & 7 == restarts & 7:
            restarts, pos = restarts + 1, pos + 2
        elif marker in _BETWEEN_SCANS and any(missing.values()):
            end = pos + 2 + int.from_bytes(data[pos + 2 : pos + 4], "big")
            if marker == 0xDA:
                if not _remove_coefficients(data[pos + 4 : end], missing, header.is_progressive):
                    break
                restarts = 0
            if end < pos + 4:
                break
            if marker in _TABLES and pos > header.first_scan:
                skeleton.append(bytes(data[pos:end]))
            pos = end
        elif marker == 0xD9 and not any(missing.values()):
            return Scans(pos + 2, b"".join(skeleton))
        else:
            break
    return None


def _remove_coefficients(header: bytes | memoryview, missing: dict[int, int], progressive: bool) -> bool:
    """Remove the coefficients of a scan from ``missing``. Return False if the scan is invalid or repeats coefficients.

    ``missing`` has one bit for each of the 64 coefficients of a component, and one more that its DC scan clears.
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
            missing[component] &= ~_NO_DC_SCAN
        elif missing[component] & _NO_DC_SCAN:
            return False  # AC coefficients before DC, which GPUs decode differently
        if bits & 15 == 0:  # the least significant bit
            missing[component] &= ~band
    return True


def is_sound(data: bytes | memoryview, header: JpegHeader, scans: Scans) -> bool:
    """Return whether Pillow decodes a JPEG without an error, and a GPU decodes it like Pillow."""
    skeleton = header.skeleton + scans.skeleton + JPEG_END
    is_cached = not scans.skeleton and len(skeleton) <= _MAX_CACHED_BYTES
    accepted = _accepts(skeleton) if is_cached else _accepts.__wrapped__(skeleton)
    if not accepted or checks.already_passed or not checks.find_zeros:
        return accepted
    data = bytes(data)
    # libjpeg may not detect damage in later scans.
    return data.find(ZERO_RUN, header.first_scan) < 0 or (not header.is_progressive and not find_damage(data))


def still_passes(header: JpegHeader) -> bool:
    """Return whether a baseline JPEG, which may have been replaced, passes the checks that its sample passed before."""
    skeleton = header.skeleton + JPEG_END
    return len(skeleton) > _MAX_CACHED_BYTES or _accepts(skeleton)


@functools.lru_cache(maxsize=1024)
def _accepts(skeleton: bytes) -> bool:
    """Return whether Pillow decodes a JPEG, regardless of ``ImageFile.LOAD_TRUNCATED_IMAGES``."""
    try:
        image = jpeg_factory(io.BytesIO(skeleton))
        decoder = Image._getdecoder(image.mode, "jpeg", image.tile[0][3])
        decoder.setimage(Image.new(image.mode, image.size).im, (0, 0, *image.size))
        consumed, code = decoder.decode(skeleton)
    except MemoryError:
        raise  # not caused by the file, so not cached
    except Exception:  # Pillow's parsers raise various exceptions, also for EXIF data
        return False
    return consumed < 0 and code >= 0


def find_damage(data: bytes) -> str:
    """Return the first warning of libjpeg-turbo about a JPEG, or ""."""
    import simplejpeg

    try:
        # Grayscale at an eighth of the size, so that parsing the scan takes most of the time.
        simplejpeg.decode_jpeg(data, "GRAY", fastdct=True, fastupsample=True, min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        return str(error)
    return ""
