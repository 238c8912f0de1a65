"""What of DALI is used to build graphs, with all that is private or differs between versions.

What is private of pipelines is in ``executor.py``.

Importing this module imports DALI. ``tests/dali/test_api.py`` holds every such name to the DALI that is installed.

NOTE [ What DALI cannot parse ]
DALI's image decoder reads the headers of a batch in several threads. Where it cannot make sense of one, it gives up
without waiting for the other threads, which go on in memory that is no longer theirs, and now and then end the process
(DALI 2.4, on a CPU). What fails later, while its pixels are decoded, does no harm. So a worker gives DALI no JPEG whose
header DALI cannot parse: ``data/jpeg_header.py`` refuses, and so leaves to Pillow, whatever is unusual there.
"""

from __future__ import annotations

import re
from typing import Any

from ..errors import MissingDaliError

try:
    from nvidia.dali import OperatorConcurrency as OperatorConcurrency
    from nvidia.dali import Pipeline as Pipeline
    from nvidia.dali import StreamPolicy as StreamPolicy
    from nvidia.dali import __version__ as __version__
    from nvidia.dali import backend as backend
    from nvidia.dali import fn as fn
    from nvidia.dali import math as math
    from nvidia.dali import pipeline_def as pipeline_def
    from nvidia.dali import tfrecord as tfrecord
    from nvidia.dali import types as types
    from nvidia.dali.pipeline import _shutdown_pipelines as _shutdown_pipelines
    from nvidia.dali.pipeline import do_not_convert as do_not_convert
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy as LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator as DALIClassificationIterator
    from nvidia.dali.plugin.pytorch import DALIGenericIterator as DALIGenericIterator
    from nvidia.dali.plugin.pytorch.experimental.proxy import DALIServer as DALIServer
    from nvidia.dali.plugin.pytorch.experimental.proxy import _external_source_node_names as _external_source_node_names
    from nvidia.dali.plugin.pytorch.torch_utils import feed_ndarray as feed_ndarray
    from nvidia.dali.plugin.pytorch.torch_utils import to_torch_type as to_torch_type
except ImportError as error:
    raise MissingDaliError(
        f"NVIDIA DALI cannot be imported ({error}). On Linux: pip install nvidia-dali-cuda120. "
        "Without it, proxyloader.DataLoader works as torch's own"
    ) from error


def upright(operator: str) -> dict[str, bool]:
    """The argument that keeps a decoder from rotating by EXIF; before DALI 2 some decoders could not, and have none."""
    schema: Any = backend
    known = schema.GetSchema(operator).HasArgument("adjust_orientation")
    return {"adjust_orientation": False} if known else {}


def split(images: Any, predicate: Any) -> tuple[Any, Any]:
    """Deal a batch out: where a scalar of each image is true, and where it is not."""
    module: Any = fn
    where_true, where_false = module._conditional.split(images, predicate=predicate)
    return where_true, where_false


def merge(where_true: Any, where_false: Any, predicate: Any) -> Any:
    """Put together again what was dealt out, in its order."""
    module: Any = fn
    return module._conditional.merge(where_true, where_false, predicate=predicate)


def filter_image(images: Any, kernel: Any, outside: Any = None) -> Any:
    """Correlate float images (H, W, C) with a kernel.

    Args:
        outside: what stands around them; None: their outermost pixels.
    """
    module: Any = fn if hasattr(fn, "filter") else fn.experimental  # it left the experiments with DALI 2
    if outside is None:
        return module.filter(images, kernel, border="clamp")
    return module.filter(images, kernel, outside, border="constant")


def equalized(images: Any) -> Any:
    """Spread the levels of uint8 images (H, W, C), channel by channel, as OpenCV's ``equalizeHist`` does."""
    module: Any = fn if hasattr(fn, "equalize") else fn.experimental  # it left the experiments with DALI 2
    return module.equalize(images)


def automatic_augmentation(name: str) -> Any:
    """A function of ``nvidia.dali.auto_aug``, which takes long to import and few ask for."""
    if name == "auto_augment":
        from nvidia.dali.auto_aug.auto_augment import auto_augment as found
    elif name == "rand_augment":
        from nvidia.dali.auto_aug.rand_augment import rand_augment as found
    else:
        from nvidia.dali.auto_aug.trivial_augment import trivial_augment_wide as found
    return found


def operators_between(start: Any, end: Any) -> list[str]:
    """The operators that an image goes through from one node of a graph to another, by their names in ``fn``.

    Returns:
        Each once, in the order they were added to the graph.
    """
    there, waiting = set(), [end.source]
    while waiting:
        operator = waiting.pop()
        if operator not in there:
            there.add(operator)
            waiting += [node.source for node in operator.inputs]
    through: list[Any] = []
    for operator in sorted(there, key=lambda operator: operator.id):  # so inputs come before what takes them
        if any(node.name == start.name or node.source in through for node in operator.inputs):
            through.append(operator)
    return list(dict.fromkeys(_name_in_fn(type(operator._op).schema_name) for operator in through))


def _name_in_fn(schema: str) -> str:
    """``decoders.image`` of ``decoders__Image``; what Python's own signs stand for in a graph gets a plain word."""
    signs = {"ArithmeticGenericOp": "arithmetic", "TensorSubscript": "subscript", "Shape": "shape"}
    parts = signs.get(schema.lstrip("_"), schema.removeprefix("_conditional__")).split("__")
    return ".".join(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).lower() for part in parts)


def without_conversion(error: Exception) -> Exception:
    """What was raised in a graph with conditions, whose code DALI has converted; it raises another error around it."""
    within = error.__context__ if hasattr(error, "ag_error_metadata") else None
    return within if isinstance(within, Exception) else error


def is_pipeline_function(thing: Any) -> bool:
    """It was made by ``@pipeline_def``: called, it gives a pipeline."""
    return bool(getattr(thing, "_is_pipeline_def", False))
