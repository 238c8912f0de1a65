"""PipelineRun: one run of a DALI pipeline, until the GPU has read its inputs; RunTimes. Main process."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from .. import _fork_safety
from ..errors import PipelineError
from .output_format import Outputs

WAITED_S = 0.001
"""Who waited longer for a run saw it end."""

SURELY = 0.8
"""Of the shortest time that a run took: in so much it will not end."""

Kinds = tuple[tuple[str, int], ...]
"""(dtype, number of dimensions) of each input of a pipeline."""


class PipelineRun:
    """One run of the pipeline, from submit to collect."""

    def __init__(self, size: int, kinds: Kinds = ()) -> None:
        self.size, self.kinds = size, kinds
        self.outputs: Outputs | None = None
        self.error: Exception | None = None
        self.finished: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None
        self.inputs: list[Any] | None = None  # as DALI has them; it should not be the last to hold them
        self.cancelled = False
        self.ended = False
        self.was_alone = False  # none was under way when it was started
        self.started_s = time.monotonic()
        self.busy_until_s = 0.0  # of time.monotonic: before that it will hardly have ended
        _fork_safety.keep_from_children(self)

    def __repr__(self) -> str:
        state = "failed" if self.error else "ended" if self.ended else "running"
        return f"PipelineRun({self.size} samples, {state}{', cancelled' if self.cancelled else ''})"

    def cancel(self) -> None:
        """Nobody will collect it."""
        self.cancelled, self.inputs = True, None

    def take_outputs(self, stream: torch.cuda.Stream | None) -> Outputs:
        """Those of a run that has ended. They can be taken once.

        Args:
            stream: that will use them.

        Raises:
            PipelineError, torch.OutOfMemoryError, MemoryError: as of ``RunQueue.collect``.
        """
        if self.cancelled:
            raise PipelineError("this run was forgotten: the server was stopped", code="stopped")
        if isinstance(self.error, (torch.OutOfMemoryError, MemoryError)):
            raise type(self.error)(str(self.error)) from self.error  # whose own frames would hold the run
        if self.error is not None:
            raise PipelineError(f"the DALI pipeline failed on a batch of {self.size}: {self.error}") from self.error
        outputs, self.outputs = self.outputs, None
        if outputs is None:
            raise PipelineError("this run was interrupted, or collected before", code="stopped")
        if self.finished is not None and self.stream != stream:
            _hand_over(outputs, self.finished, stream)
        return outputs

    def inputs_released(self) -> bool:
        """DALI has finished with the memory of the run's inputs."""
        return self.ended and (self.finished is None or bool(self.finished.query()))  # type: ignore[no-untyped-call]

    def wait_until_read(self) -> None:
        """Wait for the GPU to finish with it; returns at once for a run that was not collected."""
        if self.finished is not None:
            self.finished.synchronize()


class RunTimes:
    """How long a run takes, where none is under way before it: the shortest time so far."""

    def __init__(self) -> None:
        self._shortest_s = math.inf

    def note_start(self, pipeline_run: PipelineRun, is_alone: bool) -> None:
        """Say until when the run will hardly have ended."""
        pipeline_run.was_alone = is_alone
        if is_alone and self._shortest_s < math.inf:
            pipeline_run.busy_until_s = pipeline_run.started_s + SURELY * self._shortest_s

    def note_end(self, pipeline_run: PipelineRun, asked_s: float) -> None:
        """The run has ended, and was asked for at ``asked_s`` of ``time.monotonic()``."""
        now_s = time.monotonic()
        if pipeline_run.was_alone and now_s - asked_s > WAITED_S:  # else it was done before, nobody knows when
            self._shortest_s = min(self._shortest_s, now_s - pipeline_run.started_s)


def _hand_over(outputs: Outputs, finished: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
    """Let another stream than the one that received the outputs use them."""
    assert stream is not None
    stream.wait_event(finished)
    for output in outputs:
        for tensor in output if isinstance(output, list) else [output]:
            if tensor.is_cuda:
                tensor.record_stream(stream)
