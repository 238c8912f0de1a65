"""Multiple crops per image."""

from __future__ import annotations

from ...transforms.multi_crop import Views
from .graph import Graph, operator


@operator(Views)
def views(graph: Graph, step: Views) -> None:
    node = graph.materialize()
    graph.views = [graph.apply_branch(branch, node) for branch in step.branches]
