"""Steps that change colours, and the transforms that apply one of them, such as RandomInvert.

As in torchvision, the result of a step depends on the ``kind`` of its image: Pillow's arithmetic for a PIL image,
torch's for a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .container import RandomApply
from .plan import EXACT, Branch, ConstantParams, ImageState, Step, Tolerance
from .registry import rule

Kind = Literal["pil", "tensor"]

FLOAT32 = Tolerance(0.005, 1, 1, "a product that is nearly whole falls to the other side in float32")
"""Tolerance of steps for which torchvision truncates or rounds a result in float32 or float64."""


@dataclass(frozen=True)
class Grayscale(Step):
    """``functional.rgb_to_grayscale``: ITU-R 601-2 luma.

    Attributes:
        channels: 1, or 3 equal ones.
        kind: kind of the image before it. Pillow rounds to the nearest level; torchvision truncates for a uint8 tensor.
    """

    channels: int
    kind: Literal["pil", "tensor"] = "pil"
    closeness: ClassVar[Tolerance] = FLOAT32

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, channels=self.channels)


@dataclass(frozen=True)
class Brightness(Step):
    """``functional.adjust_brightness``. Parameter: the factor."""

    kind: Kind = "pil"
    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = EXACT


@dataclass(frozen=True)
class Contrast(Step):
    """``functional.adjust_contrast``. Parameter: the factor."""

    kind: Kind = "pil"
    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = FLOAT32


@dataclass(frozen=True)
class Saturation(Step):
    """``functional.adjust_saturation``. Parameter: the factor."""

    kind: Kind = "pil"
    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = FLOAT32


@dataclass(frozen=True)
class Hue(Step):
    """``functional.adjust_hue``. Parameter: :func:`hue_turn` of the factor."""

    kind: Kind = "pil"
    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 1

    @property
    def closeness(self) -> Tolerance:
        if self.kind == "tensor":
            return FLOAT32
        return Tolerance(
            0.02, 2, 6, "Pillow goes by way of whole levels of hue and saturation, and rounds some otherwise"
        )


@dataclass(frozen=True)
class Invert(Step):
    """``functional.invert``."""

    closeness: ClassVar[Tolerance] = EXACT


@dataclass(frozen=True)
class Posterize(Step):
    """``functional.posterize``. Parameter: the number of bits to keep. 0 gives black; Pillow >= 13 raises."""

    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = EXACT


@dataclass(frozen=True)
class Solarize(Step):
    """``functional.solarize``. Parameter: :func:`solarize_threshold` of the threshold."""

    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = EXACT


@dataclass(frozen=True)
class SolarizeAdd(Step):
    """timm's ``solarize_add``: brighten pixels that are darker than 128. Parameter: the number of levels."""

    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = EXACT


@dataclass(frozen=True)
class Sharpness(Step):
    """``functional.adjust_sharpness``. Parameter: the factor."""

    kind: Kind = "pil"
    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = Tolerance(0.1, 1, 1, FLOAT32.why)


@dataclass(frozen=True)
class Autocontrast(Step):
    """``functional.autocontrast``."""

    kind: Kind = "pil"
    slow_on_cpu: ClassVar[bool] = True
    closeness: ClassVar[Tolerance] = Tolerance(0.02, 1, 1, FLOAT32.why)


@dataclass(frozen=True)
class Equalize(Step):
    """``functional.equalize``.

    An exact result would require a comparison of each pixel with each of 256 levels. That takes 100 times as long and
    256 times the memory.
    """

    slow_on_cpu: ClassVar[bool] = True
    closeness: ClassVar[Tolerance] = Tolerance(0.5, 1, 1, "DALI's own counts and looks up, and rounds in between")


@dataclass(frozen=True)
class ChannelOrder(Step):
    """``functional.permute_channels``. Parameters: for each output channel, the number of the input channel."""

    num_params: ClassVar[int] = 3
    closeness: ClassVar[Tolerance] = EXACT


def solarize_threshold(threshold: float, kind: Kind) -> float:
    """Return the smallest value that is inverted, in the units of the image. It is exact in float32.

    Pillow compares integer levels with the threshold in double precision, so the next integer is equivalent. torch
    compares values with the threshold in float32.
    """
    return float(math.ceil(threshold)) if kind == "pil" else threshold


def hue_turn(factor: float, kind: Kind) -> float:
    """Return the shift of a hue: 0 to 255 for a PIL image, a fraction of the full circle for a tensor."""
    return float(np.int32(factor * 255).astype(np.uint8)) if kind == "pil" else factor


@rule(v1.Grayscale, v2.Grayscale)
def grayscale(transform: Any, state: ImageState) -> Branch:
    channels = transform.num_output_channels
    if channels not in (1, 3):
        raise _not_allowed("num_output_channels", channels, "1 and 3 are")
    # The v1 class keeps the single channel of a grey tensor, even if three are requested.
    stays_grey = channels == 1 or (state.kind == "tensor" and isinstance(transform, v1.Grayscale))
    return () if state.channels == 1 and stays_grey else (Grayscale(channels, state.kind),)


@rule(v1.RandomGrayscale, v2.RandomGrayscale)
def random_grayscale(transform: Any, state: ImageState) -> Branch:
    grey = (Grayscale(3, state.kind),) if state.channels == 3 else ()
    return (RandomApply(grey, float(transform.p)),)


@rule(v2.RGB)
def rgb(transform: Any, state: ImageState) -> Branch:
    return () if state.channels == 3 else (Grayscale(3, state.kind),)


@rule(v1.RandomInvert, v2.RandomInvert)
def random_invert(transform: Any, state: ImageState) -> Branch:
    return (RandomApply((Invert(),), float(transform.p)),)


@rule(v1.RandomPosterize, v2.RandomPosterize)
def random_posterize(transform: Any, state: ImageState) -> Branch:
    whole_levels(state)
    bits, least = transform.bits, 1 if state.kind == "pil" else 0
    if not isinstance(bits, int) or not least <= bits <= 8:
        raise _not_allowed("bits", bits, f"whole numbers of {least} to 8 are")
    return (RandomApply((ConstantParams(Posterize(), (float(transform.bits),)),), float(transform.p)),)


@rule(v1.RandomSolarize, v2.RandomSolarize)
def random_solarize(transform: Any, state: ImageState) -> Branch:
    most = 255 if state.dtype == "uint8" else 1
    if state.kind == "tensor" and transform.threshold > most:
        raise _not_allowed("threshold", transform.threshold, f"0 to {most} are, which a {state.dtype} tensor holds")
    return (
        RandomApply(
            (ConstantParams(Solarize(), (solarize_threshold(float(transform.threshold), state.kind),)),),
            float(transform.p),
        ),
    )


@rule(v1.RandomAdjustSharpness, v2.RandomAdjustSharpness)
def random_adjust_sharpness(transform: Any, state: ImageState) -> Branch:
    if state.kind == "tensor" and transform.sharpness_factor < 0:
        raise _not_allowed("sharpness_factor", transform.sharpness_factor, "0 and more are on tensors")
    sharper = ConstantParams(Sharpness(state.kind), (float(transform.sharpness_factor),))
    return (RandomApply((sharper,), float(transform.p)),)


@rule(v1.RandomAutocontrast, v2.RandomAutocontrast)
def random_autocontrast(transform: Any, state: ImageState) -> Branch:
    return (RandomApply((Autocontrast(state.kind),), float(transform.p)),)


@rule(v1.RandomEqualize, v2.RandomEqualize)
def random_equalize(transform: Any, state: ImageState) -> Branch:
    whole_levels(state)
    return (RandomApply((Equalize(),), float(transform.p)),)


def whole_levels(state: ImageState) -> None:
    if state.dtype != "uint8":
        reason = "it is translated for whole levels (uint8) only; put the conversion to float after it"
        raise UnsupportedTransformError(reason, code="wrong-place")


def _not_allowed(name: str, value: Any, allowed: str) -> UnsupportedTransformError:
    message = f"{name}={value!r} is not allowed here; {allowed}"
    return UnsupportedTransformError(message, code="invalid", argument=name)
