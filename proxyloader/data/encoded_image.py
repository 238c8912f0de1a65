"""EncodedImage: bytes, size and path of an undecoded image. Runs in the worker."""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
from collections.abc import Callable
from typing import IO, Any

from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PpmImagePlugin import PpmImageFile

from ..errors import ImageError
from .bad_samples import BY_CAUSE, ForeignImageError, LargeImageError, is_system_fault
from .batch_memory import batch_memory
from .jpeg import JPEG_END, JPEG_START, JpegHeader, checks, is_sound, read_jpeg_header, read_scans, still_passes

MIN_SIDE_PX = 8
"""Pillow decodes smaller images. In a 4:2:0 image one pixel wide, JPEG engines are off by up to 8 levels."""

MAX_READ_BYTES = 64 << 20
"""Maximum size of a file. Pillow, which reads only what it needs, handles larger files."""

MAX_PIXEL_BYTES = 2**31 - 1
"""Maximum size of an uncompressed image, which DALI stores in an int."""

REPLACE_ADVICE = "Replace the file, remove it from the dataset, or pass on_error='skip'"
LIMIT_ADVICE = "Raise PIL.Image.MAX_IMAGE_PIXELS if the image is supposed to be this large"
SYSTEM_ADVICE = "The file may be intact; the cause may be the disk, the network or a process limit"


class EncodedImage:
    """A JPEG (RGB or grayscale) or an RGB PPM as bytes, which DALI and Pillow decode to the same pixels.

    ``path`` is for error messages, "" if there is none. ``header`` is that of a JPEG, None for a PPM.
    """

    _view: memoryview | None = None
    """The file in the memory of its batch; see NOTE [ Reading into the slot ]."""

    def __init__(
        self, data: bytes | memoryview, height: int, width: int, path: str = "", header: JpegHeader | None = None
    ) -> None:
        self.height, self.width, self.path, self.header = height, width, path, header
        if isinstance(data, memoryview):
            self._view = data
            batch_memory.images.append(self)
        else:
            self.data = data

    @functools.cached_property
    def data(self) -> bytes:
        """A JPEG file, or an uncompressed binary PPM with pixels decoded by Pillow."""
        view = self._view
        return vars(self)["data"] if view is None else bytes(view)  # None: another thread has set it in the meantime

    def __repr__(self) -> str:
        return f"EncodedImage(height={self.height}, width={self.width}, path={self.path!r})"

    @property
    def buffer(self) -> bytes | memoryview:
        """The bytes of ``data``, without a copy. They must not be referenced after the batch has been packed."""
        return self.data if self._view is None else self._view

    def detach_data(self) -> None:
        """Copy the data out of the memory of the batch."""
        _ = self.data
        self._view = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "data": self.data, "_view": None}

    @property
    def is_gray(self) -> bool:
        return self.header is not None and len(self.header.component_ids) == 1

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels, like ``size`` of a PIL image."""
        return self.width, self.height

    def decoded(self) -> Image.Image:
        """Decode the image with Pillow, like torchvision's ``pil_loader``. Raises ImageError if that fails."""
        # The pixel limit was checked when the image was opened, and may have changed since.
        opener = JpegImageFile if self.data[: len(JPEG_START)] == JPEG_START else PpmImageFile
        return _decode(self.data, self.path, opener)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> EncodedImage:
        """Read an image file. Pillow decodes files that DALI might decode differently.

        Raises ImageError if the file is missing, empty, too large, or not an image that Pillow can decode.
        """
        path = os.fspath(path)
        try:
            data = _read(path)
        except OSError as error:
            raise _read_error(path, error) from error
        return cls.from_bytes(data, path)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview | None, path: str = "") -> EncodedImage:
        """Create an image from the content of a file; None: Pillow reads the file. Raises ImageError like ``open``."""
        if data is not None and not data:
            raise make_error(path, "the file is empty (0 bytes)", kind=ForeignImageError)
        jpeg = None if data is None else cls.from_jpeg(data, path)
        if jpeg is None:
            return cls.from_pil(_decode(data, path), path)
        Image._decompression_bomb_check(jpeg.size)  # warns like Image.open
        return jpeg

    @classmethod
    def from_jpeg(cls, data: bytes | memoryview, path: str = "") -> EncodedImage | None:
        """Create an image from the content of a JPEG file; None if DALI might decode it differently from Pillow.

        A memoryview refers to the memory of the current batch.
        """
        if data[: len(JPEG_START)] != JPEG_START or len(data) > MAX_READ_BYTES:
            return None
        header = read_jpeg_header(data)
        if header is None or not header.matches_pillow or min(header.height, header.width) < MIN_SIDE_PX:
            return None
        if Image.MAX_IMAGE_PIXELS is not None and header.height * header.width > 2 * Image.MAX_IMAGE_PIXELS:
            return None
        ends_as_jpeg = data[-len(JPEG_END) :] == JPEG_END
        if checks.already_passed and ends_as_jpeg and not header.is_progressive and still_passes(header):
            return cls(data, header.height, header.width, path, header)
        scans = read_scans(data, header)
        if scans is not None and is_sound(data[: scans.end], header, scans):
            return cls(data[: scans.end], header.height, header.width, path, header)
        type(checks).damaged += 1
        return None

    @classmethod
    def from_pil(cls, image: Image.Image, path: str = "") -> EncodedImage:
        """Create an image from a decoded RGB image, which is sent as a PPM. Raises ImageError if too large."""
        size_bytes = 3 * image.height * image.width
        if size_bytes > MAX_PIXEL_BYTES:
            reason = f"{image.width} x {image.height} pixels need {size_bytes} bytes; DALI's limit is {MAX_PIXEL_BYTES}"
            raise make_error(path, reason, "too-large", kind=LargeImageError)
        return cls(b"P6\n%d %d\n255\n" % image.size + image.tobytes(), image.height, image.width, path)


def _read(path: str) -> bytes | memoryview | None:
    """Return the content of a file, in the memory of the batch if it fits. Raises OSError.

    Return None for devices, files without a size, such as in /proc, and large files: Pillow reads what it needs.
    This takes four system calls, three fewer than Python's ``open`` and ``read``.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        is_pipe = stat.S_ISFIFO(status.st_mode)
        if not (is_pipe or stat.S_ISREG(status.st_mode)) or status.st_size > MAX_READ_BYTES:
            return None
        size = MAX_READ_BYTES if is_pipe else status.st_size
        limit = size + 1  # one more byte, so that a short read means end of file
        if (memory := batch_memory.allocate(limit)) is None:
            data: bytes | memoryview = os.read(descriptor, limit)
        else:
            data = memory[: os.readv(descriptor, [memory])]
        if len(data) == size:
            return data
        if len(data) == limit:  # it has grown, or has no size
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return bytes(data) + file.read()  # pipes and some file systems return less than they could
    finally:
        os.close(descriptor)


def _decode(
    data: bytes | memoryview | None, path: str, opener: Callable[[IO[bytes]], Image.Image] | None = None
) -> Image.Image:
    """Return the RGB image of a file, given its content or path. Raises ImageError if Pillow cannot decode it."""
    try:
        file: IO[bytes]
        with open(path, "rb") if data is None else io.BytesIO(data) as file, (opener or Image.open)(file) as image:
            decoded: Image.Image = image.convert("RGB")
            _ = decoded.im  # forces decoding: see NOTE [ Deferred decoding ]
            return decoded
    except (ImageError, MemoryError, Image.DecompressionBombWarning):
        raise
    except Image.DecompressionBombError as error:
        raise make_error(path, str(error).rstrip("."), "too-large", LIMIT_ADVICE, kind=LargeImageError) from error
    except UnidentifiedImageError as error:
        size = os.path.getsize(path) if data is None else len(data)
        raise make_error(path, f"cannot identify image file ({size} bytes)", kind=ForeignImageError) from error
    except Exception as error:  # depends on the format; AVIF raises RuntimeError
        if isinstance(error, OSError) and is_system_fault(error):
            raise _read_error(path, error) from error
        raise make_error(path, f"Pillow cannot decode it: {error}") from error


def _read_error(path: str, error: OSError) -> ImageError:
    reason = f"cannot be read: {error.strerror or error}"
    code, advice = ("machine", SYSTEM_ADVICE) if is_system_fault(error) else ("unreadable", REPLACE_ADVICE)
    return make_error(path, reason, code, advice, error.errno, kind=BY_CAUSE.get(type(error), ImageError))


def make_error(
    path: str,
    reason: str,
    code: str = "undecodable",
    advice: str = REPLACE_ADVICE,
    errno: int | None = None,
    kind: type[ImageError] = ImageError,
) -> ImageError:
    return kind(f"{path or 'an image'}: {reason}. {advice}", code=code, path=path, reason=reason, errno=errno)
