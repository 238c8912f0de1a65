"""What the kernels are held to: each step with drawn numbers, and what Pillow or torchvision makes of an image."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torchvision.transforms.functional as F
import torchvision.transforms.v2.functional as F2
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from timm.data import auto_augment as timm
from torch.nn.functional import interpolate
from torchvision.transforms import _functional_tensor as FT
from torchvision.transforms.v2.functional import _geometry as GT

from proxyloader.kernels.operations import torch_fuses_products
from proxyloader.kernels.programs import CODE, FILTERS, Programs
from proxyloader.transforms.resize import pillow_resizes_height_first

from ..compare import picture

Pixels = NDArray[np.uint8]
Random = random.Random

FACTORS = (0.0, 0.1, 0.4, 0.73, 0.999, 1.0, 1.0001, 1.37, 1.9, 2.5, 7.0, 100.0)
FACTORS_OF_PIL = (*FACTORS, -0.5)
HUES = (-0.5, -0.31, -0.1, -0.003, 0.0, 0.004, 0.05, 0.2, 0.37, 0.5)


@dataclass(frozen=True)
class Done:
    """A step with its numbers, and its result."""

    name: str
    result: Pixels
    numbers: Sequence[float] = ()
    extras: Any = None


Draw = Callable[[Random, Pixels], Done]


def on_pil(image: Pixels, change: Callable[[Image.Image], Image.Image]) -> Pixels:
    return np.asarray(change(Image.fromarray(image)))


def on_tensor(image: Pixels, change: Callable[[torch.Tensor], torch.Tensor]) -> Pixels:
    tensor = torch.from_numpy(image.copy()).permute(2, 0, 1).contiguous()
    return np.ascontiguousarray(change(tensor).permute(1, 2, 0).numpy())


# Steps from level to level, and from pixel to pixel ------------------------------------------------------------------


def table(rng: Random, image: Pixels) -> Done:
    levels = [rng.randrange(256) for _ in range(768)]
    return Done("TABLE", on_pil(image, lambda i: i.point(levels)), extras=np.array(levels, np.uint8).view(np.float32))


def of_pil(name: str, change: Any, numbers: Sequence[float] = (0,)) -> Draw:
    """Return a step of one of these numbers, which ``change`` of a PIL image is called with."""

    def draw(rng: Random, image: Pixels) -> Done:
        number = rng.choice(numbers)
        return Done(name, on_pil(image, lambda i: change(i, number)), [number])

    return draw


def of_tensor(name: str, change: Any, numbers: Sequence[float] | None = None, is_v1: bool = False) -> Draw:
    """Return a step of one of these numbers, if any, which ``change`` of a tensor is called with."""

    def draw(rng: Random, image: Pixels) -> Done:
        arguments = [] if numbers is None else [rng.choice(numbers)]
        return Done(name, on_tensor(image, lambda t: change(t, *arguments)), [*arguments, is_v1])

    return draw


def contrast_of_grey(rng: Random, image: Pixels) -> Done:
    """Of the only channel of a tensor. The channels of ``image`` must be equal."""
    factor = rng.choice(FACTORS)
    result = on_tensor(image[..., :1], lambda t: F2.adjust_contrast(t, factor))
    return Done("TENSOR_CONTRAST", result.repeat(3, 2), [factor, 0, 1])


def hue(rng: Random, image: Pixels) -> Done:
    factor = rng.choice(HUES)
    turn = float(np.int32(factor * 255).astype(np.uint8))
    return Done("HUE", on_pil(image, lambda i: F.adjust_hue(i, factor)), [turn])


def channels(rng: Random, image: Pixels) -> Done:
    order = [rng.randrange(3) for _ in range(3)]
    return Done("CHANNELS", np.ascontiguousarray(image[..., order]), order)


def matrix(rng: Random, image: Pixels) -> Done:
    numbers = [rng.uniform(-20, 20) if i % 4 == 3 else rng.uniform(-0.8, 1.3) for i in range(12)]
    return Done("MATRIX", on_pil(image, lambda i: i.convert("RGB", tuple(numbers))), numbers)


def erase(rng: Random, image: Pixels) -> Done:
    height, width = image.shape[:2]
    left, top, right, bottom = (rng.randint(-3, side + 3) for side in (width, height) * 2)
    colour, result = _colour(rng), image.copy()
    result[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = colour
    return Done("ERASE", result, [left, top, right, bottom, *colour])


# Steps from other pixels ----------------------------------------------------------------------------------------------


def window(rng: Random, image: Pixels) -> Done:
    sides = image.shape[:2]
    begins = [rng.randint(-3 * side - 2, side + 2) for side in sides]
    sizes = [rng.randint(1, min(3 * side, 200)) for side in sides]
    pads = [(max(0, -b), max(0, b + n - side)) for b, n, side in zip(begins, sizes, sides)]
    colour = _colour(rng)
    padded = np.stack([np.pad(image[..., c], pads, constant_values=colour[c]) for c in range(3)], -1)
    rows, columns = (slice(b + low, b + low + n) for b, n, (low, _) in zip(begins, sizes, pads))
    numbers = [*colour, 1, 0, begins[1], 0, 1, begins[0]]
    return Done("AFFINE_NEAREST", np.ascontiguousarray(padded[rows, columns]), numbers)


def select(rng: Random, image: Pixels) -> Done:
    lines = [[rng.randrange(side) for _ in range(rng.randint(1, 60))] for side in image.shape[:2]]
    return Done("SELECT", np.ascontiguousarray(image[np.ix_(*lines)]), extras=[*lines[0], *lines[1]])


def kernel(side: int, rng: Random, image: Pixels) -> Done:
    named = "CONTOUR DETAIL EDGE_ENHANCE EMBOSS FIND_EDGES SHARPEN SMOOTH" if side == 3 else "BLUR SMOOTH_MORE"
    drawn = ImageFilter.Kernel((side, side), [rng.gauss(0, 1) for _ in range(side * side)], 1.7, 20.25)
    of = rng.choice([drawn, *(getattr(ImageFilter, name) for name in named.split())])
    _, scale, offset, weights = of.filterargs
    divided = np.asarray(weights, np.float32) / np.float32(scale)
    return Done(f"KERNEL{side}", on_pil(image, lambda i: i.filter(of)), [float(np.float32(offset))], divided)


def affine(mode: str, rng: Random, image: Pixels) -> Done:
    """Rotations, scales, shifts by halves, what is beyond fixed point, and matrices of any numbers."""
    height, width = image.shape[:2]
    angle, scale = rng.uniform(0, 6.3), rng.choice([1, 1, 0.37, 2.5, 1e4])
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    shift_x, shift_y = rng.choice([0, 0.5, -7, rng.gauss(0, width)]), rng.choice([0, 13, rng.gauss(0, height)])
    numbers = rng.choice([
        [cos, sin, shift_x, -sin, cos, shift_y],
        [scale, 0, shift_x, 0, rng.choice([1, -1, 0.3]), shift_y],
        [1, rng.uniform(-1, 1), shift_x, 0, 1, shift_y],
        [rng.gauss(0, 1) for _ in range(6)],
    ])  # fmt: skip
    return transformed(f"AFFINE_{mode}", numbers, _transformed_size(rng, image), image, _colour(rng))


def perspective(mode: str, rng: Random, image: Pixels) -> Done:
    height, width = image.shape[:2]
    numbers = [1, 0, rng.gauss(0, 3), 0, 1, rng.gauss(0, 3)] if rng.random() < 0.5 else [rng.gauss(0, 1)] * 6
    numbers = [*numbers, rng.uniform(-0.5, 0.5) / width, rng.uniform(-0.5, 0.5) / height]
    if rng.random() < 0.2:  # all positions are (7, 5) if the division is exact
        numbers = [7, 0, 7, 5, 0, 5, 1, 0]
    return transformed(f"PERSPECTIVE_{mode}", numbers, _transformed_size(rng, image), image, _colour(rng))


def _transformed_size(rng: Random, image: Pixels) -> tuple[int, int]:
    height, width = image.shape[:2]
    sizes = [(height, width), (rng.randint(1, min(2 * height + 5, 250)), rng.randint(1, min(2 * width + 5, 250)))]
    return sizes[rng.random() < 0.4]


def transformed(name: str, numbers: Sequence[float], size: tuple[int, int], image: Pixels, fill: Sequence[int]) -> Done:
    method, mode = name.split("_")
    how, to, data = Image.Resampling[mode], Image.Transform[method], [*map(float, numbers)]
    result = on_pil(image, lambda i: i.transform(size[::-1], to, data, how, fillcolor=tuple(fill)))
    return Done(name, result, [*fill, *data])


GRIDS = {
    1: (FT._gen_affine_grid, FT._perspective_grid, FT._apply_grid_transform),
    2: (GT._affine_grid, GT._perspective_grid, GT._apply_grid_transform),
}
"""What v1 and v2 make of tensors."""


def tensor_warp(name: str, rng: Random, image: Pixels) -> Done:
    """Rotations, any maps, and such on the borders of pixels; without a fill, and with one in the ways of v1 and v2."""
    height, width = image.shape[:2]
    _, method, mode = name.split("_")
    blend, size = rng.randrange(3), (height, width)
    fill = [float(value) for value in (_colour(rng) if rng.random() < 0.7 else [0.5, 100.5, 31.4])] if blend else None
    affine_grid, perspective_grid, apply = GRIDS[blend or 2]
    if method == "AFFINE":
        size = _transformed_size(rng, image)
        angle, scale = rng.choice([rng.uniform(0, 6.3), np.pi / 2]), rng.choice([1, 1, 0.37, 2.5, 1e4])
        cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
        numbers = rng.choice([
            [cos, sin, rng.choice([0, 0.5, rng.gauss(0, width)]), -sin, cos, rng.choice([0, -7, rng.gauss(0, height)])],
            [rng.gauss(0, 1) for _ in range(6)],
        ])  # fmt: skip
        grid = affine_grid(torch.tensor(numbers, dtype=torch.float32).reshape(1, 2, 3), width, height, *size[::-1])
    else:
        shift_x, shift_y = rng.gauss(0, 3), rng.gauss(0, 3)
        numbers = rng.choice([
            [1, rng.gauss(0, 0.1), shift_x, rng.gauss(0, 0.1), 1, shift_y, rng.gauss(0, 0.3) / width, 0.1 / height],
            [1, 0, 0, 0, 1, 0, -2 / width, 0],  # a horizon
            [rng.gauss(0, 1) for _ in range(8)],
        ])  # fmt: skip
        grid = perspective_grid(numbers, width, height, torch.float32, torch.device("cpu"))
    result = on_tensor(image, lambda t: apply(t, grid, mode.lower(), fill))
    return Done(name, result, [*(fill or [0] * 3), blend, *numbers])


def tensor_resize(rng: Random, image: Pixels) -> Done:
    """v1's resize of tensors. torch itself fails on some sizes of one pixel: these stay."""
    name = rng.choice(["bilinear", "bicubic"])
    size, how = [max(2, a_size(rng, 90)) for _ in range(2)], F.InterpolationMode(name)
    if min(image.shape[:2]) == 1:
        size = list(image.shape[:2])
    result = on_tensor(image, lambda t: F.resize(t, size, how))
    return Done("TENSOR_RESIZE", result, [FILTERS[name], torch_fuses_products()])


def box_blur(rng: Random, image: Pixels) -> Done:
    radii = [rng.choice([0, 0.1, 0.5, 0.9, 1, 1.33, 3.7, 40]) for _ in range(2)]
    radii = radii if any(radii) else [0.3, 0.3]
    if rng.random() < 0.5:
        result = on_pil(image, lambda i: i.filter(ImageFilter.BoxBlur(tuple(radii))))
        return Done("BOX_BLUR", result, [*(float(np.float32(radius)) for radius in radii), 1])
    result = on_pil(image, lambda i: i.filter(ImageFilter.GaussianBlur(tuple(radii))))
    return Done("BOX_BLUR", result, [*map(_box_radius, radii), 3])


def _box_radius(sigma: float) -> float:
    """Radius of the box of which three passes have this sigma; float32, but for sqrt and floor, as in BoxBlur.c."""
    one, sigma32 = np.float32(1), np.float32(sigma)
    variance = sigma32 * sigma32 / np.float32(3)
    length = np.float32(np.sqrt(12.0 * np.float64(variance) + 1.0))
    whole = np.float32(np.floor((np.float64(length) - 1.0) / 2.0))
    part = (2 * whole + one) * (whole * (whole + one) - 3 * variance)
    return float(whole + part / (6 * (variance - (whole + one) * (whole + one))))


def tensor_blur(rng: Random, image: Pixels) -> Done:
    largest = [2 * min(side - 1, 15) + 1 for side in (image.shape[1], image.shape[0])]
    sides, sigmas = [rng.randrange(1, most + 1, 2) for most in largest], [rng.choice([0.1, 1.1, 9.0]) for _ in range(2)]
    weigh = partial(F2._misc._get_gaussian_kernel1d, dtype=torch.float32, device=torch.device("cpu"))
    weights = [w for side, sigma in zip(sides, sigmas) for w in weigh(side, sigma).tolist()]
    result = on_tensor(image, lambda t: F2.gaussian_blur(t, sides, sigmas))
    return Done("TENSOR_BLUR", result, [side // 2 for side in sides], weights)


def resample(rng: Random, image: Pixels, largest: int = 90) -> Done:
    """Resize a crop, that may lie outside, with a box in the crop."""
    height, width = image.shape[:2]
    crop, colour = [0, 0, width, height], _colour(rng)
    if rng.random() < 0.7:
        crop = [
            rng.randint(-width, width),
            rng.randint(-height, height),
            a_size(rng, 2 * width),
            a_size(rng, 2 * height),
        ]
    left, top, w, h = crop
    box = [0.0, 0.0, float(w), float(h)]
    if rng.random() < 0.3:
        (x0, x1), (y0, y1) = (sorted(float(np.float32(rng.uniform(0, side))) for _ in range(2)) for side in (w, h))
        box = [x0, y0, x1, y1] if x0 < x1 and y0 < y1 else box
    size = [a_size(rng, largest), a_size(rng, largest)]
    name = rng.choice(list(FILTERS))
    cropped = Image.new("RGB", (w, h), tuple(colour))
    cropped.paste(Image.fromarray(image), (-left, -top))
    result = np.asarray(cropped.resize(size[::-1], Image.Resampling[name.upper()], tuple(box)))
    fill = colour[0] | colour[1] << 8 | colour[2] << 16
    is_height_first = pillow_resizes_height_first((h, w), (size[0], size[1]))
    return Done("RESAMPLE", result, [*crop, *box, FILTERS[name], 0, fill, is_height_first])


def resample_tensor(rng: Random, image: Pixels, largest: int = 90) -> Done:
    size, name = [max(2, a_size(rng, largest)) for _ in range(2)], rng.choice(["bilinear", "bicubic"])
    how = {"mode": name, "align_corners": False, "antialias": True}
    height, width = image.shape[:2]
    numbers = [0, 0, width, height, 0, 0, width, height, FILTERS[name], 1]
    # Not by torchvision, which on some CPUs resizes as floats.
    return Done("RESAMPLE", on_tensor(image, lambda t: interpolate(t[None], size, **how)[0]), numbers)


def a_size(rng: Random, largest: int) -> int:
    """Sizes of all magnitudes."""
    return max(1, int(largest ** rng.random() + 0.5))


def _colour(rng: Random) -> list[int]:
    return [rng.choice([0, 255, rng.randrange(256)]) for _ in range(3)]


EXACT: dict[str, Draw] = {
    "TABLE": table,
    "BRIGHTNESS": of_pil("BRIGHTNESS", F.adjust_brightness, FACTORS_OF_PIL),
    "CONTRAST": of_pil("CONTRAST", F.adjust_contrast, FACTORS_OF_PIL),
    "SATURATION": of_pil("SATURATION", F.adjust_saturation, FACTORS_OF_PIL),
    "SHARPNESS": of_pil("SHARPNESS", F.adjust_sharpness, FACTORS_OF_PIL),
    "POSTERIZE": of_pil("POSTERIZE", F.posterize, range(1, 9)),
    "SOLARIZE": of_pil("SOLARIZE", F.solarize, [0, 1, 85.3, 128, 200.5, 255, 256]),
    "SOLARIZE_ADD": of_pil("SOLARIZE_ADD", timm.solarize_add, [0, 50, 110]),
    "INVERT": of_pil("INVERT", lambda i, _: F.invert(i)),
    "AUTOCONTRAST": of_pil("AUTOCONTRAST", lambda i, _: F.autocontrast(i)),
    "EQUALIZE": of_pil("EQUALIZE", lambda i, _: F.equalize(i)),
    "TENSOR_BRIGHTNESS": of_tensor("TENSOR_BRIGHTNESS", F2.adjust_brightness, FACTORS),
    "TENSOR_AUTOCONTRAST": of_tensor("TENSOR_AUTOCONTRAST", F2.autocontrast),
    "GREY": of_pil("GREY", lambda i, _: F.to_grayscale(i, 3)),
    "HUE": hue,
    "CHANNELS": channels,
    "MATRIX": matrix,
    "ERASE": erase,
    "TENSOR_GREY": of_tensor("TENSOR_GREY", lambda t: F2.rgb_to_grayscale(t, 3)),
    "TENSOR_HUE": of_tensor("TENSOR_HUE", F2.adjust_hue, HUES),
    "TENSOR_SATURATION of v1": of_tensor("TENSOR_SATURATION", F.adjust_saturation, FACTORS, True),
    "TENSOR_SHARPNESS of v1": of_tensor("TENSOR_SHARPNESS", F.adjust_sharpness, FACTORS, True),
    "TENSOR_AUTOCONTRAST of v1": of_tensor("TENSOR_AUTOCONTRAST", F.autocontrast, None, True),
    "TENSOR_GREY of v1": of_tensor("TENSOR_GREY", lambda t: F.rgb_to_grayscale(t, 3), None, True),
    "TENSOR_HUE of v1": of_tensor("TENSOR_HUE", F.adjust_hue, HUES, True),
    "TENSOR_CONTRAST of v1": of_tensor("TENSOR_CONTRAST", F.adjust_contrast, FACTORS, True),
    "AFFINE_NEAREST of a crop": window,
    "SELECT": select,
    "KERNEL3": partial(kernel, 3),
    "KERNEL5": partial(kernel, 5),
    **{f"AFFINE_{mode}": partial(affine, mode) for mode in ("NEAREST", "BILINEAR", "BICUBIC")},
    **{f"PERSPECTIVE_{mode}": partial(perspective, mode) for mode in ("NEAREST", "BILINEAR", "BICUBIC")},
    **{name: partial(tensor_warp, name) for name in CODE if name.startswith(("TENSOR_AFFINE", "TENSOR_PERSPECTIVE"))},
    "TENSOR_RESIZE": tensor_resize,
    "BOX_BLUR": box_blur,
    "RESAMPLE": resample,
}
"""Steps of which each level is the same."""

CLOSE: dict[str, Draw] = {
    "TENSOR_CONTRAST": of_tensor("TENSOR_CONTRAST", F2.adjust_contrast, FACTORS),
    "TENSOR_SATURATION": of_tensor("TENSOR_SATURATION", F2.adjust_saturation, FACTORS),
    "TENSOR_SHARPNESS": of_tensor("TENSOR_SHARPNESS", F2.adjust_sharpness, FACTORS),
    "TENSOR_CONTRAST of grey": contrast_of_grey,
    "TENSOR_BLUR": tensor_blur,
}
"""Steps of which a few levels differ by one. torch fuses multiplication and addition, but not for the last values of a
tensor, which depend on the CPU; and it sums a blur, and large means, in an order of its own."""


# Batches --------------------------------------------------------------------------------------------------------------


def program_of(
    images: Sequence[Pixels], steps: Sequence[Sequence[Done]], channels: int = 3, numbers: Any = ()
) -> Programs:
    """Return the programs of these steps of each image. ``numbers`` are those of STORE behind the channels."""
    programs = Programs([image.shape[:2] for image in images])
    for i, of_image in enumerate(steps):
        for done in of_image:
            extras = () if done.extras is None else [done.extras]
            programs.add(done.name, done.numbers, np.array([i]), done.result.shape[:2], extras)
    programs.add("STORE", [channels, *(numbers or (0, 0, 0, 0, 1, 1, 1))])
    return programs


def hard_images() -> list[Pixels]:
    """A photograph, noise, flat images, ramps and images of few levels, from 1x1."""
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 256, (*size, 3), np.uint8)
            for size in [(1, 1), (1, 7), (7, 1), (2, 2), (3, 3), (2, 9), (5, 5), (33, 17), (64, 48)]]  # fmt: skip
    made += [np.full((21, 19, 3), level, np.uint8) for level in (0, 77, 255)]
    made.append(rng.choice(np.array([3, 4, 200], np.uint8), (40, 30, 3)))
    ramp = np.arange(256, dtype=np.uint8)
    made.append(np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], ramp[:, None] ^ ramp[None]), -1).copy())
    made.append(np.asarray(picture(5, (161, 223))))
    made.append(np.minimum(rng.integers(0, 256, (50, 60, 3), np.uint8), rng.integers(0, 90, (50, 60, 3), np.uint8)))
    return made


assert {name.split()[0] for name in EXACT | CLOSE} | {"MIX", "BLEND", "STORE", "STORE_RESIZED", "ERASE_OUTPUT"} == set(
    CODE
)
