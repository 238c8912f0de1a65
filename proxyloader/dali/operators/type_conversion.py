"""Conversion to float, and normalization."""

from __future__ import annotations

from ...transforms.type_conversion import Normalize, ToFloat, ToTensor
from .graph import Graph, operator


@operator(ToTensor)
def to_tensor(graph: Graph, step: ToTensor) -> None:
    """The layout changes only in the output."""


@operator(ToFloat)
def to_float(graph: Graph, step: ToFloat) -> None:
    graph.scale = 1 / 255 if step.scale else 1.0


@operator(Normalize)
def normalize(graph: Graph, step: Normalize) -> None:
    graph.node = graph.normalized(step.mean, step.std, "HWC")
