"""Blur, JPEG compression, noise and random erasing."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...transforms.augment import OUTER_FACTOR, Add, Blur, BoxBlur, Erase, EraseByColor, EraseWithNoise, JpegCompression
from ..api import filter_image, fn, math, types
from .graph import Graph, operator


@operator(Blur)
def blur(graph: Graph, step: Blur) -> None:
    sigma, node = graph.take_params(1)[0], graph.materialize()
    blurred = fn.gaussian_blur(node, sigma=sigma, window_size=list(step.window), dtype=types.FLOAT)
    graph.node = fn.cast(blurred, dtype=types.UINT8) if graph.scale is None else blurred


@operator(BoxBlur)
def box_blur(graph: Graph, step: BoxBlur) -> None:
    """Box blur. Sums are integers, exact in float32. Means are float64, because many are halfway between levels."""
    drawn, values = graph.take_params(5), fn.cast(graph.materialize(), dtype=types.FLOAT)
    near, far, one = drawn[0:1], drawn[1:2], graph.constant(np.ones(1, np.float32))
    full, last = (fn.cast(drawn[k], dtype=types.FLOAT64) for k in (2, 3))
    kernel = fn.cat(far, near, one, near, far)
    for shape in [1, 5], [5, 1]:
        for _ in range(3):
            both = filter_image(values, fn.reshape(kernel, shape=shape))
            outer = math.floor(both / OUTER_FACTOR)
            inner = fn.cast(both - outer * OUTER_FACTOR, dtype=types.FLOAT64)
            mean = (inner * full + fn.cast(outer, dtype=types.FLOAT64) * last) / 2.0**24
            values = fn.cast(math.floor(mean + 0.5), dtype=types.FLOAT)
    graph.node = fn.cast(values, dtype=types.UINT8)


@operator(JpegCompression)
def compress(graph: Graph, step: JpegCompression) -> None:
    """JPEG compression on the CPU, where DALI uses the JPEG library. Its GPU operator gives different results."""
    quality, node = fn.cast(graph.take_params(1)[0], dtype=types.INT32), graph.materialize()
    if graph.options.device_id is not None:
        node = node.cpu()
    if graph.channels == 1:  # the operator needs three channels
        node = fn.cat(node, node, node, axis=2)
    node = fn.jpeg_compression_distortion(node, quality=quality)[:, :, : graph.channels]
    graph.node = fn.reshape(node if graph.options.device_id is None else node.gpu(), layout="HWC")


@operator(Erase)
def erase(graph: Graph, step: Erase) -> None:
    graph.node = _erase(graph.materialize(), graph.take_params(4), list(step.value))


@operator(EraseByColor)
def erase_by_color(graph: Graph, step: EraseByColor) -> None:
    node, drawn = graph.materialize(), graph.take_params(step.num_params)
    graph.node = _erase(node, drawn, drawn[4 : step.num_params])


def _erase(node: Any, box: Any, value: Any) -> Any:
    return fn.erase(node, fill_value=value, anchor=box[0:2], shape=box[2:4], axes=[0, 1])


@operator(EraseWithNoise)
def paste(graph: Graph, step: EraseWithNoise) -> None:
    drawn, node = graph.take_params(5), graph.materialize()
    box = fn.cast(drawn[0:4], dtype=types.INT32)
    channels = graph.constant(np.array([graph.channels], np.int32))
    patch = graph.array(drawn[4], fn.cat(math.max(box[2:4], 1), channels))
    # The patch is zero-padded to the size of the image and added to the image, which is zero there.
    whole: dict[str, Any] = {"start": -box[0:2], "shape": node.shape(dtype=types.INT32)[0:2], "axes": [0, 1]}
    placed = fn.slice(patch, **whole, out_of_bounds_policy="pad", fill_values=[0.0])
    graph.node = _erase(node, drawn, [0.0]) + placed


@operator(Add)
def add(graph: Graph, step: Add) -> None:
    where, node = graph.take_params(1)[0], graph.materialize()
    values = node + graph.array(where, node.shape(dtype=types.INT32))
    if step.clip:
        values = math.clamp(values, 0.0, 255.0 if graph.scale is None else 1.0)
    elif graph.scale is None:
        values -= 256.0 * math.floor(values / 256.0)
    graph.node = fn.cast(values, dtype=types.UINT8) if graph.scale is None else values
