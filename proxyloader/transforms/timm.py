"""timm's transforms: crops, resizes, conversions, erasing. The registry imports this module when first needed.

timm's own code draws random parameters, or they are drawn in the same order, mostly from Python's generator.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from timm.data import random_erasing, transforms

from .augment import Erase, EraseByColor, EraseWithNoise, to_hwc
from .geometry import Box, Crop, Region, as_pair
from .params import meta_image
from .plan import Branch, Draws, ImageState, OneOf, ParamRow, Size, Step, Untranslatable
from .registry import rule
from .resize import NewSize, Resize, ResizeNearest, Target, resize_to
from .type_conversion import ToFloat, ToTensor, pil_to_tensor, tensor_already
from .type_conversion import to_tensor as to_scaled_tensor


@dataclass(frozen=True)
class RandomResizedRegion(Region):
    """The box of RandomResizedCropAndInterpolation."""

    scale: tuple[float, ...]
    ratio: tuple[float, ...]
    inside = True
    draws = True

    def box(self, height: int, width: int) -> Box:
        drawn = transforms.RandomResizedCropAndInterpolation.get_params(
            meta_image(height, width), self.scale, self.ratio
        )
        top, left, new_height, new_width = drawn
        _check_not_empty((height, width), (new_height, new_width))
        return top, left, new_height, new_width


def _check_not_empty(size: Size, new_size: Size) -> None:
    if min(new_size) <= 0:  # Pillow also rejects empty images, with another message
        raise Untranslatable


def _require_pil(state: ImageState) -> None:
    if state.kind != "pil":
        raise Untranslatable


@dataclass(frozen=True)
class RandomInterpolation(Step):
    """Resize with a random interpolation. The size is sampled first and is the same for all interpolations."""

    resizes: tuple[Resize | ResizeNearest, ...]

    @property
    def operations(self) -> Branch:
        return (OneOf(tuple((each,) for each in self.resizes)),)

    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        to = Target(self.resizes[0].to.resolve(size))
        chosen = random.choice(range(len(self.resizes)))
        return OneOf(tuple((replace(each, to=to),) for each in self.resizes)).take(chosen, size, row)


def _resize_to(to: NewSize, interpolation: Any, state: ImageState, is_crop: bool = False) -> Step:
    is_drawn = isinstance(interpolation, (tuple, list))
    each = interpolation if is_drawn else [interpolation]
    resizes = tuple(resize_to(to, one, True, state, is_crop=is_crop) for one in each)
    return RandomInterpolation(resizes) if is_drawn else resizes[0]


@rule(transforms.RandomResizedCropAndInterpolation)
def random_resized_crop(transform: Any, state: ImageState) -> Branch:
    _require_pil(state)
    region = RandomResizedRegion(tuple(map(float, transform.scale)), tuple(map(float, transform.ratio)))
    return Crop(region), _resize_to(Target(as_pair(transform.size)), transform.interpolation, state, is_crop=True)


@rule(transforms.MaybeToTensor)
def maybe_to_tensor(transform: Any, state: ImageState) -> Branch:
    return to_scaled_tensor(transform, state) if state.kind == "pil" else ()


@rule(transforms.MaybePILToTensor)
def maybe_pil_to_tensor(transform: Any, state: ImageState) -> Branch:
    return pil_to_tensor(transform, state) if state.kind == "pil" else ()


@rule(transforms.ToTensor)
def to_tensor(transform: Any, state: ImageState) -> Branch:
    """Translate timm's ToTensor, which does not divide by 255."""
    if state.kind == "tensor":
        return tensor_already(transform)
    if transform.dtype not in (torch.float32, torch.uint8):
        raise Untranslatable
    return (ToTensor(), ToFloat(scale=False)) if transform.dtype is torch.float32 else (ToTensor(),)


class _BoxRecorder:
    """Stand-in for an image that records the boxes and values of timm's erasing code."""

    def __init__(self) -> None:
        self.boxes: list[tuple[Box, torch.Tensor]] = []

    def __setitem__(self, where: tuple[slice, slice, slice], value: torch.Tensor) -> None:
        top, left, bottom, right = where[1].start, where[2].start, where[1].stop, where[2].stop
        if top < bottom and left < right:
            self.boxes.append(((top, left, bottom - top, right - left), value))


@functools.lru_cache(maxsize=64)
def _eraser(mode: str, others: tuple[tuple[str, Any], ...]) -> Any:
    transform = random_erasing.RandomErasing(mode=mode, device="cpu")
    vars(transform).update(others)
    return transform


@dataclass(frozen=True)
class RandomErasing(Draws[OneOf]):
    """Draws of timm's RandomErasing: no box, or the second branch, which erases the maximum number of boxes."""

    mode: str
    others: tuple[tuple[str, Any], ...]
    channels: int
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        erased = _BoxRecorder()
        _eraser(self.mode, self.others)._erase(erased, self.channels, *size, torch.float32)
        numbers: list[float] = []
        most = len(self.step.branches[1])
        unused = [((0, 0, 0, 0), torch.zeros((self.channels, 1, 1)))] * (most - len(erased.boxes))
        for box, value in [*erased.boxes, *unused] if erased.boxes else []:
            numbers.extend(box)
            if self.mode == "rand":
                numbers.extend(value.reshape(-1).tolist())
            elif self.mode == "pixel":
                numbers.append(row.attach(to_hwc(value)))
        self.step.put(int(bool(numbers)), row, *numbers)
        return size


@rule(random_erasing.RandomErasing)
def erase_at_random(transform: Any, state: ImageState) -> Branch:
    is_noise_of_levels = transform.mode in ("rand", "pixel") and state.dtype != "float32"
    if state.kind == "pil" or str(transform.device) != "cpu" or is_noise_of_levels:
        raise Untranslatable
    kinds: dict[str, EraseByColor | EraseWithNoise] = {"rand": EraseByColor(state.channels), "pixel": EraseWithNoise()}
    erase = kinds.get(transform.mode) or Erase((0.0,) * state.channels)
    names = ("probability", "min_area", "max_area", "log_aspect_ratio", "min_count", "max_count")
    others = tuple((name, getattr(transform, name)) for name in names)
    boxes = OneOf(((), (erase,) * int(transform.max_count)))
    return (RandomErasing(boxes, transform.mode, others, state.channels),)
