"""EncodedImage: one image's bytes, size and file, undecoded. Runs in the worker."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from typing import Any

from PIL import Image, UnidentifiedImageError

from . import scans
from .errors import ImageError, InputError
from .jpeg import JPEG_START, count_scan_headers, read_jpeg_header
from .unreadable import MACHINE_ERRNOS

SMALLEST_SIDE_PX = 8
"""Slivers go to Pillow: in a 4:2:0 image one pixel wide, the GPU's engine is up to 8 levels off."""

MOST_PIXEL_BYTES = 2**31 - 1
"""Of an image that travels uncompressed: DALI counts them in an int."""

NOT_YET = (
    "Give it to the transform as it is. For a second transform of the same image there is "
    "proxyloader.compile_transforms(transform), and image.decoded() is a PIL image; or use torch.utils.data.DataLoader "
    "for this dataset"
)
"""What to do about an image that is used as if it were decoded."""

PILLOWS_LIMIT_PIXELS = 2 * 89_478_485
MOST_PASSES = 20
"""Over the largest picture that is taken: each scan of a JPEG costs its decoder one, even a scan that holds nothing."""


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
        """As of a PIL image, to "RGB", which it is.

        Raises:
            InputError: to any other mode.
        """
        if mode != "RGB":
            raise InputError(
                f"{self.path or 'an image'}: it is not decoded yet, so it cannot be converted to {mode!r}. {NOT_YET}"
            )
        return self

    def decoded(self) -> Image.Image:
        """The image in Pillow's hands, as torchvision's ``pil_loader`` opens it.

        Raises:
            ImageError: Pillow cannot decode it.
        """
        try:
            image = _opened(self.data, self.height * self.width)
            return image.convert("RGB")
        except MemoryError:
            raise
        except Exception as error:
            raise _bad(self.path, f"Pillow cannot decode it: {error}") from error

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: the image is not decoded yet; DALI will do that, after the dataset. {NOT_YET}")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"an EncodedImage is not decoded yet, and cannot be an array. {NOT_YET}")

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
            data = _content(path)
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
            header = read_jpeg_header(data, count_scans=not scans.are_known_to_be_sound(data))
            if header is not None and not header.scans:
                scans.note_damage()
            if header is not None and header.as_pillow and min(header.height, header.width) >= SMALLEST_SIDE_PX:
                refuse_too_large(header.height, header.width, path, max_pixels, header.scans)
                if not scans.needs_pillow(data, header.is_progressive):
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
                passes = count_scan_headers(data) if image.format in ("JPEG", "MPO") else 1
                refuse_too_large(image.height, image.width, path, max_pixels, passes)
                return cls.from_pil(image.convert("RGB"), path)
        except (ImageError, MemoryError):
            raise
        except Image.DecompressionBombError as error:
            reason = f"it could be a decompression bomb: {str(error).rstrip('.')}"
            raise ImageError(
                f"{path or 'an image'}: {reason}. Give the loader max_pixels if it is meant", path=path, reason=reason
            ) from error
        except UnidentifiedImageError as error:
            raise _bad(path, f"{len(data)} bytes, in no image format that Pillow knows") from error
        except Exception as error:  # whatever the library behind a format raises; AVIF's is a RuntimeError
            raise _bad(path, f"Pillow cannot decode it: {error}") from error

    @classmethod
    def from_pil(cls, image: Image.Image, path: str = "") -> EncodedImage:
        """Take a decoded RGB image; it travels uncompressed, as a PPM.

        Raises:
            InputError: it is of another mode.
            ImageError: it is larger than DALI takes.
        """
        if image.mode != "RGB":
            raise InputError(
                f"{path or 'an image'}: the mode is {image.mode!r}, and images travel as 'RGB'. "
                "Convert it in the dataset, image.convert('RGB'), or use torch.utils.data.DataLoader for this dataset"
            )
        if 3 * image.height * image.width > MOST_PIXEL_BYTES:
            raise _bad(
                path,
                f"{image.width} x {image.height} pixels are {3 * image.height * image.width} bytes, and DALI takes "
                f"{MOST_PIXEL_BYTES} of an image that is no JPEG",
            )
        return cls(b"P6\n%d %d\n255\n" % image.size + image.tobytes(), image.height, image.width, path)


def refuse_too_large(height: int, width: int, path: str, max_pixels: int | None, scans: int = 1) -> None:
    """
    Raises:
        ImageError: the image has more than ``max_pixels``; without that, more than Pillow opens. Or it has so many
            scans that decoding it would take minutes.
    """
    if max_pixels is not None:
        limit, raised = max_pixels, "Give the loader a larger max_pixels"
    elif Image.MAX_IMAGE_PIXELS is not None:
        limit, raised = 2 * Image.MAX_IMAGE_PIXELS, "Give the loader max_pixels, or raise PIL.Image.MAX_IMAGE_PIXELS,"
    else:
        return
    if height * width > limit or height * width * scans > MOST_PASSES * max(limit, PILLOWS_LIMIT_PIXELS):
        scanned = f" in {scans} scans, a pass over the picture each" if height * width <= limit else ""
        reason = f"{width} x {height} pixels{scanned}, and the limit is {limit} (it could be a decompression bomb)"
        raise ImageError(f"{path or 'an image'}: {reason}. {raised} if it is meant", path=path, reason=reason)


def _content(path: str) -> bytes:
    """All of a file, in four calls of the system; Python's own way takes three more."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        wanted = os.fstat(descriptor).st_size + 1  # so that a short answer is all there is
        data = os.read(descriptor, wanted)
        if len(data) == wanted - 1:
            return data
        parts = [data]  # no ordinary file, or a large one
        while parts[-1]:
            parts.append(os.read(descriptor, max(wanted, 1 << 20)))
        return b"".join(parts)
    finally:
        os.close(descriptor)


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
