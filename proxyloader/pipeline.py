"""From a Plan to a DALI pipeline: a pure function of encoded bytes and drawn numbers. Nothing random happens in it."""

from __future__ import annotations

from typing import Any

from ._dali import Pipeline, fn, pipeline_def, types
from .operators import Graph
from .operators import PipelineOptions as PipelineOptions
from .transforms.plan import Plan


def build_pipeline(plan: Plan, options: PipelineOptions) -> Pipeline:
    """Build the DALI pipeline of a plan.

    Its inputs are ``images``, (bytes,) uint8 each, and, where the plan draws anything, ``draws``, (columns,) float32
    and the arrays behind them. Its output is a batch of tensors (C, H, W), float32 or uint8, on ``options.device_id``
    or the CPU.
    """

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=options.batch_size,
        num_threads=options.threads,
        device_id=options.device_id,
        prefetch_queue_depth=options.prefetch_queue_depth,
        exec_dynamic=True,
    )
    def proxyloader_plan() -> Any:
        images = fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8)
        draws = fn.external_source(name="draws", no_copy=True, ndim=1, dtype=types.FLOAT) if plan.columns else None
        return Graph(options, images, draws, plan.columns).output_of(plan.steps)

    pipeline = proxyloader_plan()
    pipeline.build()
    return pipeline
