"""Steps that degrade an image: blur, JPEG compression, noise, erased boxes."""

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

from ..errors import UnsupportedTransformError
from .color import whole_levels
from .container import RandomApply
from .geometry import as_fill
from .params import Version, meta_image, parameter_function, v2_transform, version_of
from .plan import EXACT, Branch, ImageState, MemoryOrder, ParamRow, Size, Step, Tolerance
from .registry import rule

# --- GaussianBlur ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blur(Step):
    """``functional.gaussian_blur``. Takes sigma, in pixels.

    Attributes:
        window: (height, width) of the kernel, odd.
    """

    window: Size
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = Tolerance(0.001, 0, 1, "sums that lie in the middle of two levels")


@dataclass(frozen=True)
class GaussianBlur(Step):
    """GaussianBlur: ``get_params`` (v1) or ``make_params`` (v2)."""

    blur: Blur
    sigma: tuple[float, float]
    num_params: ClassVar[int] = 1
    params_doc: ClassVar[str] = "sigma: GaussianBlur.get_params"

    @property
    def operations(self) -> Branch:
        return (self.blur,)

    def sample_params(self, size: Size, row: list[float]) -> Size:
        # torch cannot reflect more than there is, and says so in words about padding
        if any(side <= window // 2 for side, window in zip(size, self.blur.window)):
            raise ValueError(
                f"GaussianBlur's kernel of {self.blur.window} is too large for an image of {size} (height, width); "
                "each side must be longer than half the kernel's. Put a Resize or a crop before it"
            )
        row.append(v1.GaussianBlur.get_params(*self.sigma))  # v2 draws the same number
        return size


@rule(v1.GaussianBlur, v2.GaussianBlur)
def gaussian_blur(transform: Any, state: ImageState) -> Branch:
    width, height = map(int, transform.kernel_size)
    low, high = map(float, transform.sigma)
    return (GaussianBlur(Blur((height, width)), (low, high)),)


@dataclass(frozen=True)
class BoxBlur(Step):
    """``ImageFilter.GaussianBlur`` of a PIL image: weighted means of neighbours, three times across, three times down.

    Takes what :func:`box_weights` makes of the radius.
    """

    slow_on_cpu: ClassVar[bool] = True
    num_params: ClassVar[int] = 4
    closeness: ClassVar[Tolerance] = EXACT


PARTLY = 4096.0
"""In a sum, what the outermost neighbours count for, so that it holds theirs and that of the others in one float32."""


def box_weights(radius: float) -> tuple[float, float, float, float]:
    """Pillow's ``BoxBlur.c``, which counts in whole 2**-24.

    Args:
        radius: of ``GaussianBlur``, in pixels, at most 2.

    Returns:
        What the neighbours of a pixel count for in a sum, those at a distance of one and of two pixels (1, PARTLY or
        0), and the weights in the mean of what counts 1 and of what counts PARTLY.
    """
    variance = radius**2 / 3
    whole = math.floor((math.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    full = int(2**24 / np.float32(2 * np.float32(whole + part) + 1))
    last = (2**24 - (2 * whole + 1) * full) // 2
    return (1.0, PARTLY, full, last) if whole else (PARTLY, 0.0, full, last)


# --- JPEG ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JpegCompression(Step):
    """JPEG (v2): the image is made a JPEG and decoded again. Takes the quality.

    Attributes:
        quality: (least, most), of 1 to 100.
    """

    quality: tuple[int, int]
    num_params: ClassVar[int] = 1
    params_doc: ClassVar[str] = "quality: JPEG.make_params"
    closeness: ClassVar[Tolerance] = EXACT

    def sample_params(self, size: Size, row: list[float]) -> Size:
        row.append(v2_transform(v2.JPEG, self.quality).make_params([])["quality"])
        return size


@rule(v2.JPEG)
def jpeg(transform: v2.JPEG, state: ImageState) -> Branch:
    whole_levels(state)
    low, high = transform.quality
    return (JpegCompression((low, high)),)


# --- RandomErasing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Erase(Step):
    """``functional.erase``. Takes top, left, height and width of the box, in pixels.

    Attributes:
        value: that the box gets, one for each channel, in the units of the values there.
    """

    value: tuple[float, ...]
    num_params: ClassVar[int] = 4
    closeness: ClassVar[Tolerance] = EXACT


@dataclass(frozen=True)
class EraseByColor(Step):
    """``functional.erase`` with a colour that is drawn. Takes what Erase takes, and then a value for each channel."""

    channels: int
    closeness: ClassVar[Tolerance] = EXACT

    @property
    def num_params(self) -> int:
        return 4 + self.channels


@dataclass(frozen=True)
class EraseWithNoise(Step):
    """``functional.erase`` with values of their own for each pixel. Takes what Erase takes, and where the array is that
    holds them, (height, width, C), of one pixel where the box is empty. Float tensors only."""

    num_params: ClassVar[int] = 5
    closeness: ClassVar[Tolerance] = EXACT


@dataclass(frozen=True)
class RandomErasing(Step):
    """The draws of RandomErasing once it acts: ``get_params`` (v1) or ``make_params`` (v2).

    Attributes:
        erase: by one value, or by noise, which travels with the row: 4 bytes for each value of the box.
        scale: (least, most) share of the image's area.
        ratio: (least, most) of height over width.
        channels: of the image.
        version: v1 or v2.
    """

    erase: Erase | EraseWithNoise
    scale: tuple[float, float]
    ratio: tuple[float, float]
    channels: int
    version: Version

    @property
    def params_doc(self) -> str:
        noise = ", noise" if isinstance(self.erase, EraseWithNoise) else ""
        return f"top, left, height, width{noise}: RandomErasing.{parameter_function(self.version)}"

    @property
    def operations(self) -> Branch:
        return (self.erase,)

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        image, noisy = meta_image(*size)[: self.channels], isinstance(self.erase, EraseWithNoise)
        if self.version == "v1":
            ones = None if noisy else [1.0]
            top, left, height, width, value = v1.RandomErasing.get_params(image, self.scale, self.ratio, ones)
            found = value is not image
        else:
            kind = "random" if noisy else 1.0
            drawn = v2_transform(v2.RandomErasing, 1.0, self.scale, self.ratio, kind).make_params([image])
            top, left, height, width, value = (drawn[name] for name in "ijhwv")
            found = value is not None
        if not found or 0 in (height, width):  # ten boxes were too large, or nothing is left of one
            top, left, height, width, value = 0, 0, 0, 0, torch.zeros((self.channels, 1, 1))
        row.extend((top, left, height, width))
        if noisy:
            row.append(row.attach(as_pixels(value)))
        return size


def as_pixels(values: torch.Tensor) -> NDArray[np.float32]:
    """(C, H, W) as (H, W, C), as DALI has images."""
    return values.permute(1, 2, 0).contiguous().numpy()


@rule(v1.RandomErasing, v2.RandomErasing)
def random_erasing(transform: Any, state: ImageState) -> Branch:
    version = version_of(transform)
    if state.kind == "pil" and version == "v1":
        raise UnsupportedTransformError("it works on tensors; put ToTensor() before it", code="wrong-place")
    low, high = map(float, transform.scale)
    narrow, wide = map(float, transform.ratio)
    erase = _erase(transform.value, state)
    erasing = RandomErasing(erase, (low, high), (narrow, wide), state.channels, version)
    return (RandomApply((erasing,), float(transform.p)),)


def _erase(value: Any, state: ImageState) -> Erase | EraseWithNoise:
    is_noise = value is None or value == "random"  # v2 keeps it as None
    if is_noise and state.dtype == "uint8":
        raise UnsupportedTransformError(
            "value='random' is noise around zero, most of which whole levels (uint8) cannot hold; "
            "put the conversion to float before it",
            code="wrong-place",
            argument="value",
        )
    if is_noise:
        return EraseWithNoise()
    values = as_fill(value, state, "value")
    if state.dtype == "uint8":
        values = tuple(float(int(each)) for each in values)  # torch cuts off after the point
    return Erase(values)


# --- GaussianNoise ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Add(Step):
    """An array (H, W, C) is added to the image. Takes where it is.

    Attributes:
        clip: to what the image can hold: 0 to 255, or 0 to 1 for floats. Without it, levels begin anew beyond 255.
    """

    clip: bool
    num_params: ClassVar[int] = 1
    closeness: ClassVar[Tolerance] = EXACT


@dataclass(frozen=True)
class GaussianNoise(Step):
    """GaussianNoise (v2): ``torch.randn_like``. The noise travels with the row: 4 bytes for each value of the image.

    Attributes:
        add: what is done with it.
        mean, sigma: for values of 0 to 1.
        levels: the image is of whole levels, and the noise is cut off to them before it is added.
        channels: of the image.
        order: in which the tensor lies in memory. ``randn_like`` deals out its numbers in that order, and takes others.
    """

    add: Add
    mean: float
    sigma: float
    levels: bool
    channels: int
    order: MemoryOrder
    num_params: ClassVar[int] = 1
    params_doc: ClassVar[str] = "noise: torch.randn_like"

    @property
    def operations(self) -> Branch:
        return (self.add,)

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        by_channels = torch.empty((self.channels, *size))
        by_pixels = torch.empty((*size, self.channels)).permute(2, 0, 1)
        noise = torch.randn_like(by_channels if self.order == "CHW" else by_pixels)
        if self.levels:
            noise = (self.mean * 255 + noise * (self.sigma * 255)).trunc()
        else:
            noise = self.mean + noise * self.sigma
        row.append(row.attach(as_pixels(noise)))
        return size


@rule(v2.GaussianNoise)
def gaussian_noise(transform: v2.GaussianNoise, state: ImageState) -> Branch:
    _refused_by_torchvision(transform, state)
    if state.order is None:
        raise UnsupportedTransformError(
            "torch deals its noise out in the order in which the tensor lies in memory, which is known only where "
            "nothing but flips, a conversion to float and Normalize follow the conversion to a tensor; "
            "put the rest before it",
            code="wrong-place",
        )
    add, levels = Add(bool(transform.clip)), state.dtype == "uint8"
    return (GaussianNoise(add, float(transform.mean), float(transform.sigma), levels, state.channels, state.order),)


def _refused_by_torchvision(transform: v2.GaussianNoise, state: ImageState) -> None:
    """Older versions take float tensors only. The one that is installed is asked."""
    sample: Any = torch.zeros((3, 1, 1), dtype=getattr(torch, state.dtype))
    if state.kind == "pil":
        sample = Image.new("RGB", (1, 1))
    try:
        with torch.random.fork_rng(devices=[]):
            transform(sample)
    except (TypeError, ValueError) as error:
        raise UnsupportedTransformError(f"torchvision refuses it here: {error}", code="wrong-place") from None
