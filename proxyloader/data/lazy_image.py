"""LazyImage: a PIL image of a JPEG that is decoded when its pixels are first used. Runs where the dataset runs.

NOTE [ Decoded late ]
``Image.open`` finds the class of a file in a registry of Pillow's. Here JPEGs get a class that reads the file where
Pillow decodes it, and decodes where a pixel is used. So code that opens, converts and copies an image, and gives it to
a compiled transform, hands on the bytes of the file, and DALI decodes them. All other code gets Pillow's pixels.

This holds in the workers of a loader whose images DALI decodes, in all of their threads. Without workers it holds in
the thread that fetches a batch, until it is fetched. Elsewhere ``Image.open`` is Pillow's own,
and so it is with Pillow 10, whose images have no place to decode them late.

When a file is read, it is seen whether DALI might decode it in another way than Pillow, for example as it is cut off.
Then Pillow decodes it at once. So a dataset that catches the error of such a file catches it where it always did.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from typing import Any

from PIL import Image, JpegImagePlugin
from PIL.JpegImagePlugin import JpegImageFile

from ..errors import ImageError
from .encoded_image import MOST_READ_BYTES, EncodedImage
from .transformed import Transformed

_MODES = ("RGB", "L")

_in_process = False
_in_thread = threading.local()


class _DecodedLate(Image.Image):
    """What both kinds of images share: ``im``, Pillow's array of pixels, which is made when it is first asked for."""

    _encoded: EncodedImage | Transformed | None = None
    """The image while it is not decoded: a file, or one on which transforms were called."""

    @property
    def im(self) -> Any:
        if isinstance(self._encoded, EncodedImage):
            image: Image.Image = JpegImageFile(io.BytesIO(self._encoded.data))
            image.load()
            self.im = image.im if image.mode == self.mode else image.convert(self.mode).im
        elif self._encoded is not None:
            self.im = self._encoded.decoded().copy().im
        return Image.Image.im.fget(self)  # type: ignore[attr-defined]

    @im.setter
    def im(self, pixels: Any) -> None:
        self._encoded = None
        Image.Image.im.fset(self, pixels)  # type: ignore[attr-defined]

    def _read(self) -> None:
        """Read the file, if that was not done."""

    def load(self) -> Any:
        """Return access to the pixels, as Pillow does; without decoding them yet."""
        self._read()
        return super().load() if self._encoded is None else _Pixels(self)

    def copy(self) -> Image.Image:
        self._read()
        return super().copy() if self._encoded is None or self.mode != "RGB" else LazyImage(self, self._encoded)

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        self._read()
        is_same = (mode or self.mode) == "RGB" and (self.mode == "RGB" or isinstance(self._encoded, EncodedImage))
        if self._encoded is None or args or kwargs or not is_same:
            return super().convert(mode, *args, **kwargs)
        return LazyImage(self, self._encoded)

    def close(self) -> None:
        super().close()
        self._encoded = None


class LazyImage(_DecodedLate):
    """An image that is not decoded yet, as others take it for a copy of one. It has the ``info`` of ``image``."""

    def __init__(self, image: Image.Image | None, encoded: EncodedImage | Transformed) -> None:
        super().__init__()
        self._mode, self._size, self._encoded = "RGB", encoded.size, encoded
        if isinstance(encoded, Transformed):
            self._mode, self._size = "RGB" if encoded.chain.state.channels == 3 else "L", encoded.size[::-1]
        info = image.info if image is not None else {}
        self.info = {key: list(value) if isinstance(value, list) else value for key, value in info.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._new(self.im).__reduce_ex__(protocol)  # as the decoded image that others take it for


class LazyJpegFile(_DecodedLate, JpegImageFile):
    """A JPEG file as ``Image.open`` returns it, which is read by ``load``, and decoded when its pixels are used."""

    _is_read = False

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        file = getattr(self, "fp", None)
        if file is None or self.mode not in _MODES:
            return
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        data = file.read(size_bytes) if size_bytes <= MOST_READ_BYTES else b""  # of more, Pillow reads what it needs
        with contextlib.suppress(ImageError):  # it takes long to decode, which Pillow does without a word
            self._encoded = EncodedImage.of_jpeg(data, self.filename if isinstance(self.filename, str) else "")
        if self._encoded is not None:  # as Pillow leaves a file that it has decoded
            self.tile, self.readonly = [], 0
            if self._exclusive_fp:
                file.close()
            self.fp = None

    def draft(self, mode: str | None, size: Any) -> Any:
        self._is_read = True  # Pillow decodes in another way then
        return super().draft(mode, size)


class _Pixels:
    """Access to the pixels of an image, which is decoded when one is asked for."""

    def __init__(self, image: _DecodedLate) -> None:
        self._image = image

    def __getitem__(self, xy: Any) -> Any:
        return self._decoded()[xy]

    def __setitem__(self, xy: Any, color: Any) -> None:
        self._decoded()[xy] = color

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoded(), name)

    def _decoded(self) -> Any:
        return self._image.im.pixel_access(self._image.readonly)


def encoded_in(image: Image.Image) -> EncodedImage | None:
    """Return the JPEG of an image that is not decoded yet, if that is the RGB image; otherwise None."""
    if not isinstance(image, _DecodedLate) or image.mode != "RGB":
        return None
    image._read()
    return image._encoded if isinstance(image._encoded, EncodedImage) else None


def transformed_in(image: Image.Image) -> Transformed | None:
    """Return an image that is not decoded yet, with the transforms that were called on it; otherwise None."""
    if isinstance(image, _DecodedLate) and isinstance(image._encoded, Transformed):
        return image._encoded
    encoded = encoded_in(image)
    return None if encoded is None else Transformed.of(encoded)


def is_late() -> bool:
    """Return whether images are decoded late here."""
    return _in_process or getattr(_in_thread, "is_on", False)


def open_late() -> None:
    """Let ``Image.open`` return images that are decoded late, in this process from now on. Worker."""
    global _in_process
    _in_process = _register()


@contextlib.contextmanager
def opened_late() -> Iterator[None]:
    """Let ``Image.open`` return images that are decoded late, in this thread. Main process."""
    before, _in_thread.is_on = getattr(_in_thread, "is_on", False), _register()
    try:
        yield
    finally:
        _in_thread.is_on = before


def _register() -> bool:
    """Put ``_opened`` into Pillow's registry. Return False if another library has put its own there."""
    Image.preinit()
    opens, accepts = Image.OPEN["JPEG"]
    if opens is JpegImagePlugin.jpeg_factory and isinstance(getattr(Image.Image, "im", None), property):
        Image.register_open("JPEG", _opened, accepts)
    return Image.OPEN["JPEG"][0] is _opened


def _opened(file: Any, filename: Any = None) -> JpegImageFile:
    if is_late():
        image = LazyJpegFile(file, filename)
        if "mp" not in image.info:  # it may be a file of several pictures, which has a class of its own
            return image
        file.seek(0)
    return JpegImagePlugin.jpeg_factory(file, filename)
