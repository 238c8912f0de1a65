"""Affine and perspective warps, with the edges of Pillow for PIL images and of torch for tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...transforms.warp import Affine, BicubicAffine, Perspective
from ..api import fn, math, types
from .graph import Graph, operator

INTERPOLATIONS = {"nearest": types.INTERP_NN, "bilinear": types.INTERP_LINEAR}

PILLOW_CUBIC = np.array([[0, 1, 0, 0], [-1, 0, 1, 0], [2, -2, 1, -1], [-1, 1, -1, 1]], np.float32)
"""Coefficients of four pixels for each power of the distance from the second one, as ``BICUBIC`` in ``Geometry.c``."""

MAX_PIXELS = 65536
"""Maximum number of pixels along a side."""

Warp = Callable[..., Any]
"""Takes a node, and ``interp_type`` and ``fill_value`` like DALI's warps. Without a fill, edge pixels repeat."""


@operator(Affine)
def affine(graph: Graph, step: Affine) -> None:
    numbers = graph.take_params(8)
    size, matrix = numbers[0:2], fn.reshape(numbers[2:8], shape=[2, 3])
    if step.kind == "tensor":
        shape = graph.materialize().shape(dtype=types.FLOAT)
        sides, new_sides = fn.stack(shape[1], shape[0]), fn.stack(numbers[1], numbers[0])
        turned = fn.reductions.sum(matrix[:, 0:2] * fn.reshape(new_sides, shape=[1, 2]), axes=[1])
        shift = fn.reshape(matrix[:, 2] + 0.5 * (sides - turned), shape=[2, 1])
        matrix = fn.cat(matrix[:, 0:2], shift, axis=1)

    def warp(node: Any, **how: Any) -> Any:
        return fn.warp_affine(node, matrix, size=size, inverse_map=True, **how)

    _warp(graph, warp, step)


@operator(Perspective)
def perspective(graph: Graph, step: Perspective) -> None:
    numbers = graph.take_params(8)
    one = graph.constant(np.ones(1, np.float32))
    matrix = fn.reshape(fn.cat(numbers, one), shape=[3, 3])
    if graph.options.device_id is not None:
        matrix = matrix.gpu()

    def warp(node: Any, fill_value: float | None = None, **how: Any) -> Any:
        border = {"border_mode": "replicate"} if fill_value is None else {"fill_value": [fill_value] * 1}
        return fn.experimental.warp_perspective(node, matrix, inverse_map=True, pixel_origin="corner", **border, **how)

    _warp(graph, warp, step)


@operator(BicubicAffine)
def bicubic_affine(graph: Graph, step: BicubicAffine) -> None:
    """Bicubic warp like Pillow's ``bicubic_filter``: a cubic along each of four rows, and one through their results.

    DALI has no bicubic warp. So the 4 x 4 pixels around each position are stacked as channels, and a nearest-neighbor
    warp gathers them. Another one gathers the index of the first of these pixels, from whose distance to the position
    the weights are computed. If float32 rounds a position to a neighboring pixel, both warps use that pixel, and the
    weights match it.
    """
    numbers, node = graph.take_params(8), graph.materialize()
    height, width = (node.shape(dtype=types.FLOAT)[axis] for axis in (0, 1))

    def nearest(image: Any, matrix: Any, size: Any, **how: Any) -> Any:
        matrix = fn.reshape(matrix, shape=[2, 3])
        return fn.warp_affine(image, matrix, size=size, inverse_map=True, interp_type=types.INTERP_NN, **how)

    # Beyond the image, Pillow repeats the outermost pixels, like a warp without a fill.
    two_away = graph.constant(np.array([1, 0, -2, 0, 1, -2], np.float32))
    around = nearest(node, two_away, fn.stack(height + 4.0, width + 4.0))
    window = {"shape": fn.cast(fn.stack(height, width) + 1.0, dtype=types.INT32), "axes": [0, 1]}
    stack = fn.cat(*(fn.slice(around, start=[y, x], **window) for y in range(4) for x in range(4)), axis=2)
    row, column = _arange(graph, height + 1.0, 0), _arange(graph, width + 1.0, 1)
    # The center of the second pixel of a window is half a pixel after the index of the window.
    matrix = numbers[2:8] + graph.constant(np.array([0, 0, 0.5, 0, 0, 0.5], np.float32))
    pixels = nearest(stack, matrix, numbers[0:2])
    starts = nearest(fn.cat(column + 0.0 * row, row + 0.0 * column, axis=2), matrix, numbers[0:2])
    y, x = _arange(graph, numbers[0], 0) + 0.5, _arange(graph, numbers[1], 1) + 0.5
    across = _cubic(graph, matrix[0] * x + matrix[1] * y + matrix[2] - starts[:, :, 0:1])
    down = _cubic(graph, matrix[3] * x + matrix[4] * y + matrix[5] - starts[:, :, 1:2])
    # Positions share one dimension, because DALI can infer only one.
    weights = fn.reshape(down, shape=[-1, 4, 1, 1], layout="") * fn.reshape(across, shape=[-1, 1, 4, 1], layout="")
    pixels = fn.reshape(fn.cast(pixels, dtype=types.FLOAT), shape=[-1, 4, 4, graph.channels], layout="")
    values = fn.reductions.sum(pixels * weights, axes=[1, 2])
    shape = fn.cat(fn.cast(numbers[0:2], dtype=types.INT32), graph.constant(np.array([graph.channels], np.int32)))
    values = math.floor(math.clamp(fn.reshape(values, shape=shape, layout="HWC") + 1e-3, 0.0, 255.0))
    share = nearest(fn.cast(node[:, :, 0:1] * 0 + 1, dtype=types.FLOAT), numbers[2:8], numbers[0:2], fill_value=0.0)
    values = share * values + (1.0 - share) * graph.constant(np.array(step.fill, np.float32).reshape(1, 1, -1))
    graph.node = fn.reshape(fn.cast(values, dtype=types.UINT8), layout="HWC")


def _arange(graph: Graph, count: Any, axis: int) -> Any:
    """Return 0, 1, 2, ... along an axis, (count, 1, 1) or (1, count, 1). Interpolation to a power of two is exact."""
    ends = graph.placed(graph.constant(np.array([0, MAX_PIXELS], np.float32)))
    step, start, one = 1 / MAX_PIXELS, 0.5 - 0.5 / MAX_PIXELS, graph.constant(np.ones((), np.float32))
    matrix = [[step, 0, start], [0, 1, 0]] if axis else [[1, 0, 0], [0, step, start]]
    return fn.warp_affine(
        fn.reshape(ends, shape=[1, 2, 1] if axis else [2, 1, 1], layout="HWC"),
        graph.constant(np.array(matrix, np.float32)),
        size=fn.stack(one, count) if axis else fn.stack(count, one),
        inverse_map=True,
    )


def _cubic(graph: Graph, away: Any) -> Any:
    """Return the weights of four pixels, (H, W, 4), from the distance to the second one, (H, W, 1)."""
    constant, first, second, third = (graph.constant(row.reshape(1, 1, 4)) for row in PILLOW_CUBIC)
    return constant + away * (first + away * (second + away * third))


def _warp(graph: Graph, warp: Warp, step: Affine | Perspective) -> None:
    node, fill = graph.materialize(), step.fill
    interpolation, on_levels = INTERPOLATIONS[step.interpolation], graph.scale is None
    if step.interpolation == "nearest" and len(set(fill)) <= 1:
        value = fill[0] if fill else 0.0
        # Some of DALI's warps truncate a fill value, while torch rounds it.
        graph.node = warp(node, interp_type=interpolation, fill_value=float(round(value)) if on_levels else value)
        return
    # A channel of ones after the same warp is the share of the image in each pixel: 0 or 1, except in bilinear warps of
    # tensors, because torch blends the edge with the fill, while Pillow repeats the outermost pixel.
    blends = step.kind == "tensor" and step.interpolation == "bilinear"
    ones = fn.cast(node[:, :, 0:1] * 0 + 1, dtype=types.FLOAT)
    share = warp(ones, interp_type=interpolation if blends else types.INTERP_NN, fill_value=0.0)
    values = fn.cast(node, dtype=types.FLOAT)
    values = warp(values, interp_type=interpolation, **{"fill_value": 0.0} if blends else {})
    if fill or not blends:
        values *= share  # a second time for tensors, because torchvision multiplies values already blended with zeros
    if any(fill):
        values += (1.0 - share) * graph.constant(np.array(fill, np.float32).reshape(1, 1, -1))
    if on_levels:
        # Pillow truncates, torch rounds.
        values = fn.cast(values if step.kind == "tensor" else math.floor(values + 1e-4), dtype=types.UINT8)
    graph.node = fn.reshape(values, layout="HWC")
