"""Color steps, and the transforms made of them.

As in torchvision, the result of a step depends on the ``kind`` of its image: Pillow's arithmetic for a PIL image,
torch's for a tensor.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torchvision.transforms import transforms as v1, v2

from .plan import Branch, ImageState, Kind, OneOf, ParamRow, Size, Step, Translation, Untranslatable, Version
from .random_numbers import bernoulli, in_thread
from .registry import at_random, rule, version_of


@dataclass(frozen=True)
class Grayscale(Step):
    """``functional.rgb_to_grayscale``: ITU-R 601-2 luma."""

    channels: int  # 1, or 3 with equal values
    kind: Kind = "pil"  # Pillow rounds to the nearest level; torchvision truncates for a uint8 tensor
    version: Version = "v2"  # whose arithmetic is used for tensors: v1 and v2 differ by 1 in a few pixels

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, channels=self.channels)


@dataclass(frozen=True)
class Adjustment(Step):
    """A function of torchvision's ``functional``, or timm's ``solarize_add``.

    Parameter, unless the function has none: the factor of ``adjust_brightness``, ``adjust_contrast``,
    ``adjust_saturation`` and ``adjust_sharpness``; the :func:`hue_shift` of the factor of ``adjust_hue``; the number of
    bits to keep of ``posterize``, where 0 gives black; the :func:`solarize_threshold` of ``solarize``; the number of
    levels that ``solarize_add`` adds to pixels below 128.
    """

    name: str  # of the function without ``adjust_``
    kind: Kind = "pil"  # of the image, if the result depends on it
    version: Version = "v2"  # whose arithmetic is used for tensors: v1 and v2 differ by 1 in a few pixels

    @property
    def title(self) -> str:
        return self.name.title().replace("_", "")

    @property
    def num_params(self) -> int:
        return int(self.name not in ("autocontrast", "equalize", "invert"))


class ChannelOrder(Step):
    """``functional.permute_channels``. Parameters: for each output channel, the number of the input channel."""

    num_params: ClassVar[int] = 3


class Table(Step):
    """``Image.point``. Parameter: the position of an array with the levels of all channels, 768 bytes."""

    num_params: ClassVar[int] = 1


@dataclass(frozen=True)
class Matrix(Step):
    """``Image.convert`` with a matrix. Parameters: three weights and an offset for each of three channels."""

    channels: Literal[1, 3]
    num_params: ClassVar[int] = 12

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, channels=self.channels)


def solarize_threshold(threshold: float, kind: Kind) -> float:
    """Return the smallest value that is inverted, in the units of the image, exact in float32.

    Pillow compares integer levels with the threshold in double precision, so the next integer is equivalent. torch
    compares values with the threshold in float32.
    """
    return float(math.ceil(threshold)) if kind == "pil" else float(np.float32(threshold))


def hue_shift(factor: float, kind: Kind) -> float:
    """Return the shift of a hue: 0 to 255 for a PIL image, a fraction of the full circle for a tensor."""
    return float(int(factor * 255) & 255) if kind == "pil" else factor


@rule(v1.Grayscale, v2.Grayscale)
def grayscale(transform: Any, state: ImageState) -> Translation:
    channels = transform.num_output_channels
    if channels not in (1, 3):
        raise Untranslatable
    # The v1 class keeps the single channel of a grayscale tensor, even if three are requested.
    stays_gray = channels == 1 or (state.kind == "tensor" and isinstance(transform, v1.Grayscale))
    is_kept = state.channels == 1 and stays_gray
    return Translation(() if is_kept else (Grayscale(channels, state.kind, version_of(transform)),))


@rule(v1.RandomGrayscale, v2.RandomGrayscale)
def random_grayscale(transform: Any, state: ImageState) -> Translation:
    gray = (Grayscale(3, state.kind, version_of(transform)),) if state.channels == 3 else ()
    return at_random(transform, Translation(gray))


@rule(v2.RGB)
def rgb(transform: Any, state: ImageState) -> Translation:
    return Translation(() if state.channels == 3 else (Grayscale(3, state.kind),))


@rule(v1.RandomSolarize, v2.RandomSolarize)
def random_solarize(transform: Any, state: ImageState) -> Translation:
    if state.kind != "pil" or not math.isfinite(transform.threshold):
        raise Untranslatable
    threshold = solarize_threshold(transform.threshold, "pil")

    def sample(size: Size, row: ParamRow) -> Size:
        row.append(threshold)
        return size

    # v1 compares the random number with ``p`` in double precision.
    is_closed = version_of(transform) == "v1" and float(np.float32(transform.p)) < transform.p
    return at_random(transform, Translation((Adjustment("solarize"),), sample), closed=is_closed)


@rule(v1.ColorJitter, v2.ColorJitter)
def color_jitter(transform: Any, state: ImageState) -> Translation:
    names, version = ("brightness", "contrast", "saturation", "hue"), version_of(transform)
    branches: list[Branch] = [(Adjustment(name, state.kind, version),) for name in names]
    if state.channels == 1:
        branches[2:] = (), ()  # grayscale images have no saturation or hue
    choice, given = OneOf(tuple(branches)), [getattr(transform, name) for name in names]
    ranges = [None if each is None else (float(each[0]), float(each[1])) for each in given]

    def sample(size: Size, row: ParamRow) -> Size:
        # Like ColorJitter.get_params of v1 and v2, without new tensors.
        order = in_thread.numbers.permutation(4)
        factors = [None if each is None else in_thread.numbers.uniform(*each) for each in ranges]
        for which in order:
            if (factor := factors[which]) is not None:
                number = hue_shift(factor, state.kind) if which == 3 else factor
                choice.put(which, row, *[number] if choice.branches[which] else [])
        return size

    return Translation((choice,) * sum(each is not None for each in ranges), sample, "numbers")


@rule(v2.RandomPhotometricDistort)
def photometric_distort(transform: Any, state: ImageState) -> Translation:
    names, p = ("brightness", "contrast", "saturation", "hue"), float(transform.p)
    choice, order = OneOf(((), *((Adjustment(name, state.kind),) for name in names))), OneOf(((), (ChannelOrder(),)))
    ranges = [(float(low), float(high)) for low, high in (getattr(transform, name) for name in names)]
    bounds = [*[(0.0, math.inf)] * 3, (-0.5, 0.5)]  # torchvision raises an error outside, but only when it is applied
    is_valid = all(least <= low <= high <= most for (low, high), (least, most) in zip(ranges, bounds))
    if state.channels != 3 or not is_valid:
        raise Untranslatable

    def sample(size: Size, row: ParamRow) -> Size:
        # Like RandomPhotometricDistort.make_params, without new tensors.
        draw = in_thread.numbers.uniform
        factors = [draw(*each) if bernoulli(p) else None for each in ranges]
        for which in (0, 1, 2, 3) if bernoulli(0.5) else (0, 2, 3, 1):
            if (factor := factors[which]) is None:
                choice.put(0, row)
            else:
                choice.put(1 + which, row, hue_shift(factor, state.kind) if which == 3 else factor)
        chosen = bernoulli(p)
        order.put(int(chosen), row, *(in_thread.numbers.permutation(3) if chosen else ()))
        return size

    return Translation((choice,) * 4 + (order,), sample, "numbers")
