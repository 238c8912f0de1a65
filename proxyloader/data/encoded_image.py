"""EncodedImage: bytes, size and path of one image that is not decoded. Runs in the worker."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PpmImagePlugin import PpmImageFile

from ..errors import ImageError, InputError
from .bad_samples import ForeignImageError, LargeImageError, get_image_error_class, is_system_fault
from .batch_memory import batch_memory
from .jpeg import JPEG_END, JPEG_START, JpegHeader, checks, is_sound, read_jpeg_header, read_scans, still_passes

MIN_SIDE_PX = 8
"""Smaller images are left to Pillow. In a 4:2:0 image one pixel wide, the GPU's engine is off by up to 8 levels."""

MAX_READ_BYTES = 64 << 20
"""Maximum number of bytes read from a file. A larger file is left to Pillow, which reads only what it needs."""

MAX_PIXEL_BYTES = 2**31 - 1
"""Maximum number of bytes of an uncompressed image. DALI counts them in an int."""

NOT_DECODED_ADVICE = (
    "Give it to the transform as it is. For a second transform of the same image there is "
    "proxyloader.compile_transforms(transform), and image.decoded() is a PIL image; or use torch.utils.data.DataLoader "
    "for this dataset"
)
"""Advice for messages about an image that is used as if it were decoded."""

EMPTY = "the file is empty (0 bytes)"
REPLACE_ADVICE = "Replace the file, or leave it out of the dataset"
LIMIT_ADVICE = "Raise PIL.Image.MAX_IMAGE_PIXELS if the image is meant to be this large"
SYSTEM_ADVICE = "The file may be sound: the disk, the network or a limit of the process may be at fault"

_SCAN_HEADER = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
"""What looks like the header of a scan, in a JPEG of any kind."""

PILLOW_LIMIT_PIXELS = 2 * 89_478_485
MAX_PASSES = 20
"""Maximum number of decoder passes over an image of the largest allowed size. Each scan of a JPEG costs one pass, even
an empty scan."""


@dataclass(frozen=True)
class EncodedImage:
    """An RGB image as bytes that DALI decodes to the same pixels as Pillow.

    Attributes:
        data: a JPEG file, or an uncompressed binary PPM with the pixels that Pillow decoded.
        height, width: in pixels.
        path: path of the file, for error messages; "" if there is none.
        header: header of a JPEG; None for a PPM.
    """

    data: bytes = field(repr=False)
    height: int
    width: int
    path: str = ""
    header: JpegHeader | None = field(default=None, repr=False, compare=False)

    mode: ClassVar[str] = "RGB"
    """As in a PIL image."""

    _view: ClassVar[memoryview | None] = None
    """The file in the memory that its batch is sent in: see NOTE [ Reading into the slot ]."""

    def __init__(
        self, data: bytes | memoryview, height: int, width: int, path: str = "", header: JpegHeader | None = None
    ) -> None:  # a frozen dataclass takes much longer for it
        if isinstance(data, memoryview):
            vars(self).update(_view=data, height=height, width=width, path=path, header=header)
            batch_memory.holds(self)
        else:
            vars(self).update(data=data, height=height, width=width, path=path, header=header)

    @property
    def buffer(self) -> bytes | memoryview:
        """The bytes of ``data``, without a copy. Nothing may refer to them when the batch was packed."""
        return self.data if self._view is None else self._view

    def detach_data(self) -> None:
        """Refer to bytes of its own."""
        vars(self).setdefault("data", b"" if self._view is None else bytes(self._view))
        vars(self).pop("_view", None)

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, **{name: value for name, value in dict(vars(self)).items() if name != "_view"}}

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels, as in a PIL image."""
        return self.width, self.height

    def convert(self, mode: str) -> EncodedImage:
        """Return the image itself for mode "RGB", as a PIL image in this mode can be converted.

        Raises:
            InputError: the mode is another one.
        """
        if mode != "RGB":
            raise InputError(
                f"{self.path or 'an image'}: it is not decoded yet, so it cannot be converted to {mode!r}. {NOT_DECODED_ADVICE}",
                code="not-decoded",
            )
        return self

    def decoded(self) -> Image.Image:
        """Return the image decoded by Pillow, as torchvision's ``pil_loader`` returns it.

        Raises:
            ImageError: Pillow cannot decode it.
        """
        # No limit of pixels holds here: it held where the image was opened, and may be another one by now.
        opens = JpegImageFile if self.data[: len(JPEG_START)] == JPEG_START else PpmImageFile
        return _decoded(self.data, self.path, opens)

    def __getattr__(self, name: str) -> Any:
        if name == "data" and (view := self._view) is not None:
            return vars(self).setdefault("data", bytes(view))
        if name in vars(self):  # another thread has given it bytes of its own
            return vars(self)[name]
        raise AttributeError(
            f"{name!r}: the image is not decoded yet; DALI will do that, after the dataset. {NOT_DECODED_ADVICE}"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"an EncodedImage is not decoded yet, and cannot be an array. {NOT_DECODED_ADVICE}")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> EncodedImage:
        """Read an image file without decoding it. Files that DALI would decode differently are decoded by Pillow.

        As in ``PIL.Image.open``, ``PIL.Image.MAX_IMAGE_PIXELS`` limits the number of pixels.

        Args:
            path: path of the file.

        Raises:
            ImageError: the file is missing, empty, too large, or not an image that Pillow reads.
        """
        path = os.fspath(path)
        data = _read(path)
        if data is None:
            return cls.by_pillow(None, path)
        return cls._taken(data, path, is_whole=len(data) <= MAX_READ_BYTES)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "") -> EncodedImage:
        """Create an image from the content of a file. Only JPEGs stay encoded; Pillow decodes the other formats.

        DALI has no faster decoder for the other formats.

        Args:
            data: whole content of the file.
            path: path for messages.

        Raises:
            ImageError: Pillow cannot decode it either, or it is too large.
        """
        if not data:
            raise _bad(path, EMPTY, kind=ForeignImageError)
        return cls._taken(bytes(data), path, is_whole=True)

    @classmethod
    def _taken(cls, data: bytes | memoryview, path: str, is_whole: bool) -> EncodedImage:
        jpeg = cls.of_jpeg(data, path)
        if jpeg is not None:
            Image._decompression_bomb_check(jpeg.size)  # warns as Image.open does
            return jpeg
        return cls.by_pillow(data if is_whole else None, path)

    @classmethod
    def of_jpeg(cls, data: bytes | memoryview, path: str = "") -> EncodedImage | None:
        """Create an image from the content of a JPEG file; None if DALI might decode it in another way than Pillow.

        So Pillow decodes a file that is damaged or too large, where the dataset opens it, and raises its errors there.
        A memoryview is of a place in the memory of its batch.
        """
        if data[: len(JPEG_START)] != JPEG_START:
            return None
        header = read_jpeg_header(data)
        if header is None or not header.matches_pillow or min(header.height, header.width) < MIN_SIDE_PX:
            return None
        if _is_too_large(header.height, header.width):
            return None
        ends_as_jpeg = data[-len(JPEG_END) :] == JPEG_END and len(data) <= MAX_READ_BYTES
        if checks.are_passed and ends_as_jpeg and not header.is_progressive and still_passes(header):
            return cls(data, header.height, header.width, path, header)
        scans = read_scans(memoryview(data)[:MAX_READ_BYTES], header)
        if scans is not None and not _is_too_large(header.height, header.width, scans.number):
            jpeg = data[: scans.end]
            if is_sound(jpeg, header, scans):
                return cls(jpeg, header.height, header.width, path, header)
        type(checks).damaged += 1
        return None

    @classmethod
    def by_pillow(cls, data: bytes | memoryview | None, path: str = "") -> EncodedImage:
        """Decode with Pillow, whatever the format. The pixels are passed on uncompressed.

        Args:
            data: whole content of the file; None: Pillow reads it from ``path``.

        Raises:
            ImageError: Pillow cannot decode it, or it is too large.
        """
        return cls.from_pil(_decoded(data, path), path)

    @classmethod
    def from_pil(cls, image: Image.Image, path: str = "") -> EncodedImage:
        """Create an image from a decoded RGB image. It is passed on uncompressed, as a PPM.

        Raises:
            InputError: the image is in another mode.
            ImageError: the image is larger than DALI accepts.
        """
        if image.mode != "RGB":
            raise InputError(
                f"{path or 'an image'}: the mode is {image.mode!r}, and DALI takes 'RGB' alone where a transform must "
                "be translated. Convert the image in the dataset, image.convert('RGB'), which makes three channels. Or "
                "let torchvision transform it in its mode, in the worker: with the loader's translate=True, the "
                "default, and the transform itself where you have called compile_transforms",
                code="wrong-mode",
            )
        size_bytes = 3 * image.height * image.width
        if size_bytes > MAX_PIXEL_BYTES:
            taken = f"DALI takes {MAX_PIXEL_BYTES} of an image that is no JPEG"
            reason = f"{image.width} x {image.height} pixels are {size_bytes} bytes, and {taken}"
            raise _bad(path, reason, "too-large", kind=LargeImageError)
        return cls(b"P6\n%d %d\n255\n" % image.size + image.tobytes(), image.height, image.width, path)


def _is_too_large(height: int, width: int, scans: int = 1) -> bool:
    """Return whether Pillow refuses to open an image of this size, or it would take minutes to decode its scans."""
    if Image.MAX_IMAGE_PIXELS is None:
        return False
    limit, pixels = 2 * Image.MAX_IMAGE_PIXELS, height * width
    return pixels > limit or pixels * scans > MAX_PASSES * max(limit, PILLOW_LIMIT_PIXELS)


def _content(path: str) -> bytes | memoryview | None:
    """Return the content of a file, of a large one the first ``MAX_READ_BYTES`` and one byte more.

    None is returned for devices and for files that do not state their size, as in /proc. These may be endless.

    It is in the memory of the batch, if that has a place. This takes four system calls; Python's ``open`` and ``read``
    take three more. OSError: the file cannot be read, or it is a directory.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
            return None
        wanted = min(status.st_size, MAX_READ_BYTES) + 1  # one byte more, so that a short read means end of file
        data: bytes | memoryview
        if (place := batch_memory.place(wanted)) is None:
            data = os.read(descriptor, wanted)
        else:
            data = place[: os.readv(descriptor, [place])]
        if len(data) == wanted - 1:
            return data
        if status.st_size == 0 and stat.S_ISREG(status.st_mode):
            return None
        parts = [data]  # the file has grown, or is a pipe
        missing = MAX_READ_BYTES + 1 - len(data)
        while parts[-1] and missing:
            parts.append(os.read(descriptor, min(missing, 1 << 20)))
            missing -= len(parts[-1])
        return b"".join(parts)
    finally:
        os.close(descriptor)


def open_decoded(path: str) -> Image.Image:
    """Open an image as torchvision's loaders do, but raise ImageError if it cannot be read."""
    data = _read(path)
    return _decoded(data if data is not None and len(data) <= MAX_READ_BYTES else None, path)


def _read(path: str) -> bytes | memoryview | None:
    """Return ``_content`` of a file, of which Pillow reads no more than it needs if it is None. Raise ImageError."""
    try:
        data = _content(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if data is not None and not data:
        raise _bad(path, EMPTY, kind=ForeignImageError)
    return data


def _decoded(
    data: bytes | memoryview | None, path: str, opens: Callable[[IO[bytes]], Image.Image] | None = None
) -> Image.Image:
    """Return the image in mode RGB; see ``EncodedImage.by_pillow``."""
    try:
        file: IO[bytes]
        with open(path, "rb") if data is None else io.BytesIO(data) as file, (opens or Image.open)(file) as image:
            if opens is None and image.format in ("JPEG", "MPO"):
                _refuse_scans(file, image, path)
            decoded: Image.Image = image.convert("RGB")
            _ = decoded.im  # decodes it here: see NOTE [ Deferred decoding ]
            return decoded
    except (ImageError, MemoryError, Image.DecompressionBombWarning):
        raise
    except Image.DecompressionBombError as error:
        raise _bad(path, str(error).rstrip("."), "too-large", LIMIT_ADVICE, kind=LargeImageError) from error
    except UnidentifiedImageError as error:
        size = os.path.getsize(path) if data is None else len(data)
        raise _bad(path, f"{size} bytes, in no image format that Pillow knows", kind=ForeignImageError) from error
    except Exception as error:  # each format raises its own exceptions; AVIF raises RuntimeError
        if isinstance(error, OSError) and is_system_fault(error):
            raise _unreadable(path, error) from error
        raise _bad(path, f"Pillow cannot decode it: {error}") from error


def _refuse_scans(file: IO[bytes], image: Image.Image, path: str) -> None:
    """Raise ImageError if decoding the scans of a JPEG would take minutes."""
    file.seek(0)
    scans = len(_SCAN_HEADER.findall(file.read(MAX_READ_BYTES)))
    if _is_too_large(image.height, image.width, scans):
        reason = f"{image.width} x {image.height} pixels in {scans} scans, each of which is a pass over the image"
        raise _bad(path, f"{reason}: it could be a decompression bomb", "too-large", LIMIT_ADVICE, kind=LargeImageError)


def _unreadable(path: str, error: OSError) -> ImageError:
    reason = f"cannot be read: {error.strerror or error}"
    if is_system_fault(error):
        return _bad(path, reason, "machine", SYSTEM_ADVICE, error.errno, get_image_error_class(error))
    return _bad(path, reason, "unreadable", errno=error.errno, kind=get_image_error_class(error))


def _bad(
    path: str,
    reason: str,
    code: str = "undecodable",
    advice: str = REPLACE_ADVICE,
    errno: int | None = None,
    kind: type[ImageError] = ImageError,
) -> ImageError:
    message = f"{path or 'an image'}: {reason}. {advice}"
    return kind(message, code=code, path=path, reason=reason, errno=errno)
