"""Steps that move pixels: crop, pad, resize, flip. All sizes and boxes are settled in the worker, in whole pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from ..errors import UnsupportedTransformError
from .choice import Sometimes
from .drawing import Version, like, parameter_function, v2_transform, version_of
from .plan import EXACT, Closeness, ImageState, Size, Step
from .registry import rule

Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels; it may reach beyond the image, where the fill value stands."""

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


class Region(Protocol):
    """Which part of an image a Crop takes."""

    @property
    def inside(self) -> bool:
        """The box never reaches beyond the image."""

    @property
    def size(self) -> Size | None:
        """(height, width) of the box where it does not depend on the image."""

    @property
    def drawn(self) -> str:
        """As ``Step.drawn``."""

    def box(self, height: int, width: int) -> Box: ...


# --- crop and pad ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crop(Step):
    """Take a box out of the image; outside the image it holds ``fill``, in the units of the values there."""

    region: Region
    fill: tuple[float, ...] = (0.0,)
    columns: ClassVar[int] = 4
    closeness: ClassVar[Closeness] = EXACT

    @property
    def drawn(self) -> str:
        return self.region.drawn

    def draw(self, size: Size, row: list[float]) -> Size:
        box = self.region.box(*size)
        row.extend(box)
        return box[2:]

    def state_after(self, state: ImageState) -> ImageState:
        return replace(state, size=self.region.size)


@dataclass(frozen=True)
class ReflectedCrop(Step):
    """As Crop; outside the image stands its mirror image, without the outermost pixel, as far as that reaches."""

    region: Region
    columns: ClassVar[int] = 4
    closeness: ClassVar[Closeness] = EXACT

    @property
    def drawn(self) -> str:
        return self.region.drawn

    def draw(self, size: Size, row: list[float]) -> Size:
        top, left, height, width = box = self.region.box(*size)
        for start, wanted, side in (top, height, size[0]), (left, width, size[1]):
            if start <= -side or start + wanted >= 2 * side:
                raise ValueError(
                    f"an image of {size} (height, width) would be reflected more than once to become one of "
                    f"{box[2:]}. Put a Resize before it, or pad with a constant"
                )
        row.extend(box)
        return height, width

    def state_after(self, state: ImageState) -> ImageState:
        return replace(state, size=self.region.size)


@dataclass(frozen=True)
class RandomResizedRegion:
    """The box of RandomResizedCrop."""

    scale: tuple[float, ...]
    ratio: tuple[float, ...]
    version: Version = "v1"
    inside: ClassVar[bool] = True
    size: ClassVar[None] = None

    @property
    def drawn(self) -> str:
        return f"top, left, height, width: RandomResizedCrop.{parameter_function(self.version)}"

    def box(self, height: int, width: int) -> Box:
        if self.version == "v1":
            top, left, height, width = v1.RandomResizedCrop.get_params(
                like(height, width), list(self.scale), list(self.ratio)
            )
            return top, left, height, width
        drawn = v2_transform(v2.RandomResizedCrop, 1, self.scale, self.ratio).make_params([like(height, width)])
        return drawn["top"], drawn["left"], drawn["height"], drawn["width"]


@dataclass(frozen=True)
class CenterRegion:
    """The box of ``functional.center_crop``: smaller images are padded evenly, the odd pixel to the right and below."""

    size: Size
    inside: ClassVar[bool] = False
    drawn: ClassVar[str] = ""

    def box(self, height: int, width: int) -> Box:
        return _centred(height, self.size[0]), _centred(width, self.size[1]), *self.size


def _centred(available: int, wanted: int) -> int:
    if wanted > available:
        return -((wanted - available) // 2)
    return round((available - wanted) / 2.0)


@dataclass(frozen=True)
class RandomRegion:
    """The box of RandomCrop, with its padding counted as outside."""

    size: Size
    padding: tuple[int, int, int, int]  # left, top, right, bottom
    pad_if_needed: bool
    version: Version = "v1"
    inside: ClassVar[bool] = False

    @property
    def drawn(self) -> str:
        return f"top, left: RandomCrop.{parameter_function(self.version)}"

    def box(self, height: int, width: int) -> Box:
        if self.version == "v2":
            padding = self.padding if any(self.padding) else None
            transform = v2_transform(v2.RandomCrop, self.size, padding, self.pad_if_needed)
            drawn = transform.make_params([like(height, width)])
            left, top = drawn["padding"][:2]
            return drawn["top"] - top, drawn["left"] - left, *self.size
        left, top, right, bottom = self.padding
        height, width = height + top + bottom, width + left + right
        if self.pad_if_needed and width < self.size[1]:
            left, width = left + self.size[1] - width, 2 * self.size[1] - width
        if self.pad_if_needed and height < self.size[0]:
            top, height = top + self.size[0] - height, 2 * self.size[0] - height
        i, j, _, _ = v1.RandomCrop.get_params(like(height, width), self.size)
        return i - top, j - left, *self.size


@dataclass(frozen=True)
class PaddedRegion:
    """The whole image and ``padding`` (left, top, right, bottom) pixels around it."""

    padding: tuple[int, int, int, int]
    inside: ClassVar[bool] = False
    size: ClassVar[None] = None
    drawn: ClassVar[str] = ""

    def box(self, height: int, width: int) -> Box:
        left, top, right, bottom = self.padding
        return -top, -left, height + top + bottom, width + left + right


@dataclass(frozen=True)
class ZoomedOutRegion:
    """The box of RandomZoomOut (v2 ``make_params``): a canvas of ``side_range`` times the image's sides around it."""

    side_range: tuple[float, float]
    inside: ClassVar[bool] = False
    size: ClassVar[None] = None
    drawn: ClassVar[str] = "top, left, height, width: RandomZoomOut.make_params"

    def box(self, height: int, width: int) -> Box:
        drawn = v2_transform(v2.RandomZoomOut, 0, self.side_range).make_params([like(height, width)])
        left, top, right, bottom = drawn["padding"]
        return -top, -left, height + top + bottom, width + left + right


@rule(v1.CenterCrop, v2.CenterCrop)
def center_crop(transform: v1.CenterCrop | v2.CenterCrop, state: ImageState) -> tuple[Step, ...]:
    return (Crop(CenterRegion(as_pair(transform.size)), as_fill(0, state)),)


@rule(v1.RandomCrop, v2.RandomCrop)
def random_crop(transform: Any, state: ImageState) -> tuple[Step, ...]:
    padding = as_ltrb(transform.padding, type(transform) is v2.RandomCrop)
    if padding != (0, 0, 0, 0) or transform.pad_if_needed:
        _can_pad(transform, state)
    region = RandomRegion(as_pair(transform.size), padding, bool(transform.pad_if_needed), version_of(transform))
    return (Crop(region, as_fill(transform.fill, state)),)


@rule(v1.Pad, v2.Pad)
def pad(transform: Any, state: ImageState) -> tuple[Step, ...]:
    _can_pad(transform, state)
    return (Crop(PaddedRegion(as_ltrb(transform.padding)), as_fill(transform.fill, state)),)


@rule(v2.RandomZoomOut)
def random_zoom_out(transform: v2.RandomZoomOut, state: ImageState) -> tuple[Step, ...]:
    low, high = map(float, transform.side_range)
    return (Sometimes((Crop(ZoomedOutRegion((low, high)), as_fill(transform.fill, state)),), float(transform.p)),)


def _can_pad(transform: Any, state: ImageState) -> None:
    if state.kind == "tensor" and version_of(transform) == "v1" and not is_number(transform.fill):
        raise UnsupportedTransformError(
            f"fill={transform.fill!r} is not what torchvision pads a tensor with; one number is, or the v2 class"
        )
    if transform.padding_mode != "constant":
        raise UnsupportedTransformError(
            f"padding_mode={transform.padding_mode!r} is not translated; padding_mode='constant' is"
        )


def as_fill(fill: Any, state: ImageState, name: str = "fill") -> tuple[float, ...]:
    if fill is None:
        fill = 0
    values = tuple(fill) if isinstance(fill, Sequence) else (fill,)
    if not all(map(is_number, values)) or len(values) not in (1, state.channels):
        raise UnsupportedTransformError(f"{name}={fill!r} is not translated; a number or {state.channels} numbers are")
    if state.dtype == "uint8" and not all(0 <= value <= 255 for value in values):
        raise UnsupportedTransformError(f"{name}={fill!r} is outside of 0..255, which pixels can hold at this point")
    return tuple(map(float, values)) * (state.channels // len(values))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_ltrb(padding: Any, in_lrtb_order: bool = False) -> tuple[int, int, int, int]:
    """Padding as torchvision takes it (1, 2 or 4 numbers) as (left, top, right, bottom)."""
    if padding is None:
        return 0, 0, 0, 0
    if is_number(padding):
        padding = [padding]
    if len(padding) == 1:
        return (int(padding[0]),) * 4
    if len(padding) == 2:
        return int(padding[0]), int(padding[1]), int(padding[0]), int(padding[1])
    if in_lrtb_order:  # v2.RandomCrop keeps its padding parsed, as left, right, top, bottom
        left, right, top, bottom = padding
        return int(left), int(top), int(right), int(bottom)
    left, top, right, bottom = padding
    return int(left), int(top), int(right), int(bottom)


def as_pair(size: Any) -> Size:
    if is_number(size):
        return int(size), int(size)
    height, width = size if len(size) == 2 else (size[0], size[0])
    return int(height), int(width)


# --- resize ----------------------------------------------------------------------------------------------------------

RESIZED = {
    "nearest": Closeness(10, 255, 255, "exact but where a sample falls on the border of two pixels, as from 120 to 90"),
    "bilinear": Closeness(
        0.25, 6, 16, "Pillow rounds between its passes; from 128 pixels on, the outermost pixels differ more"
    ),
    "bicubic": Closeness(
        0.3, 6, 16, "Pillow rounds between its passes and cuts overshoots; from 128 pixels on, the edges differ more"
    ),
}
"""By interpolation. At the edges DALI repeats the outermost pixels where torchvision shortens the filter."""


@dataclass(frozen=True)
class Resize(Step):
    """``functional.resize``.

    Attributes:
        shorter: side in pixels that the shorter edge gets, or None where ``target`` is given or only the longer edge
            is bounded.
        max_size: upper bound of the longer edge, in pixels.
        target: (height, width) in pixels that every image gets.
    """

    target: Size | None = None
    shorter: int | None = None
    max_size: int | None = None
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    columns: ClassVar[int] = 2

    @property
    def closeness(self) -> Closeness:
        return RESIZED[self.interpolation]

    def draw(self, size: Size, row: list[float]) -> Size:
        new_size = self.target or resized_size(*size, self.shorter, self.max_size)
        refuse_empty(size, new_size)
        row.extend(new_size)
        return new_size

    def state_after(self, state: ImageState) -> ImageState:
        return replace(state, size=self.target)


def refuse_empty(size: Size, new_size: Size) -> None:
    """torch and Pillow refuse it in other words; to DALI a side of 0 means "as you like"."""
    if 0 in new_size:
        raise ValueError(f"an image of {size[0]} x {size[1]} (height x width) would be resized to {new_size}")


def resized_size(height: int, width: int, shorter: int | None, max_size: int | None) -> Size:
    """The size that torchvision's Resize gives an image (``functional._compute_resized_output_size``).

    Args:
        height, width: of the image, in pixels.
        shorter: wanted length of the shorter edge, None to bound the longer one only.
        max_size: bound of the longer edge, or None.
    """
    short, long = sorted((height, width))
    if shorter is None:
        if max_size is None:
            raise ValueError("one of shorter and max_size must be given")
        new_short, new_long = int(max_size * short / long), max_size
    else:
        new_short, new_long = shorter, int(shorter * long / short)
        if max_size is not None and new_long > max_size:
            new_short, new_long = int(max_size * new_short / new_long), max_size
    return (new_short, new_long) if height <= width else (new_long, new_short)


@dataclass(frozen=True)
class RandomSize(Step):
    """RandomResize, RandomShortestSize and ScaleJitter (v2), which draw a size in ``make_params``. As Resize.

    Attributes:
        resize: to the shorter edge that the smallest drawn size gives a square image; it says how edges are made.
        name: of the class.
        arguments: that make an instance whose draws these are.
    """

    resize: Resize
    name: str
    arguments: tuple[Any, ...]
    columns: ClassVar[int] = 2

    @property
    def operations(self) -> tuple[Step, ...]:
        return (self.resize,)

    @property
    def drawn(self) -> str:
        return f"height, width: {self.name}.make_params"

    def draw(self, size: Size, row: list[float]) -> Size:
        drawn = v2_transform(getattr(v2, self.name), *self.arguments).make_params([like(*size)])["size"]
        # A pair is (height, width); one number is for the shorter edge.
        new_size = as_pair(drawn) if len(drawn) == 2 else resized_size(*size, drawn[0], None)
        refuse_empty(size, new_size)
        row.extend(new_size)
        return new_size

    def state_after(self, state: ImageState) -> ImageState:
        return replace(state, size=None)


@rule(v2.RandomResize)
def random_resize(transform: v2.RandomResize, state: ImageState) -> tuple[Step, ...]:
    if transform.min_size >= transform.max_size:
        raise UnsupportedTransformError(
            f"no size can be drawn from min_size={transform.min_size} up to, not including, "
            f"max_size={transform.max_size}; min_size must be less"
        )
    return _random_size(transform, transform.min_size, (transform.min_size, transform.max_size), state)


@rule(v2.RandomShortestSize)
def random_shortest_size(transform: v2.RandomShortestSize, state: ImageState) -> tuple[Step, ...]:
    arguments = tuple(transform.min_size), transform.max_size
    return _random_size(transform, min(transform.min_size), arguments, state)


@rule(v2.ScaleJitter)
def scale_jitter(transform: v2.ScaleJitter, state: ImageState) -> tuple[Step, ...]:
    low, high = map(float, transform.scale_range)
    target = as_pair(transform.target_size)
    return _random_size(transform, int(min(target) * low), (target, (low, high)), state)


def _random_size(transform: Any, least: int, arguments: tuple[Any, ...], state: ImageState) -> tuple[Step, ...]:
    resize = resize_step(least, None, transform.interpolation, transform.antialias, state)
    return (RandomSize(resize, type(transform).__name__, arguments),)


@rule(v1.Resize, v2.Resize)
def resize(transform: Any, state: ImageState) -> tuple[Step, ...]:
    return (resize_step(transform.size, transform.max_size, transform.interpolation, transform.antialias, state),)


@rule(v1.RandomResizedCrop, v2.RandomResizedCrop)
def random_resized_crop(transform: Any, state: ImageState) -> tuple[Step, ...]:
    scale, ratio = tuple(map(float, transform.scale)), tuple(map(float, transform.ratio))
    region = RandomResizedRegion(scale, ratio, version_of(transform))
    size = list(as_pair(transform.size))
    return Crop(region), resize_step(size, None, transform.interpolation, transform.antialias, state)


def resize_step(
    size: Any, max_size: int | None, interpolation: Any, antialias: bool | None, state: ImageState
) -> Resize:
    mode = interpolation_name(interpolation)
    # On a PIL image torchvision always antialiases, whatever the argument says; None means no for tensors.
    smooth = True if state.kind == "pil" else bool(antialias)
    if state.kind == "tensor" and mode == "nearest" and interpolation_value(interpolation) != "nearest-exact":
        raise UnsupportedTransformError(
            "interpolation 'nearest' on a tensor picks other pixels than on a PIL image; "
            "put the resize before the conversion to a tensor, or use InterpolationMode.NEAREST_EXACT"
        )
    if state.kind == "tensor" and mode == "lanczos":
        raise UnsupportedTransformError(
            "interpolation 'lanczos' on a tensor is not translated (and only the newest v2 classes do it); "
            "put the resize before the conversion to a tensor"
        )
    if mode == "bicubic" and not smooth:
        raise UnsupportedTransformError("bicubic without antialias has no equal in DALI; use antialias=True")
    if isinstance(size, Sequence) and len(size) == 2:
        if max_size is not None:
            raise UnsupportedTransformError(f"max_size={max_size} goes with one number as size, and size={size!r}")
        return Resize(target=as_pair(size), interpolation=mode, antialias=smooth)
    shorter = int(size[0]) if isinstance(size, Sequence) else size
    if shorter is not None and max_size is not None and max_size <= shorter:
        raise UnsupportedTransformError(f"max_size={max_size} must be greater than size={shorter}")
    return Resize(shorter=shorter, max_size=max_size, interpolation=mode, antialias=smooth)


def interpolation_value(interpolation: Any) -> str:
    """torchvision's name of an interpolation given as an InterpolationMode, a string or a PIL number."""
    if isinstance(interpolation, InterpolationMode):
        return str(interpolation.value)
    names = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
    return names.get(interpolation, str(interpolation))


def interpolation_name(interpolation: Any) -> Interpolation:
    """The interpolation among those that DALI has an equal for."""
    names: dict[str, Interpolation] = {
        "nearest": "nearest",
        "nearest-exact": "nearest",
        "bilinear": "bilinear",
        "bicubic": "bicubic",
        "lanczos": "lanczos",
    }
    value = interpolation_value(interpolation)
    if value not in names:
        raise UnsupportedTransformError(f"interpolation {value!r} is not translated; {', '.join(names)} are")
    return names[value]


# --- flip ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flip(Step):
    """RandomHorizontalFlip and RandomVerticalFlip: one number, in v1 and in v2."""

    axis: Literal["horizontal", "vertical"]
    p: float
    columns: ClassVar[int] = 1
    keeps_order: ClassVar[bool] = True
    closeness: ClassVar[Closeness] = EXACT

    @property
    def drawn(self) -> str:
        return f"whether it acts: torch.rand(1) < {self.p:g}"

    def draw(self, size: Size, row: list[float]) -> Size:
        row.append(float(torch.rand(1) < self.p))
        return size


@rule(v1.RandomHorizontalFlip, v2.RandomHorizontalFlip)
def random_horizontal_flip(transform: Any, state: ImageState) -> tuple[Step, ...]:
    return (Flip("horizontal", float(transform.p)),)


@rule(v1.RandomVerticalFlip, v2.RandomVerticalFlip)
def random_vertical_flip(transform: Any, state: ImageState) -> tuple[Step, ...]:
    return (Flip("vertical", float(transform.p)),)
