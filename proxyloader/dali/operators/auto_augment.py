"""Weighted sums of branches, as in AugMix."""

from __future__ import annotations

from ...transforms.auto_augment import Blend, Mixture
from ..api import fn, math, types
from .graph import Graph, operator


@operator(Mixture)
def mixture(graph: Graph, step: Mixture) -> None:
    weights, node = graph.take_params(1 + len(step.branches)), graph.materialize()
    mixed = node * weights[0]
    for k, branch in enumerate(step.branches):
        part = graph.branch(node, graph.row, graph.column)
        part.add(branch)
        graph.column = part.column
        mixed += part.materialize() * weights[k + 1]
    graph.node = fn.cast(math.floor(mixed), dtype=types.UINT8)


@operator(Blend)
def blend(graph: Graph, step: Blend) -> None:
    share, node = graph.take_params(1)[0], graph.materialize()
    part = graph.branch(node, graph.row, graph.column)
    part.add(step.branch)
    graph.column = part.column
    ours, other = (fn.cast(each, dtype=types.FLOAT) for each in (node, part.materialize()))
    graph.node = fn.cast(math.floor(ours + share * (other - ours)), dtype=types.UINT8)
