"""Transforms that draw how they change colours: ColorJitter, RandomPhotometricDistort, RandomChannelPermutation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .color import Brightness, ChannelOrder, Contrast, Hue, Kind, Saturation, hue_turn
from .plan import Branch, ImageState, OneOf, Size, Step
from .registry import rule

Range = tuple[float, float]


@dataclass(frozen=True)
class ColorJitter(Step):
    """Draws of ColorJitter: an order and four factors, by ``get_params`` (v1) or ``make_params`` (v2).

    Attributes:
        brightness, contrast, saturation, hue: (minimum, maximum); None: not changed.
        kind: kind of the image.
        channels: number of channels of the image; a grey image has no saturation and no hue.
    """

    brightness: Range | None
    contrast: Range | None
    saturation: Range | None
    hue: Range | None
    kind: Kind
    channels: int

    @functools.cached_property
    def choice(self) -> OneOf:
        colored: Branch = (Saturation(self.kind),) if self.channels == 3 else ()
        turned: Branch = (Hue(self.kind),) if self.channels == 3 else ()
        return OneOf(((Brightness(self.kind),), (Contrast(self.kind),), colored, turned, ()))

    @property
    def operations(self) -> Branch:
        return (self.choice,) * sum(each is not None for each in self._ranges)

    @property
    def _ranges(self) -> tuple[Range | None, ...]:
        return self.brightness, self.contrast, self.saturation, self.hue

    @property
    def params_doc(self) -> str:
        return f"an order, {len(self.operations)} factors: ColorJitter.get_params"

    def sample_params(self, size: Size, row: list[float]) -> Size:
        order, *factors = v1.ColorJitter.get_params(*self._ranges)  # v2 draws the same numbers
        choice = self.choice
        for which in order.tolist():
            factor = factors[which]
            if factor is not None:
                given = hue_turn(factor, self.kind) if which == 3 else factor
                choice.put(which, row, *[given] if choice.branches[which] else [])
        return size


@dataclass(frozen=True)
class PhotometricDistort(Step):
    """Draws of RandomPhotometricDistort (v2): ``make_params``."""

    brightness: Range
    contrast: Range
    saturation: Range
    hue: Range
    p: float
    kind: Kind

    @property
    def operations(self) -> Branch:
        contrast = OneOf(((), (Contrast(self.kind),)))
        return (
            OneOf(((), (Brightness(self.kind),))),
            contrast,
            OneOf(((), (Saturation(self.kind),))),
            OneOf(((), (Hue(self.kind),))),
            contrast,
            OneOf(((), (ChannelOrder(),))),
        )

    @property
    def params_doc(self) -> str:
        return "what is adjusted, the factors, an order of channels: RandomPhotometricDistort.make_params"

    def sample_params(self, size: Size, row: list[float]) -> Size:
        transform = v2.RandomPhotometricDistort(self.brightness, self.contrast, self.saturation, self.hue, self.p)
        drawn = transform.make_params([torch.empty((3, *size), device="meta")])
        before, contrast, hue = drawn["contrast_before"], drawn["contrast_factor"], drawn["hue_factor"]
        order = drawn["channel_permutation"]
        numbers = (
            drawn["brightness_factor"],
            contrast if before else None,
            drawn["saturation_factor"],
            None if hue is None else hue_turn(hue, self.kind),
            None if before else contrast,
        )
        *adjustments, permuted = self.operations
        for choice, number in zip(adjustments, numbers):
            choice.put(int(number is not None), row, *[] if number is None else [number])  # type: ignore[attr-defined]
        permuted.put(int(order is not None), row, *[] if order is None else order.tolist())  # type: ignore[attr-defined]
        return size


@dataclass(frozen=True)
class RandomChannelOrder(Step):
    """Draws of RandomChannelPermutation (v2)."""

    num_params: ClassVar[int] = 3
    params_doc: ClassVar[str] = "an order of channels: torch.randperm(3)"

    @property
    def operations(self) -> Branch:
        return (ChannelOrder(),)

    def sample_params(self, size: Size, row: list[float]) -> Size:
        row.extend(torch.randperm(3).tolist())
        return size


@rule(v1.ColorJitter, v2.ColorJitter)
def color_jitter(transform: Any, state: ImageState) -> Branch:
    brightness, contrast, saturation, hue = (
        None if each is None else (float(each[0]), float(each[1]))
        for each in (transform.brightness, transform.contrast, transform.saturation, transform.hue)
    )
    return (ColorJitter(brightness, contrast, saturation, hue, state.kind, state.channels),)


@rule(v2.RandomPhotometricDistort)
def random_photometric_distort(transform: Any, state: ImageState) -> Branch:
    _colored(state)
    brightness, contrast, saturation, hue = (
        (float(each[0]), float(each[1]))
        for each in (transform.brightness, transform.contrast, transform.saturation, transform.hue)
    )
    return (PhotometricDistort(brightness, contrast, saturation, hue, float(transform.p), state.kind),)


@rule(v2.RandomChannelPermutation)
def random_channel_permutation(transform: Any, state: ImageState) -> Branch:
    _colored(state)
    return (RandomChannelOrder(),)


def _colored(state: ImageState) -> None:
    if state.channels != 3:
        raise UnsupportedTransformError(
            f"it works on images of 3 channels, and here they have {state.channels}", code="wrong-place"
        )
