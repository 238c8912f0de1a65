"""PipelineRun: one run of a DALI pipeline, until the GPU has read its inputs. Main process."""

from __future__ import annotations

import time
from typing import Any

import torch

from .. import _fork_safety
from .output_format import Outputs

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

    def inputs_released(self) -> bool:
        """DALI has finished with the memory of the run's inputs."""
        return self.ended and (self.finished is None or bool(self.finished.query()))  # type: ignore[no-untyped-call]

    def wait_until_read(self) -> None:
        """Wait for the GPU to finish with it; returns at once for a run that was not collected."""
        if self.finished is not None:
            self.finished.synchronize()
