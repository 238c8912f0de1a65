"""The inputs, decoders and executor of a DALI pipeline. Main process.

Most of this module uses private parts of DALI, or handles differences between its versions.

NOTE [ DALI's GPU memory ]
DALI reuses the memory of an operator for the next one in the same stream without waiting, because a stream runs its
work in order. Its image decoder breaks this rule: it writes from separate streams, which do not seem to wait for the
stream of the decoder. So if other operators use that stream, the images of a later run overwrite some that have not
been read yet. This happens with StreamPolicy SINGLE and PER_OPERATOR: three of four batches were wrong when the
training stream lagged far behind (DALI 2.4), and some when memory was short. So these policies are rejected. The
default, PER_BACKEND, gives decoders a separate stream; ``tests/gpu/test_behind.py`` tests it.

The training stream is another one that reads what a decoder wrote, and DALI may reuse memory that this stream has yet
to read, assuming that its decoder waits. So a RunQueue keeps DALI's outputs until the GPU has read them.
"""

import atexit
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import PipelineError
from ..lifetime import at_exit, delay_exit, leak, watched_queues
from .api import Pipeline, StreamPolicy, _external_source_node_names, _shutdown_pipelines, backend, types

log = logging.getLogger(__name__)

MIN_FREE_BYTES = 256 << 20  # free memory of a GPU below which building a pipeline may fail
RUN_FAILED = "Critical error in pipeline"  # part of DALI's error message
PADDINGS = ("device_memory_padding", "host_memory_padding")  # arguments for preallocated memory

Padding = tuple[tuple[str, int], ...]
"""The padding arguments of a decoder. See NOTE [ Failing JPEG engines ] in ``dali/jpeg_engines.py``."""

_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The only queue that may run a pipeline, by pipeline."""


def check_sources(pipeline: Any) -> list[Any]:
    """Return the external sources of a pipeline. Raises the errors of ``ProxyServer`` if it cannot feed or run it."""
    if not isinstance(pipeline, Pipeline):
        advice = "; call the function that @pipeline_def returns" if callable(pipeline) else ""
        raise TypeError(f"pipeline must be a DALI pipeline, got {type(pipeline).__name__}{advice}")
    names = _external_source_node_names(pipeline)  # RuntimeError: it was deserialized
    if not (sources := [node for node in pipeline._ops if node.name in names]):
        raise RuntimeError(
            "the pipeline has no inputs for the dataset to feed. Begin its graph with "
            'fn.external_source(name="images") instead of a reader, or use pipelines.training(source="proxy")'
        )
    for source in sources:
        if getattr(source, "_callback", None) is not None:
            raise ValueError(
                f"input {source.name!r} of the pipeline must not have a source, because the proxy feeds it. "
                'Omit source=... and name the input: fn.external_source(name="images")'
            )
        if getattr(source._op, "_repeat_last", False):
            raise ValueError(f"input {source.name!r} of the pipeline must not have repeat_last=True; omit it")
    if pipeline.device_id is not None and pipeline.stream_policy not in (None, StreamPolicy.PER_BACKEND):
        raise ValueError(  # see NOTE [ DALI's GPU memory ]
            f"stream_policy={pipeline.stream_policy.name} lets DALI overwrite the decoded images of an earlier "
            "batch; omit it, or use the default, StreamPolicy.PER_BACKEND"
        )
    return sources


def get_declared_kind(pipeline: Any, node: Any) -> tuple[str | None, int | None]:
    """Return the (NumPy dtype string, number of dimensions) that an external source declares, each None if undeclared.

    The input of a decoder is always (uint8, 1), the bytes of a file. Other inputs may crash the process.
    """
    for operator in pipeline._ops:
        schema_name: str = getattr(type(operator._op), "schema_name", "")
        is_decoder = schema_name.startswith(("decoders__", "ImageDecoder", "experimental__decoders__"))
        if is_decoder and operator.inputs and operator.inputs[0].name == node.name:
            return np.dtype(np.uint8).str, 1
    dtype, ndim = getattr(node._op, "_dtype", None), getattr(node._op, "_ndim", None)
    return (None if dtype is None else np.dtype(types.to_numpy_type(dtype)).str), ndim


def get_engine_paddings(pipeline: Any) -> set[Padding]:
    """Return the paddings of the decoders that use the JPEG engines. The pipeline must have its graph."""
    return {tuple((name, int(args[name])) for name in PADDINGS if name in args) for _, args in _find_decoders(pipeline)}


def _find_decoders(pipeline: Any) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield the decoders that use the JPEG engines, with their arguments."""
    for node in (each for each in pipeline._ops if each._op.schema.HasArgument("hw_decoder_load")):
        lines = str(node.spec).partition("Arguments:\n")[2].splitlines()  # DALI has no API for them
        arguments = dict(line.strip().split(": ", 1) for line in lines if ": " in line)
        if arguments["device"] == "mixed" and float(arguments.get("hw_decoder_load", 1)):
            yield node, arguments


def disable_engines(pipeline: Any) -> bool:
    """Configure the decoders of a pipeline not to use the JPEG engines. A built pipeline must then be rebuilt.

    Return False if this is impossible: a pipeline that uses the engines is in the middle of an epoch, or has a decoder
    with ``hw_decoder_load`` and with arguments computed by other operators.
    """
    if not pipeline._py_graph_built:
        pipeline._build_graph()
    specs = [(operator, _spec_without_engines(operator)) for operator, _ in _find_decoders(pipeline)]
    if not specs:
        return True
    if is_mid_epoch(pipeline) or any(spec is None for _, spec in specs):
        return False
    discard_executor(pipeline)
    for operator, spec in specs:
        operator._spec = spec
    return True


def _spec_without_engines(operator: Any) -> Any:
    """Return the spec of a decoder with ``hw_decoder_load=0``; None if its other arguments cannot be preserved."""
    spec = operator.spec.copy()
    try:
        spec.AddArg("hw_decoder_load", 0.0)
    except RuntimeError:  # the argument is already set
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
    """Return a DALI batch that is a view of NumPy memory. Both must be kept until the run has finished.

    If only DALI references a batch, it is freed one sample at a time, under the interpreter lock.
    """
    if isinstance(samples, np.ndarray):
        return backend.TensorListCPU(samples, "", False)
    tensors = [backend.TensorCPU(sample, "", False) for sample in samples]
    try:
        return backend.TensorListCPU(tensors, "", False)  # not contiguous: no copy
    except TypeError:  # before DALI 2, a list of tensors was always copied
        return backend.TensorListCPU(tensors, "")


def claim(pipeline: Any, owner: Any) -> None:
    """Make ``owner`` the only queue that runs a pipeline. The previous one's ``release_pipeline`` is called."""
    if pipeline._built and pipeline._pipe is None:
        raise PipelineError(
            "the pipeline belongs to the parent of this forked process. Create a new pipeline in this process",
            code="forked",
        )
    if (previous := _owners.get(pipeline, lambda: None)()) is not None:
        previous.release_pipeline()
    _owners[pipeline] = weakref.ref(owner)


def is_mid_epoch(pipeline: Any) -> bool:
    """Return whether a pipeline is in the middle of an epoch, to which its next outputs belong."""
    return pipeline._pipe is not None and (not pipeline._first_iter or pipeline._batches_to_consume > 0)


def drop_runs(pipeline: Any) -> None:
    """Discard outputs that were not collected, or, if this is impossible, the executor."""
    try:
        while pipeline._first_iter and pipeline._batches_to_consume > 0:
            pipeline.outputs()
    except RuntimeError:
        log.info("an uncollected run failed; rebuilding the pipeline")
        discard_executor(pipeline)
    if is_mid_epoch(pipeline):  # after pipeline.run() or an iterator, whose runs cannot be mixed with ours
        discard_executor(pipeline)


def discard_executor(pipeline: Any) -> None:
    """Discard the executor of a pipeline with its runs and state. When rebuilt, its random numbers start again."""
    pipeline._pipe = pipeline._api_type = None
    pipeline._backend_prepared = pipeline._built = pipeline._last_iter = False
    pipeline._first_iter = True
    pipeline._batches_to_consume = 0


def build(pipeline: Any) -> None:
    """Build a pipeline unless it is already built. On a GPU, this is slow.

    Raises:
        torch.OutOfMemoryError, MemoryError: the GPU or the CPU runs out of memory.
        PipelineError: the pipeline requires a GPU that DALI cannot use, or DALI cannot load its decoders.
        ValueError: the pipeline was created without a batch size or a number of threads.
    """
    if pipeline._built:
        return
    sizes = {"batch_size": pipeline.max_batch_size, "num_threads": pipeline.num_threads}
    if missing := [name for name, value in sizes.items() if (value or 0) < 1]:
        raise ValueError(f"the pipeline requires {' and '.join(missing)}; pass them when you create it")
    device_id = pipeline.device_id
    if device_id is not None and get_gpu_memory(device_id)[0] < MIN_FREE_BYTES:
        torch.cuda.empty_cache()
    if device_id is not None and (free := get_gpu_memory(device_id)[0]) < MIN_FREE_BYTES:
        # A decoder that lacks memory for the engines or for CUDA may report this only on stderr. After a decoder was
        # built with nearly no memory, images of a batch appeared in the preceding one (DALI 2.4).
        reason = f"GPU {device_id} has {free / 2**20:.0f} MB free, and at least {MIN_FREE_BYTES >> 20} MB are required"
        advice = "start iterating before the model fills the memory, or reduce its batch size"
        raise _out_of_memory(f"{reason}; {advice}", device_id, "a pipeline")
    try:
        with delay_exit():
            pipeline.build()
    except (RuntimeError, MemoryError) as error:
        # If GPU memory is short, the error of a decoder does not mention it.
        if _is_out_of_memory(error) or (device_id is not None and get_gpu_memory(device_id)[0] < MIN_FREE_BYTES):
            raise _out_of_memory(error, device_id, "a pipeline") from error
        if "requires a CUDA-capable GPU" in str(error) or "CUDA is not available" in str(error):
            raise PipelineError(
                "the pipeline requires a GPU, but DALI cannot use one here. For a CPU, pass device_id=None, give its "
                'decoders device="cpu" instead of "mixed" and omit .gpu(). `proxyloader doctor` shows why there is '
                f"none. DALI's error: {error}",
                code="no-gpu",
            ) from error
        if "libnvimgcodec" in str(error):
            raise PipelineError(
                "DALI cannot load nvImageCodec, its image decoding library. Install the version that `pip check` asks "
                f"for; `proxyloader doctor` shows the installed one. DALI's error: {error}",
                code="no-decoder",
            ) from error
        raise


def get_gpu_memory(device_id: int | None) -> tuple[float, float]:
    """Return the free and the total memory of a GPU, in bytes."""
    try:
        return torch.cuda.mem_get_info(device_id)
    except (RuntimeError, AssertionError):  # CUDA has failed, or torch was built without it
        return np.inf, np.inf


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether an error is about memory, based on its message, because DALI mostly raises RuntimeError."""
    text = str(error)
    return isinstance(error, MemoryError) or bool(re.search(r"(?i)out of memory|bad_alloc|allocat(e|ion|or) ", text))


def convert_run_error(error: Exception, device_id: int | None, size: int) -> Exception | None:
    """Return the error of a run of ``size`` samples without its traceback, which would keep the run alive.

    Return None if a signal handler raised it, such as torch's for lost workers.
    """
    if error.args and _is_out_of_memory(error):
        return _out_of_memory(error, device_id, f"a batch of {size}")
    return error.with_traceback(None) if RUN_FAILED in str(error) else None


def _out_of_memory(error: Exception | str, device_id: int | None, purpose: str) -> Exception:
    """Return the error that torch would raise, or on the CPU, a MemoryError."""
    kind = MemoryError if device_id is None else torch.OutOfMemoryError
    return kind(f"DALI ran out of memory for {purpose}: {error}")


def forget_in_child(pipeline: Any) -> None:
    """Leak a pipeline in a forked child, where destroying it would wait for threads that exist only in the parent."""
    if getattr(pipeline, "_pipe", None) is not None:
        leak(pipeline._pipe)
        pipeline._pipe = None


def _for_all_pipelines(function: Callable[[Any], None]) -> None:
    """Call a function for all pipelines of this process, also those that only the garbage collector references."""
    for reference in list(Pipeline._pipes):
        if (pipeline := reference()) is not None:
            function(pipeline)


@at_exit
def _end_pipelines() -> None:
    for server in watched_queues():
        server.end()
    _for_all_pipelines(Pipeline._shutdown)
    if "__del__" in vars(Pipeline):
        del Pipeline.__del__  # it would use globals that no longer exist when it is called


atexit.unregister(_shutdown_pipelines)  # DALI's own shutdown. See NOTE [ Shutdown order ].
os.register_at_fork(after_in_child=lambda: _for_all_pipelines(forget_in_child))
