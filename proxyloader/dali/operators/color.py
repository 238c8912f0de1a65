"""Color operators, rounding like Pillow for PIL images and like torch for tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...transforms.color import (
    Autocontrast,
    Brightness,
    ChannelOrder,
    Contrast,
    Equalize,
    Grayscale,
    Hue,
    Invert,
    Posterize,
    Saturation,
    Sharpness,
    Solarize,
    SolarizeAdd,
)
from ..api import equalized, filter_image, fn, math, types
from .graph import Graph, operator

PILLOW_LUMA = [19595 / 65536, 38470 / 65536, 7471 / 65536]
TORCH_LUMA = [0.2989, 0.587, 0.114]
"""Exact weights of red, green and blue in a grayscale image."""

SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / np.float32(13)
"""Kernel of Pillow's ``ImageFilter.SMOOTH``, used for sharpness."""

ZERO = np.zeros((), np.float32)


@operator(Grayscale)
def grayscale(graph: Graph, step: Grayscale) -> None:
    if graph.channels == 3:
        graph.node = _luma(graph, step.kind)
    if step.channels == 3:
        graph.node = fn.cat(graph.node, graph.node, graph.node, axis=2)
    graph.channels = step.channels


def _luma(graph: Graph, kind: str) -> Any:
    """Return the luma of each pixel, (H, W, 1), in the dtype of the image."""
    weights = PILLOW_LUMA if kind == "pil" else TORCH_LUMA
    # On uint8 tensors, torchvision truncates and DALI rounds, so one half is subtracted, or slightly less, so that a
    # result that is an integer to four digits keeps its value.
    less = 0.49995 if kind == "tensor" and graph.scale is None else 0.0
    dtype = types.UINT8 if graph.scale is None else types.FLOAT
    return fn.coord_transform(graph.decoded(), M=weights, T=-less, dtype=dtype)


def _to_float(node: Any) -> Any:
    """Cast a node to float; conditions become 1.0 or 0.0."""
    return fn.cast(node, dtype=types.FLOAT)


def _set_image(graph: Graph, values: Any) -> None:
    """Set the image to float values, clamped to its range and truncated to integers for uint8."""
    if graph.scale is None:
        graph.node = fn.cast(math.floor(math.clamp(values, 0.0, 255.0)), dtype=types.UINT8)
    else:
        graph.node = math.clamp(values, 0.0, 1.0)


def _blend(graph: Graph, other: Any, factor: Any, kind: str) -> None:
    """Blend ``other``, at factor 0, and the image, at factor 1; larger factors extrapolate.

    Results that should be integers may be truncated to the level below, depending on float32 rounding. So the sums are
    written as in Pillow's ``ImagingBlend`` and torchvision's ``_blend``.
    """
    values = _to_float(graph.node)
    _set_image(graph, other + factor * (values - other) if kind == "pil" else factor * values + (1.0 - factor) * other)


@operator(Brightness)
def brightness(graph: Graph, step: Brightness) -> None:
    factor = graph.take_params(1)[0]
    _set_image(graph, graph.materialize() * factor)


@operator(Contrast)
def contrast(graph: Graph, step: Contrast) -> None:
    factor, node = graph.take_params(1)[0], graph.materialize()
    gray = _luma(graph, step.kind) if graph.channels == 3 else node
    mean = fn.reductions.mean(gray, dtype=types.FLOAT)
    _blend(graph, math.floor(mean + 0.5) if step.kind == "pil" else mean, factor, step.kind)


@operator(Saturation)
def saturation(graph: Graph, step: Saturation) -> None:
    factor = graph.take_params(1)[0]
    graph.materialize()
    _blend(graph, _to_float(_luma(graph, step.kind)), factor, step.kind)


@operator(Hue)
def hue(graph: Graph, step: Hue) -> None:
    shift, values = graph.take_params(1)[0], _to_float(graph.materialize())
    if step.kind == "pil":
        graph.node = fn.cast(_shift_hue_pillow(values, shift), dtype=types.UINT8)
    elif graph.scale is None:
        # torchvision converts back from float by multiplying with slightly less than 256 and truncating.
        graph.node = fn.cast(math.floor(_shift_hue(values / 255.0, shift) * 255.999), dtype=types.UINT8)
    else:
        graph.node = _shift_hue(values, shift)


def _hue(values: Any) -> tuple[Any, Any, Any]:
    """Return (hue in 0..1, maximum - minimum, maximum) of each pixel. Gray pixels have hue 0."""
    red, green, blue = (values[:, :, k : k + 1] for k in range(3))
    most = math.max(math.max(red, green), blue)
    spread = most - math.min(math.min(red, green), blue)
    over = spread + _to_float(spread == 0)
    r, g, b = ((most - channel) / over for channel in (red, green, blue))
    is_red = _to_float(red == most)
    is_green = _to_float(green == most) * (1.0 - is_red)
    is_blue = (1.0 - is_red) * (1.0 - is_green)
    sixths = is_red * (b - g) + is_green * (2.0 + r - b) + is_blue * (4.0 + g - r)
    turned = sixths / 6.0 + 1.0
    return (turned - math.floor(turned)) * _to_float(spread != 0), spread, most


def _sector_to_rgb(sixths: Any, p: Any, q: Any, t: Any, v: Any) -> Any:
    """Return red, green and blue from the HSV sector ``sixths`` and the candidate values of the channels."""
    sector = sixths - 6.0 * math.floor(sixths / 6.0)
    at = [_to_float(sector == float(k)) for k in range(6)]
    red = (at[0] + at[5]) * v + at[1] * q + (at[2] + at[3]) * p + at[4] * t
    green = at[0] * t + (at[1] + at[2]) * v + at[3] * q + (at[4] + at[5]) * p
    blue = (at[0] + at[1]) * p + at[2] * t + (at[3] + at[4]) * v + at[5] * q
    return fn.cat(red, green, blue, axis=2)


def _shift_hue_pillow(values: Any, shift: Any) -> Any:
    """Shift the hue by ``shift`` levels in uint8 HSV, as with Pillow's ``rgb2hsv`` and ``hsv2rgb``."""
    hue, spread, v = _hue(values)
    saturation = math.floor(spread * 255.0 / (v + _to_float(v == 0))) / 255.0
    level = math.floor(hue * 255.0) + shift
    sixths = (level - 256.0 * math.floor(level / 256.0)) * 6.0 / 255.0
    sector = math.floor(sixths)
    part = sixths - sector
    p, q, t = (math.floor(v * (1.0 - saturation * share) + 0.5) for share in (_to_float(v >= 0), part, 1.0 - part))
    return _sector_to_rgb(sector, p, q, t, v)


def _shift_hue(values: Any, shift: Any) -> Any:
    """Shift the hue of values in 0..1 by ``shift``, as with torchvision's ``_rgb_to_hsv`` and ``_hsv_to_rgb``."""
    hue, spread, v = _hue(values)
    saturation = spread / (v + _to_float(v == 0))
    hue = hue + shift
    sixths = (hue - math.floor(hue)) * 6.0
    sector = math.floor(sixths)
    part = sixths - sector
    p, q, t = (math.clamp(v * (1.0 - saturation * share), 0.0, 1.0) for share in (_to_float(v == v), part, 1.0 - part))
    return _sector_to_rgb(sector, p, q, t, v)


@operator(Invert)
def invert(graph: Graph, step: Invert) -> None:
    values = graph.materialize()
    graph.node = fn.cast(255 - values, dtype=types.UINT8) if graph.scale is None else 1.0 - values


@operator(Posterize)
def posterize(graph: Graph, step: Posterize) -> None:
    steps = math.pow(2.0, 8.0 - graph.take_params(1)[0])
    _set_image(graph, math.floor(graph.materialize() / steps) * steps)


@operator(Solarize)
def solarize(graph: Graph, step: Solarize) -> None:
    threshold, values = graph.take_params(1)[0], _to_float(graph.materialize())
    most = 255.0 if graph.scale is None else 1.0
    inverted = values + _to_float(values >= threshold) * (most - 2.0 * values)
    graph.node = fn.cast(inverted, dtype=types.UINT8) if graph.scale is None else inverted


@operator(SolarizeAdd)
def solarize_add(graph: Graph, step: SolarizeAdd) -> None:
    added, values = graph.take_params(1)[0], _to_float(graph.materialize())
    _set_image(graph, values + _to_float(values < 128.0) * added)


@operator(Sharpness)
def sharpness(graph: Graph, step: Sharpness) -> None:
    factor, values = graph.take_params(1)[0], _to_float(graph.materialize())
    smooth = filter_image(values, graph.constant(SMOOTH), graph.constant(ZERO))
    if graph.scale is None:
        smooth = math.floor(smooth + 0.5)
    # The outermost pixels do not change. There, the kernel extends beyond the image, so its result on ones is less than
    # one.
    inside = _to_float(filter_image(values[:, :, 0:1] * 0.0 + 1.0, graph.constant(SMOOTH), graph.constant(ZERO)) > 0.99)
    if graph.scale is None:
        # The formula of Pillow and v2. On tensors, v1 differs from it by float rounding.
        _blend(graph, values + inside * (smooth - values), factor, "pil")
    else:
        # If a side has at most two pixels, torch returns the values without clamping them to 0..1.
        has_inside = fn.reductions.max(inside)
        _blend(graph, values + inside * (smooth - values), factor, "tensor")
        graph.node = has_inside * graph.node + (1.0 - has_inside) * values


@operator(Autocontrast)
def autocontrast(graph: Graph, step: Autocontrast) -> None:
    node = graph.materialize()
    # Pillow computes in float64, which matters for the brightest pixels, where the product is close to 255.
    dtype = types.FLOAT64 if step.kind == "pil" else types.FLOAT
    ends = (reduce(node, axes=[0, 1], keep_dims=True) for reduce in (fn.reductions.min, fn.reductions.max))
    values, least, most = (fn.cast(each, dtype=dtype) for each in (node, *ends))
    flat = fn.cast(most <= least, dtype=dtype)
    scale = types.Constant(255.0 if graph.scale is None else 1.0, dtype=dtype) / (most - least + flat)
    stretched = values * scale + -least * scale if step.kind == "pil" else (values - least) * scale
    _set_image(graph, flat * values + (1.0 - flat) * stretched)


@operator(Equalize)
def equalize(graph: Graph, step: Equalize) -> None:
    """Equalize like Pillow's ``ImageOps.equalize``, using DALI's operator, which is OpenCV's ``equalizeHist``.

    Let ``below`` be the number of pixels darker than a level, ``most`` the number of pixels darker than the maximum,
    and ``width`` be ``most // 255``. Pillow maps the level to ``(width // 2 + below) // width``. OpenCV maps it to
    ``255 * below / most``, rounded, for the negative image. The result is converted from one divisor to the other.
    """
    node = graph.materialize()
    parts = 255 - _to_float(equalized(fn.cast(255 - node, dtype=types.UINT8)))
    darker = node < fn.reductions.max(node, axes=[0, 1], keep_dims=True)
    most = fn.reductions.sum(fn.cast(darker, dtype=types.INT32), axes=[0, 1], keep_dims=True)
    width = most // 255
    is_flat = _to_float(width == 0)
    divisor = _to_float(width) + is_flat
    levels = math.floor(parts * (_to_float(most) / (255.0 * divisor)) + _to_float(width // 2) / divisor)
    _set_image(graph, is_flat * _to_float(node) + (1.0 - is_flat) * levels)


@operator(ChannelOrder)
def channel_order(graph: Graph, step: ChannelOrder) -> None:
    order, node = fn.cast(graph.take_params(3), dtype=types.INT32), graph.materialize()
    graph.node = fn.cat(*(fn.slice(node, start=order[k : k + 1], shape=[1], axes=[2]) for k in range(3)), axis=2)
