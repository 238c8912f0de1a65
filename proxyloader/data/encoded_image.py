"""EncodedImage: one image's bytes, size and file, undecoded. Runs in the worker."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import struct
from dataclasses import dataclass, field
from typing import IO, Any

from PIL import Image, UnidentifiedImageError

from ..errors import ImageError, InputError
from .bad_samples import MACHINE_ERRNOS
from .jpeg_header import JPEG_END, JPEG_START, JpegHeader, count_scan_headers, count_scans, read_jpeg_header

SMALLEST_SIDE_PX = 8
"""Slivers go to Pillow: in a 4:2:0 image one pixel wide, the GPU's engine is up to 8 levels off."""

MOST_READ_BYTES = 64 << 20
"""Of a file. What does not end before is left to Pillow, which reads no more than it needs."""

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
        header: of a JPEG; None of a PPM.
    """

    data: bytes = field(repr=False)
    height: int
    width: int
    path: str = ""
    header: JpegHeader | None = field(default=None, repr=False, compare=False)

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
                f"{self.path or 'an image'}: it is not decoded yet, so it cannot be converted to {mode!r}. {NOT_YET}",
                code="not-decoded",
            )
        return self

    def decoded(self) -> Image.Image:
        """The image in Pillow's hands, as torchvision's ``pil_loader`` opens it.

        Raises:
            ImageError: Pillow cannot decode it.
        """
        return _decoded(self.data, self.path, self.height * self.width)

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
        return cls._taken(data, path, max_pixels, is_whole=len(data) <= MOST_READ_BYTES)

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
        return cls._taken(data, path, max_pixels, is_whole=True)

    @classmethod
    def _taken(cls, data: bytes, path: str, max_pixels: int | None, is_whole: bool) -> EncodedImage:
        if not data:
            raise _bad(path, "the file is empty (0 bytes)")
        if data.startswith(JPEG_START):
            header = read_jpeg_header(data)
            if header is not None and header.as_pillow and min(header.height, header.width) >= SMALLEST_SIDE_PX:
                refuse_too_large(header.height, header.width, path, max_pixels)
                jpeg = data
                if header.is_progressive or not data.endswith(JPEG_END) or len(data) > MOST_READ_BYTES:
                    scans, end = count_scans(memoryview(data)[:MOST_READ_BYTES], header)
                    refuse_too_large(header.height, header.width, path, max_pixels, scans)
                    jpeg = data[:end]
                if jpeg:  # in a JPEG that ends as it should scans are counted later, where that is not known yet
                    return cls(jpeg, header.height, header.width, path, header)
        return cls.by_pillow(data if is_whole else None, path, max_pixels)

    @classmethod
    def by_pillow(cls, data: bytes | None, path: str = "", max_pixels: int | None = None) -> EncodedImage:
        """Decode with Pillow, whatever the format; the pixels travel uncompressed.

        Args:
            data: all of the file; None: Pillow reads it, at ``path``.

        Raises:
            ImageError: Pillow cannot decode it, or it is too large.
        """
        return cls.from_pil(_decoded(data, path, max_pixels), path)

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
                "Convert it in the dataset, image.convert('RGB'), or use torch.utils.data.DataLoader for this dataset",
                code="wrong-mode",
            )
        if 3 * image.height * image.width > MOST_PIXEL_BYTES:
            raise _bad(
                path,
                f"{image.width} x {image.height} pixels are {3 * image.height * image.width} bytes, and DALI takes "
                f"{MOST_PIXEL_BYTES} of an image that is no JPEG",
                "too-large",
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
        raise ImageError(
            f"{path or 'an image'}: {reason}. {raised} if it is meant", path=path, reason=reason, code="too-large"
        )


def _content(path: str) -> bytes:
    """All of a file, in four calls of the system; Python's own way takes three more. Of a larger one a byte more than
    ``MOST_READ_BYTES``.

    Raises:
        OSError: it cannot be read, or is none: a directory, or a device, which might have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
            raise OSError(errno.EINVAL, "it is no file, but a device")
        wanted = min(status.st_size, MOST_READ_BYTES) + 1  # so that a short answer is all there is
        data = os.read(descriptor, wanted)
        if len(data) == wanted - 1:
            return data
        parts = [data]  # it has grown, or does not say how large it is, as those of /proc
        missing = MOST_READ_BYTES + 1 - len(data)
        while parts[-1] and missing:
            parts.append(os.read(descriptor, min(missing, 1 << 20)))
            missing -= len(parts[-1])
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _decoded(data: bytes | None, path: str, max_pixels: int | None) -> Image.Image:
    """The image in mode RGB.

    Args:
        data: all of its file; None: it is read at ``path``.

    Raises:
        ImageError: as of ``EncodedImage.by_pillow``.
    """
    try:
        file: IO[bytes]
        with open(path, "rb") if data is None else io.BytesIO(data) as file, _opened(file, max_pixels) as image:
            scans = 1
            if image.format in ("JPEG", "MPO"):
                file.seek(0)
                scans = count_scan_headers(file.read(MOST_READ_BYTES))
            refuse_too_large(image.height, image.width, path, max_pixels, scans)
            decoded: Image.Image = image.convert("RGB")
            return decoded
    except (ImageError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        reason = f"it could be a decompression bomb: {str(error).rstrip('.')}"
        raise ImageError(
            f"{path or 'an image'}: {reason}. Give the loader max_pixels if it is meant",
            path=path,
            reason=reason,
            code="too-large",
        ) from error
    except UnidentifiedImageError as error:
        size = os.path.getsize(path) if data is None else len(data)
        raise _bad(path, f"{size} bytes, in no image format that Pillow knows") from error
    except Exception as error:  # whatever the library behind a format raises; AVIF's is a RuntimeError
        raise _bad(path, f"Pillow cannot decode it: {error}") from error


def _opened(file: IO[bytes], max_pixels: int | None) -> Image.Image:
    """As Pillow opens it; with a limit of our own without Pillow's, which is one of the whole process."""
    if max_pixels is None:
        return Image.open(file)
    Image.init()
    start = file.read(16)
    for opens, accepts in [Image.OPEN[name] for name in Image.ID]:
        with contextlib.suppress(SyntaxError, IndexError, TypeError, struct.error):  # of a format that it is not
            accepted = accepts is None or accepts(start)
            if accepted and not isinstance(accepted, str):  # which says why it is not
                file.seek(0)
                image: Image.Image = opens(file, "")
                return image
    raise UnidentifiedImageError


def _bad(path: str, reason: str, code: str = "undecodable") -> ImageError:
    message = f"{path or 'an image'}: {reason}. Replace the file, or leave it out of the dataset"
    return ImageError(message, code=code, path=path, reason=reason)


def _unreadable(path: str, error: OSError) -> ImageError:
    reason = f"cannot be read: {error.strerror or error}"
    if error.errno in MACHINE_ERRNOS:
        code, advice = "machine", "That is a fault of the machine or the network, not of the file"
    else:
        code, advice = "unreadable", "Replace the file, or leave it out of the dataset"
    return ImageError(f"{path}: {reason}. {advice}", code=code, path=path, reason=reason, errno=error.errno)
