"""Executor of a DALI pipeline: its inputs and decoders; build, run and reset. Main process.

Most of this is private to DALI, or differs between its versions.

NOTE [ DALI's GPU memory ]
DALI reuses memory of a stream for the next operator in that stream without waiting, as the stream keeps the order. Its
image decoder breaks this rule: it writes from streams of its own, which do not seem to wait for the stream it belongs
to. So if other operators use the stream of the decoder, the images of a later run overwrite those that are still to be
read. StreamPolicy SINGLE and PER_OPERATOR do that: three of four batches were wrong when the training stream was far
behind (DALI 2.4), and some when memory was short. These policies are refused. The default, PER_BACKEND, gives decoders
a stream of their own, and ``tests/gpu/test_behind.py`` tests it.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import lifetime
from ..errors import PipelineError
from ..lifetime import at_exit, before_exit
from .api import Pipeline, StreamPolicy, _external_source_node_names, _shutdown_pipelines, backend, types

log = logging.getLogger(__name__)


def external_sources(pipeline: Any) -> list[Any]:
    """Return the ``fn.external_source`` nodes of a pipeline. RuntimeError: it was deserialized and has lost them."""
    names = _external_source_node_names(pipeline)
    return [node for node in pipeline._ops if node.name in names]


def has_source(node: Any) -> bool:
    """Return whether an external source calls a function for data, so that it cannot be fed."""
    return getattr(node, "_callback", None) is not None


def repeats_last(node: Any) -> bool:
    """Return whether an external source repeats its last batch if it is not fed."""
    return bool(getattr(node._op, "_repeat_last", False))


def declared_kind(pipeline: Any, node: Any) -> tuple[str | None, int | None]:
    """Return the (NumPy dtype string, number of dimensions) that an external source declares, each None if undeclared.

    The input of a decoder is always (uint8, 1), the bytes of a file. Other input may crash the process.
    """
    for operator in pipeline._ops:
        schema_name: str = getattr(type(operator._op), "schema_name", "")
        is_decoder = schema_name.startswith(("decoders__", "ImageDecoder", "experimental__decoders__"))
        if is_decoder and operator.inputs and operator.inputs[0].name == node.name:
            return np.dtype(np.uint8).str, 1
    dtype, ndim = getattr(node._op, "_dtype", None), getattr(node._op, "_ndim", None)
    return (None if dtype is None else np.dtype(types.to_numpy_type(dtype)).str), ndim


PADDINGS = ("device_memory_padding", "host_memory_padding")
"""Arguments of a decoder that set how much memory it allocates ahead."""

Padding = tuple[tuple[str, int], ...]
"""The padding arguments of a decoder. See NOTE [ Failing JPEG engines ] in ``dali/jpeg_engines.py``."""


def paddings_on_engines(pipeline: Any) -> set[Padding]:
    """Return the paddings of the decoders that use the JPEG engines; the default for one deserialized on a GPU.

    The pipeline must be built, or have its graph.
    """
    if not pipeline._py_graph_built:  # deserialized
        return set() if pipeline.device_id is None else {()}
    return {tuple((name, int(args[name])) for name in PADDINGS if name in args) for _, args in _on_engines(pipeline)}


def _on_engines(pipeline: Any) -> list[tuple[Any, dict[str, str]]]:
    """Return the decoders that use the JPEG engines of a GPU, with their arguments."""
    decoders = [node for node in pipeline._ops if node._op.schema.HasArgument("hw_decoder_load")]
    found = [(node, _arguments(node.spec)) for node in decoders]
    return [each for each in found if each[1]["device"] == "mixed" and float(each[1].get("hw_decoder_load", 1))]


def _arguments(spec: Any) -> dict[str, str]:
    """Parse the arguments of an operator from the text of its spec. DALI has no other access to them."""
    lines = str(spec).partition("Arguments:\n")[2].splitlines()
    return dict(line.strip().split(": ", 1) for line in lines if ": " in line)


def leave_engines_alone(pipeline: Any) -> bool:
    """Change the decoders of a pipeline to not use the JPEG engines. A built pipeline must be built again afterwards.

    Returns:
        Whether that was possible. It is not for a pipeline with engines that was deserialized and built, or is in the
        middle of an epoch, or has a decoder with ``hw_decoder_load`` and arguments that other operators compute.
    """
    if not pipeline._py_graph_built:
        if pipeline._built:  # deserialized
            return not paddings_on_engines(pipeline)
        pipeline._build_graph()
    specs = [(operator, _spec_without_engines(operator)) for operator, _ in _on_engines(pipeline)]
    if not specs:
        return True
    if is_under_way(pipeline) or any(spec is None for _, spec in specs):
        return False
    take_apart(pipeline)
    for operator, spec in specs:
        operator._spec = spec
    return True


def _spec_without_engines(operator: Any) -> Any:
    """Return the spec of a decoder with ``hw_decoder_load=0``, or None if its other arguments cannot be kept."""
    spec = operator.spec.copy()
    try:
        spec.AddArg("hw_decoder_load", 0.0)
    except RuntimeError:  # the argument was given, and cannot be changed
        if len(operator.inputs) > spec.NumRegularInput():  # other operators compute arguments
            return None
        arguments = {**operator._op._init_args, "hw_decoder_load": 0.0}
        arguments |= {} if operator._autoname else {"name": operator.name}
        with Pipeline(1, 1, None):  # an operator with preserve=True must be created in a pipeline
            node = type(operator._op)(device=operator._op.device, **arguments)(*operator.inputs)
        spec = node.source.spec
        for k in range(spec.NumOutput()):
            spec.RenameOutput(k, operator.spec.OutputName(k))
    return spec


def tensor_list(samples: NDArray[Any] | list[NDArray[Any]]) -> Any:
    """Return a DALI batch that is a view of NumPy memory, which must stay valid until the run has finished.

    The batch itself should also be kept until then. A batch that only DALI holds is freed under the interpreter lock,
    one sample at a time.
    """
    if isinstance(samples, np.ndarray):
        return backend.TensorListCPU(samples, "", False)
    tensors = [backend.TensorCPU(sample, "", False) for sample in samples]
    try:
        return backend.TensorListCPU(tensors, "", False)  # not contiguous: no copy
    except TypeError:  # before DALI 2 a list of tensors was always copied
        return backend.TensorListCPU(tensors, "")


@dataclass
class PipelineNotes:
    """Data of this package about a pipeline.

    Attributes:
        owner: weak reference to the only queue that may run it.
        holds_engines: whether a trial has shown that its decoders hold the shared room of the JPEG engines.
        look_at_s: ``time.monotonic()`` of the next check for a crowded GPU.
    """

    owner: Callable[[], Any] = lambda: None
    holds_engines: bool = False
    look_at_s: float = 0.0


def get_notes(pipeline: Any) -> PipelineNotes:
    """Return the notes of a pipeline, which are stored in its attributes so that they live as long as it does."""
    notes: PipelineNotes = vars(pipeline).setdefault("_proxyloader_notes", PipelineNotes())
    return notes


def take_over(pipeline: Any, owner: Any) -> None:
    """Make ``owner`` the only one that runs a pipeline. The method ``lose_pipeline`` of the earlier owner is called.

    Raises:
        PipelineError: the pipeline belongs to the parent process of a fork.
    """
    if pipeline._built and pipeline._pipe is None:
        raise PipelineError(
            "the pipeline belongs to the process that this one was forked from, whose threads run it: call the "
            "function that makes it once more, in this process",
            code="forked",
        )
    notes = get_notes(pipeline)
    before = notes.owner()
    if before is not None and before is not owner:
        before.lose_pipeline()
    notes.owner = weakref.ref(owner)


def is_under_way(pipeline: Any) -> bool:
    """Return whether a pipeline has run and is in the middle of an epoch, to which its next outputs belong."""
    return pipeline._pipe is not None and (not pipeline._first_iter or pipeline._batches_to_consume > 0)


def drop_runs(pipeline: Any) -> None:
    """Discard the outputs of runs that were not collected. If that is not possible, reset the pipeline."""
    if not is_under_way(pipeline):
        return
    try:
        while pipeline._first_iter and pipeline._batches_to_consume > 0:
            pipeline.outputs()
    except RuntimeError:
        log.info("an uncollected run failed; rebuilding the pipeline")
        take_apart(pipeline)
    if is_under_way(pipeline):  # it was run by pipeline.run() or an iterator, which cannot be mixed with our runs
        take_apart(pipeline)


def take_apart(pipeline: Any) -> None:
    """Remove the executor of a pipeline, with its runs and its state. The pipeline must be built again.

    Its random numbers then start again from its seed.
    """
    pipeline._pipe = pipeline._api_type = None
    pipeline._backend_prepared = pipeline._built = pipeline._last_iter = False
    pipeline._first_iter = True
    pipeline._batches_to_consume = 0


LITTLE_BYTES = 256 << 20
"""Free memory of a GPU below which building a pipeline may fail, in bytes."""


def build(pipeline: Any) -> None:
    """Build a pipeline unless it is built already. On a GPU this is slow.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is not enough memory, on the GPU or on the CPU.
        PipelineError: the pipeline requires a GPU, and there is none; or DALI cannot load its decoders.
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
        # The error of a decoder without enough GPU memory does not mention memory.
        if _is_out_of_memory(error) or (device_id is not None and gpu_memory(device_id)[0] < LITTLE_BYTES):
            raise _out_of_memory(error, device_id, "a pipeline") from error
        if "requires a CUDA-capable GPU" in str(error):
            raise PipelineError(
                "the pipeline has GPU operators, but DALI cannot use a GPU here. For a CPU, give its decoders "
                'device="cpu" instead of "mixed" and omit .gpu(). `proxyloader doctor` shows why there is none. '
                f"DALI's error: {error}",
                code="no-gpu",
            ) from error
        if "libnvimgcodec" in str(error):
            raise PipelineError(
                "DALI cannot load nvImageCodec, its image decoding library. Install the version that `pip check` asks "
                f"for; `proxyloader doctor` shows the installed one. DALI's error: {error}",
                code="no-decoder",
            ) from error
        raise


def _make_room(device_id: int) -> None:
    """Empty the cache of torch's allocator if little GPU memory is free.

    A decoder without enough memory for the engines or for CUDA may report it only on stderr. After a decoder was built
    with nearly no memory, images of one batch appeared in the batch before it (DALI 2.4).

    Raises:
        torch.OutOfMemoryError: there is still not enough memory.
    """
    if gpu_memory(device_id)[0] < LITTLE_BYTES:
        torch.cuda.empty_cache()
    if (free := gpu_memory(device_id)[0]) < LITTLE_BYTES:
        found = f"GPU {device_id} has {free / 2**20:.0f} MB free, and at least {LITTLE_BYTES >> 20} MB are required"
        advice = "start iterating before the model fills the memory, or reduce its batch size"
        raise _out_of_memory(f"{found}; {advice}", device_id, "a pipeline")


def gpu_memory(device_id: int | None) -> tuple[float, float]:
    """Return the free and the total memory of a GPU, in bytes."""
    try:
        return torch.cuda.mem_get_info(device_id)
    except (RuntimeError, AssertionError):  # CUDA itself has failed, or torch was built without it
        return math.inf, math.inf


def run(pipeline: Any) -> None:
    """Start one run with the inputs that were fed, without waiting.

    With ``exec_async=False`` it runs in the calling thread, and blocks forever if earlier outputs were not taken.
    """
    pipeline._run_once()


RUN_FAILED = "Critical error in pipeline"
"""Part of DALI's message."""


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether an error is about memory. DALI raises RuntimeError for most errors, so the text decides."""
    text = str(error)
    return isinstance(error, MemoryError) or bool(re.search(r"(?i)out of memory|bad_alloc|allocat(e|ion|or) ", text))


def run_error(error: Exception, device_id: int | None, size: int) -> Exception | None:
    """Return the error of a run of ``size`` samples, without its traceback, which would keep the run alive.

    Return None if it was not raised by DALI but by a signal handler, such as torch's for lost workers.
    """
    if error.args and _is_out_of_memory(error):
        return _out_of_memory(error, device_id, f"a batch of {size}")
    return error.with_traceback(None) if RUN_FAILED in str(error) else None


def _out_of_memory(error: Exception | str, device_id: int | None, purpose: str) -> Exception:
    """Return torch's error, which users may catch, in place of DALI's; for the CPU a MemoryError."""
    kind = MemoryError if device_id is None else torch.OutOfMemoryError
    return kind(f"DALI ran out of memory for {purpose}: {error}")


def shares_decoder_stream(pipeline: Any) -> bool:
    """Return whether other operators use the stream of a decoder. See NOTE [ DALI's GPU memory ]."""
    return pipeline.device_id is not None and pipeline.stream_policy not in (None, StreamPolicy.PER_BACKEND)


def forget_in_child(pipeline: Any) -> None:
    """Leak the pipeline in a forked child, as destroying it would wait for threads that exist only in the parent."""
    if getattr(pipeline, "_pipe", None) is not None:
        lifetime.leak(pipeline._pipe)
        pipeline._pipe = None


def _all_pipelines() -> list[Pipeline]:
    """Return all pipelines of this process, including those that only user code or the garbage collector references."""
    return [pipeline for known in list(Pipeline._pipes) if (pipeline := known()) is not None]


def _forget_all_in_child() -> None:
    for pipeline in _all_pipelines():
        forget_in_child(pipeline)


@at_exit
def _end_pipelines() -> None:
    for server in lifetime.watched_queues():
        server.end()
    for pipeline in _all_pipelines():
        pipeline._shutdown()
    if "__del__" in vars(Pipeline):
        del Pipeline.__del__  # the globals that it uses are gone when it is called


atexit.unregister(_shutdown_pipelines)  # DALI's own shutdown. See NOTE [ Shutdown order ].
os.register_at_fork(after_in_child=_forget_all_in_child)
