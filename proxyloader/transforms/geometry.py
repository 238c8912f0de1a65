"""Steps that move pixels without changing their values: crop, pad, flip, select rows and columns.

The worker computes all positions, in whole pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from PIL import Image
from torchvision.transforms import transforms as v1, v2

from .plan import Draws, ImageState, ParamRow, Size, Step, Translation, Untranslatable
from .random_numbers import BoxSampler, bernoulli, meta_image
from .registry import rule, version_of

Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels. Pixels outside the image have the fill value."""


@dataclass(frozen=True)
class Crop(Step):
    """Crop a box from the image. Parameters: the box."""

    fill: tuple[float, ...] = (0.0,)  # outside the image, in the units of the image at this step
    inside: bool = False  # whether the box is always inside the image
    num_params: ClassVar[int] = 4
    needs_kernels: ClassVar[bool] = False


def cropping(
    get_box: BoxSampler, fill: tuple[float, ...] = (0.0,), inside: bool = False, draws: Draws = "torch"
) -> Translation:
    """Return the translation of a crop, whose box depends on the (height, width). See Crop and Translation."""

    def sample(size: Size, row: ParamRow) -> Size:
        box = get_box(*size)
        if min(box[2:]) < 0:
            raise Untranslatable
        row.extend(box)
        return box[2:]

    return Translation((Crop(fill, inside),), sample, draws)


def center_box(size: Size, height: int, width: int) -> Box:
    """Return the box of ``functional.center_crop``. Smaller images are padded evenly, odd pixels at the end."""
    return _center_offset(height, size[0]), _center_offset(width, size[1]), *size


def _center_offset(available: int, wanted: int) -> int:
    return -((wanted - available) // 2) if wanted > available else round((available - wanted) / 2.0)


@rule(v1.CenterCrop, v2.CenterCrop)
def center_crop(transform: Any, state: ImageState) -> Translation:
    size = as_pair(transform.size)
    return cropping(lambda height, width: center_box(size, height, width), as_fill(0, state), draws="")


@rule(v1.RandomCrop, v2.RandomCrop)
def random_crop(transform: Any, state: ImageState) -> Translation:
    size, version = as_pair(transform.size), version_of(transform)
    padding = as_ltrb(transform.padding)
    if pads := any(padding) or transform.pad_if_needed:
        _check_padding(transform, state)

    def box_v1(height: int, width: int) -> Box:
        left, top, right, bottom = padding
        height, width = height + top + bottom, width + left + right
        if transform.pad_if_needed and width < size[1]:
            left, width = left + size[1] - width, 2 * size[1] - width
        if transform.pad_if_needed and height < size[0]:
            top, height = top + size[0] - height, 2 * size[0] - height
        i, j, _, _ = v1.RandomCrop.get_params(meta_image(height, width), size)
        return i - top, j - left, *size

    def box_v2(height: int, width: int) -> Box:
        drawn = transform.make_params([meta_image(height, width)])
        left, top = drawn["padding"][:2]
        return drawn["top"] - top, drawn["left"] - left, *size

    return cropping(box_v1 if version == "v1" else box_v2, as_fill(transform.fill, state), inside=not pads)


@rule(v1.Pad, v2.Pad)
def pad(transform: Any, state: ImageState) -> Translation:
    _check_padding(transform, state)
    left, top, right, bottom = as_ltrb(transform.padding)

    def box(height: int, width: int) -> Box:
        return -top, -left, height + top + bottom, width + left + right

    return cropping(box, as_fill(transform.fill, state), draws="")


def _check_padding(transform: Any, state: ImageState) -> None:
    needs_number = state.kind == "tensor" and version_of(transform) == "v1"
    if transform.padding_mode != "constant" or (needs_number and not is_number(transform.fill)):
        raise Untranslatable


def as_fill(fill: Any, state: ImageState) -> tuple[float, ...]:
    values = tuple(fill) if isinstance(fill, Sequence) else (0 if fill is None else fill,)
    if not all(map(is_number, values)) or len(values) not in (1, state.channels):
        raise Untranslatable
    if state.dtype == "uint8" and not all(0 <= value <= 255 for value in values):
        raise Untranslatable
    return tuple(map(float, values)) * (state.channels // len(values))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_ltrb(padding: Any) -> tuple[int, int, int, int]:
    """Convert torchvision padding, 1, 2 or 4 numbers, to (left, top, right, bottom)."""
    given = [padding or 0] if padding is None or is_number(padding) else padding
    if len(given) not in (1, 2, 4):
        raise Untranslatable
    left, top, right, bottom = [int(each) for each in given] * (4 // len(given))
    return left, top, right, bottom


def as_pair(size: Any) -> Size:
    given = [size] if is_number(size) else size
    height, width = int(given[0]), int(given[-1] if len(given) == 2 else given[0])
    if min(height, width) < 0:
        raise Untranslatable
    return height, width


@dataclass(frozen=True)
class Flip(Step):
    """A flip. Parameter: whether the image is flipped."""

    axis: Literal["horizontal", "vertical"]
    num_params: ClassVar[int] = 1
    needs_kernels: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = True


@rule(v1.RandomHorizontalFlip, v2.RandomHorizontalFlip, v1.RandomVerticalFlip, v2.RandomVerticalFlip)
def random_flip(transform: Any, state: ImageState) -> Translation:
    p, is_vertical = float(transform.p), isinstance(transform, (v1.RandomVerticalFlip, v2.RandomVerticalFlip))

    def sample(size: Size, row: ParamRow) -> Size:
        row.append(float(bernoulli(p)))
        return size

    return Translation((Flip("vertical" if is_vertical else "horizontal"),), sample, "numbers")


@dataclass(frozen=True)
class Transpose(Step):
    """``Image.transpose``."""

    method: Image.Transpose


class Turn(NamedTuple):
    """Where a turn or flip reads pixels: whether x and y swap, and whether it reads from the right or the bottom."""

    swaps: bool
    reverses_x: bool
    reverses_y: bool


TURNS = {
    Image.Transpose.FLIP_LEFT_RIGHT: Turn(False, True, False),
    Image.Transpose.FLIP_TOP_BOTTOM: Turn(False, False, True),
    Image.Transpose.ROTATE_90: Turn(True, True, False),
    Image.Transpose.ROTATE_180: Turn(False, True, True),
    Image.Transpose.ROTATE_270: Turn(True, False, True),
    Image.Transpose.TRANSPOSE: Turn(True, False, False),
    Image.Transpose.TRANSVERSE: Turn(True, True, True),
}


def transposed(size: Size, method: Image.Transpose) -> Size:
    return size[::-1] if TURNS[method].swaps else size


class IndexSelect(Step):
    """Select rows and columns of the image, in any order.

    Parameters: the new height and width, and the position of an array with the row indices, then the column indices.
    """

    num_params: ClassVar[int] = 3
