"""Resize steps with fixed or sampled sizes. The worker computes all sizes, in whole pixels."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1
from torchvision.transforms.v2.functional._geometry import _do_native_uint8_resize_on_cpu as resizes_integers

from .geometry import Crop, IndexSelect, RandomResizedRegion, as_pair
from .params import Version, version_of
from .plan import Branch, ImageState, ParamRow, Size, Step, Untranslatable
from .registry import rule


class NewSize(Protocol):
    """The target size of a resize."""

    @property
    def fixed(self) -> Size | None:
        """(height, width) in pixels if it is the same for every image; otherwise None."""

    @property
    def min_edge(self) -> int:
        """Shorter edge, in pixels, of the smallest target size for a square image."""

    def resolve(self, size: Size) -> Size: ...


@dataclass(frozen=True)
class Target:
    """The target size given by the arguments of torchvision's Resize.

    Attributes:
        size: (height, width), or the shorter edge, keeping the aspect ratio; None: only limit the longer edge.
        max_size: maximum length of the longer edge, in pixels, or None.
    """

    size: tuple[int, ...] | None
    max_size: int | None = None

    @property
    def fixed(self) -> Size | None:
        return self.size if self.size is not None and len(self.size) == 2 else None

    @property
    def min_edge(self) -> int:
        return min(self.size) if self.size else self.max_size or 0

    def resolve(self, size: Size) -> Size:
        return self.fixed or _output_size(size, self.size, self.max_size)


def _output_size(size: Size, wanted: Sequence[int] | None, max_size: int | None = None) -> Size:
    """Return the output size of torchvision's Resize for an image of ``size``. See Target for the other arguments."""
    height, width = F._compute_resized_output_size(size, wanted, max_size, allow_size_none=True)
    return height, width


Filter = Literal["bilinear", "bicubic", "lanczos"]
Nearest = Literal["pil", "nearest", "nearest-exact"]
"""Implementation that selects the nearest pixel: Pillow's, or a mode of torch's ``interpolate``."""

Line = NDArray[np.float32]


@dataclass(frozen=True)
class ResizeStep(Step):
    """Base class of the steps that implement ``functional.resize``."""

    to: NewSize

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, size=self.to.fixed)

    def new_size(self, size: Size) -> Size:
        """Return the size after the step. Raise Untranslatable if a side is 0."""
        new_size = self.to.resolve(size)
        if 0 in new_size:
            raise Untranslatable
        return new_size


LARGE_EDGE = 128
"""Minimum length of the shorter edge, in pixels, of images that DALI resizes."""


@dataclass(frozen=True)
class Resize(ResizeStep):
    """``functional.resize`` with a filter, so that pixels are weighted means. Parameters: the new height and width.

    Attributes:
        interpolation: the filter.
        antialias: whether the filter is widened for downscaling.
        rounding: library that resizes one side, rounds to integers and then resizes the other side; None: no rounding,
            as in torchvision for floats.
        is_crop: whether the image is the crop of a RandomResizedCrop.
    """

    interpolation: Filter = "bilinear"
    antialias: bool = True
    rounding: Literal["pil", "torch", None] = "pil"
    is_crop: bool = False

    num_params: ClassVar[int] = 2

    @property
    def needs_kernels(self) -> bool:
        # DALI repeats the outermost pixels, where torchvision truncates the filter: small images show it, and Lanczos
        # carries it far into an image. And it is slow if the width shrinks more than the height, as when most photos
        # become squares.
        has_inexact_edges = self.antialias and (self.to.min_edge < LARGE_EDGE or self.interpolation == "lanczos")
        is_to_one_size = self.to.fixed is not None and not self.is_crop
        return has_inexact_edges or is_to_one_size or self.rounding == "torch"

    def sample_params(self, size: Size, row: list[float]) -> Size:
        new_size = self.new_size(size)
        row.extend(new_size)
        return new_size


def pillow_resizes_height_first(size: Any, new_size: Any) -> Any:
    """Return whether Pillow resizes the height first. Heights and widths may be arrays.

    From version 13 on, it does so if that removes over twice as many rows as columns, in 12.2 and 12.3 only for images
    that are over 100 times as high as wide, and before never (Pillow pull request 9549).
    """
    rows, columns = size[0] - new_size[0], size[1] - new_size[1]
    if PILLOW_RELEASE < (12, 2):
        return rows > np.inf
    return (rows > 0) & (rows > 2 * columns if PILLOW_RELEASE >= (13, 0) else size[0] > 100 * size[1])


PILLOW_RELEASE = tuple(map(int, PIL.__version__.split(".")[:2]))


@dataclass(frozen=True)
class ResizeNearest(ResizeStep):
    """``functional.resize`` by selecting rows and columns of the image.

    Pillow accumulates many small steps; torch multiplies in float32, differently for small and large images. So a
    position on the boundary of two pixels may be rounded to either. The worker therefore resizes a line of indices with
    the same library.
    """

    nearest: Nearest = "pil"

    @property
    def operations(self) -> Branch:
        return (IndexSelect(),)

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        new_size = self.new_size(size)
        return IndexSelect().put(*nearest_pixels(size, new_size, self.nearest), row)


def nearest_pixels(size: Size, new_size: Size, nearest: Nearest) -> tuple[Line, Line]:
    """Return the rows and columns that nearest interpolation selects, (new height,) and (new width,)."""
    rows, columns = (np.arange(count, dtype=np.float32) for count in size)
    if nearest == "pil":
        return _pillow_nearest(rows, new_size[0]), _pillow_nearest(columns, new_size[1])
    # torch chooses between two kernels with different rounding by the new height and width.
    row, column = torch.from_numpy(columns).reshape(1, 1, 1, -1), torch.from_numpy(rows).reshape(1, 1, -1, 1)
    new_columns, new_rows = (torch.nn.functional.interpolate(line, new_size, mode=nearest) for line in (row, column))
    return new_rows[0, 0, :, 0].numpy(), new_columns[0, 0, 0].numpy()


def _pillow_nearest(line: Line, new_count: int) -> Line:
    return np.array(Image.fromarray(line[None]).resize((new_count, 1), Image.Resampling.NEAREST)).reshape(new_count)


@rule(v1.Resize, v2.Resize)
def resize(transform: Any, state: ImageState) -> Branch:
    return (resize_like(parse_size(transform.size, transform.max_size), transform, state),)


@rule(v1.RandomResizedCrop, v2.RandomResizedCrop)
def random_resized_crop(transform: Any, state: ImageState) -> Branch:
    scale, ratio = tuple(map(float, transform.scale)), tuple(map(float, transform.ratio))
    region = RandomResizedRegion(scale, ratio, version_of(transform))
    return Crop(region), resize_like(Target(as_pair(transform.size)), transform, state, is_crop=True)


def parse_size(size: Any, max_size: int | None = None) -> NewSize:
    """Return the target size given by ``size`` and ``max_size`` of torchvision's Resize."""
    if not all(side is None or isinstance(side, numbers.Integral) for side in np.atleast_1d(np.array(size, object))):
        raise Untranslatable
    if isinstance(size, Sequence) and len(size) == 2:
        if max_size is not None:
            raise Untranslatable
        return Target(as_pair(size))
    shorter = int(size[0]) if isinstance(size, Sequence) else size
    if shorter is not None and shorter < 1:
        raise Untranslatable
    if shorter is not None and max_size is not None and max_size <= shorter:
        raise Untranslatable
    return Target(None if shorter is None else (shorter,), max_size)


def resize_like(to: NewSize, transform: Any, state: ImageState, is_crop: bool = False) -> Step:
    """Return a resize step with the interpolation and antialias of a transform."""
    return resize_to(to, transform.interpolation, transform.antialias, state, version_of(transform), is_crop)


def resize_to(
    to: NewSize,
    interpolation: Any,
    antialias: bool | None,
    state: ImageState,
    version: Version = "v1",
    is_crop: bool = False,
) -> Resize | ResizeNearest:
    mode = interpolation_value(interpolation)
    if mode in ("nearest", "nearest-exact"):
        return ResizeNearest(to, "pil" if state.kind == "pil" else mode)  # type: ignore[arg-type]
    if mode not in ("bilinear", "bicubic", "lanczos") or (state.kind == "tensor" and mode == "lanczos"):
        raise Untranslatable
    # torchvision always antialiases PIL images, regardless of the argument. For tensors, None means False.
    smooth = True if state.kind == "pil" else bool(antialias)
    # v1 resizes tensors as floats, and so does v2, unless torchvision expects integers to be faster on this CPU.
    has_integers = version == "v2" and state.dtype == "uint8" and resizes_integers(InterpolationMode(mode))
    if mode == "bicubic" and not smooth:
        raise Untranslatable
    rounding = "pil" if state.kind == "pil" else "torch" if has_integers else None
    return Resize(to, mode, smooth, rounding, is_crop)  # type: ignore[arg-type]


def interpolation_value(interpolation: Any) -> str:
    """Return torchvision's name for an interpolation given as InterpolationMode, string or PIL constant."""
    if isinstance(interpolation, InterpolationMode):
        return str(interpolation.value)
    names = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
    return names.get(interpolation, str(interpolation))
