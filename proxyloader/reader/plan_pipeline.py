"""A torchvision transform after DALI's reader: its plan, whose parameters depend only on the size of each image.

There are no workers to draw random numbers, and torch's generator belongs to the training loop. So transforms that draw
random numbers are refused here. Others, as for validation, return the pixels of ``DataLoader``. Main process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dali.api import Pipeline, fn, pipeline_def, upright
from ..dali.operators import Graph, PipelineOptions
from ..data.compiled_transform import compile_transforms
from ..errors import UnsupportedTransformError
from ..transforms.plan import Plan, iter_steps


def plan_without_chance(transform: Any) -> Plan:
    """Return the plan of a transform of torchvision or timm, or of one that was compiled.

    Raises:
        UnsupportedTransformError: it draws random numbers, returns several images, or is not translated.
    """
    plan: Plan = compile_transforms(transform).plan
    drawn = sorted({step.params_doc for step in iter_steps(plan.steps) if step.params_doc})
    if drawn:
        raise UnsupportedTransformError(
            f"the transform draws random numbers ({'; '.join(drawn)}), which needs workers, and DALI's reader has "
            "none. With the transform as it is: proxyloader.DataLoader(ImageFolder(root, transform), ...). With DALI's "
            "reader: pipelines.training, which draws numbers of its own",
            code="random",
        )
    if plan.output.images > 1:
        raise UnsupportedTransformError(
            f"the transform makes {plan.output.images} images of one; use proxyloader.DataLoader(ImageFolder(root, "
            "transform), ...)",
            code="several-images",
        )
    return plan


@pipeline_def(exec_dynamic=True)  # type: ignore[untyped-decorator,unused-ignore]
def transformed(source: Callable[[], tuple[Any, ...]], *, plan: Plan, hw_decoder_load: float = 1.0) -> Any:
    """Read images with ``source``, apply a plan of ``plan_without_chance``, and return other outputs unchanged."""
    encoded, *others = source()
    pipeline = Pipeline.current()
    options = PipelineOptions(pipeline.max_batch_size, pipeline.device_id, hw_decoder_load=hw_decoder_load)
    rows = None
    if plan.num_params:

        def row(shape: NDArray[np.int64]) -> NDArray[np.float32]:
            return plan.sample_params(int(shape[0]), int(shape[1]))

        how: dict[str, Any] = upright("PeekImageShape")
        rows = fn.python_function(fn.peek_image_shape(encoded, **how), function=row)
    (images,) = Graph(options, encoded, rows, plan.num_params).outputs_of(plan.steps)
    return images, *(other.gpu() if pipeline.device_id is not None else other for other in others)
