"""Random parameters of RandomRotation, RandomAffine and RandomPerspective, for the steps in ``warp.py``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .container import at_random
from .params import Version, version_of
from .plan import Branch, Draws, ImageState, Size
from .registry import rule
from .warp import Affine, Perspective, affine, make_warp, rotation


@dataclass(frozen=True)
class RandomRotation(Draws[Affine]):
    """Draws of RandomRotation."""

    degrees: tuple[float, float]
    expand: bool
    center: tuple[float, ...] | None
    version: Version
    draws: ClassVar[bool] = True

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
    return (RandomRotation(warp, (low, high), bool(transform.expand), center, version_of(transform)),)


@dataclass(frozen=True)
class RandomAffine(Draws[Affine]):
    """Draws of RandomAffine."""

    degrees: tuple[float, float]
    translate: tuple[float, float] | None
    scale: tuple[float, float] | None
    shear: tuple[float, ...] | None
    center: tuple[float, ...] | None
    version: Version
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: list[float]) -> Size:
        ranges = self.degrees, self.translate, self.scale, self.shear  # v2 draws the same numbers
        angle, shift, scale, shear = v1.RandomAffine.get_params(*ranges, (size[1], size[0]))
        row.extend(affine(size, self.step, angle, shift, scale, shear, self.center, self.version))
        return size


@rule(v1.RandomAffine, v2.RandomAffine)
def random_affine(transform: Any, state: ImageState) -> Branch:
    warp = make_warp(Affine, transform, state, state.kind)
    given = (transform.degrees, transform.translate, transform.scale, transform.shear, transform.center)
    degrees, translate, scale, shear, center = (None if each is None else tuple(map(float, each)) for each in given)
    assert degrees is not None
    return (RandomAffine(warp, degrees, translate, scale, shear, center, version_of(transform)),)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RandomPerspective(Draws[Perspective]):
    """Draws of RandomPerspective if it is applied."""

    distortion_scale: float
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: list[float]) -> Size:
        start, end = v1.RandomPerspective.get_params(size[1], size[0], self.distortion_scale)
        row.extend(F._get_perspective_coeffs(start, end))  # v2 draws and computes the same
        return size


@rule(v1.RandomPerspective, v2.RandomPerspective)
def random_perspective(transform: Any, state: ImageState) -> Branch:
    warp = make_warp(Perspective, transform, state, state.kind)
    return (at_random(transform, RandomPerspective(warp, float(transform.distortion_scale))),)
