"""Resize, with torchvision's edges."""

from __future__ import annotations

from typing import Any

from ...transforms.resize import Resize
from ..api import fn, types
from .graph import Graph, operator

INTERPOLATIONS = {
    "bilinear": types.INTERP_LINEAR,
    "bicubic": types.INTERP_CUBIC,
    "lanczos": types.INTERP_LANCZOS3,
}

FILTER_REACH = {"bilinear": 1, "bicubic": 2, "lanczos": 3}
"""Radius of a filter, in pixels of the smaller image."""


@operator(Resize)
def resize(graph: Graph, step: Resize) -> None:
    sizes = [graph.take_params(2) for _ in range(step.num_params // 2)]
    graph.materialize()
    if step.has_exact_edges:
        for size in sizes:
            _resize_with_exact_edges(graph, step, size)
    else:
        # One pass per side, as in Pillow, is slow on a CPU: DALI also resamples the other side, at the same size.
        for size in sizes if graph.options.device_id is not None else sizes[-1:]:
            _resize(graph, step, size)


def _resize(graph: Graph, step: Resize, size: Any, **region: Any) -> None:
    how = {"interp_type": INTERPOLATIONS[step.interpolation], "antialias": step.antialias}
    graph.node = fn.resize(graph.node, size=size, **how, **region)


def _resize_with_exact_edges(graph: Graph, step: Resize, size: Any) -> None:
    """Resize with the edges of Pillow and torch, which ignore the part of the filter outside the image.

    DALI repeats the edge instead. So the image is zero-padded and gets an additional channel of ones. After the resize,
    this channel is the sum of the weights inside the image, by which the colors are divided.
    """
    node, colors, reach = graph.node, graph.channels, FILTER_REACH[step.interpolation]
    pad: dict[str, Any] = {"out_of_bounds_policy": "pad"}
    shape = node.shape(dtype=types.INT32)[0:2]
    around = fn.cast(reach * (shape / size + 1), dtype=types.INT32)
    node = fn.slice(node, start=[0], shape=[colors + 1], axes=[2], fill_values=[0.0] * colors + [1.0], **pad)
    graph.node = fn.slice(node, start=-around, shape=shape + 2 * around, axes=[0, 1], fill_values=[0.0], **pad)
    start, end = (fn.cast(corner, dtype=types.FLOAT) for corner in (around, around + shape))
    _resize(graph, step, size, roi_start=start, roi_end=end, dtype=types.FLOAT)
    sums = graph.node
    resized: Any = sums[:, :, :colors] / sums[:, :, colors:]
    graph.node = fn.cast(resized, dtype=types.UINT8) if graph.scale is None else resized
