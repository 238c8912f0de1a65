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
"""How far a filter reaches to each side, in pixels of the smaller image."""

EXACT_EDGES_BELOW = 128
"""Images resized to a side shorter than this, in pixels, get edges as torchvision makes them. In larger ones the frame,
one pixel wide (two where bicubic), is a few levels off, which is too little to spend half as much CPU time again on."""


@operator(Resize)
def resize(graph: Graph, step: Resize) -> None:
    sizes = [graph.take_params(2) for _ in range(step.num_params // 2)]
    graph.materialize()
    # The edges of Lanczos are off far into the image.
    if step.antialias and (step.to.least_edge < EXACT_EDGES_BELOW or step.interpolation == "lanczos"):
        for size in sizes:
            _resized_with_exact_edges(graph, step, size)
    else:
        # A pass for each side, as Pillow has, is dear on a CPU: DALI resizes the other side, too, to what it is.
        for size in sizes if graph.options.device_id is not None else sizes[-1:]:
            _resized(graph, step, size)


def _resized(graph: Graph, step: Resize, size: Any, **region: Any) -> None:
    how = {"interp_type": INTERPOLATIONS[step.interpolation], "antialias": step.antialias}
    graph.node = fn.resize(graph.node, size=size, **how, **region)


def _resized_with_exact_edges(graph: Graph, step: Resize, size: Any) -> None:
    """Where the filter reaches beyond the image, Pillow and torch leave that part of it out; DALI repeats the edge.

    So zeros are put around the image, and a channel of ones beside its colours; resized alike, it is the sum of the
    weights that fell inside, which the colours are divided by.
    """
    node, colors, reach = graph.node, graph.channels, FILTER_REACH[step.interpolation]
    pad: dict[str, Any] = {"out_of_bounds_policy": "pad"}
    shape = node.shape(dtype=types.INT32)[0:2]
    around = fn.cast(reach * (shape / size + 1), dtype=types.INT32)
    node = fn.slice(node, start=[0], shape=[colors + 1], axes=[2], fill_values=[0.0] * colors + [1.0], **pad)
    graph.node = fn.slice(node, start=-around, shape=shape + 2 * around, axes=[0, 1], fill_values=[0.0], **pad)
    start, end = (fn.cast(corner, dtype=types.FLOAT) for corner in (around, around + shape))
    _resized(graph, step, size, roi_start=start, roi_end=end, dtype=types.FLOAT)
    sums = graph.node
    resized: Any = sums[:, :, :colors] / sums[:, :, colors:]
    graph.node = fn.cast(resized, dtype=types.UINT8) if graph.scale is None else resized
