"""Blur, and boxes that are erased."""

from __future__ import annotations

from .._dali import fn, types
from ..transforms.corrupt import Blur, Erase
from .graph import Graph, operator


@operator(Blur)
def blur(graph: Graph, step: Blur) -> None:
    sigma, node = graph.drawn(1)[0], graph.settle()
    blurred = fn.gaussian_blur(node, sigma=sigma, window_size=list(step.window), dtype=types.FLOAT)
    graph.node = fn.cast(blurred, dtype=types.UINT8) if graph.scale is None else blurred


@operator(Erase)
def erase(graph: Graph, step: Erase) -> None:
    box, node = graph.drawn(4), graph.settle()
    region = {"anchor": box[0:2], "shape": box[2:4], "axes": [0, 1]}
    graph.node = fn.erase(node, fill_value=list(step.value), **region)
