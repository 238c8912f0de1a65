"""Resize steps with fixed or sampled sizes. The worker computes all sizes, in whole pixels."""

import functools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import InterpolationMode, functional as F, transforms as v1, v2
from torchvision.transforms.v2.functional._geometry import _do_native_uint8_resize_on_cpu as resizes_integers

from .geometry import IndexSelect, as_pair, cropping
from .plan import ImageState, ParamRow, Size, Step, Translation, Untranslatable, Version, in_sequence
from .random_numbers import draws_alike, resized_crop_box
from .registry import rule, version_of


class Target(NamedTuple):
    """The target size given by the arguments of torchvision's Resize, in pixels."""

    size: tuple[int, ...] | None  # (height, width), or the shorter edge, keeping the ratio; None: only a maximum
    max_size: int | None = None  # maximum length of the longer edge

    def resolve(self, size: Size) -> Size:
        """Return the size of an image of ``size`` after the resize."""
        height, width = F._compute_resized_output_size(size, self.size, self.max_size, allow_size_none=True)
        return height, width


Filter = Literal["bilinear", "bicubic", "lanczos"]
Nearest = Literal["pil", "nearest", "nearest-exact"]
"""Implementation that selects the nearest pixel: Pillow's, or a mode of torch's ``interpolate``."""

Line = NDArray[np.float32]

PILLOW_RELEASE = tuple(map(int, PIL.__version__.split(".")[:2]))

LARGE_EDGE = 128  # minimum length of the shorter edge, in pixels, of images that DALI resizes


@dataclass(frozen=True)
class Resize(Step):
    """``functional.resize`` with a filter, so that pixels are weighted means. Parameters: the new height and width."""

    interpolation: Filter = "bilinear"
    antialias: bool = True  # whether the filter is widened for downscaling
    # Library that resizes one side, rounds to integers and then resizes the other; None: no rounding, as for floats.
    rounding: Literal["pil", "torch", None] = "pil"
    in_dali: bool = False  # whether DALI resizes as fast as torchvision, with few differences
    num_params: ClassVar[int] = 2

    @property
    def needs_kernels(self) -> bool:  # type: ignore[override]
        return not self.in_dali


@dataclass(frozen=True)
class ResizeBox(Step):
    """``Image.resize`` with a filter. Parameters: left, top, right and bottom of the box; the new height and width."""

    interpolation: Literal["bilinear", "bicubic", "lanczos", "box", "hamming"]
    num_params: ClassVar[int] = 6


def pillow_resizes_height_first(size: Any, new_size: Any) -> Any:
    """Return whether Pillow resizes the height first. Heights and widths may be arrays.

    From version 13 on, it does so if that removes over twice as many rows as columns, in 12.2 and 12.3 only for images
    that are over 100 times as high as wide, and before never (Pillow pull request 9549).
    """
    rows, columns = size[0] - new_size[0], size[1] - new_size[1]
    if PILLOW_RELEASE < (12, 2):
        return rows > np.inf
    return (rows > 0) & (rows > 2 * columns if PILLOW_RELEASE >= (13, 0) else size[0] > 100 * size[1])


def nearest_pixels(size: Size, new_size: Size, nearest: Nearest) -> tuple[Line, Line]:
    """Return the rows and columns that nearest interpolation selects, (new height,) and (new width,).

    Pillow accumulates many small steps; torch multiplies in float32, differently for small and large images. So a
    position on the boundary of two pixels may be rounded to either, and the same library resizes a line of indices.
    """
    rows, columns = (np.arange(count, dtype=np.float32) for count in size)
    if nearest == "pil":
        return _pillow_nearest(rows, new_size[0]), _pillow_nearest(columns, new_size[1])
    return _torch_nearest(rows, *new_size, nearest), _torch_nearest(columns, *new_size[::-1], nearest)


def _torch_nearest(line: Line, new_count: int, other: int, mode: str) -> Line:
    # torch has two kernels with different rounding, one for a sum of new height and width of up to 128.
    other = min(other, max(1, 129 - new_count))
    new = torch.nn.functional.interpolate(torch.from_numpy(line)[None, None, None], (other, new_count), mode=mode)
    return new[0, 0, 0].numpy()


def _pillow_nearest(line: Line, new_count: int) -> Line:
    return np.array(Image.fromarray(line[None]).resize((new_count, 1), Image.Resampling.NEAREST)).reshape(new_count)


@rule(v1.Resize, v2.Resize)
def resize(transform: Any, state: ImageState) -> Translation:
    step = resize_step(transform.interpolation, transform.antialias, state, version_of(transform))
    return resizing(parse_size(transform.size, transform.max_size), step)


@rule(v1.RandomResizedCrop, v2.RandomResizedCrop)
def random_resized_crop(transform: Any, state: ImageState) -> Translation:
    (low, high), (narrow, wide) = map(float, transform.scale), map(float, transform.ratio)
    if not draws_alike():
        raise Untranslatable
    step = resize_step(transform.interpolation, transform.antialias, state, version_of(transform))
    box = functools.partial(resized_crop_box, (low, high), (narrow, wide))
    resized = resizing(Target(as_pair(transform.size)), step, is_crop=True)
    return in_sequence([cropping(box, inside=True, draws="numbers"), resized])


def parse_size(size: Any, max_size: int | None = None) -> Target:
    """Return the target size given by ``size`` and ``max_size`` of torchvision's Resize."""
    sides = size if isinstance(size, Sequence) else [size]
    if len(sides) > 2 or not all(each is None or isinstance(each, numbers.Integral) for each in sides):
        raise Untranslatable
    if len(sides) == 2 and max_size is None:
        return Target(as_pair(size))
    (shorter,) = sides
    if shorter is not None and (shorter < 1 or (max_size is not None and max_size <= shorter)):
        raise Untranslatable
    return Target(None if shorter is None else (int(shorter),), max_size)


def resizing(target: Target, step: Resize | Nearest, is_crop: bool = False) -> Translation:
    """Return the translation of a resize. ``is_crop``: whether the image is the crop of a RandomResizedCrop."""

    def sample(size: Size, row: ParamRow) -> Size:
        new_size = target.resolve(size)
        if 0 in new_size:
            raise Untranslatable
        row.extend(new_size)
        if not isinstance(step, Resize):
            row.append(row.attach(np.concatenate(nearest_pixels(size, new_size, step))))
        return new_size

    if not isinstance(step, Resize):
        return Translation((IndexSelect(),), sample)
    # DALI repeats the outermost pixels, where torchvision truncates the filter: small images show it, and Lanczos
    # carries it far into an image. And it is slow if the width shrinks more than the height, as when most photos become
    # squares.
    min_edge = min(target.size) if target.size else target.max_size or 0
    has_inexact_edges = step.antialias and (min_edge < LARGE_EDGE or step.interpolation == "lanczos")
    is_to_one_size = target.size is not None and len(target.size) == 2 and not is_crop
    in_dali = not has_inexact_edges and not is_to_one_size and step.rounding != "torch"
    return Translation((replace(step, in_dali=in_dali),), sample)


def resize_step(interpolation: Any, antialias: bool | None, state: ImageState, version: Version) -> Resize | Nearest:
    """Return the step of a resize with a filter, or how the nearest pixel is selected."""
    mode = interpolation_value(interpolation)
    if mode in ("nearest", "nearest-exact"):
        return "pil" if state.kind == "pil" else mode  # type: ignore[return-value]
    if mode not in get_args(Filter) or (state.kind == "tensor" and mode == "lanczos"):
        raise Untranslatable
    # torchvision always antialiases PIL images, regardless of the argument. For tensors, None means False.
    smooth = True if state.kind == "pil" else bool(antialias)
    # v1 resizes tensors as floats, and so does v2, unless torchvision expects integers to be faster on this CPU.
    has_integers = version == "v2" and state.dtype == "uint8" and resizes_integers(InterpolationMode(mode))
    if mode == "bicubic" and not smooth:
        raise Untranslatable
    rounding: Literal["pil", "torch", None] = "pil" if state.kind == "pil" else "torch" if has_integers else None
    return Resize(mode, smooth, rounding)  # type: ignore[arg-type]


def interpolation_value(interpolation: Any) -> str:
    """Return torchvision's name for an interpolation given as InterpolationMode, string or PIL constant."""
    if isinstance(interpolation, InterpolationMode):
        return str(interpolation.value)
    names = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
    return names.get(interpolation, str(interpolation))
