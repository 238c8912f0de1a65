"""Steps that degrade an image: blur, JPEG compression, noise, random erasing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .color import require_uint8
from .container import at_random
from .geometry import as_fill
from .params import meta_image, v2_transform, version_of
from .plan import Branch, Draws, ImageState, MemoryOrder, ParamRow, Size, Step, Tolerance
from .registry import rule
from .unsupported import wrong_place


@dataclass(frozen=True)
class Blur(Step):
    """``functional.gaussian_blur`` with a kernel of (height, width), both odd. Parameter: sigma, in pixels."""

    window: Size
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = Tolerance(0.001, 0, 1, "sums halfway between two levels may round differently")


@dataclass(frozen=True)
class GaussianBlur(Draws[Blur]):
    """Draws of GaussianBlur: ``get_params`` (v1) or ``make_params`` (v2)."""

    sigma: tuple[float, ...]
    params_doc: ClassVar[str] = "sigma: GaussianBlur.get_params"

    def sample_params(self, size: Size, row: list[float]) -> Size:
        # torch's own error would be about padding
        if any(side <= window // 2 for side, window in zip(size, self.step.window)):
            raise ValueError(
                f"GaussianBlur kernel of size {self.step.window} is too large for an image of size {size}: each side "
                "must be longer than half the kernel. Add a Resize or a crop before it"
            )
        row.append(v1.GaussianBlur.get_params(*self.sigma))  # v2 draws the same number
        return size


@rule(v1.GaussianBlur, v2.GaussianBlur)
def gaussian_blur(transform: Any, state: ImageState) -> Branch:
    width, height = map(int, transform.kernel_size)
    return (GaussianBlur(Blur((height, width)), tuple(map(float, transform.sigma))),)


class BoxBlur(Step):
    """``ImageFilter.GaussianBlur`` of a PIL image: three box blurs in each direction.

    Parameters: the four numbers of :func:`box_weights`, and the radius.
    """

    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 5


OUTER_FACTOR = 4096.0
"""Factor of the outermost neighbors in a sum, so that one float32 holds both their sum and that of the other pixels."""


def box_weights(radius: float) -> tuple[float, float, float, float]:
    """Weights of Pillow's ``BoxBlur.c``, which computes in multiples of 2**-24.

    Args:
        radius: radius of ``GaussianBlur``, in pixels, at most 2.

    Returns:
        The factors of the neighbors at distances 1 and 2 in a sum (1, OUTER_FACTOR or 0), and the weights of pixels
        with factor 1 and with factor OUTER_FACTOR in the mean.
    """
    variance = radius**2 / 3
    whole = math.floor((math.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    full = int(2**24 / np.float32(2 * np.float32(whole + part) + 1))
    last = (2**24 - (2 * whole + 1) * full) // 2
    return (1.0, OUTER_FACTOR, full, last) if whole else (OUTER_FACTOR, 0.0, full, last)


@dataclass(frozen=True)
class JpegCompression(Step):
    """JPEG (v2): encode the image as a JPEG and decode it again. Parameter: the quality, from 1 to 100."""

    quality: tuple[int, ...]
    num_params: ClassVar[int] = 1
    params_doc: ClassVar[str] = "quality: JPEG.make_params"

    def sample_params(self, size: Size, row: list[float]) -> Size:
        row.append(v2_transform(v2.JPEG, self.quality).make_params([])["quality"])
        return size


@rule(v2.JPEG)
def jpeg(transform: v2.JPEG, state: ImageState) -> Branch:
    require_uint8(state)
    return (JpegCompression(tuple(transform.quality)),)


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

    @property
    def params_doc(self) -> str:
        noise = ", noise" if isinstance(self.step, EraseWithNoise) else ""
        return f"top, left, height, width{noise}: RandomErasing.get_params"

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
    """Convert (C, H, W) to (H, W, C), the layout of images in DALI."""
    return values.permute(1, 2, 0).contiguous().numpy()


@rule(v1.RandomErasing, v2.RandomErasing)
def random_erasing(transform: Any, state: ImageState) -> Branch:
    if state.kind == "pil" and version_of(transform) == "v1":
        raise wrong_place("it works on tensors; put ToTensor() before it")
    low, high = map(float, transform.scale)
    narrow, wide = map(float, transform.ratio)
    erase = _erase(transform.value, state)
    return (at_random(transform, RandomErasing(erase, (low, high), (narrow, wide), state.channels)),)


def _erase(value: Any, state: ImageState) -> Erase | EraseWithNoise:
    is_noise = value is None or value == "random"  # v2 stores "random" as None
    if is_noise and state.dtype == "uint8":
        raise wrong_place(
            "value='random' fills with zero-mean noise, which uint8 cannot represent; "
            "put the conversion to float before it",
            "value",
        )
    if is_noise:
        return EraseWithNoise()
    values = as_fill(value, state, "value")
    if state.dtype == "uint8":
        values = tuple(float(int(each)) for each in values)  # torch truncates to an integer
    return Erase(values)


@dataclass(frozen=True)
class Add(Step):
    """Add an array (H, W, C) to the image. Parameter: the position of the array.

    Attributes:
        clip: whether to clip to the value range, 0 to 255, or 0 to 1 for floats. Otherwise uint8 values wrap around.
    """

    clip: bool
    num_params: ClassVar[int] = 1


@dataclass(frozen=True)
class GaussianNoise(Draws[Add]):
    """Draws of GaussianNoise (v2): ``torch.randn_like``. The noise is attached to the row: 4 bytes per value.

    Attributes:
        mean, sigma: for a value range of 0 to 1.
        levels: whether the image is uint8, so that the noise is truncated to integers before it is added.
        order: memory order of the tensor, on which the numbers of ``randn_like`` and their order depend.
    """

    mean: float
    sigma: float
    levels: bool
    channels: int
    order: MemoryOrder
    params_doc: ClassVar[str] = "noise: torch.randn_like"

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        by_channels = torch.empty((self.channels, *size))
        by_pixels = torch.empty((*size, self.channels)).permute(2, 0, 1)
        noise = torch.randn_like(by_channels if self.order == "CHW" else by_pixels)
        if self.levels:
            noise = (self.mean * 255 + noise * (self.sigma * 255)).trunc()
        else:
            noise = self.mean + noise * self.sigma
        row.append(row.attach(to_hwc(noise)))
        return size


@rule(v2.GaussianNoise)
def gaussian_noise(transform: v2.GaussianNoise, state: ImageState) -> Branch:
    _check_accepted(transform, state)
    if state.order is None:
        raise wrong_place(
            "torch generates noise in memory order, which is known only if the conversion to a tensor is followed by "
            "nothing but flips, a conversion to float and Normalize; put other transforms before the conversion"
        )
    add, levels = Add(bool(transform.clip)), state.dtype == "uint8"
    return (GaussianNoise(add, float(transform.mean), float(transform.sigma), levels, state.channels, state.order),)


def _check_accepted(transform: v2.GaussianNoise, state: ImageState) -> None:
    """Raise an error if the installed torchvision rejects the transform. Older versions accept only float tensors."""
    sample: Any = torch.zeros((3, 1, 1), dtype=getattr(torch, state.dtype))
    if state.kind == "pil":
        sample = Image.new("RGB", (1, 1))
    try:
        with torch.random.fork_rng(devices=[]):
            transform(sample)
    except (TypeError, ValueError) as error:
        raise wrong_place(f"torchvision rejects it here: {error}") from None
