"""Steps that spoil an image: blur, and boxes that are erased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .choice import Sometimes
from .drawing import Version, like, v2_transform, version_of
from .geometry import as_fill
from .plan import Branch, ImageState, Size, Step
from .registry import rule

# --- GaussianBlur ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blur(Step):
    """``functional.gaussian_blur``. Takes sigma, in pixels. Exact but for a pixel in 10,000 that is a level off, where
    the weighted sum lies in the middle of two levels; float tensors: float rounding.

    Attributes:
        window: (height, width) of the kernel, odd.
    """

    window: Size
    columns: ClassVar[int] = 1


@dataclass(frozen=True)
class GaussianBlur(Step):
    """GaussianBlur: ``get_params`` (v1) or ``make_params`` (v2)."""

    blur: Blur
    sigma: tuple[float, float]
    columns: ClassVar[int] = 1

    @property
    def operations(self) -> Branch:
        return (self.blur,)

    def draw(self, size: Size, row: list[float]) -> Size:
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


# --- RandomErasing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Erase(Step):
    """``functional.erase``. Takes top, left, height and width of the box, in pixels. Exact.

    Attributes:
        value: that the box gets, one for each channel, in the units of the values there.
    """

    value: tuple[float, ...]
    columns: ClassVar[int] = 4


@dataclass(frozen=True)
class RandomErasing(Step):
    """The draws of RandomErasing once it acts: ``get_params`` (v1) or ``make_params`` (v2)."""

    erase: Erase
    scale: tuple[float, float]
    ratio: tuple[float, float]
    version: Version
    columns: ClassVar[int] = 4

    @property
    def operations(self) -> Branch:
        return (self.erase,)

    def draw(self, size: Size, row: list[float]) -> Size:
        image = like(*size)
        if self.version == "v1":
            top, left, height, width, value = v1.RandomErasing.get_params(image, self.scale, self.ratio, [0.0])
            found = value is not image
        else:
            drawn = v2_transform(v2.RandomErasing, 1.0, self.scale, self.ratio).make_params([image])
            top, left, height, width, found = *(drawn[name] for name in "ijhw"), drawn["v"] is not None
        # Where ten boxes were too large, none is erased.
        row.extend((top, left, height, width) if found else (0, 0, 0, 0))
        return size


@rule(v1.RandomErasing, v2.RandomErasing)
def random_erasing(transform: Any, state: ImageState) -> Branch:
    version = version_of(transform)
    if state.kind == "pil" and version == "v1":
        raise UnsupportedTransformError("it works on tensors; put ToTensor() before it")
    value = transform.value
    if value is None or value == "random":
        raise UnsupportedTransformError("value='random' is not translated; a number or a tuple of numbers is")
    values = as_fill(value, state, "value")
    if state.dtype == "uint8":
        values = tuple(float(int(each)) for each in values)  # torch cuts off after the point
    low, high = map(float, transform.scale)
    narrow, wide = map(float, transform.ratio)
    erasing = RandomErasing(Erase(values), (low, high), (narrow, wide), version)
    return (Sometimes((erasing,), float(transform.p)),)
