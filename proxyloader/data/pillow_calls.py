"""Record calls to Pillow and torchvision's functions on undecoded images. Runs where the dataset runs.

NOTE [ Recorded calls ]
Code that calls no known class of transforms, such as ``image.crop(box)`` or ``TF.adjust_hue(image, 0.1)``, ultimately
calls a few Pillow functions, which torchvision, timm and Pillow itself are built on. For an undecoded image, they are
recorded as steps with the numbers of the call, and the result is an undecoded image with Pillow's mode, size and
``info``. If its pixels are used after all, the calls are repeated on the decoded image.

A function returns a Note for a call, or None if the call needs pixels: it has no kernel, reads a second image, or is
invalid. Pillow then decodes the image, and returns its own result or raises its own error.

Padding pastes the image into a new one, which is DeferredPixels until then. ``ImageEnhance`` blends it with an image
that is computed only if other code asks for it.
"""

import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter
from torchvision.transforms import transforms as v1, v2

from ..transforms import augment, color
from ..transforms.geometry import TURNS, Crop, Flip, IndexSelect, Transpose, as_ltrb, transposed
from ..transforms.plan import Branch, Size
from ..transforms.resize import Line, ResizeBox
from ..transforms.type_conversion import ToFloat, ToTensor
from ..transforms.warp import Affine, Perspective
from .called_transforms import apply_undecoded
from .deferral import active, find_call_obstacle, materializing
from .lazy_decoding import find_decoded
from .lazy_image import (
    DeferredPixels,
    can_read_as,
    create_lazy_image,
    find_undecoded,
    get_transformed,
    hook_pillow,
    is_lazy,
    replace_undecoded,
)
from .lazy_tensor import create_lazy_output, wrap_values
from .replaced_code import code_patches, original, unless_handled
from .transformed import TransformedImage, pixel_uses

MAX_PIXELS = 1 << 26
"""Maximum size of the result of a recorded call. Pillow computes larger ones, or warns about them."""

MAX_RADIUS = 64  # maximum radius of a recorded blur, in pixels

FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
WARPS = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Filters of ``Image.resize`` and ``Image.transform``, by Pillow's number."""


class Note(NamedTuple):
    """A call on an undecoded image, or on its tensor. The first three are those of ``TransformedImage.note``."""

    steps: Branch = ()  # none: the result is a copy
    numbers: Sequence[Any] = ()
    size: Size | None = None  # None: that of the image
    replay: Callable[[Any], Any] | None = None  # repeats the call on a decoded image; None: with the same arguments
    is_view: bool = False  # whether torchvision's result shares the memory of a tensor
    in_place: bool = False  # whether it is the tensor


Noter = Callable[..., Note | None]


def pillow_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each function to record."""
    hook_pillow()  # first, because it replaces some of the same methods, permanently
    setattr(ImageEnhance._Enhance, "__getattr__", _compute_degenerate)  # noqa: B010  # the dataset may keep enhancers
    for note in (crop, resize, transpose, transform, convert, filter, point, getchannel):
        handle = functools.partial(_apply, note, True)
        yield Image.Image, note.__name__, unless_handled(getattr(Image.Image, note.__name__), handle)
    yield Image.Image, "paste", unless_handled(Image.Image.paste, _paste)
    yield Image.Image, "split", unless_handled(Image.Image.split, _split)
    for enhancer in ENHANCERS:
        yield enhancer, "__init__", unless_handled(enhancer.__init__, functools.partial(_defer_degenerate, enhancer))
    yield ImageEnhance._Enhance, "enhance", unless_handled(ImageEnhance._Enhance.enhance, _enhance)
    handlers: dict[str, Any] = {"PIL.Image:new": _defer_new, "PIL.Image:merge": _merge}
    handlers |= {name: functools.partial(_apply, *noted) for name, noted in FUNCTIONS.items()}
    handlers |= {name: functools.partial(_convert, *known) for name, known in CONVERSIONS.items()}
    yield from code_patches(handlers)


def _apply(note: Noter, has_info: bool, call: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a call. ``has_info``: whether Pillow's result has the info of the argument."""
    if not is_lazy(image):
        return NotImplemented
    args, kwargs = tuple(map(frozen, args)), {name: frozen(each) for name, each in kwargs.items()}
    if (found := note(image, *args, **kwargs)) is None:
        return NotImplemented
    if not found.steps:
        return image.copy()
    replay = found.replay or (lambda image: call(image, *args, **kwargs))
    after = extend(get_transformed(image), found, replay)
    return NotImplemented if after is None else create_lazy_image(after, image if has_info else None)


def frozen(value: Any) -> Any:
    """Return a copy of an argument that the caller may change before the call is repeated."""
    if type(value) in (int, float, tuple):
        return value
    if isinstance(value, list):
        return value.copy() if {int, float}.issuperset(map(type, value)) else list(map(frozen, value))
    if isinstance(value, (np.ndarray, ImageFilter.Filter)):
        return copy.copy(value)
    if isinstance(value, Iterator):  # its elements can be read only once
        raise TypeError
    return value.clone() if isinstance(value, torch.Tensor) else value


def extend(transformed: TransformedImage | None, note: Note, call: Callable[[Any], Any]) -> TransformedImage | None:
    """Return the undecoded image after a call; None if the call needs pixels."""
    if transformed is None or (deferral := active()) is None:
        return None
    height, width = size = note.size or transformed.size
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        return None
    after = transformed.note(note.steps, note.numbers, size, call)
    if why := find_call_obstacle(deferral.find_obstacle, after.chain):
        pixel_uses.explain(why, names_caller=True)
        return None
    return after


def number(value: Any) -> float:
    """Return a finite number as a float. Raise ValueError if value is not one."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError
    return float(value)


# --- methods of an image ----------------------------------------------------------------------------------------------


def crop(image: Image.Image, box: Any = None) -> Note | None:
    left, top, right, bottom = map(int, map(round, (0, 0, *image.size) if box is None else box))
    if (left, top, right, bottom) == (0, 0, *image.size):
        return Note()
    return _crop(left, top, right - left, bottom - top, (0.0,))


def _crop(left: int, top: int, width: int, height: int, fill: tuple[float, ...]) -> Note:
    return Note((Crop(fill),), (top, left, height, width), (height, width))


def resize(
    image: Image.Image, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
) -> Note | None:
    width, height = map(operator.index, size)
    corners = np.array((0, 0, *image.size) if box is None else box, np.float32)
    left, top, right, bottom = edges = corners.tolist()
    if edges == [0, 0, *image.size] and (width, height) == image.size:
        return Note()
    if not (0 <= left < right <= image.width and 0 <= top < bottom <= image.height):
        return None
    scales = ((corners[2:] - corners[:2]).astype(float) / (width, height)).tolist()
    if resample == Image.Resampling.NEAREST:
        matrix = scales[0], 0, left, 0, scales[1], top
        return Note((Affine("nearest", (0.0,) * 3),), (height, width, *matrix), (height, width))
    if reducing_gap is not None and (reducing_gap < 1 or max(scales) / reducing_gap >= 2):
        return None  # Pillow shrinks the image in two steps
    step = ResizeBox(FILTERS[Image.Resampling.BICUBIC if resample is None else resample])  # type: ignore[arg-type]
    return Note((step,), (*edges, height, width), (height, width))


def transpose(image: Image.Image, method: Any) -> Note | None:
    method = Image.Transpose(method)
    if not TURNS[method].swaps and method != Image.Transpose.ROTATE_180:  # a flip, which DALI also does without kernels
        return Note((Flip("horizontal" if TURNS[method].reverses_x else "vertical"),), (1.0,))
    return Note((Transpose(method),), (), transposed(image.size[::-1], method))


def transform(
    image: Image.Image,
    size: Any,
    method: Any,
    data: Any = None,
    resample: Any = Image.Resampling.NEAREST,
    fill: Any = 1,
    fillcolor: Any = None,
) -> Note | None:
    width, height = map(operator.index, size)
    method, outside = Image.Transform(method), get_levels(image.mode, fillcolor)
    if method == Image.Transform.EXTENT:
        left, top, right, bottom = data
        data = (right - left) / width, 0, left, 0, (bottom - top) / height, top
    elif method not in (Image.Transform.AFFINE, Image.Transform.PERSPECTIVE):
        return None
    is_perspective = method == Image.Transform.PERSPECTIVE
    numbers = tuple(map(number, data[: 8 if is_perspective else 6]))
    if len(numbers) != (8 if is_perspective else 6):
        return None
    step = (Perspective if is_perspective else Affine)(WARPS[resample], outside)  # type: ignore[arg-type]
    return Note((step,), (height, width, *numbers), (height, width))


def convert(image: Image.Image, mode: Any = None, matrix: Any = None, *_: Any, **__: Any) -> Note | None:
    encoded = find_undecoded(image)
    if matrix:
        if image.mode != "RGB" or len(matrix) != {"RGB": 12, "L": 4}[mode]:
            return None
        return Note((color.Matrix(len(matrix) // 4),), [*map(number, matrix)] * (12 // len(matrix)))  # type: ignore[arg-type]
    if encoded is None or mode not in ("L", "RGB") or mode == image.mode or can_read_as(encoded, mode):
        return None
    return Note((color.Grayscale(1 if mode == "L" else 3),))


def filter(image: Image.Image, filter: Any) -> Note | None:
    made = filter() if isinstance(filter, type) else filter  # a function may draw random numbers
    if type(made) in (ImageFilter.GaussianBlur, ImageFilter.BoxBlur):
        radii = made.radius if isinstance(made.radius, (tuple, list)) else (made.radius, made.radius)
        x, y = (float(np.float32(number(each))) for each in radii)
        if not max(x, y):
            return Note()
        if min(x, y) < 0 or max(x, y) > MAX_RADIUS:
            return None
        return Note((augment.PillowBlur(type(made) is ImageFilter.GaussianBlur),), (x, y))
    if not isinstance(made, ImageFilter.BuiltinFilter) or type(made).filter is not ImageFilter.BuiltinFilter.filter:
        return None
    (side, other), scale, offset, weights = made.filterargs
    if side not in (3, 5) or side != other or len(weights) != side**2 or not scale:
        return None
    divided = np.asarray([*map(number, weights)], np.float32) / np.float32(scale)
    return Note((augment.Kernel(side),), (float(np.float32(offset)), *divided.tolist()))


def point(image: Image.Image, lut: Any, mode: Any = None) -> Note | None:
    has_kernel = extend(get_transformed(image), Note((color.Table(),)), Image.Image.copy) is not None
    if isinstance(lut, Image.ImagePointHandler) or mode is not None or not has_kernel:
        return None  # without calling the function, which may draw random numbers
    bands = len(image.getbands())
    levels = [lut(level) for level in range(256)] * bands if callable(lut) else list(lut)
    try:
        table = bytes(levels)
    except (TypeError, ValueError):  # not integers in [0, 255]
        table = bytes([min(255, max(0, level)) for level in map(int, map(round, levels))])
    if len(table) != 256 * bands:
        return None
    array = np.frombuffer(table * (3 // bands), np.uint8).view(np.float32)
    return Note((color.Table(),), (array,), replay=operator.methodcaller("point", table))


class Band(NamedTuple):
    of: TransformedImage
    channel: int

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.getchannel(self.channel)


def getchannel(image: Image.Image, channel: Any) -> Note | None:
    number, of = operator.index(image.getbands().index(channel) if isinstance(channel, str) else channel), None
    if image.mode == "L" and number == 0:
        return Note()
    if image.mode != "RGB" or not 0 <= number < 3 or (of := get_transformed(image)) is None:
        return None
    weights = [float(number == each) for each in range(3)]
    return Note((color.Matrix(1),), [*weights, 0.0] * 3, replay=Band(of, number))  # type: ignore[arg-type]


def _split(split: Any, image: Image.Image) -> Any:
    if get_transformed(image) is None:
        return NotImplemented
    return tuple(map(image.getchannel, range(len(image.getbands()))))


def _merge(merge: Callable[..., Any], mode: Any, bands: Any) -> Any:
    """Record the order of the channels of one image."""
    transformed = [get_transformed(each) for each in bands]
    calls = [each.calls[-1][0][0] for each in transformed if each is not None and each.calls]
    if mode != "RGB" or len(bands) != 3 or len(calls) != 3 or not all(type(call) is Band for call in calls):
        return NotImplemented
    of = calls[0].of
    if any(call.of.image is not of.image or call.of.calls is not of.calls for call in calls):
        return NotImplemented
    steps, channels = (color.ChannelOrder(),), [call.channel for call in calls]
    after = of.note(steps, channels, of.size, lambda image: merge("RGB", [*map(image.getchannel, channels)]))
    return create_lazy_image(after, bands[0])


# --- a new image, and the first paste into it -------------------------------------------------------------------------


def get_levels(mode: str, color: Any) -> tuple[float, ...]:
    """Convert any color that Pillow accepts (name, number or tuple) to channel values, or raise Pillow's error."""
    level = _new(mode, (1, 1), color).getpixel((0, 0))
    return tuple(map(float, level if isinstance(level, tuple) else (level,)))


_new = original(Image.new)


def _defer_new(new: Callable[..., Image.Image], mode: Any, size: Any, color: Any = 0) -> Any:
    width, height = size = tuple(map(operator.index, size))
    if mode not in ("RGB", "L") or min(size) < 1 or width * height > MAX_PIXELS:
        return NotImplemented
    pixels = DeferredPixels(size, functools.partial(new, mode, size, color), get_levels(mode, color))
    return create_lazy_image(pixels, mode=mode)


def _paste(paste: Any, image: Image.Image, im: Any, box: Any = None, mask: Any = None) -> Any:
    canvas = find_undecoded(image)
    if not isinstance(canvas, DeferredPixels) or not is_lazy(im) or mask is not None:
        return NotImplemented
    left, top, *others = box = tuple(map(operator.index, (0, 0) if box is None else box))
    if others and others != [left + im.width, top + im.height]:
        return NotImplemented

    def replay(image: Image.Image) -> Image.Image:
        made: Image.Image = canvas.compute()
        made.paste(image, box)
        return made

    note = _crop(-left, -top, *image.size, canvas.levels)
    after = extend(get_transformed(im.convert(image.mode)), note, replay)
    return NotImplemented if after is None else replace_undecoded(image, after)


# --- ImageEnhance -----------------------------------------------------------------------------------------------------

ENHANCERS: dict[Any, tuple[str, bool]] = {
    ImageEnhance.Brightness: ("brightness", False),
    ImageEnhance.Contrast: ("contrast", False),
    ImageEnhance.Color: ("saturation", True),
    ImageEnhance.Sharpness: ("sharpness", True),
}
"""Classes of ``ImageEnhance``, their adjustments, and whether the result has the info of the image."""


def _defer_degenerate(enhancer: Any, init: Any, made: Any, image: Any) -> Any:
    is_itself = enhancer is ImageEnhance.Color and image.mode == "L"  # the degenerate image is the image
    if is_itself or get_transformed(image) is None:
        return NotImplemented
    made.image = image
    if enhancer is ImageEnhance.Color:
        made.intermediate_mode = "L"
    made._proxyloader_before = enhancer, image.copy()  # the image may change later
    return None


def _compute_degenerate(made: Any, name: str) -> Any:
    """Return the image that an enhancer blends with, which code outside of Pillow hardly ever uses."""
    if name != "degenerate" or "_proxyloader_before" not in vars(made):
        raise AttributeError(f"{type(made).__name__!r} object has no attribute {name!r}")
    enhancer, before = made._proxyloader_before
    if find_undecoded(made.image) is find_undecoded(before):
        before = made.image  # so that it is decoded once
    with materializing():
        made.degenerate = enhancer(before).degenerate
    return made.degenerate


def _enhance(enhance: Any, made: Any, factor: Any) -> Any:
    factor, degenerate = number(factor), vars(made).get("degenerate")
    if degenerate is made.image:
        return made.image.copy()
    enhancer, before = vars(made).get("_proxyloader_before", (None, None))
    if before is None or degenerate is not None or find_undecoded(made.image) is not find_undecoded(before):
        return NotImplemented
    name, has_info = ENHANCERS[enhancer]
    note = Note((color.Adjustment(name),), (factor,))
    after = extend(get_transformed(before), note, lambda image: enhancer(image).enhance(factor))
    return NotImplemented if after is None else create_lazy_image(after, before if has_info else None)


def pad_by_pixels(size: Size, padding: Sequence[int], mode: str) -> Note | None:
    """Return the note of a padding (left, top, right, bottom) with pixels of the image; None if it also crops."""
    left, top, right, bottom = padding
    lines = [np.arange(count, dtype=np.float32) for count in size]
    sides = (top, bottom), (left, right)
    return None if min(padding) < 0 else select(*(np.pad(line, each, mode) for line, each in zip(lines, sides)))  # type: ignore[call-overload]


def pad(img: Image.Image, padding: Any, fill: Any = 0, padding_mode: str = "constant") -> Note | None:
    if padding_mode == "constant":
        return None  # it calls ``ImageOps.expand``
    return pad_by_pixels(img.size[::-1], as_ltrb(padding), padding_mode)


def select(rows: Line, columns: Line) -> Note:
    size = len(rows), len(columns)
    return Note((IndexSelect(),), (*size, np.concatenate((rows, columns))), size)


# --- functions that read pixels ---------------------------------------------------------------------------------------


def adjust_hue(img: Image.Image, hue_factor: Any) -> Note | None:
    if img.mode != "RGB" or not -0.5 <= hue_factor <= 0.5:
        return None
    return Note((color.Adjustment("hue"),), (color.hue_shift(hue_factor, "pil"),))


def to_grayscale(img: Image.Image, num_output_channels: int) -> Note | None:
    return Note((color.Grayscale(3),)) if num_output_channels == 3 else None  # converts to "L" otherwise


def permute_channels(image: Image.Image, permutation: Any) -> Note | None:
    order = torch.as_tensor(permutation).tolist()
    return Note((color.ChannelOrder(),), order) if image.mode == "RGB" and sorted(order) == [0, 1, 2] else None


TORCHVISION = "torchvision.transforms"

FUNCTIONS: dict[str, tuple[Noter, bool]] = {
    "PIL.ImageOps:autocontrast": (lambda image: Note((color.Adjustment("autocontrast"),)), True),
    "PIL.ImageOps:equalize": (lambda image: Note((color.Adjustment("equalize"),)), True),
    "PIL.ImageChops:invert": (lambda image: Note((color.Adjustment("invert"),)), True),
    f"{TORCHVISION}._functional_pil:pad": (pad, False),
    f"{TORCHVISION}._functional_pil:adjust_hue": (adjust_hue, False),
    f"{TORCHVISION}._functional_pil:to_grayscale": (to_grayscale, False),
    f"{TORCHVISION}.v2.functional._color:_permute_channels_image_pil": (permute_channels, False),
}
"""Functions that use pixels, other than by the methods above, and whether their result has the info of the image."""

CONVERSIONS: dict[str, tuple[Any, Branch]] = {
    f"{TORCHVISION}.functional:to_tensor": (v1.ToTensor(), (ToTensor("CHW"), ToFloat(scale=True))),
    f"{TORCHVISION}.functional:pil_to_tensor": (v1.PILToTensor(), ()),
    f"{TORCHVISION}.v2.functional:to_image": (v2.ToImage(), (ToTensor("CHW", pure=False),)),
}
"""Functions that convert an image to a tensor, the equivalent transforms, and the steps for an array."""


def _convert(transform: Any, array_steps: Branch, convert: Any, image: Any) -> Any:
    deferral = active()
    if isinstance(image, Image.Image) and deferral is not None:
        result = apply_undecoded(deferral, transform, image)
        if result is None and image.mode == "RGB":  # other images may be masks, which stay on the CPU as with torch
            result = wrap_values(convert(image))
        return NotImplemented if result is None else result
    is_array = type(image) is np.ndarray and image.flags.c_contiguous
    of = find_decoded(image) if is_array and array_steps else None
    if of is None or torch.get_default_dtype() is not torch.float32:
        return NotImplemented
    return create_lazy_output(of.note(array_steps, (), of.size, lambda image: convert(np.array(image))))
