"""Random parameters of RandomRotation, RandomAffine and RandomPerspective, for the steps in ``warp.py``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .container import at_random
from .geometry import IndexSelect
from .params import Version, version_of
from .plan import Branch, Draws, ImageState, ParamRow, Size, Step
from .registry import rule
from .warp import Affine, Perspective, affine, make_warp, reject_boundaries, rotation


@dataclass(frozen=True)
class RandomRotation(Draws[Affine]):
    """Draws of RandomRotation."""

    degrees: tuple[float, float]
    expand: bool
    center: tuple[float, ...] | None
    version: Version
    params_doc: ClassVar[str] = "angle: RandomRotation.get_params"

    def sample_params(self, size: Size, row: list[float]) -> Size:
        angle = v1.RandomRotation.get_params(list(self.degrees))  # v2 draws the same number
        numbers = rotation(size, angle, self.step, self.expand, self.center, self.version)
        row.extend(numbers)
        return int(numbers[0]), int(numbers[1])

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, size=None if self.expand else state.size)


@rule(v1.RandomRotation, v2.RandomRotation)
def random_rotation(transform: Any, state: ImageState) -> Branch:
    warp = make_warp(Affine, transform, state, state.kind)
    center = None if transform.center is None else tuple(map(float, transform.center))
    low, high = map(float, transform.degrees)
    version, expand = version_of(transform), bool(transform.expand)
    if low == high:
        (angle,) = _round_to_float32(low)
        reject_boundaries(warp, state, lambda size: rotation(size, angle, warp, expand, center, version))
    return (RandomRotation(warp, (low, high), expand, center, version),)


@dataclass(frozen=True)
class RandomAffine(Step):
    """Draws of RandomAffine."""

    warp: Affine
    degrees: tuple[float, float]
    translate: tuple[float, float] | None
    scale: tuple[float, float] | None
    shear: tuple[float, ...] | None
    center: tuple[float, ...] | None
    version: Version
    params_doc: ClassVar[str] = "angle, translation, scale, shear: RandomAffine.get_params"

    @property
    def lines(self) -> IndexSelect | None:
        """Replacement for ``warp`` for PIL images that are neither rotated nor sheared; None: use ``warp``.

        torch's rounding differs, so tensors always use ``warp``.
        """
        upright = self.degrees == (0.0, 0.0) and not any(self.shear or ())
        whole = upright and self.warp.kind == "pil" and self.warp.interpolation == "nearest"
        return IndexSelect(self.warp.fill or (0.0,)) if whole else None

    @property
    def operations(self) -> Branch:
        return (self.lines or self.warp,)

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        ranges = self.degrees, self.translate, self.scale, self.shear  # v2 draws the same numbers
        angle, shift, scale, shear = v1.RandomAffine.get_params(*ranges, (size[1], size[0]))
        numbers = affine(size, self.warp, angle, shift, scale, shear, self.center, self.version)
        if self.lines is None:
            row.extend(numbers)
            return size
        _, _, a, _, c, _, e, f = numbers
        return self.lines.put(_pillow_source_indices(size[0], e, f), _pillow_source_indices(size[1], a, c), row)


def _round_to_float32(*numbers: float) -> list[float]:
    """Round numbers to float32, as torch does when it draws: 0.8 becomes slightly larger."""
    drawn: list[float] = np.array(numbers, np.float32).tolist()
    return drawn


def _pillow_source_indices(count: int, scale: float, shift: float) -> NDArray[np.float32]:
    """Return the indices that Pillow reads from a line of ``count`` pixels at ``scale * position + shift``; -1: fill.

    Pillow accumulates many small steps, so a position on the boundary of two pixels may be rounded to either.
    """
    line = Image.fromarray(np.arange(count, dtype=np.float32)[None])
    matrix = (scale, 0.0, shift, 0.0, 1.0, 0.0)
    return np.array(line.transform((count, 1), Image.Transform.AFFINE, matrix, fillcolor=-1)).reshape(count)


@rule(v1.RandomAffine, v2.RandomAffine)
def random_affine(transform: Any, state: ImageState) -> Branch:
    warp = make_warp(Affine, transform, state, state.kind)
    given = (transform.degrees, transform.translate, transform.scale, transform.shear, transform.center)
    degrees, translate, scale, shear, center = (None if each is None else tuple(map(float, each)) for each in given)
    assert degrees is not None
    version = version_of(transform)
    ranges = [each[k : k + 2] for each in (degrees, scale, shear) if each for k in range(0, len(each), 2)]
    if all(low == high for low, high in ranges):
        slant = (*(shear or (0.0, 0.0)), 0.0, 0.0)[0:4:2]
        angle, times, *slants = _round_to_float32(degrees[0], scale[0] if scale else 1.0, *slant)
        reject_boundaries(warp, state, lambda size: affine(size, warp, angle, (0, 0), times, slants, center, version))
    return (RandomAffine(warp, degrees, translate, scale, shear, center, version),)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RandomPerspective(Draws[Perspective]):
    """Draws of RandomPerspective if it is applied."""

    distortion_scale: float
    params_doc: ClassVar[str] = "corners: RandomPerspective.get_params"

    def sample_params(self, size: Size, row: list[float]) -> Size:
        start, end = v1.RandomPerspective.get_params(size[1], size[0], self.distortion_scale)
        row.extend(F._get_perspective_coeffs(start, end))  # v2 draws and computes the same
        return size


@rule(v1.RandomPerspective, v2.RandomPerspective)
def random_perspective(transform: Any, state: ImageState) -> Branch:
    warp = make_warp(Perspective, transform, state, state.kind)
    return (at_random(transform, RandomPerspective(warp, float(transform.distortion_scale))),)
