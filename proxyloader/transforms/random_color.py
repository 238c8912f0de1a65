"""Random color transforms: ColorJitter, RandomPhotometricDistort."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..lifetime import cached_property
from .color import Brightness, ChannelOrder, Contrast, Hue, Saturation, arithmetic, hue_shift
from .params import Version, meta_image, v2_transform
from .plan import Branch, ImageState, Kind, OneOf, Size, Step, Untranslatable
from .registry import rule

Range = tuple[float, float]


@dataclass(frozen=True)
class ColorJitter(Step):
    """Draws of ColorJitter: order and four factors, by ``get_params`` (v1) or ``make_params`` (v2).

    Attributes:
        ranges: (minimum, maximum) of brightness, contrast, saturation and hue; None: unchanged.
        kind: kind of the image.
        channels: number of channels of the image; grayscale images have no saturation or hue.
        version: see Adjustment.
    """

    ranges: tuple[Range | None, ...]
    kind: Kind
    channels: int
    version: Version = "v2"

    @cached_property
    def choice(self) -> OneOf:
        how = self.kind, self.version
        colored: tuple[Branch, ...] = ((Saturation(*how),), (Hue(*how),)) if self.channels == 3 else ((), ())
        return OneOf(((Brightness(*how),), (Contrast(*how),), *colored))

    @property
    def operations(self) -> Branch:
        return (self.choice,) * sum(each is not None for each in self.ranges)

    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: list[float]) -> Size:
        order, *factors = v1.ColorJitter.get_params(*self.ranges)  # v2 draws the same numbers
        choice = self.choice
        for which in order.tolist():
            factor = factors[which]
            if factor is not None:
                given = hue_shift(factor, self.kind) if which == 3 else factor
                choice.put(which, row, *[given] if choice.branches[which] else [])
        return size


@dataclass(frozen=True)
class PhotometricDistort(Step):
    """Draws of RandomPhotometricDistort (v2): ``make_params``. See ColorJitter for the attributes."""

    ranges: tuple[Range, ...]
    p: float
    kind: Kind
    draws: ClassVar[bool] = True

    @cached_property
    def choices(self) -> tuple[OneOf, ...]:
        kind = self.kind
        steps = Brightness(kind), Contrast(kind), Saturation(kind), Hue(kind), Contrast(kind), ChannelOrder()
        return tuple(OneOf(((), (step,))) for step in steps)

    @property
    def operations(self) -> Branch:
        return self.choices

    def sample_params(self, size: Size, row: list[float]) -> Size:
        transform = v2_transform(v2.RandomPhotometricDistort, *self.ranges, self.p)
        drawn = transform.make_params([meta_image(*size)])
        before, contrast = drawn["contrast_before"], drawn["contrast_factor"]
        hue, order = drawn["hue_factor"], drawn["channel_permutation"]
        factors = (
            drawn["brightness_factor"],
            contrast if before else None,
            drawn["saturation_factor"],
            None if hue is None else hue_shift(hue, self.kind),
            None if before else contrast,
        )
        numbers = [None if factor is None else [factor] for factor in factors]
        for choice, given in zip(self.choices, [*numbers, None if order is None else order.tolist()]):
            choice.put(int(given is not None), row, *given or ())
        return size


@rule(v1.ColorJitter, v2.ColorJitter)
def color_jitter(transform: Any, state: ImageState) -> Branch:
    kind, version = arithmetic(transform, state)
    return (ColorJitter(_ranges(transform), kind, state.channels, version),)


@rule(v2.RandomPhotometricDistort)
def random_photometric_distort(transform: Any, state: ImageState) -> Branch:
    _require_rgb(state)
    return (PhotometricDistort(_ranges(transform), float(transform.p), state.kind),)


def _ranges(transform: Any) -> tuple[Any, ...]:
    given = transform.brightness, transform.contrast, transform.saturation, transform.hue
    return tuple(None if each is None else (float(each[0]), float(each[1])) for each in given)


def _require_rgb(state: ImageState) -> None:
    if state.channels != 3:
        raise Untranslatable
