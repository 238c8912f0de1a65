"""Steps of calls on an image, whose parameters are given instead of sampled.

A worker records them only for kernels, so no DALI graph has them. Steps that classes of transforms share, such as
``color.Brightness``, are in the other modules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from PIL import Image

from .plan import ImageState, Size, Step
from .warp import Warp


@dataclass(frozen=True)
class Transpose(Step):
    """``Image.transpose``."""

    method: Image.Transpose


@dataclass(frozen=True)
class ResizeBox(Step):
    """``Image.resize`` with a filter. Parameters: left, top, right and bottom of the box; the new height and width."""

    interpolation: Literal["bilinear", "bicubic", "lanczos", "box", "hamming"]
    num_params: ClassVar[int] = 6


class Projection(Warp):
    """``Image.transform`` with a perspective. Parameters: the new height and width, and eight coefficients."""

    num_params: ClassVar[int] = 10


class Table(Step):
    """``Image.point``. Parameter: the position of an array with the levels of all channels, 768 bytes."""

    num_params: ClassVar[int] = 1


@dataclass(frozen=True)
class Kernel(Step):
    """``ImageFilter.Kernel``. Parameters: the offset, and side x side weights, in float32."""

    side: Literal[3, 5]

    @property
    def num_params(self) -> int:
        return 1 + self.side**2


@dataclass(frozen=True)
class PillowBlur(Step):
    """``ImageFilter.BoxBlur``, or ``GaussianBlur``. Parameters: the radius in x and in y, or sigmas."""

    is_gaussian: bool
    num_params: ClassVar[int] = 2


@dataclass(frozen=True)
class Matrix(Step):
    """``Image.convert`` with a matrix. Parameters: three weights and an offset for each of three channels."""

    channels: Literal[1, 3]
    num_params: ClassVar[int] = 12

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, channels=self.channels)


class ToPIL(Step):
    """``functional.to_pil_image`` of a uint8 tensor, or of one divided by 255."""

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, kind="pil", dtype="uint8")


TURNS: dict[Image.Transpose, tuple[int, Literal["", "horizontal", "vertical"]]] = {
    Image.Transpose.FLIP_LEFT_RIGHT: (0, "horizontal"),
    Image.Transpose.FLIP_TOP_BOTTOM: (0, "vertical"),
    Image.Transpose.ROTATE_90: (1, ""),
    Image.Transpose.ROTATE_180: (2, ""),
    Image.Transpose.ROTATE_270: (3, ""),
    Image.Transpose.TRANSPOSE: (1, "vertical"),
    Image.Transpose.TRANSVERSE: (1, "horizontal"),
}
"""Each transpose as quarter turns, counterclockwise, and a flip along an axis after them."""


def transposed(size: Size, method: Image.Transpose) -> Size:
    """Return the size after a transpose."""
    return size[::-1] if TURNS[method][0] % 2 else size
