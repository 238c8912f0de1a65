"""Steps that turn, shear and tilt: each pixel of the new image is fetched from a place that a matrix gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from PIL import Image
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms._functional_tensor import _compute_affine_output_size

from ..errors import UnsupportedTransformError
from .choice import Sometimes
from .drawing import Version, like, parameter_function, v2_transform, version_of
from .geometry import as_fill, interpolation_value
from .plan import Branch, Closeness, ImageState, Size, Step
from .registry import rule

Kind = Literal["pil", "tensor"]
Matrix = tuple[float, ...]
"""Six numbers a to f: the pixel whose centre is at (x, y) is fetched from (a x + b y + c, d x + e y + f)."""


WARPED = {
    "nearest": Closeness(0.1, 16, 255, "a place that falls between two pixels may go to the other one"),
    "bilinear": Closeness(0.1, 8, 255, "both round; and at its border the image may end a pixel earlier or later"),
}
"""By interpolation."""


@dataclass(frozen=True)
class Affine(Step):
    """Takes the new height and width, and a Matrix.

    Attributes:
        interpolation: ``"nearest"`` or ``"bilinear"``.
        fill: for places outside of the image, one for each channel; none: zeros, and torch blends into them otherwise.
        kind: of the image. Pillow's bilinear ends at the edge of the outermost pixel; torch's blends into the fill.
    """

    interpolation: Literal["nearest", "bilinear"]
    fill: tuple[float, ...]
    kind: Kind = "pil"
    columns: ClassVar[int] = 8

    @property
    def closeness(self) -> Closeness:
        return WARPED[self.interpolation]

    def state_after(self, state: ImageState) -> ImageState:
        return replace(state, size=None)


@dataclass(frozen=True)
class Perspective(Step):
    """``functional.perspective``. Takes its eight coefficients. Its attributes are those of an Affine."""

    interpolation: Literal["nearest", "bilinear"]
    fill: tuple[float, ...]
    kind: Kind = "pil"
    columns: ClassVar[int] = 8

    @property
    def closeness(self) -> Closeness:
        return WARPED[self.interpolation]


def rotation(
    size: Size, angle: float, kind: Kind, expand: bool = False, center: Sequence[float] | None = None
) -> list[float]:
    """What an Affine takes to do as ``functional.rotate``. ``angle`` is in degrees."""
    if kind == "pil":
        wanted = _Wanted(size)
        Image.Image.rotate(wanted, angle, expand=expand, center=center)  # type: ignore[arg-type]
        return [*wanted.new_size, *wanted.matrix]
    height, width = size
    middle = (0.0, 0.0) if center is None else (center[0] - width * 0.5, center[1] - height * 0.5)
    a, b, c, d, e, f = F._get_inverse_affine_matrix(list(middle), -angle, [0.0, 0.0], 1.0, [0.0, 0.0])
    new_width, new_height = (
        _compute_affine_output_size([a, b, c, d, e, f], width, height) if expand else (width, height)
    )
    if expand and center is None and angle % 180 == 90:
        new_width, new_height = height, width
    # torchvision's matrix counts from the middle of both images
    x, y = new_width * 0.5, new_height * 0.5
    return [new_height, new_width, a, b, c + width * 0.5 - a * x - b * y, d, e, f + height * 0.5 - d * x - e * y]


class _Wanted:
    """Stands in for an image while Pillow works out how to rotate it."""

    def __init__(self, size: Size) -> None:
        self.height, self.width = size
        self.size = self.width, self.height
        self.new_size, self.matrix = size, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]

    def copy(self) -> None:
        """It stays as it is."""

    def transpose(self, method: Image.Transpose) -> None:
        h, w = float(self.height), float(self.width)
        self.matrix = {
            Image.Transpose.ROTATE_180: [-1.0, 0.0, w, 0.0, -1.0, h],
            Image.Transpose.ROTATE_90: [0.0, -1.0, w, 1.0, 0.0, 0.0],
            Image.Transpose.ROTATE_270: [0.0, 1.0, 0.0, -1.0, 0.0, h],
        }[method]
        if method != Image.Transpose.ROTATE_180:
            self.new_size = self.width, self.height

    def transform(self, size: tuple[int, int], method: Any, matrix: list[float], *_: Any, **__: Any) -> None:
        self.new_size, self.matrix = (size[1], size[0]), matrix


def affine(
    size: Size,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: Sequence[float],
    center: Sequence[float] | None = None,
) -> list[float]:
    """What an Affine takes to do as ``functional.affine``: degrees, pixels, and (x, y) as torchvision has them."""
    center = [size[1] * 0.5, size[0] * 0.5] if center is None else list(center)
    return [*size, *F._get_inverse_affine_matrix(center, angle, list(translate), scale, list(shear))]


def warp_interpolation(interpolation: Any) -> Literal["nearest", "bilinear"]:
    value = interpolation_value(interpolation)
    if value in ("nearest", "bilinear"):
        return value  # type: ignore[return-value]
    raise UnsupportedTransformError(f"interpolation {value!r} is not translated here; 'nearest' and 'bilinear' are")


def warp_fill(fill: Any, state: ImageState) -> tuple[float, ...]:
    return () if fill is None else as_fill(fill, state)


# --- RandomRotation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomRotation(Step):
    """RandomRotation."""

    warp: Affine
    degrees: tuple[float, float]
    expand: bool
    center: tuple[float, ...] | None
    columns: ClassVar[int] = 8
    drawn: ClassVar[str] = "an angle: RandomRotation.get_params"

    @property
    def operations(self) -> Branch:
        return (self.warp,)

    def draw(self, size: Size, row: list[float]) -> Size:
        angle = v1.RandomRotation.get_params(list(self.degrees))  # v2 draws the same number
        numbers = rotation(size, angle, self.warp.kind, self.expand, self.center)
        row.extend(numbers)
        return int(numbers[0]), int(numbers[1])

    def state_after(self, state: ImageState) -> ImageState:
        return replace(state, size=None if self.expand else state.size)


@rule(v1.RandomRotation, v2.RandomRotation)
def random_rotation(transform: Any, state: ImageState) -> Branch:
    warp = Affine(warp_interpolation(transform.interpolation), warp_fill(transform.fill, state), state.kind)
    center = None if transform.center is None else tuple(map(float, transform.center))
    low, high = map(float, transform.degrees)
    return (RandomRotation(warp, (low, high), bool(transform.expand), center),)


# --- RandomAffine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomAffine(Step):
    """RandomAffine."""

    warp: Affine
    degrees: tuple[float, float]
    translate: tuple[float, float] | None
    scale: tuple[float, float] | None
    shear: tuple[float, ...] | None
    center: tuple[float, ...] | None
    version: Version
    columns: ClassVar[int] = 8

    @property
    def drawn(self) -> str:
        return f"an angle, a shift, a scale, a shear: RandomAffine.{parameter_function(self.version)}"

    @property
    def operations(self) -> Branch:
        return (self.warp,)

    def draw(self, size: Size, row: list[float]) -> Size:
        if self.version == "v1":
            lists = (None if each is None else list(each) for each in (self.translate, self.scale, self.shear))
            angle, translate, scale, shear = v1.RandomAffine.get_params(list(self.degrees), *lists, [size[1], size[0]])
        else:
            transform = v2_transform(v2.RandomAffine, self.degrees, self.translate, self.scale, self.shear)
            drawn = transform.make_params([like(*size)])
            angle, translate, scale, shear = drawn["angle"], drawn["translate"], drawn["scale"], drawn["shear"]
        row.extend(affine(size, angle, translate, scale, shear, self.center))
        return size

    def state_after(self, state: ImageState) -> ImageState:
        return state


@rule(v1.RandomAffine, v2.RandomAffine)
def random_affine(transform: Any, state: ImageState) -> Branch:
    warp = Affine(warp_interpolation(transform.interpolation), warp_fill(transform.fill, state), state.kind)
    given = (transform.degrees, transform.translate, transform.scale, transform.shear, transform.center)
    degrees, translate, scale, shear, center = (None if each is None else tuple(map(float, each)) for each in given)
    assert degrees is not None
    return (RandomAffine(warp, degrees, translate, scale, shear, center, version_of(transform)),)  # type: ignore[arg-type]


# --- RandomPerspective -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TiltedAtRandom(Step):
    """RandomPerspective, once it acts."""

    warp: Perspective
    distortion_scale: float
    columns: ClassVar[int] = 8
    drawn: ClassVar[str] = "four corners: RandomPerspective.get_params"

    @property
    def operations(self) -> Branch:
        return (self.warp,)

    def draw(self, size: Size, row: list[float]) -> Size:
        start, end = v1.RandomPerspective.get_params(size[1], size[0], self.distortion_scale)
        row.extend(F._get_perspective_coeffs(start, end))  # v2 draws and computes the same
        return size


@rule(v1.RandomPerspective, v2.RandomPerspective)
def random_perspective(transform: Any, state: ImageState) -> Branch:
    warp = Perspective(warp_interpolation(transform.interpolation), warp_fill(transform.fill, state), state.kind)
    return (Sometimes((TiltedAtRandom(warp, float(transform.distortion_scale)),), float(transform.p)),)
