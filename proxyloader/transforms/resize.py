"""Resizes, to sizes that are given or drawn. All sizes are settled in the worker, in whole pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from ..errors import UnsupportedTransformError
from .drawing import like, v2_transform, version_of
from .geometry import Crop, RandomResizedRegion, as_pair
from .plan import Closeness, ImageState, Size, Step
from .registry import rule

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]

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
