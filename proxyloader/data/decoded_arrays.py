"""Recognize arrays that simplejpeg and OpenCV have decoded. Runs where the dataset runs.

An array is memory that any code may read, so decoding it cannot be deferred. But ``Image.fromarray`` of an unchanged
array returns an undecoded image, and ``to_tensor`` an undecoded tensor (``pillow_calls.py``), so that calls on them are
recorded. The worker then decodes, but does not transform.

A copy of the pixels shows whether the array has been changed in the meantime. It is used if pixels are needed.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .deferral import recording
from .encoded_image import EncodedImage
from .lazy_decoding import find_orientation
from .lazy_image import create_lazy_image
from .replaced_code import original, replacements
from .transformed import TransformedImage


class Decoded(NamedTuple):
    """An array (height, width, 3) with the pixels of a file, and a copy. ``is_bgr``: its channels are reversed."""

    array: weakref.ref[NDArray[np.uint8]]
    pixels: NDArray[np.uint8]
    image: EncodedImage
    is_bgr: bool


class _Recent(threading.local):
    """The arrays that this thread decoded last."""

    def __init__(self) -> None:
        self.arrays: collections.deque[Decoded] = collections.deque(maxlen=4)


_recent = _Recent()
_fromarray = original(Image.fromarray)

BGR2RGB = 4
"""``cv2.COLOR_BGR2RGB``."""

COLOR_FLAGS = {1: (True, True), 1 | 128: (True, False), 256: (False, True), 256 | 128: (False, False)}
"""IMREAD_COLOR and IMREAD_COLOR_RGB of OpenCV, each also with IMREAD_IGNORE_ORIENTATION: ``is_bgr``, ``is_turned``."""


def array_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of the functions of imported decoders, and of ``Image.fromarray``."""
    simplejpeg, opencv = sys.modules.get("simplejpeg"), sys.modules.get("cv2")
    decoders = (simplejpeg, "decode_jpeg", _remember_rgb), (opencv, "imdecode", _remember_bgr)
    for module, name, remember in (*decoders, (opencv, "imread", _remember_file), (opencv, "cvtColor", _follow)):
        if (function := getattr(module, name, None)) is not None:
            yield module, name, _hook(function, remember)
    if simplejpeg or opencv:
        yield from replacements(Image.fromarray, _hook_fromarray(original(Image.fromarray)))


def _hook(function: Callable[..., Any], remember: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if type(result) is np.ndarray and result.ndim == 3 and len(args) in (1, 2) and not kwargs and recording():
            remember(result, *args)
        return result

    return hooked


def _remember_rgb(array: Any, data: Any, colorspace: Any = "RGB") -> None:
    if str(colorspace).upper() == "RGB":
        _remember(array, EncodedImage.from_jpeg(bytes(data)), False)


def _remember_bgr(array: Any, data: Any, flags: Any = 1, path: str = "") -> None:
    if flags in COLOR_FLAGS:
        is_bgr, is_turned = COLOR_FLAGS[flags]
        image = EncodedImage.from_jpeg(bytes(data), path)
        if image is not None and (not is_turned or find_orientation(image) == ()):
            _remember(array, image, is_bgr)


def _remember_file(array: Any, path: Any, flags: Any = 1) -> None:
    _remember_bgr(array, Path(path).read_bytes(), flags, str(path))


def _follow(result: Any, array: Any, code: Any) -> None:
    """Remember the result of a conversion of a remembered array."""
    for known in tuple(_recent.arrays) if code == BGR2RGB else ():
        if (source := known.array()) is not None and source is array and np.array_equal(source, known.pixels):
            _remember(result, known.image, not known.is_bgr)


def _remember(array: NDArray[np.uint8], image: EncodedImage | None, is_bgr: bool) -> None:
    if image is not None and array.dtype == np.uint8 and array.shape == (image.height, image.width, 3):
        _recent.arrays.append(Decoded(weakref.ref(array), array.copy(), image, is_bgr))


def _hook_fromarray(fromarray: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fromarray)
    def hooked(obj: Any, mode: Any = None) -> Any:
        transformed = find_decoded(obj) if mode in (None, "RGB") else None
        return fromarray(obj, mode) if transformed is None else create_lazy_image(transformed)

    return hooked


def find_decoded(array: Any) -> TransformedImage | None:
    """Return the image of an array, or of a view of one, with RGB pixels; None if it is not known, or has changed."""
    if type(array) is not np.ndarray or not _recent.arrays or recording() is None:
        return None
    for known in _recent.arrays:
        decoded: Any = known.array()
        if decoded is not None and any(decoded is each for each in (array, array.base)):
            order = slice(None, None, -1 if known.is_bgr else 1)
            is_rgb = decoded[..., order].__array_interface__ == array.__array_interface__
            if is_rgb and np.array_equal(decoded, known.pixels):
                return TransformedImage(known.image, functools.partial(_fromarray, known.pixels[..., order]))
    return None
