"""Crop, flip and index-select operators."""

from __future__ import annotations

from typing import Any

from ...transforms.geometry import Crop, Flip, IndexSelect, ReflectedCrop
from ..api import fn, math, types
from .graph import Graph, operator


@operator(Crop)
def crop(graph: Graph, step: Crop) -> None:
    box = fn.cast(graph.take_params(4), dtype=types.INT32)
    start, shape = box[0:2], box[2:4]
    region = {"start": start, "shape": shape, "axes": [0, 1]}
    if graph.node is None and graph.mirror is None and step.region.inside and graph.options.device_id is None:
        # On the CPU, only the crop is decoded. The pixels are the same, except in crops one pixel wide at the side of a
        # 4:2:0 image, which differ by a few levels. On an H200, whose engines decode whole images, decoding only the
        # crop takes seven times as long (benchmarks/results/parts.jsonl).
        graph.node = fn.decoders.image_slice(graph.encoded, **region, **graph.decoder("decoders__ImageSlice"))
        return
    node = graph.materialize()
    if not step.region.inside:
        region |= {"out_of_bounds_policy": "pad", "fill_values": list(step.fill)}
    graph.node = fn.slice(node, **region)


@operator(ReflectedCrop)
def reflected_crop(graph: Graph, step: ReflectedCrop) -> None:
    """Crop from the image, reflected first on the left and right, then above and below."""
    box, node = fn.cast(graph.take_params(4), dtype=types.INT32), graph.materialize()
    beyond = math.max(node.shape(dtype=types.INT32)[0:2] - 1, 1)
    for axis in (1, 0):
        mirrored = fn.flip(node, horizontal=axis, vertical=1 - axis)
        side = {"shape": beyond[axis : axis + 1], "axes": [axis], "out_of_bounds_policy": "pad"}
        node = fn.cat(fn.slice(mirrored, start=[0], **side), node, fn.slice(mirrored, start=[1], **side), axis=axis)
    graph.node = fn.slice(node, start=box[0:2] + beyond, shape=box[2:4], axes=[0, 1])


@operator(Flip)
def flip(graph: Graph, step: Flip) -> None:
    wanted = fn.cast(graph.take_params(1)[0], dtype=types.INT32)
    if step.axis == "vertical":
        graph.node = fn.flip(graph.decoded(), horizontal=0, vertical=wanted)
    else:
        graph.apply_mirror()
        graph.mirror = wanted


@operator(IndexSelect)
def lines(graph: Graph, step: IndexSelect) -> None:
    drawn, node = fn.cast(graph.take_params(3), dtype=types.INT32), graph.materialize()
    height, width = drawn[0:1], drawn[1:2]
    numbers = fn.cast(graph.attached(drawn[2], height + width), dtype=types.INT32)
    if step.fill:  # prepended as a row and a column
        shape, fill = node.shape(dtype=types.INT32)[0:2] + 1, list(step.fill)
        node = fn.slice(node, start=[-1, -1], shape=shape, axes=[0, 1], out_of_bounds_policy="pad", fill_values=fill)
        numbers += 1
    # The operator selects along the first dimension, so columns are transposed to it and back.
    node = _take(node, fn.slice(numbers, start=[0], shape=height, axes=[0]))
    node = _take(fn.transpose(node, perm=[1, 2, 0]), fn.slice(numbers, start=height, shape=width, axes=[0]))
    graph.node = fn.reshape(fn.transpose(node, perm=[2, 0, 1]), layout="HWC")


def _take(node: Any, which: Any) -> Any:
    """Select indices along the first dimension, which DALI requires to be named ``F``."""
    return fn.sequence_rearrange(fn.reshape(node, layout="FXY"), new_order=which)
