"""Rotation, shear and perspective steps. A matrix gives the source position of each output pixel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import _functional_tensor as FT
from torchvision.transforms import functional as F
from torchvision.transforms.v2.functional import _geometry as F2

from .geometry import as_fill
from .params import Version, arithmetic_of
from .plan import ImageState, Kind, Size, Step, Tolerance
from .resize import interpolation_value
from .unsupported import unsupported

Matrix = tuple[float, ...]
"""Six numbers a to f: the pixel with center (x, y) is read from (a x + b y + c, d x + e y + f). For tensors, positions
are relative to the centers of both images, as in torchvision, whose rounding can only be followed from its numbers."""


WARPED = {
    ("nearest", "pil"): Tolerance(
        0.1, 16, 255, "beyond 256 pixels, float32 is coarser than Pillow's fixed-point numbers"
    ),
    ("nearest", "tensor"): Tolerance(
        1, 60, 255, "positions on pixel boundaries, which are rare with random parameters: mean 0.05"
    ),
    ("bilinear", "pil"): Tolerance(0.5, 8, 255, "both round; the border of the image may shift by a pixel"),
    ("bilinear", "tensor"): Tolerance(0.15, 8, 255, "both round; the border of the image may differ"),
    ("bicubic", "pil"): Tolerance(
        0.01, 1, 255, "Pillow accumulates in double precision; the border of the image may shift by a pixel"
    ),
}
"""Tolerances by interpolation and kind of image. Means are largest if all images have the same parameters."""


@dataclass(frozen=True)
class Warp(Step):
    """Base class of the steps that read each pixel from another position, with eight parameters.

    Attributes:
        interpolation: name of the mode in torchvision.
        fill: value outside the image, one number per channel; (): zeros, with which bilinear interpolation of a tensor
            blends once instead of twice.
        kind: kind of the image. Pillow's bilinear ends at the edge of the outermost pixel; torch's blends into the
            fill.
        version: version whose arithmetic is used for tensors: they round a blend with the fill differently.
    """

    interpolation: Literal["nearest", "bilinear", "bicubic"]
    fill: tuple[float, ...]
    kind: Kind = "pil"
    version: Version = "v2"
    num_params: ClassVar[int] = 8

    slow_on_cpu: ClassVar[bool] = True

    @property
    def closeness(self) -> Tolerance:
        return WARPED[self.interpolation, self.kind]

    def affine_params(self, size: Size, matrix: Sequence[float]) -> list[float]:
        """Return the parameters of an affine transform with a new size and a Matrix."""
        if self.kind == "pil" and self.interpolation == "nearest" and uses_fixed_point(size, matrix):
            matrix = _in_fixed_point(matrix)
        return [*size, *matrix]


class Affine(Warp):
    """Affine transform, nearest or bilinear. Parameters: the new height and width, and a Matrix."""


class BicubicAffine(Warp):
    """``Image.transform`` of a PIL image with ``Image.Resampling.BICUBIC``. Parameters: those of Affine."""


class Perspective(Warp):
    """``functional.perspective``, nearest or bilinear. Parameters: its eight coefficients."""


W = TypeVar("W", bound=Warp)


HALF_UNIT = 0.5 / 65536.0


def uses_fixed_point(size: Any, matrix: Any) -> Any:
    """Return whether Pillow selects the nearest pixels with a Matrix by ``affine_fixed``. Arguments may be arrays."""
    (height, width), (a, b, c, d, e, f) = size, matrix
    corners = [(x, y) for x in (0, width) for y in (0, height)]
    fits = [(abs(x * a + y * b + c) < 32768) & (abs(x * d + y * e + f) < 32768) for x, y in corners]
    return ((b != 0) | (d != 0)) & fits[0] & fits[1] & fits[2] & fits[3]  # otherwise ``ImagingScaleAffine``, or floats


def _in_fixed_point(matrix: Sequence[float]) -> Sequence[float]:
    """Return the matrix of Pillow's ``affine_fixed``: multiples of 1/65536, relative to the pixel center.

    HALF_UNIT is added to each position. This changes no pixel, and keeps positions on a boundary from being rounded
    down in DALI.
    """
    a, b, c, d, e, f = matrix

    def fixed(value: float) -> float:
        return math.floor(value * 65536.0 + 0.5) / 65536.0

    x, y = fixed(c + a * 0.5 + b * 0.5), fixed(f + d * 0.5 + e * 0.5)
    a, b, d, e = map(fixed, (a, b, d, e))
    return a, b, x - (a + b) * 0.5 + HALF_UNIT, d, e, y - (d + e) * 0.5 + HALF_UNIT


INVERSE_AFFINE = {"v1": F._get_inverse_affine_matrix, "v2": F2._get_inverse_affine_matrix}
"""The results of v1 and v2 differ in the last bit, which matters for positions on a boundary."""

OUTPUT_SIZE = {"v1": FT._compute_affine_output_size, "v2": F2._compute_affine_output_size}


def rotation(
    size: Size,
    angle: float,
    warp: Warp,
    expand: bool = False,
    center: Sequence[float] | None = None,
    version: Version = "v1",
) -> list[float]:
    """Return the parameters of ``functional.rotate`` for ``warp``. ``angle`` is in degrees."""
    if warp.kind == "pil":
        recorder = _RotationRecorder(size)
        Image.Image.rotate(recorder, angle, expand=expand, center=center)  # type: ignore[arg-type]
        return warp.affine_params(recorder.new_size, recorder.matrix)
    height, width = size
    middle = (0.0, 0.0) if center is None else (center[0] - width * 0.5, center[1] - height * 0.5)
    angle = angle % 360 if version == "v2" else angle
    matrix = INVERSE_AFFINE[version](list(middle), -angle, [0.0, 0.0], 1.0, [0.0, 0.0])
    new_width, new_height = OUTPUT_SIZE[version](matrix, width, height) if expand else (width, height)
    if expand and center is None and angle % 90 == 0 and version == "v2":  # it transposes; v1 may add a pixel
        new_width, new_height = (height, width) if angle % 180 else (width, height)
    return warp.affine_params((new_height, new_width), matrix)


class _RotationRecorder:
    """Stand-in for an image that records how Pillow would rotate it."""

    def __init__(self, size: Size) -> None:
        self.height, self.width = size
        self.size = self.width, self.height
        self.new_size, self.matrix = size, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]

    def copy(self) -> None:
        """Pillow calls this if the image does not change."""

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
    warp: Warp,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: Sequence[float],
    center: Sequence[float] | None = None,
    version: Version = "v1",
) -> list[float]:
    """Return the parameters of ``functional.affine`` for ``warp``. Arguments are as in torchvision.

    Angles are in degrees, ``translate`` is in pixels, and ``shear`` and ``center`` are (x, y).
    """
    middle = size[1] * 0.5, size[0] * 0.5
    center = list(middle if center is None else center)
    if warp.kind == "tensor":
        center = [place - half for place, half in zip(center, middle)]
    return warp.affine_params(size, INVERSE_AFFINE[version](center, angle, list(translate), scale, list(shear)))


def make_warp(cls: type[W], transform: Any, state: ImageState, kind: Kind) -> W:
    """Return the step with the interpolation and the fill of a transform."""
    mode = interpolation_value(transform.interpolation)
    if mode not in ("nearest", "bilinear"):
        raise unsupported(f"interpolation must be 'nearest' or 'bilinear', got {mode!r}", "interpolation")
    fill = () if transform.fill is None else as_fill(transform.fill, state)
    # Pillow truncates to integers
    fill = tuple(map(math.floor, fill)) if kind == "pil" else fill
    return cls(mode, fill, kind, arithmetic_of(transform, kind))  # type: ignore[arg-type]


def reject_boundaries(warp: Warp, state: ImageState, get_params: Callable[[Size], list[float]]) -> None:
    """Raise UnsupportedTransformError if many pixels of every image depend on rounding.

    For example, rotate 64 x 63 pixels by 90 degrees. On the boundary of two pixels, torch reads either of them. At the
    edge of the image, Pillow stops blending. With random parameters, such positions are rare.
    """
    if (warp.kind == "pil") == (warp.interpolation == "nearest"):
        return
    for size in [state.size] if state.size else [(64, 64), (64, 63), (63, 64), (63, 63)]:
        numbers = np.array(get_params(size))
        if warp.kind == "pil":
            share = (_inside(numbers, size) != _inside(numbers.astype(np.float32), size)).mean()
            if share > 0.008:  # for photos, a mean difference of about one level
                raise unsupported(
                    f"it reads {share:.0%} of the pixels of a {size[0]} x {size[1]} image from its exact edge, where "
                    "rounding decides whether they are outside; use InterpolationMode.NEAREST",
                    "interpolation",
                )
        else:
            positions = _source_positions(_from_corners(numbers, size))
            share = (abs(positions - positions.round()) < 1e-4).any(0).mean()
            if share > 0.05:  # the same mean difference; adjacent pixels differ less than the image and the fill
                raise unsupported(
                    f"it reads {share:.0%} of the pixels of a {size[0]} x {size[1]} tensor from the boundary of two, "
                    "where rounding decides which one is read; put it before the conversion to a tensor, "
                    "or use InterpolationMode.BILINEAR",
                    "interpolation",
                )


def _from_corners(numbers: NDArray[Any], size: Size) -> NDArray[Any]:
    """Return the parameters of an affine transform of a tensor with a Matrix that is not relative to centers."""
    height, width, a, b, c, d, e, f = numbers
    x, y = width * 0.5, height * 0.5
    return np.array([height, width, a, b, c + size[1] * 0.5 - a * x - b * y, d, e, f + size[0] * 0.5 - d * x - e * y])


def _source_positions(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the source positions of the output pixels: x and y, (2, height, width), in the dtype of the numbers."""
    height, width, a, b, c, d, e, f = numbers
    y, x = np.mgrid[: int(height), : int(width)].astype(numbers.dtype) + numbers.dtype.type(0.5)
    return np.stack([a * x + b * y + c, d * x + e * y + f])


def _inside(numbers: NDArray[Any], size: Size) -> NDArray[Any]:
    x, y = _source_positions(numbers)
    inside: NDArray[Any] = (x >= 0) & (x < size[1]) & (y >= 0) & (y < size[0])
    return inside
