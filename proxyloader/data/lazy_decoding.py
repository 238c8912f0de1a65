"""Defer decoding in libraries other than Pillow. Runs where the dataset runs.

``pil_loader`` of ``ImageFolder`` reads the file without Pillow, which is faster, and names it in errors.

``read_image``, ``decode_image`` and ``decode_jpeg`` of torchvision look up operators of ``torch.ops.image`` by name.
While decoding is deferred, these return a LazyTensor: see NOTE [ Lazy tensors ]. It has values immediately if the file
is not a JPEG or not decoded to RGB, so that all images of a batch arrive on the same device. The same applies to
``decode_jpeg`` of torchcodec, which ``decode_image`` calls, if the EXIF orientation, which it applies, is upright.

simplejpeg and OpenCV decode to an array, which is memory that any code may read, so decoding cannot be deferred. But
``Image.fromarray`` of an unchanged array returns an undecoded image, and ``to_tensor`` an undecoded tensor
(``pillow_calls.py``), so that calls on them are recorded. A copy of the pixels shows whether the array has been changed
in the meantime.
"""

import collections
import contextlib
import functools
import io
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile
from torchvision.datasets import folder
from torchvision.io import ImageReadMode

from ..transforms.chain import START_AS_TENSOR
from .deferral import active
from .encoded_image import EncodedImage
from .lazy_image import APP1_MARKER, create_lazy_image
from .lazy_tensor import create_lazy_output, materialize, wrap_values
from .recorded import map_leaves
from .replaced_code import code_patches, original, replacements
from .transformed import TransformedImage


def decoder_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of ``pil_loader``, and of the functions of other decoders."""
    load = original(folder.pil_loader)
    defer: Any = lambda path: create_lazy_image(EncodedImage.open(path)) if active() is not None else load(path)  # noqa: E731
    yield from replacements(folder.pil_loader, functools.wraps(load)(defer))
    for name in ("decode_image", "decode_jpeg"):
        if (operator := getattr(torch.ops.image, name, None)) is not None:  # None: torchvision was built without it
            yield torch.ops.image, name, _patch(name, operator)
    if "torchcodec.decoders" in sys.modules:
        names = "torchcodec.decoders._image_decoders:decode_jpeg", "torchcodec.decoders._image_decoders:decode_image"
        yield from code_patches(dict.fromkeys(names, _decode_torchcodec))
    simplejpeg, opencv = sys.modules.get("simplejpeg"), sys.modules.get("cv2")
    decoders = (simplejpeg, "decode_jpeg", _remember_rgb), (opencv, "imdecode", _remember_bgr)
    for module, name, remember in (*decoders, (opencv, "imread", _remember_file), (opencv, "cvtColor", _follow)):
        if (function := getattr(module, name, None)) is not None:
            yield module, name, _remembering(function, remember)
    if simplejpeg or opencv:
        yield from code_patches({"PIL.Image:fromarray": _defer_fromarray})


@functools.cache  # cached, because torch.jit registers id(hooked)
def _patch(name: str, operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(operator, assigned=(), updated=())
    def hooked(data: Any, mode: int = ImageReadMode.UNCHANGED.value, apply_exif_orientation: bool = False) -> Any:
        if active() is None:
            return operator(data, mode, apply_exif_orientation)
        data = materialize(data)  # it may be encoded from an image, as by ``v2.JPEG``
        image = None if apply_exif_orientation else _encode(data, mode)
        if image is None:
            return wrap_values(operator(data, mode, apply_exif_orientation))
        copied = data.clone()  # data may change before it is decoded
        transformed = TransformedImage(image, functools.partial(operator, copied, mode, False), START_AS_TENSOR)
        return create_lazy_output(transformed)

    with contextlib.suppress(AttributeError):  # for ``torch.jit.script`` of functions that call it
        torch.jit._builtins._register_builtin(hooked, f"image::{name}")
    return hooked


def _encode(data: Any, mode: int) -> EncodedImage | None:
    """Return the JPEG; None if the mode is not RGB, or DALI might decode it differently."""
    if not isinstance(data, torch.Tensor) or mode not in (ImageReadMode.UNCHANGED.value, ImageReadMode.RGB.value):
        return None
    image = EncodedImage.from_jpeg(data.numpy().tobytes())
    return None if image is None or (mode == 0 and image.is_gray) else image


def _decode_torchcodec(decode: Callable[..., Any], source: Any, **options: Any) -> Any:
    transformed = _defer_torchcodec(decode, source, **options) if decode.__name__ == "decode_jpeg" else None
    if transformed is None:
        return map_leaves(wrap_values, decode(source, **options))
    return create_lazy_output(transformed)


def _defer_torchcodec(
    decode: Callable[..., Any], source: Any, *, mode: Any = "RGB", output_dtype: Any = torch.uint8, device: Any = "cpu"
) -> TransformedImage | None:
    number = ImageReadMode[str(getattr(mode, "name", mode)).upper()].value
    if output_dtype not in (torch.uint8, "auto") or torch.device(device).type != "cpu":
        return None
    if isinstance(source, (str, Path)):
        source = Path(source).read_bytes()
    if isinstance(source, (bytes, bytearray)):
        source = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    image = _encode(source, number)
    if image is None or not is_upright(image):
        return None
    return TransformedImage(image, functools.partial(decode, source.clone(), mode=mode), START_AS_TENSOR)


def is_upright(image: EncodedImage) -> bool:
    """Return whether decoders that apply the EXIF orientation leave an image as it is."""
    assert image.header is not None
    head = image.data[: image.header.first_scan]
    if APP1_MARKER not in head:
        return True
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("error")
        exif = Image.Exif()
        exif.load(JpegImageFile(io.BytesIO(image.data)).info.get("exif", b""))
        return bool(exif.get(ExifTags.Base.Orientation, 1) == 1) and head.count(b"Exif\0\0") <= 1
    return False


# --- arrays -----------------------------------------------------------------------------------------------------------


class Decoded(NamedTuple):
    """An array (height, width, 3) with the pixels of a file, and a copy. ``is_bgr``: its channels are reversed."""

    array: weakref.ref[NDArray[np.uint8]]
    pixels: NDArray[np.uint8]
    image: EncodedImage
    is_bgr: bool


_recent: collections.deque[Decoded] = collections.deque(maxlen=4)

_fromarray = original(Image.fromarray)

BGR2RGB = 4  # ``cv2.COLOR_BGR2RGB``

COLOR_FLAGS = {1: (True, True), 1 | 128: (True, False), 256: (False, True), 256 | 128: (False, False)}
"""IMREAD_COLOR and IMREAD_COLOR_RGB of OpenCV, each also with IMREAD_IGNORE_ORIENTATION: ``is_bgr``, ``is_turned``."""


def _remembering(function: Callable[..., Any], remember: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if type(result) is np.ndarray and result.ndim == 3 and _redecodes_faster():
            with contextlib.suppress(Exception):  # TypeError: arguments that change the pixels
                remember(result, *args, **kwargs)
        return result

    return hooked


def _redecodes_faster() -> bool:
    """Return whether decoding an image again is faster than sending the pixels of its array."""
    return (deferral := active()) is not None and deferral.on_gpu


def _remember_rgb(array: Any, data: Any, colorspace: Any = "RGB", *, min_height: int = 0, min_width: int = 0) -> None:
    if str(colorspace).upper() == "RGB":  # an array that is scaled down has another size
        _remember(array, EncodedImage.from_jpeg(bytes(data)), False)


def _remember_bgr(array: Any, data: Any, flags: Any = 1, *, path: str = "") -> None:
    if flags in COLOR_FLAGS:
        is_bgr, is_turned = COLOR_FLAGS[flags]
        image = EncodedImage.from_jpeg(bytes(data), path)
        if image is not None and (not is_turned or is_upright(image)):
            _remember(array, image, is_bgr)


def _remember_file(array: Any, path: Any, flags: Any = 1) -> None:
    _remember_bgr(array, Path(path).read_bytes(), flags, path=str(path))


def _follow(result: Any, array: Any, code: Any) -> None:
    for known in tuple(_recent) if code == BGR2RGB else ():
        if (source := known.array()) is not None and source is array and np.array_equal(source, known.pixels):
            _remember(result, known.image, not known.is_bgr)


def _remember(array: NDArray[np.uint8], image: EncodedImage | None, is_bgr: bool) -> None:
    if image is not None and array.dtype == np.uint8 and array.shape == (image.height, image.width, 3):
        _recent.append(Decoded(weakref.ref(array), array.copy(), image, is_bgr))


def _defer_fromarray(fromarray: Any, obj: Any, mode: Any = None) -> Any:
    transformed = find_decoded(obj) if mode in (None, "RGB") else None
    return NotImplemented if transformed is None else create_lazy_image(transformed)


def find_decoded(array: Any) -> TransformedImage | None:
    """Return the image of an array, or of a view of one, with RGB pixels; None if it is not known, or has changed."""
    if type(array) is not np.ndarray or not _recent or not _redecodes_faster():
        return None
    for known in _recent:
        decoded: Any = known.array()
        if decoded is not None and any(decoded is each for each in (array, array.base)):
            order = slice(None, None, -1 if known.is_bgr else 1)
            is_rgb = decoded[..., order].__array_interface__ == array.__array_interface__
            if is_rgb and np.array_equal(decoded, known.pixels):
                return TransformedImage(known.image, functools.partial(_fromarray, known.pixels[..., order]))
    return None
