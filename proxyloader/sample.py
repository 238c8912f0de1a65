"""EncodedImage: one image's bytes, size and file, undecoded. Runs in the worker."""

from __future__ import annotations

import io
import os
import struct
from dataclasses import dataclass, field
from typing import Any

from PIL import Image, UnidentifiedImageError

from . import scans
from .errors import ImageError
from .unreadable import MACHINE_ERRNOS

JPEG_START = b"\xff\xd8\xff"
JPEG_END = b"\xff\xd9"

# Baseline, extended and progressive Huffman: what libjpeg and the GPU's decoders agree on. Lossless, hierarchical and
# arithmetic frames go to Pillow, which decodes some of them and names the rest.
_DECODED_ALIKE = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_RGB_COMPONENT_IDS = b"RGB"

SMALLEST_SIDE_PX = 8
"""Slivers go to Pillow: in a 4:2:0 image one pixel wide, the GPU's engine is up to 8 levels off."""


@dataclass(frozen=True)
class JpegHeader:
    """What a JPEG file says of itself before its first scan.

    Attributes:
        height, width: in pixels, as stored (the EXIF orientation is not applied; torchvision ignores it too).
        as_pillow: DALI's decoders and Pillow give the same RGB for this file.
    """

    height: int
    width: int
    as_pillow: bool


def read_jpeg_header(data: bytes | memoryview) -> JpegHeader | None:
    """Read size and kind of a JPEG from its marker segments (ITU T.81, annex B). None where they make no sense."""
    at, end = 2, len(data)
    frame: tuple[int, int, bool] | None = None
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
            if length < 8:
                return None
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            if length < 8 + 3 * components:
                return None
            ids = bytes(data[at + 10 : at + 10 + 3 * components : 3])
            alike = marker in _DECODED_ALIKE and bits == 8 and components in (1, 3) and ids != _RGB_COMPONENT_IDS
            frame = height, width, alike
        elif marker == 0xEE and length >= 14 and bytes(data[at + 4 : at + 9]) == b"Adobe":
            adobe_transform = data[at + 15]
        elif marker == 0xDA:
            if frame is None or 0 in frame[:2]:
                return None
            height, width, alike = frame
            # An Adobe marker with transform 0 means the three components are RGB, not YCbCr. And a scan that never
            # ends was cut off: only Pillow's verdict counts there. (A thumbnail's end lies before the scan.)
            complete = bytes(data[-2:]) == JPEG_END or bytes(data[at:]).rfind(JPEG_END) >= 0
            return JpegHeader(height, width, alike and adobe_transform != 0 and complete)
        at += 2 + length
    return None


@dataclass(frozen=True)
class EncodedImage:
    """An RGB image as bytes that DALI's image decoder turns into the same pixels as Pillow.

    Attributes:
        data: a JPEG file, or a binary PPM (uncompressed) made from what Pillow decoded.
        height, width: in pixels.
        path: the file it came from, for error messages; "" where there is none.
    """

    data: bytes = field(repr=False)
    height: int
    width: int
    path: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels, as of a PIL image."""
        return self.width, self.height

    @property
    def mode(self) -> str:
        """As of a PIL image."""
        return "RGB"

    def convert(self, mode: str) -> EncodedImage:
        """As of a PIL image, to "RGB", which it is."""
        if mode != "RGB":
            raise ImageError(f"{self.path or 'an image'}: it is not decoded yet, so it cannot be converted to {mode!r}")
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r}: the image is not decoded yet; DALI will do that, after the dataset. "
            "Give it to the transform as it is, or use torch.utils.data.DataLoader for this dataset"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an EncodedImage is not decoded yet, and cannot be an array")

    @classmethod
    def open(cls, path: str | os.PathLike[str], max_pixels: int | None = None) -> EncodedImage:
        """Read an image file without decoding it, or, where DALI would see it differently, with Pillow.

        Args:
            path: of the file.
            max_pixels: most that the image may have; by default twice ``PIL.Image.MAX_IMAGE_PIXELS``, as with Pillow.

        Raises:
            ImageError: the file is missing, empty, too large, or not an image that Pillow reads.
        """
        path = os.fspath(path)
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read()
        except OSError as error:
            raise _unreadable(path, error) from error
        return cls.from_bytes(data, path, max_pixels)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "", max_pixels: int | None = None) -> EncodedImage:
        """Take an image file's content. Only JPEGs stay encoded: DALI has no faster decoder for the other formats.

        Args:
            data: all of the file.
            path: for messages.
            max_pixels: as of ``open``.

        Raises:
            ImageError: Pillow cannot decode it either, or it is too large.
        """
        if not data:
            raise _bad(path, "the file is empty (0 bytes)")
        if data.startswith(JPEG_START):
            header = read_jpeg_header(data)
            if header is not None and header.as_pillow and min(header.height, header.width) >= SMALLEST_SIDE_PX:
                refuse_too_large(header.height, header.width, path, max_pixels)
                if not scans.needs_pillow(data):
                    return cls(data, header.height, header.width, path)
        return cls.by_pillow(data, path, max_pixels)

    @classmethod
    def by_pillow(cls, data: bytes, path: str = "", max_pixels: int | None = None) -> EncodedImage:
        """Decode with Pillow, whatever the format; the pixels travel uncompressed.

        Raises:
            ImageError: Pillow cannot decode it, or it is too large.
        """
        try:
            with _opened(data, max_pixels) as image:
                refuse_too_large(image.height, image.width, path, max_pixels)
                return cls.from_pil(image.convert("RGB"), path)
        except ImageError:
            raise
        except UnidentifiedImageError as error:
            raise _bad(path, f"{len(data)} bytes, in no image format that Pillow knows") from error
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise _bad(path, f"Pillow cannot decode it: {error}") from error

    @classmethod
    def from_pil(cls, image: Image.Image, path: str = "") -> EncodedImage:
        """Take a decoded RGB image; it travels uncompressed, as a PPM."""
        if image.mode != "RGB":
            raise ImageError(
                f"{path or 'image'}: the mode is {image.mode!r}, and images travel as 'RGB'. "
                "Convert it in the dataset: image.convert('RGB')"
            )
        return cls(b"P6\n%d %d\n255\n" % image.size + image.tobytes(), image.height, image.width, path)


def refuse_too_large(height: int, width: int, path: str, max_pixels: int | None) -> None:
    """
    Raises:
        ImageError: the image has more than ``max_pixels``; without that, more than Pillow opens.
    """
    if max_pixels is not None:
        limit, raised = max_pixels, "Give the loader a larger max_pixels"
    elif Image.MAX_IMAGE_PIXELS is not None:
        limit, raised = 2 * Image.MAX_IMAGE_PIXELS, "Give the loader max_pixels, or raise PIL.Image.MAX_IMAGE_PIXELS,"
    else:
        return
    if height * width > limit:
        reason = f"{width} x {height} pixels, and the limit is {limit} (it could be a decompression bomb)"
        raise ImageError(f"{path or 'an image'}: {reason}. {raised} if it is meant", path=path, reason=reason)


def _opened(data: bytes, max_pixels: int | None) -> Image.Image:
    if max_pixels is None:
        return Image.open(io.BytesIO(data))
    pillows, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the user's own limit counts
    try:
        return Image.open(io.BytesIO(data))
    finally:
        Image.MAX_IMAGE_PIXELS = pillows


def _bad(path: str, reason: str) -> ImageError:
    message = f"{path or 'an image'}: {reason}. Replace the file, or leave it out of the dataset"
    return ImageError(message, path=path, reason=reason)


def _unreadable(path: str, error: OSError) -> ImageError:
    reason = f"cannot be read: {error.strerror or error}"
    if error.errno in MACHINE_ERRNOS:
        advice = "That is a fault of the machine or the network, not of the file"
    else:
        advice = "Replace the file, or leave it out of the dataset"
    named = ImageError(f"{path}: {reason}. {advice}", path=path, reason=reason)
    named.errno = error.errno
    return named
