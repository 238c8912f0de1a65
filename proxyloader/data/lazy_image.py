"""PIL images of JPEGs that are decoded when their pixels are first used. Runs where the dataset runs.

NOTE [ Deferred decoding ]
``Image.open`` finds the class of a file in a registry of Pillow's. Here the whole JPEG is read, and decoded where a
pixel is used. So code that opens, converts and copies an image, and gives it to a compiled transform, hands on the
bytes of the file, and DALI decodes them. All other code gets Pillow's pixels.

This holds in the workers of a loader whose images DALI decodes, in all of their threads. Without workers it holds in
the thread that fetches a batch, until it is fetched: see ``hooks.py``. With Pillow 10, whose images have no place to
decode them late, ``Image.open`` stays Pillow's own.

Of an image in mode L DALI decodes RGB, and converts it to grey as Pillow does (``START_AS_GREY`` in
``transforms/chain.py``). A JPEG that is grey itself keeps its levels thereby.

Such an image is an instance of Pillow's own class, because torchvision, timm and datasets look up ``type(image)``. What
it lacks is in its ``__dict__``, and the methods of Pillow that need pixels are hooked.

If a file is damaged, or DALI might decode it in another way than Pillow, ``Image.open`` returns Pillow's own image. See
NOTE [ When errors are raised ] in ``jpeg.py``.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from typing import Any

from PIL import Image, JpegImagePlugin
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PpmImagePlugin import PpmImageFile

from .batch_memory import batch_memory
from .deferral import current
from .encoded_image import MAX_READ_BYTES, EncodedImage
from .transformed import TransformedImage, is_materializing, pixel_uses

_ATTRIBUTES = {name: value for name, value in vars(Image.Image()).items() if name != "info"}
"""What Pillow gives an image that has no pixels yet."""

MARKER_OF_EXIF = b"\xff\xe1"
"""Of APP1, the segments that EXIF and XMP data are in."""

PILLOW_SUPPORTS_LAZY = isinstance(getattr(Image.Image, "im", None), property)
"""Whether images have a place to decode late, as from Pillow 11 on."""

Image.preinit()  # here, as a worker that imported Pillow's formats might wait for a lock of another thread's import


# What a late image has in its ``__dict__`` beside what Pillow gives it. Nothing of it is changed in place, as code that
# copies ``vars(image)`` gives it to another image.
_IMAGE = "_proxyloader_image"
"""The image while it is not decoded: an EncodedImage, or a TransformedImage."""

_FILE = "_proxyloader_file"
"""The EncodedImage of a file before ``load``."""

_HEADER = "_proxyloader_header"
"""The header of the file that the image comes from, to its first scan, until Pillow has read it."""


def create_lazy_image(
    encoded: EncodedImage | TransformedImage, like: Image.Image | None = None, mode: str = "RGB"
) -> Image.Image:
    """Return an ``Image.Image`` that is decoded when its pixels are first used. It has the ``info`` of ``like``."""
    _hook_pillow()
    image, size = Image.Image.__new__(Image.Image), encoded.size
    if isinstance(encoded, TransformedImage):
        mode, size = encoded.mode, size[::-1]
    state = vars(image)
    state.update(_ATTRIBUTES, _mode=mode, _size=size, _proxyloader_image=encoded)
    if like is None:
        image.info = {}
    elif (info := vars(like).get("info")) is not None:
        image.info = {key: list(value) if isinstance(value, list) else value for key, value in info.items()}
    else:
        state[_HEADER] = vars(like)[_HEADER]
    return image


def _undecoded(image: Image.Image) -> EncodedImage | TransformedImage | None:
    """Return what an image is while it is not decoded; None if it is. A file is loaded thereby."""
    state: dict[str, Any] = image.__dict__
    if _FILE in state:
        encoded = state.pop(_FILE)
        if image.fp is not None:  # type: ignore[attr-defined]  # otherwise it was closed
            # As Pillow leaves a file that it has decoded.
            state.update(_proxyloader_image=encoded, tile=[], _readonly=0)
            if image._exclusive_fp:  # type: ignore[attr-defined]
                image.fp.close()  # type: ignore[attr-defined]
            image.fp = None  # type: ignore[attr-defined]
    return state.get(_IMAGE)


def _decode(image: Image.Image, encoded: EncodedImage | TransformedImage) -> None:
    if isinstance(encoded, EncodedImage):
        pixel_uses.note()
        opens = PpmImageFile if encoded.header is None else JpegImageFile
        pixels: Image.Image = opens(io.BytesIO(encoded.data))
        pixels.load()
        image.im = pixels.im if pixels.mode == image.mode else pixels.convert(image.mode).im
    else:
        image.im = encoded.real().copy().im


@functools.cache
def _hook_pillow() -> None:
    """Let Pillow's own classes have images that are decoded late, in this process from now on.

    So ``type(image) is Image.Image`` holds. Images that are not late are served by Pillow as before.
    """
    cls = Image.Image
    fget, fset = vars(cls)["im"].fget, vars(cls)["im"].fset
    copy, convert, close, getexif, draft = cls.copy, cls.convert, cls.close, cls.getexif, JpegImageFile.draft

    def get_im(self: Image.Image) -> Any:
        if _IMAGE in self.__dict__:
            _decode(self, self.__dict__[_IMAGE])
        return fget(self)

    def set_im(self: Image.Image, pixels: Any) -> None:
        fset(self, pixels)
        self.__dict__.pop(_IMAGE, None)  # last, as another thread may ask for pixels

    def get_missing(self: Image.Image, name: str) -> Any:
        header = None if name.startswith("__") else vars(self).pop(_HEADER, None)
        if header is None:
            return object.__getattribute__(self, name)  # which raises the error, also that of a property
        known = vars(JpegImageFile(io.BytesIO(header)))
        for key in known if isinstance(self, JpegImageFile) else ("info",):
            vars(self).setdefault(key, known[key])
        return getattr(self, name)

    def loading(load: Any) -> Any:
        @functools.wraps(load)
        def hooked(self: Image.Image) -> Any:
            state = self.__dict__
            is_late = (_IMAGE in state or _FILE in state) and _undecoded(self) is not None
            return _Pixels(self) if is_late else load(self)

        return hooked

    @functools.wraps(copy)
    def hooked_copy(self: Image.Image) -> Image.Image:
        encoded = _undecoded(self)
        return copy(self) if encoded is None else create_lazy_image(encoded, self, self.mode)

    @functools.wraps(convert)
    def hooked_convert(self: Image.Image, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        encoded, wanted = _undecoded(self), mode or self.mode
        if encoded is None or args or kwargs or not (wanted == self.mode or _is_read_as(encoded, wanted)):
            return convert(self, mode, *args, **kwargs)
        return create_lazy_image(encoded, self, wanted)

    @functools.wraps(close)
    def hooked_close(self: Image.Image) -> None:
        close(self)
        vars(self).pop(_FILE, None)
        vars(self).pop(_IMAGE, None)

    @functools.wraps(getexif)
    def hooked_getexif(self: Image.Image) -> Image.Exif:  # Hugging Face's ``datasets`` asks each image for it
        if self._exif is None and MARKER_OF_EXIF not in vars(self).get(_HEADER, MARKER_OF_EXIF):
            self._exif = Image.Image().getexif()
        return getexif(self)

    @functools.wraps(draft)
    def hooked_draft(self: JpegImageFile, mode: str | None, size: Any) -> Any:
        if vars(self).pop(_FILE, None) is not None:  # Pillow decodes in another way then
            pixel_uses.note_caller()
        return draft(self, mode, size)

    for hooked in (hooked_copy, hooked_convert, hooked_close, hooked_getexif):
        setattr(cls, hooked.__name__, hooked)
    for each in (cls, ImageFile):
        setattr(each, "load", loading(each.load))  # noqa: B010
    setattr(cls, "im", property(get_im, set_im))  # noqa: B010
    setattr(cls, "__getattr__", get_missing)  # noqa: B010
    if (of_file := vars(JpegImageFile).get("__getattr__")) is not None:  # as in Pillow 11

        def get_missing_of_file(self: JpegImageFile, name: str) -> Any:
            return get_missing(self, name) if _HEADER in vars(self) else of_file(self, name)

        setattr(JpegImageFile, "__getattr__", get_missing_of_file)  # noqa: B010
    setattr(JpegImageFile, "draft", hooked_draft)  # noqa: B010


def _is_read_as(encoded: EncodedImage | TransformedImage, mode: str) -> bool:
    """Return whether the file, read in this mode, is the image converted to it."""
    return isinstance(encoded, EncodedImage) and (mode == "L" or (mode == "RGB" and _mode_of(encoded) == "L"))


class _Pixels:
    """Access to the pixels of an image, which is decoded when one is asked for."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image

    def __getitem__(self, xy: Any) -> Any:
        return self._decoded()[xy]

    def __setitem__(self, xy: Any, color: Any) -> None:
        self._decoded()[xy] = color

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoded(), name)

    def _decoded(self) -> Any:
        return self._image.im.pixel_access(self._image.readonly)


def get_encoded(image: Image.Image) -> EncodedImage | None:
    """Return the JPEG of an image that is not decoded yet, if that is the RGB image; otherwise None."""
    encoded = _undecoded(image) if image.mode == "RGB" else None
    return encoded if isinstance(encoded, EncodedImage) else None


def get_image_path(image: Image.Image) -> str:
    """Return the path of the file that an image was opened from, also of a converted one if it is not decoded yet."""
    encoded = vars(image).get(_IMAGE)
    return encoded.path if isinstance(encoded, EncodedImage) else str(getattr(image, "filename", ""))


def get_transformed(image: Image.Image) -> TransformedImage | None:
    """Return an image that is not decoded yet, with the transforms that were called on it; otherwise None."""
    encoded = _undecoded(image)
    return TransformedImage.of(encoded, image.mode) if isinstance(encoded, EncodedImage) else encoded


def is_late() -> bool:
    """Return whether images stay undecoded here."""
    deferral = current()
    return PILLOW_SUPPORTS_LAZY and deferral is not None and deferral.is_active and not is_materializing()


def patch_opener() -> Callable[[], None]:
    """Put ``_opened`` into Pillow's registry, unless another library has put its own there. Return what undoes it."""
    Image.preinit()
    opens, accepts = Image.OPEN["JPEG"]
    if opens is JpegImagePlugin.jpeg_factory and PILLOW_SUPPORTS_LAZY:
        Image.register_open("JPEG", _opened, accepts)

    def undo() -> None:
        if Image.OPEN["JPEG"][0] is _opened:
            Image.register_open("JPEG", JpegImagePlugin.jpeg_factory, accepts)

    return undo


def _opened(file: Any, filename: Any = None) -> JpegImageFile:
    late = _opened_late(file, filename) if is_late() else None
    if late is not None:
        return late
    file.seek(0)
    image: JpegImageFile = JpegImagePlugin.jpeg_factory(file, filename)
    return image


def _opened_late(file: Any, filename: Any) -> JpegImageFile | None:
    """Return a JPEG file whose pixels are decoded when they are used; None if Pillow is to open it.

    It is in memory. Pillow reads its header when an attribute is asked for that is not needed to decode it.
    """
    size_bytes = file.seek(0, os.SEEK_END)
    if size_bytes > MAX_READ_BYTES:  # Pillow reads what it needs
        return None
    file.seek(0)
    place = batch_memory.place(size_bytes) if type(file) in (io.BufferedReader, io.BytesIO) else None
    data: bytes | memoryview = file.read(size_bytes) if place is None else place[: file.readinto(place)]
    encoded = EncodedImage.of_jpeg(data, filename if isinstance(filename, str) else "")
    if encoded is None or encoded.header is None:
        return None
    at = encoded.header.first_scan + 2
    header = bytes(data[: at + int.from_bytes(data[at : at + 2], "big")])
    if b"MPF\0" in header:  # several pictures, which have a class of their own
        return None
    _hook_pillow()
    image = JpegImageFile.__new__(JpegImageFile)
    known = {"_mode": _mode_of(encoded), "_size": encoded.size, _HEADER: header, _FILE: encoded}
    vars(image).update(_ATTRIBUTES, fp=file, filename=filename or "", _exclusive_fp=False, **known)
    image.readonly = 1  # as Pillow has it until the file is decoded
    return image


def _mode_of(encoded: EncodedImage) -> str:
    """Return the mode in which Pillow opens an image."""
    return "L" if encoded.header is not None and encoded.header.is_grey else "RGB"
