"""The one door to DALI's private names and to what differs between its versions.

Importing this module imports DALI. ``tests/test_dali.py`` holds every name used here to the DALI that is installed.

NOTE [ DALI's memory on a GPU ]
DALI gives memory that a stream has done with to the next operator in that stream without waiting: the stream keeps the
order. Its image decoder breaks that: it writes from streams of its own, which, it seems, do not wait for the one it
belongs to. So where other operators work in the decoder's stream, the pictures of a later run are written over those
that are still to be read. That is so with StreamPolicy SINGLE and PER_OPERATOR: three of four batches were wrong where
the training stream was far behind (DALI 2.4), and some wherever memory was short. They are refused. The default,
PER_BACKEND, gives decoders a stream of their own; ``tests/gpu/test_behind.py`` holds it.

NOTE [ What DALI cannot parse ]
DALI's image decoder reads the headers of a batch in several threads. Where it cannot make sense of one, it gives up
without waiting for the other threads, which go on in memory that is no longer theirs, and now and then end the process
(DALI 2.4, on a CPU). What fails later, while its pixels are decoded, does no harm. So a worker gives DALI no JPEG whose
header DALI cannot parse: ``jpeg.py`` refuses, and so leaves to Pillow, whatever is unusual there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from numpy.typing import NDArray

from . import forks
from .errors import MissingDaliError

try:
    from nvidia.dali import OperatorConcurrency as OperatorConcurrency
    from nvidia.dali import Pipeline as Pipeline
    from nvidia.dali import StreamPolicy as StreamPolicy
    from nvidia.dali import __version__ as __version__
    from nvidia.dali import backend as _backend
    from nvidia.dali import fn as fn
    from nvidia.dali import math as math
    from nvidia.dali import pipeline_def as pipeline_def
    from nvidia.dali import tfrecord as tfrecord
    from nvidia.dali import types as types
    from nvidia.dali.pipeline import do_not_convert as do_not_convert
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy as LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator as DALIClassificationIterator
    from nvidia.dali.plugin.pytorch import DALIGenericIterator as DALIGenericIterator
    from nvidia.dali.plugin.pytorch.experimental.proxy import DALIServer as DALIServer
    from nvidia.dali.plugin.pytorch.experimental.proxy import _external_source_node_names
    from nvidia.dali.plugin.pytorch.torch_utils import feed_ndarray as _feed_ndarray
    from nvidia.dali.plugin.pytorch.torch_utils import to_torch_type as _to_torch_type
except ImportError as error:
    raise MissingDaliError(
        f"NVIDIA DALI cannot be imported ({error}). On Linux: pip install nvidia-dali-cuda120 "
        "(nvidia-dali-cuda130 for CUDA 13). Without it, proxyloader.DataLoader works as torch's own"
    ) from error


def upright(operator: str) -> dict[str, bool]:
    """The argument that keeps a decoder from rotating by EXIF; before DALI 2 some decoders could not, and have none."""
    schema: Any = _backend
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


def external_sources(pipeline: Any) -> list[Any]:
    """The nodes of a pipeline that data is fed to, in its order.

    Raises:
        RuntimeError: the pipeline was deserialized, and knows them no more.
    """
    names = _external_source_node_names(pipeline)
    return [node for node in pipeline._ops if node.name in names]


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


def uses_engines(pipeline: Any) -> bool:
    """It was built, and has a decoder that gives JPEGs to a GPU's engines, or, being deserialized, may have one."""
    return pipeline._ops is None or bool(_on_engines(pipeline))


def _on_engines(pipeline: Any) -> list[Any]:
    """The decoders that give JPEGs to a GPU's engines."""
    decoders = [operator for operator in pipeline._ops if operator._op.schema.HasArgument("hw_decoder_load")]
    # The text of a spec is all that there is to read.
    texts = [str(operator.spec) for operator in decoders]
    return [
        operator
        for operator, text in zip(decoders, texts)
        if "device: mixed" in text and "hw_decoder_load: 0.000000" not in text
    ]


def leave_engines_alone(pipeline: Any) -> bool:
    """Tell the decoders of a pipeline to give nothing to a GPU's engines. Where it was built, it is to be built anew.

    Returns:
        False: that cannot be told to them; the pipeline was deserialized, say.
    """
    if not pipeline._py_graph_built:
        if pipeline._backend_prepared:  # without a graph
            return False
        pipeline._build_graph()
    found = _on_engines(pipeline)
    specs = [_off_engines(operator) for operator in found]
    if None in specs:
        return False
    for operator, spec in zip(found, specs):
        operator._spec = spec
    if found:
        take_apart(pipeline)
    return True


def _off_engines(operator: Any) -> Any:
    """A decoder's spec, with another ``hw_decoder_load``; None where not all the rest would be the same."""
    spec = operator.spec.copy()
    try:
        spec.AddArg("hw_decoder_load", 0.0)
    except RuntimeError:  # it is given, and cannot be changed
        how = {**operator._op._init_args, "name": operator.name, "hw_decoder_load": 0.0}
        again = type(operator._op)(device=operator._op.device, **how)(*operator.inputs[: spec.NumRegularInput()])
        spec = again.source.spec
        if _rest_of(spec) != _rest_of(operator.spec):
            return None
    return spec


def _rest_of(spec: Any) -> list[str]:
    """All that is told to an operator but how many JPEGs the engines get, and what has no part in its work."""
    without = ("hw_decoder_load: ", "preserve_name: ", "_origin_stack_")
    return [line for line in str(spec).splitlines() if not line.strip().startswith(without)]


def tensor_list(samples: NDArray[Any] | list[NDArray[Any]]) -> Any:
    """A DALI batch that refers to numpy memory, without a copy. The memory must stay until the run has finished.

    So should the batch itself: what DALI is the last to hold, it gives back under the interpreter lock, a sample at a
    time.
    """
    if isinstance(samples, np.ndarray):
        return _backend.TensorListCPU(samples, "", False)
    return _list_of([_backend.TensorCPU(sample, "", False) for sample in samples])


def _list_of(tensors: list[Any]) -> Any:
    try:
        return _backend.TensorListCPU(tensors, "", False)  # not contiguous: no copy
    except TypeError:  # before DALI 2 a list of tensors was always copied
        return _backend.TensorListCPU(tensors, "")


def is_pipeline_function(thing: Any) -> bool:
    """It was made by ``@pipeline_def``: called, it gives a pipeline."""
    return bool(getattr(thing, "_is_pipeline_def", False))


def keeps_checkpoints(pipeline: Any) -> bool:
    """Its state can be saved."""
    return bool(pipeline._enable_checkpointing)


def take_apart(pipeline: Any, seed: int | None = None) -> None:
    """Take a pipeline's executor away, with all that is under way and was learnt. It is to be built anew.

    Args:
        seed: another one for what is random in it; None: the one it has.
    """
    pipeline._pipe = None
    pipeline._seed = pipeline._seed if seed is None else seed
    pipeline._backend_prepared = pipeline._built = pipeline._last_iter = False
    pipeline._first_iter = True
    pipeline._batches_to_consume = 0


LITTLE_BYTES = 256 << 20
"""Of a GPU's memory, with which a pipeline may find too little."""


def build(pipeline: Any) -> None:
    """Build a pipeline, if it is not built yet. On a GPU it takes a second or two.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is no memory for it, on the GPU or on the CPU.
    """
    if pipeline._built:
        return
    device_id = pipeline.device_id
    if device_id is not None:
        _make_room(device_id)
    try:
        pipeline.build()
    except (RuntimeError, MemoryError) as error:
        # A decoder that finds no memory on a GPU says nothing of it.
        if is_out_of_memory(error) or (device_id is not None and _free_bytes(device_id) < LITTLE_BYTES):
            raise out_of_memory(error, device_id, "a pipeline") from error
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


def is_out_of_memory(error: Exception) -> bool:
    """DALI raises RuntimeError for nearly everything; the text tells."""
    return isinstance(error, MemoryError) or bool(
        re.search(r"out of memory|bad_alloc|allocat(e|ion|or) ", str(error), re.IGNORECASE)
    )


HOMES = tuple(str(Path(str(file)).parent) + os.sep for file in (_backend.__file__, torch.__file__, __file__))
"""Where the code is that takes a run's outputs."""


def is_of_a_run(error: BaseException) -> bool:
    """It came from taking a run's outputs; not from a signal handler of the user's, which may raise in any line, and
    not from Python itself."""
    if isinstance(error, RecursionError) or (isinstance(error, MemoryError) and not error.args):
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is None or traceback.tb_frame.f_code.co_filename.startswith(HOMES)


def out_of_memory(error: Exception | str, device_id: int | None, purpose: str) -> Exception:
    """What to raise in the place of DALI's error: torch's, whose users catch it."""
    kind = MemoryError if device_id is None else torch.OutOfMemoryError
    return kind(f"DALI found no memory for {purpose}: {error}")


def take_outputs(pipeline: Any, stream: torch.cuda.Stream | None) -> list[torch.Tensor | list[torch.Tensor]]:
    """Wait for the oldest iteration and give its outputs as torch tensors.

    On a GPU the waiting is left to ``stream``, and the tensors are torch's own memory, so that what torch's users know
    about streams, ``record_stream`` and memory statistics holds for them.

    Returns:
        For each output a tensor (N, ...), or a list of N tensors where the samples differ in shape.
    """
    asynchronous = stream is not None and pipeline.exec_dynamic
    outputs = pipeline.outputs(cuda_stream=stream) if asynchronous else pipeline.outputs()
    return [_to_torch(output, stream, pipeline.exec_dynamic) for output in outputs]


def view_outputs(pipeline: Any, stream: torch.cuda.Stream) -> list[torch.Tensor | list[torch.Tensor]]:
    """As ``take_outputs``, of a pipeline on a GPU, but DALI's own memory: to be read in ``stream`` and let go at once.

    DALI gives it to others when ``stream`` has come that far, and knows nothing of any other stream.
    """
    outputs = pipeline.outputs(cuda_stream=stream)
    view: Callable[[Any], torch.Tensor] = torch.utils.dlpack.from_dlpack
    return [
        view(output.as_tensor()) if output.is_dense_tensor() else [view(output[k]) for k in range(len(output))]
        for output in outputs
    ]


def shares_decoder_stream(pipeline: Any) -> bool:
    """What follows a decoder works in its stream. See NOTE [ DALI's memory on a GPU ]."""
    return pipeline.device_id is not None and pipeline.stream_policy not in (None, StreamPolicy.PER_BACKEND)


def _to_torch(output: Any, stream: torch.cuda.Stream | None, exec_dynamic: bool) -> torch.Tensor | list[torch.Tensor]:
    if output.is_dense_tensor():
        return _tensor_to_torch(output.as_tensor(), stream, exec_dynamic)
    return [_tensor_to_torch(output[k], stream, exec_dynamic) for k in range(len(output))]


def _tensor_to_torch(tensor: Any, stream: torch.cuda.Stream | None, exec_dynamic: bool) -> torch.Tensor:
    on_gpu = "GPU" in type(tensor).__name__
    if not on_gpu and exec_dynamic:
        return torch.utils.dlpack.from_dlpack(tensor)
    device = torch.device("cuda", tensor.device_id()) if on_gpu else torch.device("cpu")
    copied = torch.empty(tensor.shape(), dtype=_to_torch_type[tensor.dtype], device=device)
    _feed_ndarray(tensor, copied, cuda_stream=stream if on_gpu else None)
    return copied


def forget_in_child(pipeline: Any) -> None:
    """Make a forked copy of a pipeline harmless: destroying it there waits for threads that only the parent has."""
    if getattr(pipeline, "_pipe", None) is not None:
        forks.never_destroy(pipeline._pipe)
        pipeline._pipe = None
