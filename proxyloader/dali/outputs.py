"""The outputs of a DALI pipeline as torch tensors. Main process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.dlpack

from .api import feed_ndarray, to_torch_type
from .output_format import Output, Outputs


def take_outputs(pipeline: Any, stream: torch.cuda.Stream | None) -> Sequence[Any]:
    """Return the outputs of the oldest run as DALI has them.

    On the CPU this waits for the run. On a GPU ``stream`` waits for it, if the pipeline has ``exec_dynamic``.
    """
    asynchronous = stream is not None and pipeline.exec_dynamic
    outputs: Sequence[Any] = pipeline.outputs(cuda_stream=stream) if asynchronous else pipeline.outputs()
    return outputs


def to_torch(outputs: Sequence[Any], stream: torch.cuda.Stream | None, exec_dynamic: bool) -> Outputs:
    """Return outputs as torch tensors.

    GPU tensors are allocated by torch, so torch's rules for streams, ``record_stream`` and memory statistics apply.
    """
    return [_convert(lambda tensor: _tensor_to_torch(tensor, stream, exec_dynamic), each) for each in outputs]


def _tensor_to_torch(tensor: Any, stream: torch.cuda.Stream | None, exec_dynamic: bool) -> torch.Tensor:
    on_gpu = "GPU" in type(tensor).__name__
    if not on_gpu and exec_dynamic:
        # Pass a capsule: for other objects torch calls DALI's code for the device, in which a Ctrl-C is lost.
        return torch.utils.dlpack.from_dlpack(tensor.__dlpack__())
    device = torch.device("cuda", tensor.device_id()) if on_gpu else torch.device("cpu")
    copied = torch.empty(tensor.shape(), dtype=to_torch_type[tensor.dtype], device=device)
    feed_ndarray(tensor, copied, cuda_stream=stream if on_gpu else None)
    return copied


def _convert(to_torch: Callable[[Any], torch.Tensor], output: Any) -> Output:
    """Convert an output to a tensor (N, ...), or to a list of N tensors if the samples differ in shape."""
    if output.is_dense_tensor():
        return to_torch(output.as_tensor())
    return [to_torch(output[k]) for k in range(len(output))]
