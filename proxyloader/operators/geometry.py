"""Crop, resize, flip."""

from __future__ import annotations

from typing import Any

from .._dali import fn, math, types
from ..transforms.geometry import Crop, Flip, ReflectedCrop, Resize
from .graph import Graph, operator

INTERPOLATIONS = {
    "nearest": types.INTERP_NN,
    "bilinear": types.INTERP_LINEAR,
    "bicubic": types.INTERP_CUBIC,
    "lanczos": types.INTERP_LANCZOS3,
}

FILTER_REACH = {"bilinear": 1, "bicubic": 2, "lanczos": 3}
"""How far a filter reaches to each side, in pixels of the smaller image."""

EXACT_EDGES_BELOW = 128
"""Images resized to a side shorter than this, in pixels, get edges as torchvision makes them. In larger ones the frame,
one pixel wide (two where bicubic), is a few levels off, which is too little to spend half as much CPU time again on."""


@operator(Crop)
def crop(graph: Graph, step: Crop) -> None:
    box = fn.cast(graph.drawn(4), dtype=types.INT32)
    start, shape = box[0:2], box[2:4]
    region = {"start": start, "shape": shape, "axes": [0, 1]}
    if graph.node is None and graph.mirror is None and step.region.inside and graph.options.device_id is None:
        # On the CPU only what the crop needs is decoded. The pixels are the same, but for crops one pixel wide at the
        # side of a 4:2:0 image, which are a few levels off. On the engines it saves nothing.
        graph.node = fn.decoders.image_slice(graph.encoded, **region, **graph.decoder("decoders__ImageSlice"))
        return
    node = graph.settle()
    if not step.region.inside:
        region |= {"out_of_bounds_policy": "pad", "fill_values": list(step.fill)}
    graph.node = fn.slice(node, **region)


@operator(ReflectedCrop)
def reflected_crop(graph: Graph, step: ReflectedCrop) -> None:
    """Out of the image with a mirror image on each side, first left and right, and then above and below these three."""
    box, node = fn.cast(graph.drawn(4), dtype=types.INT32), graph.settle()
    beyond = math.max(node.shape(dtype=types.INT32)[0:2] - 1, 1)
    for axis in (1, 0):
        mirrored = fn.flip(node, horizontal=axis, vertical=1 - axis)
        side = {"shape": beyond[axis : axis + 1], "axes": [axis], "out_of_bounds_policy": "pad"}
        node = fn.cat(fn.slice(mirrored, start=[0], **side), node, fn.slice(mirrored, start=[1], **side), axis=axis)
    graph.node = fn.slice(node, start=box[0:2] + beyond, shape=box[2:4], axes=[0, 1])


@operator(Resize)
def resize(graph: Graph, step: Resize) -> None:
    size, node = graph.drawn(2), graph.settle()
    how = {"size": size, "interp_type": INTERPOLATIONS[step.interpolation], "antialias": step.antialias}
    side = min(step.target) if step.target else step.shorter or step.max_size or 0
    small = side < EXACT_EDGES_BELOW or step.interpolation == "lanczos"  # whose edges are off far into the image
    if step.antialias and step.interpolation in FILTER_REACH and small:
        resized = _resized_with_exact_edges(node, graph.channels, FILTER_REACH[step.interpolation], size, how)
        graph.node = fn.cast(resized, dtype=types.UINT8) if graph.scale is None else resized
    else:
        graph.node = fn.resize(node, **how)


def _resized_with_exact_edges(node: Any, colors: int, reach: int, size: Any, how: dict[str, Any]) -> Any:
    """Where the filter reaches beyond the image, Pillow and torch leave that part of it out; DALI repeats the edge.

    So zeros are put around the image, and a channel of ones beside its colours; resized alike, it is the sum of the
    weights that fell inside, which the colours are divided by.
    """
    pad: dict[str, Any] = {"out_of_bounds_policy": "pad"}
    shape = node.shape(dtype=types.INT32)[0:2]
    around = fn.cast(reach * (shape / size + 1), dtype=types.INT32)
    node = fn.slice(node, start=[0], shape=[colors + 1], axes=[2], fill_values=[0.0] * colors + [1.0], **pad)
    node = fn.slice(node, start=-around, shape=shape + 2 * around, axes=[0, 1], fill_values=[0.0], **pad)
    start, end = (fn.cast(corner, dtype=types.FLOAT) for corner in (around, around + shape))
    sums: Any = fn.resize(node, roi_start=start, roi_end=end, dtype=types.FLOAT, **how)
    return sums[:, :, :colors] / sums[:, :, colors:]


@operator(Flip)
def flip(graph: Graph, step: Flip) -> None:
    wanted = fn.cast(graph.drawn(1)[0], dtype=types.INT32)
    if step.axis == "vertical":
        graph.node = fn.flip(graph.decoded(), horizontal=0, vertical=wanted)
    else:
        graph.settle_mirror()
        graph.mirror = wanted
