"""Executor of a DALI pipeline: its inputs and decoders; build, run and reset. Main process.

Most of that is private to DALI, or differs between its versions.

NOTE [ DALI's memory on a GPU ]
DALI gives memory that a stream has done with to the next operator in that stream without waiting: the stream keeps the
order. Its image decoder breaks that: it writes from streams of its own, which, it seems, do not wait for the one it
belongs to. So where other operators work in the decoder's stream, the pictures of a later run are written over those
that are still to be read. That is so with StreamPolicy SINGLE and PER_OPERATOR: three of four batches were wrong where
the training stream was far behind (DALI 2.4), and some wherever memory was short. They are refused. The default,
PER_BACKEND, gives decoders a stream of their own; ``tests/gpu/test_behind.py`` holds it.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _fork_safety
from .._exit_safety import at_exit, before_exit
from ..errors import PipelineError
from .api import Pipeline, StreamPolicy, _external_source_node_names, _shutdown_pipelines, backend, types

log = logging.getLogger(__name__)


def external_sources(pipeline: Any) -> list[Any]:
    """The nodes of a pipeline that bring data into it by ``fn.external_source``, in its order.

    Raises:
        RuntimeError: the pipeline was deserialized, and knows them no more.
    """
    names = _external_source_node_names(pipeline)
    return [node for node in pipeline._ops if node.name in names]


def fed_by_hand(pipeline: Any) -> list[str]:
    """The names of those that call no function, where the pipeline knows."""
    return [node.name for node in external_sources(pipeline) if not has_source(node)] if _has_graph(pipeline) else []


def has_source(node: Any) -> bool:
    """An external source that calls a function of its own for data, so that nobody else can feed it."""
    return getattr(node, "_callback", None) is not None


def repeats_last(node: Any) -> bool:
    """An external source that gives its last batch again where it is fed none."""
    return bool(getattr(node._op, "_repeat_last", False))


def declared_kind(pipeline: Any, node: Any) -> tuple[str | None, int | None]:
    """(numpy's dtype, number of dimensions) that an external source says it takes; None where it says nothing.

    What a decoder takes are the bytes of a file, whatever the source says; given anything else it may end the process.
    """
    if any(node.name == each.inputs[0].name for each in pipeline._ops if each.inputs and _is_decoder(each)):
        return np.dtype(np.uint8).str, 1
    dtype, ndim = getattr(node._op, "_dtype", None), getattr(node._op, "_ndim", None)
    return (None if dtype is None else np.dtype(types.to_numpy_type(dtype)).str), ndim


def _is_decoder(operator: Any) -> bool:
    schema_name: str = getattr(type(operator._op), "schema_name", "")
    return schema_name.startswith(("decoders__", "ImageDecoder", "experimental__decoders__"))


PADDINGS = ("device_memory_padding", "host_memory_padding")
"""How much memory a decoder is to take ahead."""

Padding = tuple[tuple[str, int], ...]
"""What a decoder is told of that. See NOTE [ Engines that fail ] in ``dali/jpeg_engines.py``."""


def is_built(pipeline: Any) -> bool:
    """It has an executor."""
    return bool(pipeline._built)


def uses_engines(pipeline: Any) -> bool:
    """It is built, or has its graph, and a decoder in it gives JPEGs to a GPU's engines."""
    return bool(_on_engines(pipeline)) if _has_graph(pipeline) else pipeline.device_id is not None


def paddings_on_engines(pipeline: Any) -> set[Padding]:
    """Those of the decoders that give JPEGs to a GPU's engines; of a pipeline that was deserialized, the usual one."""
    if not _has_graph(pipeline):
        return {()}
    told = [_told(operator.spec) for operator in _on_engines(pipeline)]
    return {tuple((name, int(each[name])) for name in PADDINGS if name in each) for each in told}


def _has_graph(pipeline: Any) -> bool:
    """In Python, as all pipelines do from when they are built, but those that were deserialized."""
    return bool(pipeline._py_graph_built)


def _on_engines(pipeline: Any) -> list[Any]:
    """The decoders that give JPEGs to a GPU's engines."""
    decoders = [operator for operator in pipeline._ops if operator._op.schema.HasArgument("hw_decoder_load")]
    told = [_told(operator.spec) for operator in decoders]
    return [
        operator
        for operator, each in zip(decoders, told)
        if each["device"] == "mixed" and float(each.get("hw_decoder_load", 1)) != 0
    ]


def _told(spec: Any) -> dict[str, str]:
    """An operator's arguments. The text of its spec is all that there is to read."""
    lines = str(spec).partition("Arguments:\n")[2].splitlines()
    return dict(line.strip().split(": ", 1) for line in lines if ": " in line)


def leave_engines_alone(pipeline: Any) -> bool:
    """Tell the decoders of a pipeline to give nothing to a GPU's engines. Where it was built, it is to be built anew.

    Returns:
        False: that cannot be told to them; the pipeline was deserialized, say, or has run.
    """
    if not _has_graph(pipeline):
        if is_built(pipeline):
            return not uses_engines(pipeline)
        pipeline._build_graph()
    found = _on_engines(pipeline)
    specs = [_off_engines(operator) for operator in found]
    if None in specs or (found and is_under_way(pipeline)):
        return False
    if found:
        take_apart(pipeline)
    for operator, spec in zip(found, specs):
        operator._spec = spec
    return True


def _off_engines(operator: Any) -> Any:
    """A decoder's spec, with another ``hw_decoder_load``; None where not all the rest would be the same."""
    spec = operator.spec.copy()
    try:
        spec.AddArg("hw_decoder_load", 0.0)
    except RuntimeError:  # it is given, and cannot be changed
        how = {**operator._op._init_args, "hw_decoder_load": 0.0}
        how |= {} if operator._autoname else {"name": operator.name}
        with Pipeline(1, 1, None):  # where an operator with preserve=True can be
            again = type(operator._op)(device=operator._op.device, **how)(*operator.inputs[: spec.NumRegularInput()])
        spec = again.source.spec
        for k in range(spec.NumOutput()):
            spec.RenameOutput(k, operator.spec.OutputName(k))
        if _rest_of(spec) != _rest_of(operator.spec):
            return None
    return spec


def _rest_of(spec: Any) -> list[str]:
    """All that is told to an operator but how many JPEGs the engines get, and from which line of code it is."""
    lines = [line.strip() for line in str(spec).splitlines()]
    return [line for line in lines if not line.startswith(("hw_decoder_load: ", "_origin_stack_"))]


def tensor_list(samples: NDArray[Any] | list[NDArray[Any]]) -> Any:
    """A DALI batch that refers to numpy memory, without a copy. The memory must stay until the run has finished.

    So should the batch itself: what DALI is the last to hold, it gives back under the interpreter lock, a sample at a
    time.
    """
    if isinstance(samples, np.ndarray):
        return backend.TensorListCPU(samples, "", False)
    return _list_of([backend.TensorCPU(sample, "", False) for sample in samples])


def _list_of(tensors: list[Any]) -> Any:
    try:
        return backend.TensorListCPU(tensors, "", False)  # not contiguous: no copy
    except TypeError:  # before DALI 2 a list of tensors was always copied
        return backend.TensorListCPU(tensors, "")


def keeps_checkpoints(pipeline: Any) -> bool:
    """Its state can be saved."""
    return bool(pipeline._enable_checkpointing)


_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def take_over(pipeline: Any, owner: Any) -> None:
    """From now on ``owner`` alone runs a pipeline. Who did so before is told, by its ``lose_pipeline``.

    Raises:
        PipelineError: it is the copy of one that this process was forked with.
    """
    if pipeline._built and pipeline._pipe is None:
        raise PipelineError(
            "the pipeline belongs to the process that this one was forked from, whose threads run it: call the "
            "function that makes it once more, in this process",
            code="forked",
        )
    before = _owners.get(pipeline, lambda: None)()
    if before is not None and before is not owner:
        before.lose_pipeline()
    _owners[pipeline] = weakref.ref(owner)


def is_under_way(pipeline: Any) -> bool:
    """It has run, and is not at its start, or at the end of an epoch: what it gives next belongs to what was before."""
    return pipeline._pipe is not None and (not pipeline._first_iter or pipeline._batches_to_consume > 0)


def drop_runs(pipeline: Any) -> None:
    """Take the outputs of runs that nobody has collected; where that cannot be, take the pipeline apart."""
    if not is_under_way(pipeline):
        return
    try:
        while pipeline._first_iter and pipeline._batches_to_consume > 0:
            pipeline.outputs()
    except RuntimeError:
        log.info("a run that nobody has collected failed; the pipeline is built anew")
        take_apart(pipeline)
    if is_under_way(pipeline):  # by DALI's own ways to run it, which cannot be mixed with ours
        take_apart(pipeline)


def calls_functions(pipeline: Any) -> bool:
    """Of the user's, for data."""
    return _has_graph(pipeline) and any(map(has_source, pipeline._ops))


def begins_anew(pipeline: Any) -> bool:
    """Taken apart and built, it is at its start again. Not so one that was deserialized, that goes on from a
    checkpoint, or that calls functions of the user's for data."""
    return _has_graph(pipeline) and not calls_functions(pipeline) and pipeline._checkpoint is None


def batches_before(pipeline: Any) -> int:
    """That its epoch had before the checkpoint from which it goes on."""
    return int(pipeline._consumer_iter) if pipeline.is_restored_from_checkpoint else 0


def take_apart(pipeline: Any, seed: int | None = None) -> None:
    """Take a pipeline's executor away, with all that is under way and was learnt. It is to be built anew.

    Args:
        seed: another one for what is random in it; None: the one it has.
    """
    pipeline._pipe = pipeline._api_type = None
    pipeline._seed = pipeline._seed if seed is None else seed
    pipeline._backend_prepared = pipeline._built = pipeline._last_iter = False
    pipeline._first_iter = True
    pipeline._batches_to_consume = 0


NEEDS_A_GPU = "requires a CUDA-capable GPU"
"""DALI's words."""

LITTLE_BYTES = 256 << 20
"""Of a GPU's memory, with which a pipeline may find too little."""


def build(pipeline: Any) -> None:
    """Build a pipeline, if it is not built yet. On a GPU it takes a second or two.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is no memory for it, on the GPU or on the CPU.
        PipelineError: it needs a GPU, and there is none.
    """
    if pipeline._built:
        return
    device_id = pipeline.device_id
    if device_id is not None:
        _make_room(device_id)
    try:
        with before_exit():
            pipeline.build()
    except (RuntimeError, MemoryError) as error:
        # A decoder that finds no memory on a GPU says nothing of it.
        if is_out_of_memory(error) or (device_id is not None and _free_bytes(device_id) < LITTLE_BYTES):
            raise out_of_memory(error, device_id, "a pipeline") from error
        if NEEDS_A_GPU in str(error):
            raise PipelineError(
                "the pipeline has operators for a GPU, and there is none that DALI can use here. On a CPU give its "
                f'decoders device="cpu" in place of "mixed", and leave out .gpu(). DALI says: {error}',
                code="no-gpu",
            ) from error
        raise


def _make_room(device_id: int) -> None:
    """Take from torch what it keeps for later, where little is left.

    A decoder that finds too little for its engines, or for CUDA, may say so on stderr alone; and after one was built in
    nearly nothing, pictures of a batch were seen in the batch before (DALI 2.4).

    Raises:
        torch.OutOfMemoryError: that is not enough.
    """
    if _free_bytes(device_id) >= LITTLE_BYTES:
        return
    torch.cuda.empty_cache()
    free = _free_bytes(device_id)
    if free < LITTLE_BYTES:
        found = f"GPU {device_id} has {free / 2**20:.0f} MB left, and {LITTLE_BYTES >> 20} should be free"
        advice = "begin the loop before the model takes all, or leave it less with a smaller batch"
        raise out_of_memory(f"{found}; {advice}", device_id, "a pipeline")


def _free_bytes(device_id: int) -> float:
    try:
        free: int = torch.cuda.mem_get_info(device_id)[0]
        return free
    except (RuntimeError, AssertionError):  # CUDA itself has failed, or torch was built without it
        return float("inf")


def run(pipeline: Any) -> None:
    """Start one iteration with the inputs that were fed; returns at once, but with ``exec_async=False``, which runs it
    in the calling thread, and waits there for ever where outputs of earlier ones have not been taken."""
    pipeline._run_once()


RUN_FAILED = "Critical error in pipeline"
"""DALI's words."""


def is_of_a_run(error: Exception) -> bool:
    """It tells that a run failed. A signal handler, such as torch's for lost workers, may raise another in any line."""
    return RUN_FAILED in str(error) or (bool(error.args) and is_out_of_memory(error))


def is_out_of_memory(error: Exception) -> bool:
    """DALI raises RuntimeError for nearly everything; the text tells."""
    return isinstance(error, MemoryError) or bool(
        re.search(r"out of memory|bad_alloc|allocat(e|ion|or) ", str(error), re.IGNORECASE)
    )


def error_of_run(error: Exception, device_id: int | None, size: int) -> Exception:
    """What a run of so many samples failed with, without the frames that would hold the run."""
    found = out_of_memory(error, device_id, f"a batch of {size}") if is_out_of_memory(error) else error
    return found.with_traceback(None)


def out_of_memory(error: Exception | str, device_id: int | None, purpose: str) -> Exception:
    """What to raise in the place of DALI's error: torch's, whose users catch it."""
    kind = MemoryError if device_id is None else torch.OutOfMemoryError
    return kind(f"DALI found no memory for {purpose}: {error}")


def shares_decoder_stream(pipeline: Any) -> bool:
    """What follows a decoder works in its stream. See NOTE [ DALI's memory on a GPU ]."""
    return pipeline.device_id is not None and pipeline.stream_policy not in (None, StreamPolicy.PER_BACKEND)


def forget_in_child(pipeline: Any) -> None:
    """Make a forked copy of a pipeline harmless: destroying it there waits for threads that only the parent has."""
    if getattr(pipeline, "_pipe", None) is not None:
        _fork_safety.leak(pipeline._pipe)
        pipeline._pipe = None


_inherited: set[weakref.ref[Pipeline]] = set()
"""Those that this process was forked with."""


@at_exit
def _end_pipelines() -> None:
    for server in _fork_safety.watched():
        server.end()
    for known in list(Pipeline._pipes):
        pipeline = known()
        if known in _inherited:
            forget_in_child(pipeline)
        elif pipeline is not None:
            pipeline._shutdown()
    if "__del__" in vars(Pipeline):
        del Pipeline.__del__  # its names are gone when it is called


atexit.unregister(_shutdown_pipelines)  # DALI's own way to do so. See NOTE [ The end of the interpreter ].
os.register_at_fork(after_in_child=lambda: _inherited.update(Pipeline._pipes))
