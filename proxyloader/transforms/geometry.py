"""Steps that move pixels without changing their values: crop, pad, flip, select rows and columns.

The worker computes all positions, in whole pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .container import RandomApply
from .fast_params import resized_crop_box
from .params import Version, bernoulli, meta_image, parameter_function, v2_transform, version_of
from .plan import EXACT, ImageState, ParamRow, Size, Step, Tolerance
from .registry import rule

Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels. It may extend beyond the image, where pixels have the fill value."""


class Region(Protocol):
    """The part of an image that a Crop takes."""

    @property
    def inside(self) -> bool:
        """Whether the box is always inside the image."""

    @property
    def size(self) -> Size | None:
        """(height, width) of the box, in pixels; None if it depends on the image."""

    @property
    def params_doc(self) -> str:
        """See ``Step.params_doc``."""

    def box(self, height: int, width: int) -> Box: ...


# --- crop and pad ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crop(Step):
    """Crop a box from the image. Pixels outside the image are ``fill``, in the units of the image at this step."""

    region: Region
    fill: tuple[float, ...] = (0.0,)
    num_params: ClassVar[int] = 4
    closeness: ClassVar[Tolerance] = EXACT

    @property
    def params_doc(self) -> str:
        return self.region.params_doc

    def sample_params(self, size: Size, row: list[float]) -> Size:
        box = self.region.box(*size)
        if min(box[2:]) < 0:
            raise ValueError(f"nothing is left of an image of {size} (height, width) when {box[2:]} of it are taken")
        row.extend(box)
        return box[2:]

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, size=self.region.size)


@dataclass(frozen=True)
class ReflectedCrop(Step):
    """Crop a box from the image, which is reflected at its edges without repeating the edge pixels."""

    region: Region
    num_params: ClassVar[int] = 4
    closeness: ClassVar[Tolerance] = EXACT

    @property
    def params_doc(self) -> str:
        return self.region.params_doc

    def sample_params(self, size: Size, row: list[float]) -> Size:
        top, left, height, width = box = self.region.box(*size)
        for start, wanted, side in (top, height, size[0]), (left, width, size[1]):
            if start <= -side or start + wanted >= 2 * side:
                raise ValueError(
                    f"an image of {size} (height, width) would be reflected more than once to become one of "
                    f"{box[2:]}. Put a Resize before it, or pad with a constant"
                )
        row.extend(box)
        return height, width

    def output_state(self, state: ImageState) -> ImageState:
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
    def params_doc(self) -> str:
        return f"top, left, height, width: RandomResizedCrop.{parameter_function(self.version)}"

    def box(self, height: int, width: int) -> Box:
        return resized_crop_box(self.scale, self.ratio, self.version)(height, width)


@dataclass(frozen=True)
class CenterRegion:
    """The box of ``functional.center_crop``. Smaller images are padded evenly, an odd pixel at the right and bottom."""

    size: Size
    inside: ClassVar[bool] = False
    params_doc: ClassVar[str] = ""

    def box(self, height: int, width: int) -> Box:
        return _centred(height, self.size[0]), _centred(width, self.size[1]), *self.size


def _centred(available: int, wanted: int) -> int:
    if wanted > available:
        return -((wanted - available) // 2)
    return round((available - wanted) / 2.0)


@dataclass(frozen=True)
class RandomRegion:
    """The box of RandomCrop. Its padding counts as outside the image."""

    size: Size
    padding: tuple[int, int, int, int]  # left, top, right, bottom
    pad_if_needed: bool
    version: Version = "v1"
    inside: ClassVar[bool] = False

    @property
    def params_doc(self) -> str:
        return f"top, left: RandomCrop.{parameter_function(self.version)}"

    def box(self, height: int, width: int) -> Box:
        if self.version == "v2":
            padding = self.padding if any(self.padding) else None
            transform = v2_transform(v2.RandomCrop, self.size, padding, self.pad_if_needed)
            drawn = transform.make_params([meta_image(height, width)])
            left, top = drawn["padding"][:2]
            return drawn["top"] - top, drawn["left"] - left, *self.size
        left, top, right, bottom = self.padding
        height, width = height + top + bottom, width + left + right
        if self.pad_if_needed and width < self.size[1]:
            left, width = left + self.size[1] - width, 2 * self.size[1] - width
        if self.pad_if_needed and height < self.size[0]:
            top, height = top + self.size[0] - height, 2 * self.size[0] - height
        i, j, _, _ = v1.RandomCrop.get_params(meta_image(height, width), self.size)
        return i - top, j - left, *self.size


@dataclass(frozen=True)
class PaddedRegion:
    """The box of the whole image with ``padding`` pixels (left, top, right, bottom) around it."""

    padding: tuple[int, int, int, int]
    inside: ClassVar[bool] = False
    size: ClassVar[None] = None
    params_doc: ClassVar[str] = ""

    def box(self, height: int, width: int) -> Box:
        left, top, right, bottom = self.padding
        return -top, -left, height + top + bottom, width + left + right


@dataclass(frozen=True)
class ZoomedOutRegion:
    """The box of RandomZoomOut (v2 ``make_params``): the image with a border, ``side_range`` times as high and wide."""

    side_range: tuple[float, float]
    inside: ClassVar[bool] = False
    size: ClassVar[None] = None
    params_doc: ClassVar[str] = "top, left, height, width: RandomZoomOut.make_params"

    def box(self, height: int, width: int) -> Box:
        drawn = v2_transform(v2.RandomZoomOut, 0, self.side_range).make_params([meta_image(height, width)])
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
    return (RandomApply((Crop(ZoomedOutRegion((low, high)), as_fill(transform.fill, state)),), float(transform.p)),)


def _can_pad(transform: Any, state: ImageState) -> None:
    if state.kind == "tensor" and version_of(transform) == "v1" and not is_number(transform.fill):
        raise UnsupportedTransformError(
            f"fill={transform.fill!r} is not what torchvision pads a tensor with; one number is, or the v2 class",
            code="invalid",
            argument="fill",
        )
    if transform.padding_mode != "constant":
        raise UnsupportedTransformError(
            f"padding_mode={transform.padding_mode!r} is not translated; padding_mode='constant' is",
            argument="padding_mode",
        )


def as_fill(fill: Any, state: ImageState, name: str = "fill") -> tuple[float, ...]:
    if fill is None:
        fill = 0
    values = tuple(fill) if isinstance(fill, Sequence) else (fill,)
    if not all(map(is_number, values)) or len(values) not in (1, state.channels):
        raise UnsupportedTransformError(
            f"{name}={fill!r} is not translated; a number or {state.channels} numbers are", argument=name
        )
    if state.dtype == "uint8" and not all(0 <= value <= 255 for value in values):
        raise UnsupportedTransformError(
            f"{name}={fill!r} is outside of 0..255, which pixels can hold at this point", argument=name
        )
    return tuple(map(float, values)) * (state.channels // len(values))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_ltrb(padding: Any, in_lrtb_order: bool = False) -> tuple[int, int, int, int]:
    """Convert a padding of torchvision, 1, 2 or 4 numbers, to (left, top, right, bottom)."""
    if padding is None:
        return 0, 0, 0, 0
    if is_number(padding):
        padding = [padding]
    if len(padding) not in (1, 2, 4):
        raise UnsupportedTransformError(
            f"padding={padding!r}; one number, two or four are expected", code="invalid", argument="padding"
        )
    if len(padding) == 1:
        return (int(padding[0]),) * 4
    if len(padding) == 2:
        return int(padding[0]), int(padding[1]), int(padding[0]), int(padding[1])
    if in_lrtb_order:  # v2.RandomCrop stores its padding as left, right, top, bottom
        left, right, top, bottom = padding
        return int(left), int(top), int(right), int(bottom)
    left, top, right, bottom = padding
    return int(left), int(top), int(right), int(bottom)


def as_pair(size: Any) -> Size:
    if is_number(size):
        size = (size,)
    height, width = size if len(size) == 2 else (size[0], size[0])
    return _not_negative(int(height)), _not_negative(int(width))


def _not_negative(side: int) -> int:
    if side < 0:
        raise UnsupportedTransformError(f"an image cannot get a side of {side} pixels", code="invalid", argument="size")
    return side


# --- flip ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flip(Step):
    """Draws of RandomHorizontalFlip and RandomVerticalFlip: one number, in v1 and in v2."""

    axis: Literal["horizontal", "vertical"]
    p: float
    num_params: ClassVar[int] = 1
    keeps_order: ClassVar[bool] = True
    closeness: ClassVar[Tolerance] = EXACT

    @property
    def params_doc(self) -> str:
        return f"whether it acts: torch.rand(1) < {self.p:g}"

    def sample_params(self, size: Size, row: list[float]) -> Size:
        row.append(float(bernoulli(self.p)))
        return size


@rule(v1.RandomHorizontalFlip, v2.RandomHorizontalFlip)
def random_horizontal_flip(transform: Any, state: ImageState) -> tuple[Step, ...]:
    return (Flip("horizontal", float(transform.p)),)


@rule(v1.RandomVerticalFlip, v2.RandomVerticalFlip)
def random_vertical_flip(transform: Any, state: ImageState) -> tuple[Step, ...]:
    return (Flip("vertical", float(transform.p)),)


# --- rows and columns ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IndexSelect(Step):
    """Select rows and columns of the image, in any order.

    Parameters: the new height and width, and the position of an array with the indices of the rows, then of the
    columns. -1 means outside the image.

    Attributes:
        fill: value of pixels outside the image, one number for each channel; (): all indices are inside.
    """

    fill: tuple[float, ...] = ()
    num_params: ClassVar[int] = 3
    closeness: ClassVar[Tolerance] = EXACT

    def put(self, rows: NDArray[np.float32], columns: NDArray[np.float32], row: ParamRow) -> Size:
        """Append the parameters to the row of an image. Return the new (height, width)."""
        new_size = len(rows), len(columns)
        row.extend((*new_size, row.attach(np.concatenate([rows, columns]))))
        return new_size

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, size=None)
