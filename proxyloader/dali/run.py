"""PipelineRun: one run of a DALI pipeline, until the GPU has read its inputs. Main process."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..errors import PipelineError
from ..lifetime import leak_in_child
from .output_format import Outputs

Kinds = tuple[tuple[str, int], ...]
"""(dtype, number of dimensions) of each input of a pipeline."""


class PipelineRun:
    """One run of the pipeline, from submit to collect.

    Args:
        size: number of samples.
        kinds: (dtype, number of dimensions) of each input.
    """

    def __init__(self, size: int, kinds: Kinds = ()) -> None:
        self.size, self.kinds = size, kinds
        self.outputs: Outputs | None = None
        self.error: Exception | None = None
        self.finished: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None
        self.inputs: list[Any] | None = None  # DALI should not be their last owner: see executor.tensor_list
        self.cancelled = False
        self.ended = False
        self.was_alone = False  # no other run was in flight when it was started
        self.started_s = time.monotonic()
        self.busy_until_s = 0.0  # in time.monotonic(): it is assumed not to end before
        leak_in_child(self)

    def __repr__(self) -> str:
        state = "failed" if self.error else "ended" if self.ended else "running"
        return f"PipelineRun({self.size} samples, {state}{', cancelled' if self.cancelled else ''})"

    def cancel(self) -> None:
        """Mark it as cancelled: it will not be collected."""
        self.cancelled, self.inputs = True, None

    def take_outputs(self, stream: torch.cuda.Stream | None) -> Outputs:
        """Return the outputs of a run that has ended, for use in ``stream``, once. Errors are those of ``collect``."""
        if self.cancelled:
            raise PipelineError("this run was forgotten: the server was stopped", code="stopped")
        if isinstance(self.error, (torch.OutOfMemoryError, MemoryError)):
            raise type(self.error)(str(self.error)) from self.error  # its own frames would hold the run
        if self.error is not None:
            raise PipelineError(f"the DALI pipeline failed on a batch of {self.size}: {self.error}") from self.error
        outputs, self.outputs = self.outputs, None
        if outputs is None:
            raise PipelineError("this run was interrupted, or collected before", code="stopped")
        if self.finished is not None and self.stream != stream:
            _hand_over(outputs, self.finished, stream)
        return outputs

    def inputs_released(self) -> bool:
        """Return whether DALI has finished reading the memory of the inputs."""
        return self.ended and (self.finished is None or bool(self.finished.query()))  # type: ignore[no-untyped-call]

    def wait_until_read(self) -> None:
        """Wait until the GPU has finished the run. This returns at once for a run that was not collected."""
        if self.finished is not None:
            self.finished.synchronize()


def _hand_over(outputs: Outputs, finished: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
    """Let ``stream`` use outputs that another stream received."""
    assert stream is not None
    stream.wait_event(finished)
    for output in outputs:
        for tensor in output if isinstance(output, list) else [output]:
            if tensor.is_cuda:
                tensor.record_stream(stream)
