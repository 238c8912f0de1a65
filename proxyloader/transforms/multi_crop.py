"""Multiple crops per image: FiveCrop and TenCrop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .geometry import Box, CenterRegion, Crop, Flip, Region, as_pair
from .plan import Branch, ConstantParams, ImageState, ParamRow, Size, Step, Untranslatable
from .registry import rule


@dataclass(frozen=True)
class Views(Step):
    """Apply several branches to the same image. Each branch returns one output image."""

    branches: tuple[Branch, ...]

    @property
    def num_params(self) -> int:
        return sum(step.num_params for branch in self.branches for step in branch)

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        for branch in self.branches:
            after = size
            for step in branch:
                after = step.sample_params(after, row)
        return after

    def output_state(self, state: ImageState) -> ImageState:
        if state.images > 1:
            raise Untranslatable
        return replace(self.branches[0][-1].output_state(state), images=len(self.branches))


@dataclass(frozen=True)
class CornerRegion(Region):
    """The box of one of the four corners of ``functional.five_crop``. Smaller images raise Untranslatable."""

    size: Size = field()
    bottom: bool
    right: bool
    inside = True

    def box(self, height: int, width: int) -> Box:
        top, left = height - self.size[0], width - self.size[1]
        if top < 0 or left < 0:
            raise Untranslatable
        return top if self.bottom else 0, left if self.right else 0, *self.size


@rule(v1.FiveCrop, v2.FiveCrop)
def five_crop(transform: Any, state: ImageState) -> Branch:
    return (Views(tuple((crop,) for crop in _five(as_pair(transform.size)))),)


@rule(v1.TenCrop, v2.TenCrop)
def ten_crop(transform: Any, state: ImageState) -> Branch:
    flip = ConstantParams(Flip("vertical" if transform.vertical_flip else "horizontal", 1.0), (1.0,))
    five = _five(as_pair(transform.size))
    return (Views((*((crop,) for crop in five), *((flip, crop) for crop in five))),)


def _five(size: Size) -> list[Crop]:
    """Return the crops in torchvision's order: top left, top right, bottom left, bottom right, center."""
    corners = [CornerRegion(size, bottom, right) for bottom in (False, True) for right in (False, True)]
    return [*map(Crop, corners), Crop(CenterRegion(size))]
