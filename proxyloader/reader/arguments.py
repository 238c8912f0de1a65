"""Checks of the arguments of FileReaderLoader, and the names of its outputs. Main process."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..dali import api
from ..dali.executor import RUN_FAILED
from ..errors import PipelineError
from ..transforms.nested import TransformStandIn
from ..transforms.plan import Plan
from . import pipelines
from .bad_files import is_of_an_image
from .plan_pipeline import transformed
from .sources import DIGITS, class_number

NAMES: dict[int, tuple[str, ...]] = {1: ("data",), 2: ("data", "label")}
"""Default names of outputs, by their number."""


def names_of(output_map: Sequence[str] | None, outputs: int) -> list[str]:
    """Return the names of the outputs of a pipeline, which are given, or None for the default names."""
    if output_map is None and outputs in NAMES:
        return list(NAMES[outputs])
    given = [] if output_map is None or isinstance(output_map, str) else list(output_map)
    if len(given) != outputs or len(set(given)) != outputs:
        raise ValueError(
            f"the pipeline has {outputs} outputs, and output_map is {output_map!r}; "
            "give each a name of its own, such as output_map=['data', 'mask', 'label']"
        )
    return given


def is_transform(pipeline: Any) -> bool:
    """Return whether it is a transform of torchvision or timm, of a subclass of these, or one that was compiled."""
    if isinstance(pipeline, type):
        return False
    of_theirs = any(cls.__module__.startswith(("torchvision.", "timm.")) for cls in type(pipeline).__mro__)
    return of_theirs or isinstance(pipeline, (Plan, TransformStandIn))


BY_NAME = {"random_shuffle": "shuffle", "num_shards": "num_shards", "shard_id": "shard_id"}
"""Arguments of DALI's readers that are arguments of FileReaderLoader, and their names there."""

ELSEWHERE = {
    "device_id": "device=...",
    "prefetch_queue_depth": "prefetch=...",
    "random_shuffle": "shuffle=True",
    "file_root": "root, the first argument",
    "pad_last_batch": 'last_batch_policy="fill"',
    "stick_to_shard": 'reader_options={"stick_to_shard": True}',
}
"""Arguments of pipelines, and of the readers in ``pipelines``, that FileReaderLoader sets, and what to use instead."""


def check_pipeline_function(pipeline: Any, graph_options: Mapping[str, Any]) -> None:
    """Check the pipeline function of a FileReaderLoader and its options."""
    if isinstance(pipeline, api.Pipeline):
        raise TypeError(
            "pipeline is a nvidia.dali.Pipeline, which has its reader, batch size and device already; "
            "use FileReaderLoader.from_pipeline(pipeline)"
        )
    if not api.is_pipeline_function(pipeline):
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
    own = {"device_id", "prefetch_queue_depth"}
    if pipeline.__module__ == pipelines.__name__:  # other functions may have arguments of these names
        own = {*ELSEWHERE, *BY_NAME}
    for name in (name for name in graph_options if name in own):
        raise TypeError(
            f"{name} is an argument of the pipeline, which FileReaderLoader gives it: use {ELSEWHERE[name]}"
        )
    known = {*takes, *inspect.signature(api.Pipeline.__init__).parameters} - {"self", "source"}
    unknown = [name for name in graph_options if name not in known]
    if unknown and pipeline is transformed:
        raise TypeError(f"FileReaderLoader with a transform takes no {', '.join(unknown)}: the transform says all that")
    if unknown:
        names = ", ".join(name for name in takes if name not in {"source", "device", *own})
        raise TypeError(
            f"neither FileReaderLoader nor {pipeline.__name__} takes {', '.join(unknown)}; beside source "
            f"{pipeline.__name__} takes {names or 'nothing'}"
        )


def check_reader_options(options: Any) -> None:
    """Check the options of a reader, some of which FileReaderLoader sets itself."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(f"reader_options is a dict of arguments of the reader, or None; got {options!r:.60}")
    for name in BY_NAME.keys() & options.keys():
        raise ValueError(f"reader_options has {name}, which FileReaderLoader gives the reader: use {BY_NAME[name]}=...")
    for name in {"name", "pad_last_batch"} & options.keys():
        raise ValueError(
            f"reader_options has {name}, which is FileReaderLoader's own matter; to build a pipeline with it, use "
            "FileReaderLoader.from_pipeline"
        )
    if options.get("shuffle_after_epoch"):
        raise ValueError(
            "reader_options has shuffle_after_epoch, with which orders depend on how many epochs were read to "
            "their end: processes that differ in that would read the same samples. Use shuffle=True"
        )


STATE = {"epoch", "first_epoch", "batches", "checkpoint"}
"""Keys of a state in addition to those that must agree with the loader."""


def check_state(state: Any, wanted: Mapping[str, Any]) -> None:
    """Check that a state has the keys and values of this loader."""
    if not isinstance(state, dict) or not STATE | wanted.keys() <= state.keys():
        raise ValueError(f"load_state_dict takes what state_dict of a FileReaderLoader gave, got {type(state)}")
    if others := [name for name, value in wanted.items() if state[name] != value]:
        saved, here = (", ".join(f"{name}={of[name]!r}" for name in others) for of in (state, wanted))
        raise ValueError(
            f"the state was saved by a loader with {saved}, and this one has {here}. Give it the same arguments"
        )


def as_called(function: str, options: Mapping[str, Any]) -> str:
    """Return a call as text, which is the same in each run of a script. States are compared by it."""
    written = (f"{name}={_written(options[name])}" for name in sorted(options.keys() - {"enable_checkpointing"}))
    return f"{function}({', '.join(written)})"


def _written(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_written, value))}]"
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
    return str(value) if plain else type(value).__name__  # its repr may have an address


def named(thing: Any) -> str:
    """Return the name of an object, or of its type, for messages."""
    return getattr(thing, "__name__", None) or type(thing).__name__


def what_is_missing(error: Exception) -> Exception | None:
    """Return an error that explains DALI's error when a pipeline is built, or None if its cause is not known."""
    if "No files found" in str(error):
        return FileNotFoundError(
            "there is no file that DALI takes for an image by its ending: .jpg, .jpeg, .png, .webp, .bmp, ... "
            "For others give reader_options={'file_filters': ['*']}"
        )
    if "num_shards_ <= Size()" in str(error):
        counted = re.search(r"samples: (\d+),.* shards: (\d+)", str(error))
        found = (
            f"num_shards is {counted[2]}, and there are {counted[1]} samples" if counted else "num_shards is too many"
        )
        return ValueError(
            f"{found}: DALI's readers want one for each shard. Start fewer processes, or use "
            "proxyloader.DataLoader(..., num_shards=...), which deals out any number"
        )
    if "Underful sample" in str(error):
        return ValueError(
            "the webdataset is empty, or a sample of it lacks one of the parts that reader_options={'ext': [...]} "
            "names (by default jpg, jpeg or png, and cls). 'missing_component_behavior': 'skip' leaves such samples "
            f"out. DALI says: {error}"
        )
    if reader := re.search(r"operator `nvidia\.dali\.(fn\.readers\.\w+)`", str(error)):
        return PipelineError(
            f"{reader[1]} cannot read what it is given; is the root of that kind, and what reader_options say? "
            f"DALI says: {error}",
            code="unreadable-root",
        )
    return None


def what_failed(error: Exception, blamed: str) -> str:
    """Return a message that explains DALI's error in a run. ``blamed`` is the result of ``bad_files.find_bad_file``."""
    if RUN_FAILED not in str(error):  # raised by DALI's iterator, not by a run
        return (
            "the samples of a batch differ in shape, so they make no tensor; resize or crop them in the pipeline "
            f"(pipelines.rotation has size=... for that): {error}"
        )
    if class_number.__name__ in str(error):
        return (
            f"a label of the webdataset is no number in digits, or has more than {DIGITS}. Where labels are written "
            f"otherwise, let reader_options={{'ext': [...]}} name that part, and read its bytes in a pipeline of your "
            f"own: {error}"
        )
    if not blamed and not is_of_an_image(error):
        return f"DALI failed on a batch. DALI says: {error}"
    return (
        f"DALI failed on a batch. {blamed}{'. ' * bool(blamed)}DALI's reader cannot leave out what is no image; the "
        "next loop begins a new epoch. proxyloader.DataLoader(..., on_error='skip') leaves such files out, and names "
        f"them. DALI says: {error}"
    )
