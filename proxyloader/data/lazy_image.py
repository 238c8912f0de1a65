"""PIL images of JPEGs that are decoded when their pixels are first accessed. Runs where the dataset runs.

NOTE [ Deferred decoding ]
Pillow's opener of JPEGs is replaced by one that reads the whole file, but defers decoding until a pixel is accessed.
DALI decodes an image in mode L to RGB and converts it to grayscale like Pillow (``START_AS_GREY`` in
``transforms/chain.py``), which preserves the levels of a grayscale JPEG.

An undecoded image is an instance of Pillow's own class, because torchvision, timm and datasets look up ``type(image)``.
Its data are in its ``__dict__``, and hooks replace the methods of Pillow that need pixels.

If a file is damaged, or DALI might decode it differently from Pillow, ``Image.open`` returns Pillow's own image. See
NOTE [ When errors are raised ] in ``jpeg.py``.
"""

import functools
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from PIL import Image, JpegImagePlugin
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PpmImagePlugin import PpmImageFile

from .bad_samples import name_of
from .batch_memory import batch_memory
from .deferral import active
from .encoded_image import MAX_READ_BYTES, EncodedImage
from .transformed import TransformedImage, pixel_uses

_ATTRIBUTES = {name: value for name, value in vars(Image.Image()).items() if name != "info"}  # without pixels

APP1_MARKER = b"\xff\xe1"  # marker of APP1 segments, which hold EXIF and XMP data

Image.preinit()  # importing Pillow's formats in a worker could wait for the import lock of another thread

# Additional keys in the ``__dict__`` of a lazy image. Their values never change in place, because code that copies
# ``vars(image)`` shares them with another image.
_IMAGE = "_proxyloader_image"
"""The undecoded image: an EncodedImage, a TransformedImage or DeferredPixels."""

_HEADER = "_proxyloader_header"
"""The header of the source file up to its first scan, until Pillow has parsed it."""

_INFO = "_proxyloader_info"
"""What ``info`` depends on until it is accessed: a TransformedImage, and the image before its last call."""


class DeferredPixels(NamedTuple):
    """The pixels of an image of one color. ``size``: (width, height)."""

    size: tuple[int, int]
    compute: Callable[[], Image.Image]
    levels: tuple[float, ...]


Undecoded = EncodedImage | TransformedImage | DeferredPixels


def create_lazy_image(
    encoded: Undecoded, like: Image.Image | None = None, mode: str = "RGB", may_lose_info: bool = False
) -> Image.Image:
    """Return an ``Image.Image`` that is decoded on first access to its pixels, with the ``info`` of ``like``.

    ``may_lose_info``: whether the last call may have lost it, which is determined when ``info`` is accessed.
    """
    hook_pillow()
    image, size = Image.Image.__new__(Image.Image), encoded.size
    if isinstance(encoded, TransformedImage):
        mode, size = encoded.mode, size[::-1]
    state: dict[str, Any] = {"info": {}} if like is None else like.__dict__
    if may_lose_info and like is not None:
        info: dict[str, Any] = {_INFO: (encoded, like.copy())}
    elif "info" in state:
        info = {"info": state["info"].copy()}
    else:  # it depends on another attribute
        info = {_HEADER: state[_HEADER]} if _HEADER in state else {_INFO: state[_INFO]}
    image.__dict__ = {**_ATTRIBUTES, "_mode": mode, "_size": size, _IMAGE: encoded, **info}
    return image


def find_undecoded(image: Image.Image) -> Undecoded | None:
    """Return the undecoded image behind a PIL image, or None if it is decoded. Afterwards, a file counts as loaded."""
    state: dict[str, Any] = image.__dict__
    if (encoded := state.get(_IMAGE)) is not None and (file := state.get("fp")) is not None:
        if image._exclusive_fp:  # type: ignore[attr-defined]
            file.close()
        state.update(fp=None, tile=[])
        image.readonly = 0
    return encoded


def _decode(image: Image.Image, encoded: Undecoded) -> None:
    if isinstance(encoded, EncodedImage):
        pixel_uses.add()
        image_class = PpmImageFile if encoded.header is None else JpegImageFile
        pixels: Image.Image = image_class(io.BytesIO(encoded.data))
        pixels.load()
        image.im = pixels.im if pixels.mode == image.mode else pixels.convert(image.mode).im
    elif isinstance(encoded, TransformedImage):
        image.im = encoded.materialize().copy().im
    else:
        image.im = encoded.compute().im


@functools.cache
def hook_pillow() -> None:
    """Extend Pillow's own classes with decoding on access, permanently, so that ``type(image) is Image.Image``."""
    cls = Image.Image
    fget, fset = vars(cls)["im"].fget, vars(cls)["im"].fset
    copy, convert, close, getexif, draft = cls.copy, cls.convert, cls.close, cls.getexif, JpegImageFile.draft
    putpalette = cls.putpalette

    def get_im(self: Image.Image) -> Any:
        if _IMAGE in self.__dict__ and (encoded := find_undecoded(self)) is not None:
            _decode(self, encoded)
        return fget(self)

    def set_im(self: Image.Image, pixels: Any) -> None:
        fset(self, pixels)
        self.__dict__.pop(_IMAGE, None)  # last, because another thread may access pixels

    def get_missing(self: Image.Image, name: str) -> Any:
        if name == "encoded" and (transformed := get_transformed(self)) is not None:
            return transformed.image.data
        if name == "info" and _INFO in vars(self):
            transformed, before = vars(self)[_INFO]
            is_kept = not before.info or transformed.keeps_info(before.mode, before.size)
            return vars(self).setdefault("info", before.info.copy() if is_kept else {})
        header = None if name.startswith("__") else vars(self).pop(_HEADER, None)
        if header is None:
            return object.__getattribute__(self, name)  # raises the proper error, also for properties
        parsed = vars(JpegImageFile(io.BytesIO(header)))
        for key in parsed if isinstance(self, JpegImageFile) else ("info",):
            vars(self).setdefault(key, parsed[key])
        return getattr(self, name)

    def hook_load(load: Any) -> Any:
        @functools.wraps(load)
        def hooked(self: Image.Image) -> Any:
            return load(self) if find_undecoded(self) is None else _Pixels(self)

        return hooked

    def hooked_copy(self: Image.Image) -> Image.Image:
        encoded = find_undecoded(self)
        return copy(self) if encoded is None else create_lazy_image(encoded, self, self.mode)

    def hooked_convert(self: Image.Image, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        encoded, target = find_undecoded(self), mode or self.mode
        if encoded is None or args or kwargs or not (target == self.mode or can_read_as(encoded, target)):
            return convert(self, mode, *args, **kwargs)
        return create_lazy_image(encoded, self, target)

    def hooked_putpalette(self: Image.Image, *args: Any, **kwargs: Any) -> None:
        _ = self.im if is_lazy(self) else None  # Pillow changes the mode before it accesses pixels
        putpalette(self, *args, **kwargs)

    def hooked_close(self: Image.Image) -> None:
        close(self)
        vars(self).pop(_IMAGE, None)

    def hooked_getexif(self: Image.Image) -> Image.Exif:  # called for every image by Hugging Face's ``datasets``
        if self._exif is None and APP1_MARKER not in vars(self).get(_HEADER, APP1_MARKER):
            self._exif = Image.Image().getexif()
        return getexif(self)

    def hooked_draft(self: JpegImageFile, mode: str | None, size: Any) -> Any:
        before = self.mode, self.size
        result = draft(self, mode, size)
        if (self.mode, self.size) != before and vars(self).pop(_IMAGE, None) is not None:  # it is decoded differently
            pixel_uses.explain()
        return result

    hooks = (copy, hooked_copy), (convert, hooked_convert), (close, hooked_close), (getexif, hooked_getexif)
    for method, hooked in (*hooks, (putpalette, hooked_putpalette)):
        setattr(cls, method.__name__, functools.wraps(method)(hooked))
    setattr(JpegImageFile, "draft", functools.wraps(draft)(hooked_draft))  # noqa: B010
    for each in (cls, ImageFile):
        setattr(each, "load", hook_load(each.load))  # noqa: B010
    setattr(cls, "im", property(get_im, set_im))  # noqa: B010
    setattr(cls, "__getattr__", get_missing)  # noqa: B010
    if (in_file := vars(JpegImageFile).get("__getattr__")) is not None:  # in Pillow 11
        missing: Any = lambda self, name: (get_missing if _HEADER in vars(self) else in_file)(self, name)  # noqa: E731
        setattr(JpegImageFile, "__getattr__", missing)  # noqa: B010


def can_read_as(encoded: Undecoded, mode: str) -> bool:
    """Return whether reading the file in this mode is equivalent to converting the image."""
    return isinstance(encoded, EncodedImage) and (mode == "L" or (mode == "RGB" and encoded.is_gray))


class _Pixels:
    """Pixel access that decodes the image on first use."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image

    def __getitem__(self, xy: Any) -> Any:
        return self._image.im.pixel_access(self._image.readonly)[xy]

    def __setitem__(self, xy: Any, color: Any) -> None:
        self._image.im.pixel_access(self._image.readonly)[xy] = color


def get_transformed(image: Image.Image) -> TransformedImage | None:
    """Return the undecoded image of a file with the transforms called on it; None for any other image."""
    encoded = find_undecoded(image)
    if isinstance(encoded, TransformedImage):
        return encoded
    return TransformedImage.start(encoded, image.mode) if isinstance(encoded, EncodedImage) else None


def is_lazy(value: Any) -> bool:
    """Return whether a value is an undecoded image."""
    return isinstance(value, Image.Image) and _IMAGE in value.__dict__


def replace_undecoded(image: Image.Image, encoded: TransformedImage) -> None:
    vars(image).update(_proxyloader_image=encoded, _mode=encoded.mode, _size=encoded.size[::-1])


def opener_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of Pillow's opener of JPEGs, unless another library has replaced it."""
    opener, accept = Image.OPEN["JPEG"]
    if opener is JpegImagePlugin.jpeg_factory:
        yield Image.OPEN, "JPEG", (_open, accept)


def _open(file: Any, filename: Any = None) -> JpegImageFile:
    if active() is not None and (lazy := _open_lazy(file, filename)) is not None:
        return lazy
    file.seek(0)
    return JpegImagePlugin.jpeg_factory(file, filename)


def _open_lazy(file: Any, filename: Any) -> JpegImageFile | None:
    """Return a lazy image of a JPEG file, which is read into memory; None if Pillow must open the file."""
    try:
        if (size_bytes := file.seek(0, os.SEEK_END)) is None:  # such as of mmap
            size_bytes = file.tell()
    except Exception:  # it may only seek from the start
        return None
    if size_bytes > MAX_READ_BYTES:  # Pillow reads only what it needs
        return None
    file.seek(0)
    memory = batch_memory.allocate(size_bytes) if type(file) in (io.BufferedReader, io.BytesIO) else None
    data: bytes | memoryview = file.read(size_bytes) if memory is None else memory[: file.readinto(memory)]
    encoded = EncodedImage.from_jpeg(data, filename if isinstance(filename, str) and filename else name_of(file))
    if encoded is None or encoded.header is None:
        return None
    start = encoded.header.first_scan + 2
    header = bytes(data[: start + int.from_bytes(data[start : start + 2], "big")])
    if b"MPF\0" in header:  # multi-picture files have their own class
        return None
    hook_pillow()
    image = JpegImageFile.__new__(JpegImageFile)
    attributes = {"_mode": "L" if encoded.is_gray else "RGB", "_size": encoded.size, _HEADER: header, _IMAGE: encoded}
    image.__dict__ = {**_ATTRIBUTES, **attributes, "fp": file, "filename": filename or "", "_exclusive_fp": False}
    image.readonly = 1  # like Pillow before decoding
    return image
