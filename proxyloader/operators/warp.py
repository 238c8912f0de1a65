"""Affine and perspective warps, with Pillow's edges for PIL images and torch's for tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._dali import fn, math, types
from ..transforms.warp import Affine, Perspective
from .graph import Graph, operator

INTERPOLATIONS = {"nearest": types.INTERP_NN, "bilinear": types.INTERP_LINEAR}

Warp = Callable[..., Any]
"""Takes a node, and as ``interp_type`` and ``fill_value`` what DALI's warps take. No fill: the outermost pixel."""


@operator(Affine)
def affine(graph: Graph, step: Affine) -> None:
    numbers = graph.drawn(8)
    size, matrix = numbers[0:2], fn.reshape(numbers[2:8], shape=[2, 3])

    def warp(node: Any, **how: Any) -> Any:
        return fn.warp_affine(node, matrix, size=size, inverse_map=True, **how)

    _warp(graph, warp, step)


@operator(Perspective)
def perspective(graph: Graph, step: Perspective) -> None:
    numbers = graph.drawn(8)
    one = graph.constant(np.ones(1, np.float32))
    matrix = fn.reshape(fn.cat(numbers, one), shape=[3, 3])
    if graph.options.device_id is not None:
        matrix = matrix.gpu()

    def warp(node: Any, fill_value: float | None = None, **how: Any) -> Any:
        border = {"border_mode": "replicate"} if fill_value is None else {"fill_value": [fill_value] * 1}
        return fn.experimental.warp_perspective(node, matrix, inverse_map=True, pixel_origin="corner", **border, **how)

    _warp(graph, warp, step)


def _warp(graph: Graph, warp: Warp, step: Affine | Perspective) -> None:
    node, fill = graph.settle(), step.fill
    interpolation = INTERPOLATIONS[step.interpolation]
    if step.interpolation == "nearest" and len(set(fill)) <= 1:
        graph.node = warp(node, interp_type=interpolation, fill_value=fill[0] if fill else 0.0)
        return
    # A channel of ones, warped alike, is the share that comes from inside: 0 or 1, and for a bilinear warp of a tensor
    # what lies between, as torch blends into the fill where Pillow repeats the outermost pixel.
    blends = step.kind == "tensor" and step.interpolation == "bilinear"
    ones = fn.cast(node[:, :, 0:1] * 0 + 1, dtype=types.FLOAT)
    share = warp(ones, interp_type=interpolation if blends else types.INTERP_NN, fill_value=0.0)
    values = fn.cast(node, dtype=types.FLOAT)
    values = warp(values, interp_type=interpolation, **{"fill_value": 0.0} if blends else {})
    if fill or not blends:
        values *= share  # for tensors once more: torchvision multiplies what is blended with zeros already
    if any(fill):
        values += (1.0 - share) * graph.constant(np.array(fill, np.float32).reshape(1, 1, -1))
    if graph.scale is None:
        # Pillow cuts off after the point, torch rounds.
        values = fn.cast(values if step.kind == "tensor" else math.floor(values + 1e-4), dtype=types.UINT8)
    graph.node = fn.reshape(values, layout="HWC")
