"""Build a DALI pipeline from a Plan. The pipeline is a pure function of encoded bytes and sampled parameters."""

from __future__ import annotations

import itertools
from typing import Any

from ..transforms.plan import Branch, ImageState, Plan
from . import jpeg_engines
from .api import OperatorConcurrency, Pipeline, fn, operators_between, pipeline_def, types
from .fused_normalize import split
from .operators import Graph
from .operators import PipelineOptions as PipelineOptions


def build_pipeline(plan: Plan, options: PipelineOptions) -> Pipeline:
    """Build the DALI pipeline of a plan.

    Its inputs are ``images``, (bytes,) uint8 each, and, if the plan has parameters, ``draws``, float32: the columns,
    followed by the arrays. It has ``plan.output.images`` outputs. Each is a batch of tensors (C, H, W), or (H, W, C)
    with ``options.channels_last``, floating-point or uint8, on ``options.device_id`` or the CPU.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is not enough memory, on the GPU or on the CPU.
    """

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=options.batch_size,
        num_threads=options.threads,
        device_id=options.device_id,
        prefetch_queue_depth=options.prefetch_queue_depth,
        exec_dynamic=True,
        # Many operators run on a GPU in less time than it takes to launch them, so several threads launch them. On a
        # CPU, DALI runs one operator at a time.
        concurrency=OperatorConcurrency.FULL,
    )
    def proxyloader_plan() -> Any:
        images = fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8)
        draws = fn.external_source(name="draws", no_copy=True, ndim=1, dtype=types.FLOAT) if plan.num_params else None
        return tuple(Graph(options, images, draws, plan.num_params).outputs(plan.steps))

    pipeline = proxyloader_plan()
    jpeg_engines.build(pipeline)
    return pipeline


def operators_of(steps: Branch, device_id: int | None = None) -> list[list[str]]:
    """Return the DALI operators that each step of a plan adds to the graph, by their names in ``fn``.

    There is a list for each step, of which there must be at least one, and one for the output. The list of a deferred
    step is empty, as later operators perform it.
    """
    with Pipeline(1, 1, device_id, exec_dynamic=True):
        encoded, draws = (fn.external_source(name=name) for name in ("images", "draws"))
        graph = Graph(PipelineOptions(1, device_id), encoded, draws, sum(step.num_params for step in steps))
        in_dali, last = (steps, ()) if device_id is None else split(steps)
        output, *_ = graph.outputs(in_dali)
        reached = [encoded, *(encoded if node is None else node for node in graph.reached)]
        # A Normalize at the end produces the output.
        reached = [*reached, *reached[-1:] * len(last), output, output][: len(steps) + 2]
        return [operators_between(before, after) for before, after in itertools.pairwise(reached)]


def operators_of_branch(steps: Branch, state: ImageState, device_id: int | None = None) -> list[str]:
    """Return the DALI operators of a branch, by their names in ``fn``. ``state`` is the state before the branch."""
    with Pipeline(1, 1, device_id, exec_dynamic=True):
        image, draws = (fn.external_source(name=name) for name in ("images", "draws"))
        graph = Graph(PipelineOptions(1, device_id), None, draws, sum(step.num_params for step in steps))
        image = image if device_id is None else image.gpu()
        graph.node, graph.channels = image, state.channels
        graph.scale = None if state.dtype == "uint8" else 1.0
        graph.add(steps)
        return operators_between(image, graph.materialize())
