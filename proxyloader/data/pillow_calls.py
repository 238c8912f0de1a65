"""Record calls of Pillow and of torchvision's functions on undecoded images. Runs where the dataset runs.

NOTE [ Recorded calls ]
Code that calls no known class of transforms, such as ``image.crop(box)`` or ``TF.adjust_hue(image, 0.1)``, ends in a
few functions of Pillow, because torchvision, timm and Pillow itself are made of them. For an undecoded image, they are
recorded as steps with the numbers of the call, and the result is an undecoded image with Pillow's mode, size and
``info``. If its pixels are used after all, the calls are repeated on the decoded image.

A function returns a Note for a call, or None if the call needs pixels: it has no kernel, reads a second image, or is
invalid. Pillow then decodes the image, and returns its own result or raises its own error.

The code of functions is replaced, as other modules may have imported them by their names (``replaced_code.py``).

``ImageEnhance`` blends the image with another one that it computes first, and padding pastes it into a new one. These
other images are DeferredPixels, which know what a blend or the first ``paste`` means.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..transforms import color, given
from ..transforms.geometry import Crop, IndexSelect, as_ltrb
from ..transforms.plan import Branch, Size, Step
from ..transforms.resize import Line
from ..transforms.type_conversion import ToFloat, ToTensor
from ..transforms.warp import Affine
from .called_transforms import apply_undecoded, wrap_result
from .decoded_arrays import find_decoded
from .deferral import Deferral, active, recording
from .lazy_image import (
    DeferredPixels,
    can_read_as,
    create_lazy_image,
    find_undecoded,
    get_transformed,
    hook_pillow,
    is_lazy,
    is_unread,
    replace_undecoded,
)
from .lazy_tensor import create_lazy_output
from .replaced_code import find, original, replacements
from .transformed import TransformedImage

MAX_PIXELS = 1 << 26
"""Maximum size of the result of a recorded call. Pillow makes larger ones, or warns of them."""

MAX_RADIUS = 64
"""Maximum radius of a recorded blur, in pixels."""

FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Filters of ``Image.resize``, by Pillow's number."""

WARPS = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Filters of ``Image.transform``, by Pillow's number."""


class Note(NamedTuple):
    """A call on an undecoded image, or on its tensor.

    Attributes:
        steps, numbers, size: see ``TransformedImage.note``. No steps: the result is a copy.
        again: makes the same call on a decoded image; None: the function with the same arguments does.
        image: the image that is changed; None: the first argument.
        is_view, in_place: whether torchvision's result shares the memory of a tensor, or is the tensor.
    """

    steps: Branch
    numbers: Sequence[Any]
    size: Size
    again: Callable[[Any], Any] | None = None
    image: Image.Image | None = None
    is_view: bool = False
    in_place: bool = False


Noter = Callable[..., Note | None]


def pillow_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each function to record."""
    hook_pillow()  # first, because it replaces some of the same methods, permanently
    for note in (crop, resize, transpose, transform, convert, filter, point, getchannel):
        yield Image.Image, note.__name__, _record(getattr(Image.Image, note.__name__), note)
    yield Image.Image, "paste", _record_paste(Image.Image.paste)
    yield Image.Image, "split", _record_split(Image.Image.split)
    yield Image.Image, "thumbnail", _record_thumbnail(Image.Image.thumbnail)
    for enhancer, (step, has_info) in ENHANCERS.items():
        yield enhancer, "__init__", _defer_degenerate(enhancer, step, has_info)
    yield from replacements(Image.new, _defer_new(original(Image.new)))
    yield from replacements(Image.merge, _record_merge(original(Image.merge)))
    for name, function in find(*FUNCTIONS).items():
        yield from replacements(function, _record(original(function), *FUNCTIONS[name]))
    for name, function in find(*CONVERSIONS).items():
        yield from replacements(function, _convert(original(function), *CONVERSIONS[name]))


def _record(call: Callable[..., Any], note: Noter, has_info: bool = True) -> Callable[..., Any]:
    """Return a function that records calls. ``has_info``: whether Pillow's result has the info of the argument."""

    @functools.wraps(call)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if args and is_lazy(args[0]) and (deferral := recording()) is not None:
            image, *others = args
            others, named = [frozen(each) for each in others], {name: frozen(each) for name, each in kwargs.items()}
            try:
                found = note(image, *others, **named)
            except Exception:  # Pillow raises its own error
                found = None
            if found is not None:
                again = found.again or (lambda image: call(image, *others, **named))
                result = _apply(deferral, found, image, again, has_info)
                if result is not None:
                    return result
        return call(*args, **kwargs)

    return hooked


_CONSTANTS = frozenset({int, float, bool, str, tuple, type(None), Image.Resampling, Image.Transpose})


def frozen(value: Any) -> Any:
    """Return a copy of an argument that the caller may change before the call is repeated."""
    if type(value) in _CONSTANTS:  # faster
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, np.ndarray, ImageFilter.Filter)) else value


def _apply(
    deferral: Deferral, note: Note, image: Image.Image, again: Callable[[Any], Any], has_info: bool
) -> Image.Image | None:
    """Return the undecoded result of a call with the info of ``image``; None if the call needs pixels."""
    changed = image if note.image is None else note.image
    if not note.steps:
        return changed.copy()
    transformed = _note(deferral, note, changed, again)
    return None if transformed is None else create_lazy_image(transformed, image if has_info else None)


def _note(deferral: Deferral, note: Note, image: Image.Image, again: Callable[[Any], Any]) -> TransformedImage | None:
    transformed, (height, width) = get_transformed(image), note.size
    if transformed is None or height < 1 or width < 1 or height * width > MAX_PIXELS:
        return None
    after = transformed.note(note.steps, note.numbers, note.size, again)
    return None if deferral.find_call_obstacle(after.chain) else after


def _size(image: Image.Image) -> Size:
    return image.height, image.width


def _one(step: Step, image: Image.Image, *numbers: Any) -> Note:
    """Return the note of a step that keeps the size."""
    return Note((step,), numbers, _size(image))


def _levels(values: Sequence[Any]) -> tuple[float, ...]:
    """Return finite numbers. ValueError: one is not finite; TypeError: one is not a number."""
    if not all(isinstance(each, Real) and math.isfinite(each) for each in values):
        raise ValueError
    return tuple(map(float, values))


# --- methods of an image ----------------------------------------------------------------------------------------------


def crop(image: Image.Image, box: Any = None) -> Note | None:
    if box is None:
        return Note((), (), _size(image))
    left, top, right, bottom = map(int, map(round, box))
    if (left, top, right, bottom) == (0, 0, *image.size):
        return Note((), (), _size(image))
    return _crop(left, top, right - left, bottom - top, (0.0,))


def _crop(left: int, top: int, width: int, height: int, fill: tuple[float, ...]) -> Note:
    return Note((Crop(given.GivenRegion(), fill),), (top, left, height, width), (height, width))


def resize(
    image: Image.Image, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
) -> Note | None:
    width, height = map(operator.index, size)
    left, top, right, bottom = edges = np.array((0, 0, *image.size) if box is None else box, np.float32).tolist()
    if edges == [0, 0, *image.size] and (width, height) == image.size:
        return Note((), (), _size(image))
    if not (0 <= left < right <= image.width and 0 <= top < bottom <= image.height):
        return None
    scales = (right - left) / width, (bottom - top) / height
    if resample == Image.Resampling.NEAREST:
        matrix = scales[0], 0, left, 0, scales[1], top
        return Note((Affine("nearest", (0.0,) * 3),), (height, width, *matrix), (height, width))
    if reducing_gap is not None and (reducing_gap < 1 or max(scales) / reducing_gap >= 2):
        return None  # Pillow shrinks the image in two steps
    step = given.ResizeBox(FILTERS[Image.Resampling.BICUBIC if resample is None else resample])  # type: ignore[arg-type]
    return Note((step,), (*edges, height, width), (height, width))


def transpose(image: Image.Image, method: Any) -> Note | None:
    method = Image.Transpose(method)
    return Note((given.Transpose(method),), (), given.transposed(_size(image), method))


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
    numbers = _levels(data[: 8 if is_perspective else 6])
    if len(numbers) != (8 if is_perspective else 6):
        return None
    step = (given.Projection if is_perspective else Affine)(WARPS[resample], outside)  # type: ignore[arg-type]
    return Note((step,), (height, width, *numbers), (height, width))


def convert(image: Image.Image, mode: Any = None, matrix: Any = None, *_: Any, **__: Any) -> Note | None:
    encoded = find_undecoded(image)
    if matrix:
        if image.mode != "RGB" or len(matrix) != {"RGB": 12, "L": 4}[mode]:
            return None
        return _one(given.Matrix(len(matrix) // 4), image, *_levels(matrix) * (12 // len(matrix)))  # type: ignore[arg-type]
    if encoded is None or mode not in ("L", "RGB") or mode == image.mode or can_read_as(encoded, mode):
        return None
    return _one(color.Grayscale(1 if mode == "L" else 3), image)


def filter(image: Image.Image, filter: Any) -> Note | None:
    made = filter() if callable(filter) else filter
    if type(made) in (ImageFilter.GaussianBlur, ImageFilter.BoxBlur):
        radii = made.radius if isinstance(made.radius, (tuple, list)) else (made.radius, made.radius)
        x, y = (float(np.float32(each)) for each in _levels(radii))
        if not max(x, y):
            return Note((), (), _size(image))
        is_gaussian = type(made) is ImageFilter.GaussianBlur
        return _one(given.PillowBlur(is_gaussian), image, x, y) if min(x, y) >= 0 and max(x, y) <= MAX_RADIUS else None
    if not isinstance(made, ImageFilter.BuiltinFilter) or type(made).filter is not ImageFilter.BuiltinFilter.filter:
        return None
    (side, other), scale, offset, weights = made.filterargs
    if side not in (3, 5) or side != other or len(weights) != side**2 or not scale:
        return None
    divided = np.asarray(_levels(weights), np.float32) / np.float32(scale)
    return _one(given.Kernel(side), image, float(np.float32(offset)), *divided.tolist())


def point(image: Image.Image, lut: Any, mode: Any = None) -> Note | None:
    if isinstance(lut, Image.ImagePointHandler) or mode is not None or get_transformed(image) is None:
        return None  # without calling the function, which may draw random numbers
    bands = len(image.getbands())
    levels = [lut(level) for level in range(256)] * bands if callable(lut) else list(lut)
    try:
        table = bytes(levels)
    except (TypeError, ValueError):  # not whole, or not levels
        table = bytes([min(255, max(0, level)) for level in map(int, map(round, levels))])
    if len(table) != 256 * bands:
        return None
    array = np.frombuffer(table * (3 // bands), np.uint8).view(np.float32)
    return _one(given.Table(), image, array)._replace(again=operator.methodcaller("point", table))


class Band(NamedTuple):
    """A call that returns a channel of an image."""

    of: TransformedImage
    channel: int

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.getchannel(self.channel)


def getchannel(image: Image.Image, channel: Any) -> Note | None:
    number, of = operator.index(image.getbands().index(channel) if isinstance(channel, str) else channel), None
    if image.mode == "L" and number == 0:
        return Note((), (), _size(image))
    if image.mode != "RGB" or not 0 <= number < 3 or (of := get_transformed(image)) is None:
        return None
    weights = [float(number == each) for each in range(3)]
    return _one(given.Matrix(1), image, *[*weights, 0.0] * 3)._replace(again=Band(of, number))  # type: ignore[arg-type]


def _record_split(split: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(split)
    def hooked(self: Image.Image) -> Any:
        if not is_lazy(self) or recording() is None or get_transformed(self) is None:
            return split(self)
        return tuple(map(self.getchannel, range(len(self.getbands()))))

    return hooked


def _record_merge(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Record the order of the channels of one image."""

    @functools.wraps(merge)
    def hooked(mode: Any, bands: Any) -> Any:
        if recording() is None or mode != "RGB" or len(bands) != 3 or not all(map(is_lazy, bands)):
            return merge(mode, bands)
        transformed = [get_transformed(each) for each in bands]
        calls = [each.calls[-1][0][0] for each in transformed if each is not None and each.calls]
        of = calls[0].of if len(calls) == 3 and all(type(call) is Band for call in calls) else None
        if of is None or any(call.of.image is not of.image or call.of.calls is not of.calls for call in calls):
            return merge(mode, bands)
        numbers = [call.channel for call in calls]

        def again(image: Image.Image) -> Image.Image:
            return merge("RGB", [image.getchannel(number) for number in numbers])  # type: ignore[no-any-return]

        return create_lazy_image(of.note((color.ChannelOrder(),), numbers, of.size, again), bands[0])

    return hooked


class _Thumbnail:
    """Stand-in for an image, which Pillow resizes in its place.

    Attributes:
        resized: the image after it; None: it keeps its size.
    """

    resized: Image.Image | None = None

    def __init__(self, image: Image.Image) -> None:
        self._image, self.size = image, image.size
        self.width, self.height = image.size

    def draft(self, _: Any, size: Any) -> None:
        if is_unread(self._image) and min(self.width // size[0], self.height // size[1]) > 1:
            raise ValueError("Pillow decodes the file at a smaller size")

    def load(self) -> None:
        """Do nothing."""

    def resize(self, *args: Any, **kwargs: Any) -> Any:
        self.resized = self._image.resize(*args, **kwargs)
        return SimpleNamespace(im=SimpleNamespace(mode=""))


def _record_thumbnail(thumbnail: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(thumbnail)
    def hooked(self: Image.Image, *args: Any, **kwargs: Any) -> None:
        if is_lazy(self) and recording() is not None:
            stand_in = _Thumbnail(self)
            try:
                thumbnail(stand_in, *args, **kwargs)
            except Exception:  # Pillow raises its own error
                stand_in.resized = None
            if (resized := stand_in.resized) is not None:
                transformed = get_transformed(resized)
                if transformed is not None:
                    replace_undecoded(self, transformed)
                else:
                    self.im = resized.im
                    vars(self).update(_size=resized.size, _mode=resized.mode)
                self.readonly = 0
                return
        thumbnail(self, *args, **kwargs)

    return hooked


# --- a new image, and the first paste into it -------------------------------------------------------------------------


def get_levels(mode: str, color: Any) -> tuple[float, ...]:
    """Return the levels of what Pillow takes for a color: a name, a number or a tuple. Raise Pillow's error."""
    level = _new(mode, (1, 1), color).getpixel((0, 0))
    return tuple(map(float, level if isinstance(level, tuple) else (level,)))


class Blank(NamedTuple):
    """Meaning of the pixels of a new image: one color."""

    levels: tuple[float, ...]


_new = original(Image.new)


def _defer_new(new: Callable[..., Image.Image]) -> Callable[..., Image.Image]:
    @functools.wraps(new)
    def hooked(mode: Any, size: Any, color: Any = 0) -> Image.Image:
        if recording() is None or mode not in ("RGB", "L"):
            return new(mode, size, color)
        try:
            width, height = map(operator.index, size)
            blank = Blank(get_levels(mode, color))
        except Exception:  # Pillow raises its own error
            width, height = 0, 0
        if min(width, height) < 1 or width * height > MAX_PIXELS:
            return new(mode, size, color)
        pixels = functools.partial(new, mode, (width, height), color)
        return create_lazy_image(DeferredPixels((width, height), pixels, blank), mode=mode)

    return hooked


def _record_paste(paste: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(paste)
    def hooked(self: Image.Image, im: Any, box: Any = None, mask: Any = None) -> None:
        if is_lazy(self) and is_lazy(im) and mask is None and (deferral := recording()) is not None:
            canvas = find_undecoded(self)
            if isinstance(canvas, DeferredPixels) and isinstance(canvas.meaning, Blank):
                converted = im.convert(self.mode)
                try:
                    note = _paste(self, canvas, converted, (0, 0) if box is None else box)
                except Exception:  # Pillow raises its own error
                    note = None
                again = None if note is None else note.again
                transformed = None if note is None or again is None else _note(deferral, note, converted, again)
                if transformed is not None:
                    replace_undecoded(self, transformed)
                    return
        paste(self, im, box, mask)

    return hooked


def _paste(blank: Image.Image, canvas: DeferredPixels, image: Image.Image, box: Any) -> Note | None:
    left, top, *others = box = tuple(map(operator.index, box))
    if others and others != [left + image.width, top + image.height]:
        return None

    def again(image: Image.Image) -> Image.Image:
        made = canvas.compute()
        made.paste(image, box)
        return made

    note = _crop(-left, -top, *blank.size, canvas.meaning.levels)
    return note._replace(again=again)


# --- ImageEnhance -----------------------------------------------------------------------------------------------------


ENHANCERS: dict[Any, tuple[type[color.Adjustment], bool]] = {
    ImageEnhance.Brightness: (color.Brightness, False),
    ImageEnhance.Contrast: (color.Contrast, False),
    ImageEnhance.Color: (color.Saturation, True),
    ImageEnhance.Sharpness: (color.Sharpness, True),
}
"""Classes of ``ImageEnhance``, their steps, and whether their degenerate image has the info of the image."""


class Degenerate(NamedTuple):
    """Meaning of the pixels of the image that an enhancer blends with its image.

    Attributes:
        step: the step that a blend with ``of`` is.
        of: what ``find_undecoded`` returned for the image.
        enhance: does the same to a decoded image.
    """

    step: Step
    of: Any
    enhance: Callable[[Any, float], Any]


def _defer_degenerate(enhancer: Any, step: type[color.Adjustment], has_info: bool) -> Callable[..., None]:
    init = enhancer.__init__

    def enhance(image: Image.Image, factor: float) -> Any:
        return enhancer(image).enhance(factor)

    @functools.wraps(init)
    def hooked(self: Any, image: Any) -> None:
        is_itself = enhancer is ImageEnhance.Color and image.mode == "L"  # the degenerate image is the image
        if is_itself or not is_lazy(image) or recording() is None or get_transformed(image) is None:
            init(self, image)
            return
        before = image.copy()  # the image may change later

        def compute() -> Any:
            made = enhancer.__new__(enhancer)
            init(made, before)
            return made.degenerate

        self.image = image
        if enhancer is ImageEnhance.Color:
            self.intermediate_mode = "L"
        pixels = DeferredPixels(image.size, compute, Degenerate(step(), find_undecoded(image), enhance))
        self.degenerate = create_lazy_image(pixels, image if has_info else None, image.mode)

    return hooked


def blend(im1: Image.Image, im2: Any, alpha: Any) -> Note | None:
    (factor,) = _levels([alpha])
    if im1 is im2:
        return Note((), (), _size(im1))
    degenerate = find_undecoded(im1)
    if not isinstance(degenerate, DeferredPixels) or not isinstance(degenerate.meaning, Degenerate):
        return None
    step, of, enhance = degenerate.meaning
    if find_undecoded(im2) is not of or im1.mode != im2.mode:
        return None
    return Note((step,), (factor,), _size(im2), lambda image: enhance(image, alpha), im2)


def pad_lines(size: Size, padding: Sequence[int], mode: str) -> tuple[Line, Line] | None:
    """Return the rows and columns of a padded image whose border has pixels of the image; None if it is cropped.

    ``padding``: left, top, right and bottom, in pixels.
    """
    left, top, right, bottom = padding
    if min(padding) < 0:
        return None
    lines = [np.arange(count, dtype=np.float32) for count in size]
    rows, columns = (np.pad(line, each, mode) for line, each in zip(lines, ((top, bottom), (left, right))))  # type: ignore[call-overload]
    return rows, columns


def pad(img: Image.Image, padding: Any, fill: Any = 0, padding_mode: str = "constant") -> Note | None:
    if padding_mode == "constant":
        return None  # it calls ``ImageOps.expand``
    lines = pad_lines(_size(img), as_ltrb(padding), padding_mode)
    return None if lines is None else select(*lines)


def select(rows: Line, columns: Line) -> Note:
    size = len(rows), len(columns)
    return Note((IndexSelect(),), (*size, np.concatenate((rows, columns))), size)


# --- functions that read pixels ---------------------------------------------------------------------------------------


def autocontrast(
    image: Image.Image, cutoff: Any = 0, ignore: Any = None, mask: Any = None, preserve_tone: Any = False
) -> Note | None:
    is_plain = not cutoff and ignore is None and mask is None and not preserve_tone
    return _one(color.Autocontrast(), image) if is_plain else None


def equalize(image: Image.Image, mask: Any = None) -> Note | None:
    return _one(color.Equalize(), image) if mask is None else None


def invert(image: Image.Image) -> Note | None:
    return _one(color.Invert(), image)


def adjust_hue(img: Image.Image, hue_factor: Any) -> Note | None:
    if img.mode != "RGB" or not -0.5 <= hue_factor <= 0.5:
        return None
    return _one(color.Hue(), img, color.hue_shift(hue_factor, "pil"))


def to_grayscale(img: Image.Image, num_output_channels: int) -> Note | None:
    return _one(color.Grayscale(3), img) if num_output_channels == 3 else None  # converts to "L" otherwise


def permute_channels(image: Image.Image, permutation: Any) -> Note | None:
    order = torch.as_tensor(permutation).tolist()
    return _one(color.ChannelOrder(), image, *order) if image.mode == "RGB" and sorted(order) == [0, 1, 2] else None


TORCHVISION = "torchvision.transforms"

FUNCTIONS: dict[str, tuple[Noter, bool]] = {
    "PIL.ImageOps:autocontrast": (autocontrast, True),
    "PIL.ImageOps:equalize": (equalize, True),
    "PIL.ImageChops:invert": (invert, True),
    "PIL.Image:blend": (blend, True),
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


def _convert(call: Callable[..., Any], conversion: Any, array_steps: Branch) -> Callable[..., Any]:
    @functools.wraps(call)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if active() is None or not args or not isinstance(args[0], Image.Image):
            is_array = len(args) == 1 and type(args[0]) is np.ndarray and args[0].flags.c_contiguous
            of = find_decoded(args[0]) if is_array and array_steps else None
            if of is None or torch.get_default_dtype() is not torch.float32:
                return call(*args, **kwargs)
            return create_lazy_output(of.note(array_steps, (), of.size, lambda image: call(np.array(image))))
        result = apply_undecoded(conversion, False, args[0]) if len(args) == 1 and not kwargs else None
        if result is None:
            result = call(*args, **kwargs)
            if args[0].mode == "RGB":  # other images may be masks, which stay on the CPU as with torch
                result = wrap_result(args[0], result)
        return result

    return hooked
