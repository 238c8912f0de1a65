"""Branches: a choice between sequences of steps, made per image."""

from __future__ import annotations

from typing import Any

from ...transforms.plan import OneOf
from ..api import merge, split
from .graph import Graph, operator


@operator(OneOf)
def one_of(graph: Graph, step: OneOf) -> None:
    """Split the batch across the branches, halving them recursively, and merge it in the original order.

    Each branch processes only its own images, so every image is processed once, regardless of the number of branches.
    """
    node, column = graph.materialize(), graph.column
    graph.take_params(step.num_params)
    parts: list[Graph] = []

    def split_range(first: int, end: int, node: Any, row: Any, *forks: tuple[Any, int]) -> Any:
        if end - first == 1:
            part = graph.branch(node, row, column + 1, forks)
            part.add(step.branches[first])
            parts.append(part)
            return part.materialize()
        middle = (first + end) // 2
        low = row[column] < float(middle)
        nodes, rows = split(node, low), split(row, low)
        return merge(
            split_range(first, middle, nodes[0], rows[0], *forks, (low, 0)),
            split_range(middle, end, nodes[1], rows[1], *forks, (low, 1)),
            low,
        )

    graph.node = split_range(0, len(step.branches), node, graph.row)
    graph.scale, graph.channels = parts[0].scale, parts[0].channels
