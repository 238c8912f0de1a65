"""Steps that move pixels without changing their values: crop, pad, flip, select rows and columns.

The worker computes all positions, in whole pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .fast_params import has_fast_sampling, resized_crop_box
from .params import Version, bernoulli, meta_image, v2_transform, version_of
from .plan import Branch, ImageState, ParamRow, Size, Step, Untranslatable
from .registry import rule

Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels. Pixels outside the image have the fill value."""


class Region:
    """Base class of the regions that a crop selects.

    Attributes:
        needs_kernels, draws: see ``Step``.
        inside: whether the box is always inside the image.
        size: (height, width) of the box, in pixels; None if it depends on the image. Dataclasses declare their field
            with ``field()``, or this None would become its default.
    """

    needs_kernels: bool = False
    inside: bool = False
    size: Size | None = None
    draws: bool = False

    @property
    def takes_numbers_ahead(self) -> bool:
        """See ``Step.takes_numbers_ahead``."""
        return not self.draws

    def box(self, height: int, width: int) -> Box:
        raise NotImplementedError


@dataclass(frozen=True)
class RegionStep(Step):
    """Base class of the steps that crop a region from the image. Parameters: its box."""

    region: Region
    num_params: ClassVar[int] = 4

    @property
    def draws(self) -> bool:
        return self.region.draws

    @property
    def takes_numbers_ahead(self) -> bool:
        return self.region.takes_numbers_ahead

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, size=self.region.size)


@dataclass(frozen=True)
class Crop(RegionStep):
    """Crop a box from the image. Pixels outside the image are ``fill``, in the units of the image at this step."""

    fill: tuple[float, ...] = (0.0,)

    @property
    def needs_kernels(self) -> bool:
        return self.region.needs_kernels

    def sample_params(self, size: Size, row: list[float]) -> Size:
        box = self.region.box(*size)
        if min(box[2:]) < 0:
            raise Untranslatable
        row.extend(box)
        return box[2:]


@dataclass(frozen=True)
class RandomResizedRegion(Region):
    """The box of RandomResizedCrop."""

    scale: tuple[float, ...]
    ratio: tuple[float, ...]
    version: Version = "v1"
    inside = True
    draws = True

    @property
    def takes_numbers_ahead(self) -> bool:
        return has_fast_sampling(self.version)

    def box(self, height: int, width: int) -> Box:
        return resized_crop_box(self.scale, self.ratio, self.version)(height, width)


@dataclass(frozen=True)
class CenterRegion(Region):
    """The box of ``functional.center_crop``. Smaller images are padded evenly, odd pixels at the right and bottom."""

    size: Size = field()

    def box(self, height: int, width: int) -> Box:
        return _center_offset(height, self.size[0]), _center_offset(width, self.size[1]), *self.size


def _center_offset(available: int, wanted: int) -> int:
    if wanted > available:
        return -((wanted - available) // 2)
    return round((available - wanted) / 2.0)


@dataclass(frozen=True)
class RandomRegion(Region):
    """The box of RandomCrop. Its padding counts as outside the image."""

    size: Size = field()
    padding: tuple[int, int, int, int]  # left, top, right, bottom
    pad_if_needed: bool
    version: Version = "v1"
    draws = True

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
class PaddedRegion(Region):
    """The box of the whole image with ``padding`` pixels (left, top, right, bottom) around it."""

    padding: tuple[int, int, int, int]

    def box(self, height: int, width: int) -> Box:
        left, top, right, bottom = self.padding
        return -top, -left, height + top + bottom, width + left + right


@rule(v1.CenterCrop, v2.CenterCrop)
def center_crop(transform: v1.CenterCrop | v2.CenterCrop, state: ImageState) -> Branch:
    return (Crop(CenterRegion(as_pair(transform.size)), as_fill(0, state)),)


@rule(v1.RandomCrop, v2.RandomCrop)
def random_crop(transform: Any, state: ImageState) -> Branch:
    padding = as_ltrb(transform.padding, type(transform) is v2.RandomCrop)
    if padding != (0, 0, 0, 0) or transform.pad_if_needed:
        _check_padding(transform, state)
    region = RandomRegion(as_pair(transform.size), padding, bool(transform.pad_if_needed), version_of(transform))
    return (Crop(region, as_fill(transform.fill, state)),)


@rule(v1.Pad, v2.Pad)
def pad(transform: Any, state: ImageState) -> Branch:
    _check_padding(transform, state)
    return (Crop(PaddedRegion(as_ltrb(transform.padding)), as_fill(transform.fill, state)),)


def _check_padding(transform: Any, state: ImageState) -> None:
    needs_number = state.kind == "tensor" and version_of(transform) == "v1"
    if transform.padding_mode != "constant" or (needs_number and not is_number(transform.fill)):
        raise Untranslatable


def as_fill(fill: Any, state: ImageState) -> tuple[float, ...]:
    if fill is None:
        fill = 0
    values = tuple(fill) if isinstance(fill, Sequence) else (fill,)
    if not all(map(is_number, values)) or len(values) not in (1, state.channels):
        raise Untranslatable
    if state.dtype == "uint8" and not all(0 <= value <= 255 for value in values):
        raise Untranslatable
    return tuple(map(float, values)) * (state.channels // len(values))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_ltrb(padding: Any, in_lrtb_order: bool = False) -> tuple[int, int, int, int]:
    """Convert torchvision padding, 1, 2 or 4 numbers, to (left, top, right, bottom)."""
    given = [padding or 0] if padding is None or is_number(padding) else padding
    if len(given) not in (1, 2, 4):
        raise Untranslatable
    left, top, right, bottom = [int(each) for each in given] * (4 // len(given))
    if in_lrtb_order and len(given) == 4:  # v2.RandomCrop stores its padding as left, right, top, bottom
        top, right = right, top
    return left, top, right, bottom


def as_pair(size: Any) -> Size:
    given = [size] if is_number(size) else size
    height, width = int(given[0]), int(given[-1] if len(given) == 2 else given[0])
    if min(height, width) < 0:
        raise Untranslatable
    return height, width


@dataclass(frozen=True)
class Flip(Step):
    """RandomHorizontalFlip and RandomVerticalFlip: both versions draw one number."""

    axis: Literal["horizontal", "vertical"]
    p: float
    num_params: ClassVar[int] = 1
    needs_kernels: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = True
    takes_numbers_ahead: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: list[float]) -> Size:
        row.append(float(bernoulli(self.p)))
        return size


@rule(v1.RandomHorizontalFlip, v2.RandomHorizontalFlip)
def random_horizontal_flip(transform: Any, state: ImageState) -> Branch:
    return (Flip("horizontal", float(transform.p)),)


@rule(v1.RandomVerticalFlip, v2.RandomVerticalFlip)
def random_vertical_flip(transform: Any, state: ImageState) -> Branch:
    return (Flip("vertical", float(transform.p)),)


class IndexSelect(Step):
    """Select rows and columns of the image, in any order.

    Parameters: the new height and width, and the position of an array with the row indices, then the column indices.
    """

    num_params: ClassVar[int] = 3

    def put(self, rows: NDArray[np.float32], columns: NDArray[np.float32], row: ParamRow) -> Size:
        """Append the parameters to the row of an image. Return the new (height, width)."""
        new_size = len(rows), len(columns)
        row.extend((*new_size, row.attach(np.concatenate([rows, columns]))))
        return new_size
