"""The outputs of a DALI pipeline as torch tensors. Main process."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.dlpack

from .api import feed_ndarray, to_torch_type

LEGACY_STREAM = 1
"""What DLPack calls CUDA's default stream, where torch and CUDA say 0."""


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
    return [
        _view(output.as_tensor(), stream)
        if output.is_dense_tensor()
        else [_view(output[k], stream) for k in range(len(output))]
        for output in pipeline.outputs(cuda_stream=stream)
    ]


def _to_torch(output: Any, stream: torch.cuda.Stream | None, exec_dynamic: bool) -> torch.Tensor | list[torch.Tensor]:
    if output.is_dense_tensor():
        return _tensor_to_torch(output.as_tensor(), stream, exec_dynamic)
    return [_tensor_to_torch(output[k], stream, exec_dynamic) for k in range(len(output))]


def _tensor_to_torch(tensor: Any, stream: torch.cuda.Stream | None, exec_dynamic: bool) -> torch.Tensor:
    on_gpu = "GPU" in type(tensor).__name__
    if not on_gpu and exec_dynamic:
        return _view(tensor, None)
    device = torch.device("cuda", tensor.device_id()) if on_gpu else torch.device("cpu")
    copied = torch.empty(tensor.shape(), dtype=to_torch_type[tensor.dtype], device=device)
    feed_ndarray(tensor, copied, cuda_stream=stream if on_gpu else None)
    return copied


def _view(tensor: Any, stream: torch.cuda.Stream | None) -> torch.Tensor:
    """DALI's memory as a tensor of torch's; ``stream`` is to read it, where it is a GPU's."""
    # A capsule: of anything else torch compares the device with its own, and a Ctrl-C is lost where it is DALI's.
    how = {} if stream is None else {"stream": stream.cuda_stream or LEGACY_STREAM}
    return torch.utils.dlpack.from_dlpack(tensor.__dlpack__(**how))
