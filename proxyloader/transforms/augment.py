"""Steps that degrade an image: blur, random erasing."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms import transforms as v1, v2

from .geometry import as_fill
from .plan import ImageState, ParamRow, Size, Step, Translation, Untranslatable
from .random_numbers import in_thread, meta_image
from .registry import at_random, rule, version_of


@dataclass(frozen=True)
class Blur(Step):
    """``functional.gaussian_blur`` with a kernel of (height, width), both odd. Parameter: sigma, in pixels."""

    window: Size
    num_params: ClassVar[int] = 1


@rule(v1.GaussianBlur, v2.GaussianBlur)
def gaussian_blur(transform: Any, state: ImageState) -> Translation:
    width, height = map(int, transform.kernel_size)
    sigmas = tuple(map(float, transform.sigma))

    def sample(size: Size, row: ParamRow) -> Size:
        if size[0] <= height // 2 or size[1] <= width // 2:
            raise Untranslatable
        row.append(in_thread.numbers.uniform(*sigmas))  # like GaussianBlur.get_params of v1 and v2
        return size

    return Translation((Blur((height, width)),), sample, "numbers")


@dataclass(frozen=True)
class PillowBlur(Step):
    """``ImageFilter.BoxBlur``, or ``GaussianBlur``. Parameters: the radius in x and in y, or sigmas."""

    is_gaussian: bool
    num_params: ClassVar[int] = 2


@dataclass(frozen=True)
class Kernel(Step):
    """``ImageFilter.Kernel``. Parameters: the offset, and side x side weights, in float32."""

    side: Literal[3, 5]

    @property
    def num_params(self) -> int:
        return 1 + self.side**2


@dataclass(frozen=True)
class Erase(Step):
    """``functional.erase``. Parameters: top, left, height and width of the box, in pixels, then a value per channel.

    With noise, which only float tensors have, the last one is the position of the array of values, (height, width, C).
    The array holds one pixel if the box is empty.
    """

    channels: int
    is_noisy: bool = False  # whether each pixel has a random value

    @property
    def num_params(self) -> int:
        return 5 if self.is_noisy else 4 + self.channels


def to_hwc(values: torch.Tensor) -> NDArray[np.float32]:
    """Convert (C, H, W) to (H, W, C), the layout of decoded images."""
    return values.permute(1, 2, 0).contiguous().numpy()


@rule(v1.RandomErasing, v2.RandomErasing)
def random_erasing(transform: Any, state: ImageState) -> Translation:
    if state.kind == "pil" and version_of(transform) == "v1":
        raise Untranslatable
    scale, ratio = tuple(map(float, transform.scale)), tuple(map(float, transform.ratio))
    channels, is_noisy = state.channels, transform.value in (None, "random")  # v2 stores "random" as None
    if is_noisy and state.dtype == "uint8":
        raise Untranslatable
    fill: tuple[float, ...] = () if is_noisy else as_fill(transform.value, state)
    if state.dtype == "uint8":
        fill = tuple(float(int(each)) for each in fill)  # torch truncates to an integer

    def sample(size: Size, row: ParamRow) -> Size:
        image, ones = meta_image(*size)[:channels], None if is_noisy else [1.0]  # v2 draws the same numbers
        top, left, height, width, value = v1.RandomErasing.get_params(image, scale, ratio, ones)
        if value is image or 0 in (height, width):  # all ten boxes were too large, or the box is empty
            top, left, height, width, value = 0, 0, 0, 0, torch.zeros((channels, 1, 1))
        row.extend((top, left, height, width, *fill))
        if is_noisy:
            row.append(row.attach(to_hwc(value)))
        return size

    return at_random(transform, Translation((Erase(channels, is_noisy),), sample, "torch"))
