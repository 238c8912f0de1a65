"""LazyImage: a PIL image of a JPEG that is decoded when its pixels are first used. Runs where the dataset runs.

NOTE [ Decoded late ]
``Image.open`` finds the class of a file in a registry of Pillow's. Here JPEGs get a class that reads the whole file,
and decodes where a pixel is used. So code that opens, converts and copies an image, and gives it to a compiled
transform, hands on the bytes of the file, and DALI decodes them. All other code gets Pillow's pixels.

This holds in the workers of a loader whose images DALI decodes, in all of their threads. Without workers it holds in
the thread that fetches a batch, until it is fetched. Elsewhere ``Image.open`` is Pillow's own,
and so it is with Pillow 10, whose images have no place to decode them late.

Of an image in mode L DALI decodes RGB, and converts it to grey as Pillow does (``START_AS_GREY`` in
``transforms/chain.py``). A JPEG that is grey itself keeps its levels thereby.

When a file is opened, it is seen whether DALI might decode it in another way than Pillow, for example as it is cut off.
Then it is Pillow's own image. So a dataset that catches the error of such a file catches it where it always did.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from PIL import Image, JpegImagePlugin
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PpmImagePlugin import PpmImageFile

from ..errors import ImageError
from .batch_memory import batch_memory
from .encoded_image import MOST_READ_BYTES, EncodedImage
from .read_check import is_sound
from .transformed import Transformed, is_making_values, pixel_uses

_ATTRIBUTES = {name: value for name, value in vars(Image.Image()).items() if name != "info"}
"""What Pillow gives an image that has no pixels yet."""

MARKER_OF_EXIF = b"\xff\xe1"
"""Of APP1, the segments that EXIF and XMP data are in."""

PILLOW_DECODES_LATE = isinstance(getattr(Image.Image, "im", None), property)
"""Whether images have a place to decode late, as from Pillow 11 on."""

Image.preinit()  # here, as a worker that imported Pillow's formats might wait for a lock of another thread's import

_in_process = False
_in_thread = threading.local()


_set_class = vars(object)["__class__"].__set__


class _DecodedLate(Image.Image):
    """What both kinds of images share: ``im``, Pillow's array of pixels, which is made when it is first asked for."""

    _encoded: EncodedImage | Transformed | None = None
    """The image while it is not decoded: a file, or one on which transforms were called."""

    _header = b""
    """The header of the file that the image comes from, to its first scan; empty once Pillow has read it."""

    _taken_for: ClassVar[type[Image.Image]]
    """The class of Pillow's that others take it for."""

    if not TYPE_CHECKING:  # to mypy no image would be of a class of this module

        @property
        def __class__(self) -> type[Image.Image]:  # images of two classes are never equal
            return self._taken_for

        @__class__.setter
        def __class__(self, cls: type[Image.Image]) -> None:  # as fastai does
            _ = self.load(), self.im, self.info
            _set_class(self, cls)

    def __getattr__(self, name: str) -> Any:
        if not self._header or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        known = self._known_to_pillow()
        self._header = b""
        for key, value in known.items():
            vars(self).setdefault(key, value)
        return getattr(self, name)

    def _known_to_pillow(self) -> dict[str, Any]:
        """Return the attributes that Pillow finds in the header."""
        raise NotImplementedError

    def getexif(self) -> Image.Exif:
        """Return the EXIF data as Pillow does, which is asked for each image by Hugging Face's ``datasets``."""
        if self._exif is None and self._header and MARKER_OF_EXIF not in self._header:
            self._exif = Image.Image().getexif()
        return super().getexif()

    @property
    def im(self) -> Any:
        if isinstance(self._encoded, EncodedImage):
            pixel_uses.note()
            opens = PpmImageFile if self._encoded.header is None else JpegImageFile
            image: Image.Image = opens(io.BytesIO(self._encoded.data))
            image.load()
            self.im = image.im if image.mode == self.mode else image.convert(self.mode).im
        elif self._encoded is not None:
            self.im = self._encoded.decoded().copy().im
        return Image.Image.im.fget(self)  # type: ignore[attr-defined]

    @im.setter
    def im(self, pixels: Any) -> None:
        Image.Image.im.fset(self, pixels)  # type: ignore[attr-defined]
        self._encoded = None  # last, as another thread may ask for pixels

    def _read(self) -> None:
        """Read the file, if that was not done."""

    def load(self) -> Any:
        """Return access to the pixels, as Pillow does; without decoding them yet."""
        self._read()
        return super().load() if self._encoded is None else _Pixels(self)

    def copy(self) -> Image.Image:
        self._read()
        return super().copy() if self._encoded is None else LazyImage(self, self._encoded, self.mode)

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        self._read()
        wanted = mode or self.mode
        if self._encoded is None or args or kwargs or not (wanted == self.mode or self._is_read_as(wanted)):
            return super().convert(mode, *args, **kwargs)
        return LazyImage(self, self._encoded, wanted)

    def _is_read_as(self, mode: str) -> bool:
        """Return whether the file, read in this mode, is the image converted to it."""
        if not isinstance(self._encoded, EncodedImage):
            return False
        return mode == "L" or (mode == "RGB" and _mode_of(self._encoded) == "L")

    def close(self) -> None:
        super().close()
        self._encoded = None


class LazyImage(_DecodedLate):
    """An image that is not decoded yet, as others take it for a copy of one. It has the ``info`` of ``image``."""

    def __init__(self, image: Image.Image | None, encoded: EncodedImage | Transformed, mode: str = "RGB") -> None:
        size = encoded.size
        if isinstance(encoded, Transformed):
            mode, size = encoded.mode, size[::-1]
        vars(self).update(_ATTRIBUTES, _mode=mode, _size=size, _encoded=encoded)
        if image is None:
            self.info = {}
        elif (info := vars(image).get("info")) is not None:
            self.info = {key: list(value) if isinstance(value, list) else value for key, value in info.items()}
        else:
            assert isinstance(image, _DecodedLate)
            self._header = image._header

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Image.Image, (), self._new(self.im).__getstate__()  # as the decoded image that others take it for

    def _known_to_pillow(self) -> dict[str, Any]:
        return {"info": vars(JpegImageFile(io.BytesIO(self._header)))["info"]}


class LazyJpegFile(_DecodedLate, JpegImageFile):
    """A JPEG file as ``Image.open`` returns it, whose pixels are decoded when they are used.

    It is in memory. Pillow reads its header when an attribute is asked for that is not needed to decode it.
    """

    _unread: EncodedImage | None = None
    """The image before ``load``."""

    @classmethod
    def of(cls, header: bytes, encoded: EncodedImage, mode: str, file: Any, filename: Any) -> LazyJpegFile:
        image = cls.__new__(cls)
        known = {"_mode": mode, "_size": encoded.size, "_header": header, "_unread": encoded}
        vars(image).update(_ATTRIBUTES, fp=file, filename=filename or "", _exclusive_fp=False, **known)
        image.readonly = 1  # as Pillow has it until the file is decoded
        return image

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (JpegImageFile,), self.__getstate__()  # as Pillow's

    def _known_to_pillow(self) -> dict[str, Any]:
        return vars(JpegImageFile(io.BytesIO(self._header)))

    def _read(self) -> None:
        encoded, self._unread = self._unread, None
        if encoded is None or self.fp is None:  # as it was closed
            return
        if not is_sound(encoded):  # so Pillow decodes it
            return
        self._encoded = encoded
        self.tile, self.readonly = [], 0  # as Pillow leaves a file that it has decoded
        if self._exclusive_fp:
            self.fp.close()
        self.fp = None

    def close(self) -> None:
        self._unread = None
        super().close()

    def draft(self, mode: str | None, size: Any) -> Any:
        if self._unread is not None:
            pixel_uses.note_line()
        self._unread = None  # Pillow decodes in another way then
        return super().draft(mode, size)


for _lazy, _other in ((LazyImage, Image.Image), (LazyJpegFile, JpegImageFile)):
    _lazy._taken_for = _other
    # So that repr(image), and errors that name its type, say what others take it for.
    _lazy.__module__, _lazy.__qualname__, _lazy.__name__ = _other.__module__, _other.__qualname__, _other.__name__


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


def path_in(image: Image.Image) -> str:
    """Return the path of the file that an image was opened from, also of a converted one if it is not decoded yet."""
    if isinstance(image, _DecodedLate) and isinstance(image._encoded, EncodedImage):
        return image._encoded.path
    return str(getattr(image, "filename", ""))


def transformed_in(image: Image.Image) -> Transformed | None:
    """Return an image that is not decoded yet, with the transforms that were called on it; otherwise None."""
    if not isinstance(image, _DecodedLate):
        return None
    image._read()
    if not isinstance(image._encoded, EncodedImage):
        return image._encoded
    return Transformed.of(image._encoded, image.mode)


def is_late() -> bool:
    """Return whether images are decoded late here."""
    return (_in_process or getattr(_in_thread, "is_on", False)) and not is_making_values()


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
    if opens is JpegImagePlugin.jpeg_factory and PILLOW_DECODES_LATE:
        Image.register_open("JPEG", _opened, accepts)
    return Image.OPEN["JPEG"][0] is _opened


def _opened(file: Any, filename: Any = None) -> JpegImageFile:
    late = _opened_late(file, filename) if is_late() else None
    if late is not None:
        return late
    file.seek(0)
    image: JpegImageFile = JpegImagePlugin.jpeg_factory(file, filename)
    return image


def _opened_late(file: Any, filename: Any) -> LazyJpegFile | None:
    """Return a JPEG that is decoded late; None if Pillow is to open it."""
    size_bytes = file.seek(0, os.SEEK_END)
    if size_bytes > MOST_READ_BYTES:  # Pillow reads what it needs
        return None
    file.seek(0)
    place = batch_memory.place(size_bytes) if type(file) in (io.BufferedReader, io.BytesIO) else None
    data: bytes | memoryview = file.read(size_bytes) if place is None else place[: file.readinto(place)]
    try:
        encoded = EncodedImage.of_jpeg(data, filename if isinstance(filename, str) else "")
    except ImageError:  # it takes long to decode, which Pillow does without a word
        return None
    if encoded is None or encoded.header is None:
        return None
    at = encoded.header.first_scan + 2
    header = bytes(data[: at + int.from_bytes(data[at : at + 2], "big")])
    if b"MPF\0" in header:  # several pictures, which have a class of their own
        return None
    return LazyJpegFile.of(header, encoded, _mode_of(encoded), file, filename)


def _mode_of(encoded: EncodedImage) -> str:
    """Return the mode in which Pillow opens an image."""
    return "L" if encoded.header is not None and encoded.header.is_grey else "RGB"
