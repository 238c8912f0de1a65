"""Record calls of torchvision's functions on the tensors of undecoded images. Runs where the dataset runs.

See NOTE [ Recorded calls ] in ``pillow_calls.py``. Without a kernel, torchvision's function runs, and its torch
operations are recorded or get values: see NOTE [ Lazy tensors ].

The functions of v1 and v2 end in those of ``_functional_tensor`` and in those that are named ``*_image``, whose code is
replaced. v2's registry has wrappers of the latter for ``tv_tensors.Image``, which are replaced, too, because what they
return would share memory with another tensor.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import functional as F
from torchvision.transforms.v2 import functional as F2
from torchvision.tv_tensors._torch_function_helpers import _must_return_subclass

from ..transforms import augment, color, resize, warp
from ..transforms.geometry import Box, Crop, Flip, Transpose, as_fill, as_ltrb, as_pair, center_box, transposed
from ..transforms.plan import Branch, ImageState, Size, Version
from ..transforms.type_conversion import ToFloat, ToPIL, ToTensor, normalization
from .deferral import active
from .lazy_image import create_lazy_image
from .lazy_tensor import LazyTensor, create_lazy_output, find_transformed, is_unshared, recorders, requires_grad, share
from .pillow_calls import TORCHVISION, Note, Noter, extend, frozen, number, pad_by_pixels, select
from .placeholders import ProxySample
from .replaced_code import code_patches, kernel_patches


class Input(NamedTuple):
    """The tensor that a function of a version is called with: its state and (height, width)."""

    state: ImageState
    size: Size
    version: Version


def tensor_patches() -> Iterator[tuple[Any, Any, Any]]:
    """Yield the owner, name and replacement of each function to record."""
    named: dict[str, tuple[Noter, Version]] = {f"{TORCHVISION}.functional:to_pil_image": (to_pil_image, "v1")}
    named |= {f"{TORCHVISION}._functional_tensor:{name}": (note, "v1") for name, note in V1.items()}
    named |= {f"{TORCHVISION}.v2.functional:{name}_image": (note, "v2") for name, note in V2.items()}
    yield from code_patches({name: functools.partial(_apply, *noted, True) for name, noted in named.items()})
    known = {name: note for name, note in V2.items() if hasattr(F2, f"{name}_image")}
    kernels = {name: functools.partial(_apply, note, "v2", False) for name, note in known.items()}
    yield from kernel_patches(tv_tensors.Image, kernels)


def _apply(note: Noter, version: Version, is_pure: bool, call: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a call without values; NotImplemented if it needs values or has no kernel.

    ``is_pure``: whether torchvision's function returns a plain tensor, even for an image.
    """
    transformed = find_transformed(image) if isinstance(image, LazyTensor) else None
    if transformed is None or active() is None or torch.get_default_dtype() is not torch.float32:
        return NotImplemented
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    if tensors and (requires_grad(*tensors) or any(isinstance(each, LazyTensor) for each in tensors)):
        return NotImplemented
    state = transformed.chain.state
    found = note(Input(state, transformed.size, version), *args, **kwargs)
    if found is None or (is_pure and type(image) is not LazyTensor and (found.in_place or _returns_image(found.steps))):
        return NotImplemented
    steps = found.steps
    if state.pure is not is_pure:
        steps = ToTensor(state.order, is_pure), *steps  # type: ignore[arg-type]
    args, kwargs = tuple(map(frozen, args)), {name: frozen(value) for name, value in kwargs.items()}
    stock = type(image).stock

    def again(values: torch.Tensor) -> Any:
        return call(values.as_subclass(stock), *args, **kwargs)

    after = extend(transformed, found._replace(steps=steps), again) if steps else transformed
    if after is None or (found.in_place and not is_unshared(image)):
        return NotImplemented
    if after.chain.state.kind == "pil":
        return create_lazy_image(after)
    if found.in_place:
        image._node = ProxySample(after)
        return image
    result = create_lazy_output(after)
    return share(image, result, again) if found.is_view else result


def _returns_image(steps: Branch) -> bool:
    """Return whether a function of plain tensors returns an image for an image, for example because it clones it."""
    *_, last = None, *steps
    is_cast = isinstance(last, ToFloat) and not last.scale
    is_clone = last is None or isinstance(last, augment.Erase)
    return is_cast or is_clone or _must_return_subclass()


# --- geometry ---------------------------------------------------------------------------------------------------------


def crop(image: Input, top: Any, left: Any, height: Any, width: Any) -> Note | None:
    top, left, height, width = map(operator.index, (top, left, height, width))
    touches = top < image.size[0] and left < image.size[1] and top + height > 0 and left + width > 0
    return _crop(image, (top, left, height, width)) if touches else None


def _crop(image: Input, box: Box, fill: tuple[float, ...] = ()) -> Note:
    top, left, height, width = box
    inside = top >= 0 and left >= 0 and top + height <= image.size[0] and left + width <= image.size[1]
    return Note((Crop(fill or (0.0,) * image.state.channels, inside),), box, box[2:], is_view=inside and not fill)


def pad(image: Input, padding: Any, fill: Any = 0, padding_mode: str = "constant") -> Note | None:
    height, width = image.size
    left, top, right, bottom = sides = as_ltrb(padding)
    if padding_mode != "constant":
        most = {"edge": np.inf, "reflect": -1, "symmetric": 0}[padding_mode]  # more than the image; torch's limit
        is_valid = max(left, right) <= width + most and max(top, bottom) <= height + most
        is_valid = is_valid and not isinstance(fill, (list, tuple))
        return pad_by_pixels(image.size, sides, padding_mode) if is_valid else None
    levels = as_fill(fill, image.state)
    if image.state.dtype == "uint8" and not all(level.is_integer() for level in levels):
        return None
    return _crop(image, (-top, -left, height + top + bottom, width + left + right), levels)


def resized(
    image: Input, size: Any, interpolation: Any = "bilinear", max_size: Any = None, antialias: Any = True
) -> Note | None:
    new_size = resize.parse_size(size, max_size).resolve(image.size)
    if new_size == image.size or min(new_size) < 1:
        return None  # torchvision returns the same tensor, or raises
    step = resize.resize_step(interpolation, antialias, image.state, image.version)
    if not isinstance(step, resize.Resize):
        return select(*resize.nearest_pixels(image.size, new_size, step))
    return Note((step,), new_size, new_size)


# --- warps ------------------------------------------------------------------------------------------------------------


def _warp(cls: type[warp.W], image: Input, interpolation: Any, fill: Any) -> warp.W:
    return warp.make_warp(cls, interpolation, fill, image.state, "tensor", image.version)


def affine_v1(
    image: Input, matrix: Any, interpolation: Any = "nearest", *, expand: Any = False, fill: Any = None
) -> Note | None:
    height, width = image.size
    if expand:
        width, height = warp.OUTPUT_SIZE["v1"](matrix, width, height)
    step = _warp(warp.Affine, image, interpolation, fill)
    return Note((step,), (height, width, *map(number, matrix)), (height, width)) if len(matrix) == 6 else None


def rotate_v2(
    image: Input, angle: Any, interpolation: Any = "nearest", expand: Any = False, center: Any = None, fill: Any = None
) -> Note:
    angle = number(angle) % 360
    if center is None and angle == 0:
        return Note()
    if center is None and angle % 90 == 0 and (angle == 180 or expand or image.size[0] == image.size[1]):
        method = Image.Transpose[f"ROTATE_{angle:.0f}"]
        return Note((Transpose(method),), (), transposed(image.size, method))
    step = _warp(warp.Affine, image, interpolation, fill)
    height, width, *matrix = warp.rotation(image.size, angle, step, bool(expand), center)
    return Note((step,), (height, width, *matrix), (int(height), int(width)))


def affine_v2(
    image: Input,
    angle: Any,
    translate: Any,
    scale: Any,
    shear: Any,
    interpolation: Any = "nearest",
    fill: Any = None,
    center: Any = None,
) -> Note | None:
    shear = [shear, 0.0] if isinstance(shear, Real) else list(shear) * (3 - len(shear))
    if len(translate) != 2 or len(shear) != 2 or not scale > 0:
        return None
    step = _warp(warp.Affine, image, interpolation, fill)
    center = center and list(map(number, center))
    translate, shear = map(number, translate), list(map(number, shear))
    numbers = warp.affine(image.size, step, number(angle), list(translate), number(scale), shear, center)
    return Note((step,), numbers)


def perspective_v1(
    image: Input, perspective_coeffs: Any, interpolation: Any = "bilinear", fill: Any = None
) -> Note | None:
    step = _warp(warp.Perspective, image, interpolation, fill)
    return Note((step,), (*image.size, *map(number, perspective_coeffs))) if len(perspective_coeffs) == 8 else None


def perspective_v2(
    image: Input,
    startpoints: Any,
    endpoints: Any,
    interpolation: Any = "bilinear",
    fill: Any = None,
    coefficients: Any = None,
) -> Note | None:
    if coefficients is None:
        coefficients = F._get_perspective_coeffs(startpoints, endpoints)
    elif startpoints is not None and endpoints is not None:
        return None
    return perspective_v1(image, coefficients, interpolation, fill)


# --- colors -----------------------------------------------------------------------------------------------------------


def _adjust(name: str, accepts: Callable[..., bool], convert: Callable[[float], float] = float) -> Noter:
    """Return the function for an adjustment. ``convert`` returns the parameter of its step for an argument."""

    def note(image: Input, *args: Any, **kwargs: Any) -> Note | None:
        numbers = [*map(number, (*args, *kwargs.values()))]
        step = color.Adjustment(name, "tensor", image.version)
        return Note((step,), [*map(convert, numbers)]) if accepts(image, *numbers) else None

    return note


ADJUSTMENTS: dict[str, Noter] = {
    "adjust_brightness": _adjust("brightness", lambda image, factor: factor >= 0),
    "adjust_contrast": _adjust("contrast", lambda image, factor: factor >= 0),
    "adjust_saturation": _adjust("saturation", lambda image, factor: factor >= 0 and image.state.channels == 3),
    "adjust_hue": _adjust("hue", lambda image, factor: -0.5 <= factor <= 0.5 and image.state.channels == 3),
    "adjust_sharpness": _adjust("sharpness", lambda image, factor: factor >= 0 and min(image.size) > 2),
    "posterize": _adjust("posterize", lambda image, bits: bits in range(1, 9)),
    "solarize": _adjust(
        "solarize",
        lambda image, threshold: threshold <= 255,
        lambda threshold: color.solarize_threshold(threshold, "tensor"),
    ),
    **{name: _adjust(name, lambda image: True) for name in ("autocontrast", "equalize", "invert")},
}
"""Functions with at most one argument, a number."""


def adjust_gamma(image: Input, gamma: Any, gain: Any = 1) -> Note | None:
    """Note a table of levels, if torch's rounding, which depends on the position of a pixel, cannot change one."""
    if image.state.dtype != "uint8" or number(gamma) < 0:
        return None
    exact = np.minimum(number(gain) * (np.arange(256) / 255) ** float(gamma), 1) * 255.999
    if image.state.channels not in (1, 3) or gain < 0 or (abs(exact - exact.round())[exact > 0] < 1e-4).any():
        return None
    return Note((color.Table(),), (np.tile(exact.astype(np.uint8), 3).view(np.float32),))


def permute_channels(image: Input, permutation: Any) -> Note | None:
    if image.state.channels != 3 or sorted(permutation) != [0, 1, 2]:
        return None
    return Note((color.ChannelOrder(),), [*map(float, permutation)])


def index(image: Input, indices: Any) -> Note | None:
    """Note an index that permutes the channels, such as ``image[..., permutation, :, :]``."""
    order, *more = indices
    is_order = type(order) is torch.Tensor and order.shape == (3,) and order.dtype is torch.int64
    return permute_channels(image, order.tolist()) if is_order and not any(each is not None for each in more) else None


def slice_of_all(image: Input, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Note | None:
    """Note a slice of everything, as torch 2.6 takes for each ``:`` beside a permutation."""
    size = (image.state.channels, *image.size)[dim]
    return Note(is_view=True) if step == 1 and not start and (end is None or end >= size) else None


def rgb_to_grayscale(image: Input, num_output_channels: Any = 1) -> Note | None:
    if num_output_channels not in (1, 3):
        return None
    if image.state.channels == 1 and (num_output_channels == 1 or image.version == "v1"):
        return Note()
    return Note((color.Grayscale(int(num_output_channels), "tensor", image.version),))


# --- blur and erasing -------------------------------------------------------------------------------------------------


def gaussian_blur(image: Input, kernel_size: Any, sigma: Any = None) -> Note | None:
    window = [kernel_size] * 2 if isinstance(kernel_size, int) else list(map(operator.index, kernel_size))
    sigmas = [side * 0.15 + 0.35 for side in window] if sigma is None else sigma
    sigmas = [*map(number, sigmas if isinstance(sigmas, (list, tuple)) else [sigmas])]
    if len(window) != 2 or len(sigmas) > 2 or len(set(sigmas)) != 1 or sigmas[0] <= 0:
        return None
    height, width = window[::-1]
    is_small = height // 2 < image.size[0] and width // 2 < image.size[1]
    return Note((augment.Blur((height, width)),), sigmas[:1]) if is_small and height % 2 and width % 2 else None


def erase(image: Input, i: Any, j: Any, h: Any, w: Any, v: Any, inplace: Any = False) -> Note | None:
    top, left, height, width = box = tuple(map(operator.index, (i, j, h, w)))
    channels, is_levels = image.state.channels, image.state.dtype == "uint8"
    if min(box) < 0 or top + height > image.size[0] or left + width > image.size[1] or not height * width:
        return None
    if v.ndim <= 3 and v.numel() in (1, channels) and v.shape[:-3] + v.shape[-2:] in ((), (1, 1)):
        values = v.reshape(-1).tolist() * (channels // v.numel())
        values = list(map(int, values)) if is_levels else values
        if is_levels and not all(0 <= value <= 255 for value in values):
            return None
        return Note((augment.Erase(channels),), (*box, *values), in_place=bool(inplace))
    if is_levels or v.dtype is not torch.float32 or v.shape != (channels, height, width):
        return None
    noise = augment.to_hwc(v.detach().clone())
    return Note((augment.Erase(channels, is_noisy=True),), (*box, noise), in_place=bool(inplace))


# --- conversions ------------------------------------------------------------------------------------------------------


def to_dtype(image: Input, dtype: Any = torch.float, scale: Any = False) -> Note | None:
    if dtype is not torch.float32 or image.state.dtype != "uint8":
        return None
    return Note((ToFloat(bool(scale), image.version),))


def normalize(image: Input, mean: Any, std: Any, inplace: Any = False) -> Note | None:
    if image.state.dtype != "float32":
        return None
    return Note((normalization(mean, std, image.state),), in_place=bool(inplace))


def to_pil_image(image: Input, mode: Any = None) -> Note | None:
    return Note((ToPIL(),)) if mode in (None, "RGB" if image.state.channels == 3 else "L") else None


NOTERS = adjust_gamma, crop, erase, gaussian_blur, normalize, pad, rgb_to_grayscale
OF_BOTH: dict[str, Noter] = {note.__name__: note for note in NOTERS} | ADJUSTMENTS | {"resize": resized}

V1: dict[str, Noter] = {
    **OF_BOTH,
    "hflip": lambda image: Note((Flip("horizontal"),), (1.0,)),
    "vflip": lambda image: Note((Flip("vertical"),), (1.0,)),
    "rotate": affine_v1,
    "affine": affine_v1,
    "perspective": perspective_v1,
    "convert_image_dtype": functools.partial(to_dtype, scale=True),
}
"""Functions of ``_functional_tensor``, in which the functions and classes of v1 end."""

V2: dict[str, Noter] = {
    **OF_BOTH,
    "permute_channels": permute_channels,
    "to_dtype": to_dtype,
    "horizontal_flip": V1["hflip"],
    "vertical_flip": V1["vflip"],
    "center_crop": lambda image, output_size: _crop(image, center_box(as_pair(output_size), *image.size)),
    "rotate": rotate_v2,
    "affine": affine_v2,
    "perspective": perspective_v2,
    "grayscale_to_rgb": lambda image: rgb_to_grayscale(image, 3) if image.state.channels == 1 else None,
}
"""Kernels of ``v2.functional``, without their suffix "_image"."""

recorders[torch.ops.aten.index.Tensor] = functools.partial(_apply, index, "v1", True)
recorders[torch.ops.aten.slice.Tensor] = functools.partial(_apply, slice_of_all, "v1", True)
