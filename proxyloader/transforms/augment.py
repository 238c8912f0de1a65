"""Steps that degrade an image: blur, random erasing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .container import at_random
from .geometry import as_fill
from .params import meta_image, version_of
from .plan import Branch, Draws, ImageState, ParamRow, Size, Step, Untranslatable
from .registry import rule


@dataclass(frozen=True)
class Blur(Step):
    """``functional.gaussian_blur`` with a kernel of (height, width), both odd. Parameter: sigma, in pixels."""

    window: Size
    num_params: ClassVar[int] = 1


@dataclass(frozen=True)
class GaussianBlur(Draws[Blur]):
    """Draws of GaussianBlur: ``get_params`` (v1) or ``make_params`` (v2)."""

    sigma: tuple[float, ...]
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: list[float]) -> Size:
        if any(side <= window // 2 for side, window in zip(size, self.step.window)):
            raise Untranslatable
        row.append(v1.GaussianBlur.get_params(*self.sigma))  # v2 draws the same number
        return size


@rule(v1.GaussianBlur, v2.GaussianBlur)
def gaussian_blur(transform: Any, state: ImageState) -> Branch:
    width, height = map(int, transform.kernel_size)
    return (GaussianBlur(Blur((height, width)), tuple(map(float, transform.sigma))),)


class BoxBlur(Step):
    """``ImageFilter.GaussianBlur`` of a PIL image: three box blurs in each direction. Parameter: its radius."""

    num_params: ClassVar[int] = 1


@dataclass(frozen=True)
class Erase(Step):
    """``functional.erase``. Parameters: top, left, height and width of the box, in pixels.

    Attributes:
        value: value of the pixels in the box, one number per channel, in the units of the image at this step.
    """

    value: tuple[float, ...]
    num_params: ClassVar[int] = 4


@dataclass(frozen=True)
class EraseByColor(Step):
    """``functional.erase`` with a random color. Parameters: those of Erase, then one value per channel."""

    channels: int

    @property
    def num_params(self) -> int:
        return 4 + self.channels


class EraseWithNoise(Step):
    """``functional.erase`` with a random value per pixel. Float tensors only.

    Parameters: those of Erase, then the position of the array of values, (height, width, C). The array holds one pixel
    if the box is empty.
    """

    num_params: ClassVar[int] = 5


@dataclass(frozen=True)
class RandomErasing(Draws[Erase | EraseWithNoise]):
    """Draws of RandomErasing if it is applied. Noise is attached to the row: 4 bytes per value in the box."""

    scale: tuple[float, float]
    ratio: tuple[float, float]
    channels: int
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        image, noisy = meta_image(*size)[: self.channels], isinstance(self.step, EraseWithNoise)
        ones = None if noisy else [1.0]  # v2 draws the same numbers
        top, left, height, width, value = v1.RandomErasing.get_params(image, self.scale, self.ratio, ones)
        if value is image or 0 in (height, width):  # all ten boxes were too large, or the box is empty
            top, left, height, width, value = 0, 0, 0, 0, torch.zeros((self.channels, 1, 1))
        row.extend((top, left, height, width))
        if noisy:
            row.append(row.attach(to_hwc(value)))
        return size


def to_hwc(values: torch.Tensor) -> NDArray[np.float32]:
    """Convert (C, H, W) to (H, W, C), the layout of decoded images."""
    return values.permute(1, 2, 0).contiguous().numpy()


@rule(v1.RandomErasing, v2.RandomErasing)
def random_erasing(transform: Any, state: ImageState) -> Branch:
    if state.kind == "pil" and version_of(transform) == "v1":
        raise Untranslatable
    low, high = map(float, transform.scale)
    narrow, wide = map(float, transform.ratio)
    erase = _erase(transform.value, state)
    return (at_random(transform, RandomErasing(erase, (low, high), (narrow, wide), state.channels)),)


def _erase(value: Any, state: ImageState) -> Erase | EraseWithNoise:
    is_noise = value is None or value == "random"  # v2 stores "random" as None
    if is_noise and state.dtype == "uint8":
        raise Untranslatable
    if is_noise:
        return EraseWithNoise()
    values = as_fill(value, state)
    if state.dtype == "uint8":
        values = tuple(float(int(each)) for each in values)  # torch truncates to an integer
    return Erase(values)
