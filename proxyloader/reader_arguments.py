"""What FileReaderLoader may be given, what its batches are called, and what it says of failures. Main process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import _dali
from .transformed import transformed

NAMES: dict[int, tuple[str, ...]] = {1: ("data",), 2: ("data", "label")}
"""What outputs are called, by how many there are."""


def are_class_numbers(labels: torch.Tensor, samples: int) -> bool:
    """One whole number for each sample."""
    return labels.numel() == samples and not labels.is_floating_point() and labels.dtype != torch.bool


def names_of(output_map: Sequence[str] | None, outputs: int) -> list[str]:
    """
    Args:
        output_map: the names that were asked for, if any.
        outputs: how many the pipeline has.

    Raises:
        ValueError: they are too few or too many, or two are the same.
    """
    if output_map is None and outputs in NAMES:
        return list(NAMES[outputs])
    given = [] if output_map is None else list(output_map)
    if len(given) != outputs or len(set(given)) != outputs:
        raise ValueError(
            f"the pipeline has {outputs} outputs, and output_map is {output_map!r}; "
            "give each a name of its own, such as output_map=['data', 'mask', 'label']"
        )
    return given


def is_transform(pipeline: Any) -> bool:
    """Of torchvision or timm, or of a class of one's own that is made from theirs."""
    homes = ("torchvision.", "timm.", "proxyloader.transforms.")
    return not isinstance(pipeline, type) and any(cls.__module__.startswith(homes) for cls in type(pipeline).__mro__)


def check_pipeline_function(pipeline: Any, graph_options: Mapping[str, Any]) -> None:
    """
    Raises:
        TypeError: it is no function that makes a pipeline around a source, or does not take these options.
    """
    if isinstance(pipeline, _dali.Pipeline):
        raise TypeError(
            "pipeline is a nvidia.dali.Pipeline, which has its reader, batch size and device already; "
            "use FileReaderLoader.from_pipeline(pipeline)"
        )
    if not _dali.is_pipeline_function(pipeline):
        raise TypeError(
            f"pipeline is {named(pipeline)}; it should be pipelines.training, pipelines.validation, or a function "
            "made by @nvidia.dali.pipeline_def that takes source: `encoded, labels = source()`"
        )
    takes = inspect.signature(pipeline).parameters
    if "source" not in takes:
        raise TypeError(
            f"the pipeline function {pipeline.__name__} does not take source, and so cannot be given a reader. "
            "Let it call encoded, labels = source() in place of fn.readers.file(...); or build the pipeline yourself "
            "and use FileReaderLoader.from_pipeline(pipeline)"
        )
    known = {*takes, *inspect.signature(_dali.Pipeline.__init__).parameters} - {"self", "source"}
    unknown = [name for name in graph_options if name not in known]
    if unknown and pipeline is transformed:
        raise TypeError(f"FileReaderLoader with a transform takes no {', '.join(unknown)}: the transform says all that")
    if unknown:
        raise TypeError(
            f"neither FileReaderLoader nor {pipeline.__name__} takes {', '.join(unknown)}; "
            f"{pipeline.__name__} takes {', '.join(name for name in takes if name != 'source')}"
        )


def named(thing: Any) -> str:
    """For messages."""
    return getattr(thing, "__name__", None) or type(thing).__name__


def what_failed(error: Exception) -> str:
    """What DALI's error means."""
    if "Critical error in pipeline" not in str(error):  # in which DALI's text quotes paths and code
        return f"the samples of a batch differ in shape, so they make no tensor; resize or crop them: {error}"
    return (
        "DALI failed on a batch. Its reader cannot leave out what is no image; the next loop begins a new epoch. "
        f"proxyloader.DataLoader(..., on_error='skip') leaves such files out, and names them. DALI says: {error}"
    )
