"""Crop, flip."""

from __future__ import annotations

from .._dali import fn, types
from ..transforms.geometry import Crop, Flip
from .graph import Graph, operator


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


@operator(Flip)
def flip(graph: Graph, step: Flip) -> None:
    wanted = fn.cast(graph.drawn(1)[0], dtype=types.INT32)
    if step.axis == "vertical":
        graph.node = fn.flip(graph.decoded(), horizontal=0, vertical=wanted)
    else:
        graph.settle_mirror()
        graph.mirror = wanted
