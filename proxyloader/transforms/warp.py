"""Rotation, shear and perspective steps. A matrix gives the source position of each output pixel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, TypeVar

from PIL import Image
from torchvision.transforms import _functional_tensor as FT, functional as F
from torchvision.transforms.v2.functional import _geometry as F2

from .geometry import as_fill
from .plan import ImageState, Kind, Size, Step, Untranslatable, Version
from .resize import interpolation_value

Matrix = tuple[float, ...]
"""Six numbers a to f: the pixel with center (x, y) is read from (a x + b y + c, d x + e y + f). For tensors, positions
are relative to the centers of both images, as in torchvision, whose rounding can only be followed from its numbers."""


@dataclass(frozen=True)
class Warp(Step):
    """Base class of the steps that read each pixel from another position."""

    interpolation: Literal["nearest", "bilinear", "bicubic"]  # bicubic only for PIL images
    # Outside the image, per channel; (): zeros, with which bilinear interpolation of a tensor blends once, not twice.
    fill: tuple[float, ...]
    kind: Kind = "pil"  # Pillow's bilinear ends at the edge of the outermost pixel; torch's blends into the fill
    version: Version = "v2"  # whose arithmetic is used for tensors: v1 and v2 round a blend with the fill differently


class Affine(Warp):
    """Affine transform. Parameters: the new height and width, and a Matrix."""

    num_params: ClassVar[int] = 8


class Perspective(Warp):
    """Perspective transform. Parameters: the new height and width, and eight coefficients."""

    num_params: ClassVar[int] = 10


W = TypeVar("W", bound=Warp)

INVERSE_AFFINE = {"v1": F._get_inverse_affine_matrix, "v2": F2._get_inverse_affine_matrix}
"""The results of v1 and v2 differ in the last bit, which matters for positions on a boundary."""

OUTPUT_SIZE = {"v1": FT._compute_affine_output_size, "v2": F2._compute_affine_output_size}


def rotation(
    size: Size, angle: float, warp: Warp, expand: bool = False, center: Sequence[float] | None = None
) -> list[float]:
    """Return the parameters of ``functional.rotate`` for ``warp``. ``angle`` is in degrees.

    ``expand`` and ``center`` are of tensors only.
    """
    (height, width), version = size, warp.version
    if warp.kind == "pil":
        stand_in = SimpleNamespace(size=(width, height), transform=lambda size, method, matrix, *_, **__: matrix)
        # With a center, Pillow does not transpose images by right angles, which has the same pixels.
        return [*size, *Image.Image.rotate(stand_in, angle, center=(width / 2, height / 2))]  # type: ignore[arg-type,misc]
    middle = (0.0, 0.0) if center is None else (center[0] - width * 0.5, center[1] - height * 0.5)
    angle = angle % 360 if version == "v2" else angle
    matrix = INVERSE_AFFINE[version](list(middle), -angle, [0.0, 0.0], 1.0, [0.0, 0.0])
    new_width, new_height = OUTPUT_SIZE[version](matrix, width, height) if expand else (width, height)
    if expand and center is None and angle % 90 == 0 and version == "v2":  # it transposes; v1 may add a pixel
        new_width, new_height = (height, width) if angle % 180 else (width, height)
    return [new_height, new_width, *matrix]


def affine(
    size: Size,
    warp: Warp,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: Sequence[float],
    center: Sequence[float] | None = None,
) -> list[float]:
    """Return the parameters of ``functional.affine`` for ``warp``. Arguments are as in torchvision.

    Angles are in degrees, ``translate`` is in pixels, and ``shear`` and ``center`` are (x, y).
    """
    middle = size[1] * 0.5, size[0] * 0.5
    center = list(middle if center is None else center)
    if warp.kind == "tensor":
        center = [place - half for place, half in zip(center, middle)]
    return [*size, *INVERSE_AFFINE[warp.version](center, angle, list(translate), scale, list(shear))]


def make_warp(cls: type[W], interpolation: Any, fill: Any, state: ImageState, kind: Kind, version: Version) -> W:
    """Return the step with the interpolation and the fill of a transform or function."""
    mode = interpolation_value(interpolation)
    if mode not in ("nearest", "bilinear"):
        raise Untranslatable
    levels = () if fill is None else as_fill(fill, state)
    levels = tuple(map(math.floor, levels)) if kind == "pil" else levels  # Pillow truncates to integers
    return cls(mode, levels, kind, version)  # type: ignore[arg-type]
