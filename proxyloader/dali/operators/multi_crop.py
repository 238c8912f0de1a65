"""Several crops of one image."""

from __future__ import annotations

from ...transforms.multi_crop import Views
from .graph import Graph, operator


@operator(Views)
def views(graph: Graph, step: Views) -> None:
    node = graph.materialize()
    for branch in step.branches:
        view = graph.branch(node, graph.row, graph.column)
        view.add(branch)
        graph.column = view.column
        graph.views.append(view)
