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
        mixed += graph.apply_branch(branch, node).materialize() * weights[k + 1]
    graph.node = fn.cast(math.floor(mixed), dtype=types.UINT8)


@operator(Blend)
def blend(graph: Graph, step: Blend) -> None:
    share, node = graph.take_params(1)[0], graph.materialize()
    blended = graph.apply_branch(step.branch, node).materialize()
    ours, other = (fn.cast(each, dtype=types.FLOAT) for each in (node, blended))
    graph.node = fn.cast(math.floor(ours + share * (other - ours)), dtype=types.UINT8)
