"""ProgramServer: serves a Plan with kernels, behind a queue that only decodes. Main process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..kernels.launcher import Launcher
from ..kernels.operations import build_programs
from ..transforms.plan import Plan, plan_of
from ..transforms.type_conversion import ToTensor
from .build import PipelineOptions
from .output_format import OutputFormat, Outputs
from .plan_server import PlanServer
from .run_queue import PipelineRun


def create_decoder(options: PipelineOptions) -> PlanServer:
    """Return a queue that decodes images, (H, W, C) in DALI. The plans of a loader share it."""
    return PlanServer(plan_of((ToTensor(),)), options, OutputFormat(memory_format=torch.channels_last))


class ProgramServer:
    """Serves a plan like a ``PlanServer``, but only the decoder belongs to DALI.

    Attributes:
        was_used: whether a run has started since a loader last reset this.
    """

    deterministic = False

    def __init__(self, decoder: PlanServer, plan: Plan, launcher: Launcher) -> None:
        self._decoder, self._plan, self._launcher = decoder, plan, launcher
        self.was_used = False

    @property
    def pipeline(self) -> Any:
        return self._decoder.pipeline

    @property
    def num_runs(self) -> int:
        """Number of runs in flight, of all plans that share the decoder."""
        return self._decoder.num_runs

    def submit(self, inputs: Sequence[Any]) -> PipelineRun:
        """Start a run. See ``RunQueue.submit``."""
        files, *rows = inputs
        self.was_used = True
        return self._decoder.submit([files], functools.partial(self._transform, rows[0] if rows else None))

    def collect(self, run: PipelineRun) -> Outputs:
        """Wait for a run and return its outputs. See ``RunQueue.collect``."""
        return self._decoder.collect(run)

    def pause(self) -> bool:
        """See ``RunQueue.pause``."""
        return self._decoder.pause()

    def resume(self) -> None:
        self._decoder.resume()

    def _transform(self, rows: Any, images: Any) -> Outputs:
        """Launch the kernels for decoded images, in the current stream. ``rows`` are the sampled parameters."""
        count, state = len(images), self._plan.output
        programs = build_programs(self._plan, np.array(images.shape())[:, :2], rows)
        output = self._launcher.run(programs, [images[k].data_ptr() for k in range(count)], state.channels)
        return [output[at : at + count] for at in range(0, state.images * count, count)]
