"""ProgramServer: serves a Plan with kernels, behind a queue that only decodes. Main process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..kernels.launcher import Launcher
from ..kernels.operations import build_schedule, output_dtype
from ..kernels.programs import Schedule
from ..transforms.plan import Plan, plan_of
from ..transforms.type_conversion import ToTensor
from .build import PipelineOptions
from .output_format import OutputFormat, Outputs
from .plan_server import PlanServer
from .run_queue import PipelineRun

_decoders: weakref.WeakValueDictionary[PipelineOptions, PlanServer] = weakref.WeakValueDictionary()


def get_decoder(options: PipelineOptions) -> PlanServer:
    """Return a queue that decodes images, (H, W, C) in DALI.

    The plans of a loader share it, and so do loaders with equal options, such as those for training and validation:
    another one would take 1.6 s to build, and most of a gigabyte of GPU memory.
    """
    decoder = _decoders.get(options)
    if decoder is None or decoder.is_lost:
        format = OutputFormat(memory_format=torch.channels_last)
        decoder = _decoders[options] = PlanServer(plan_of((ToTensor(),)), options, format)
    return decoder


class ProgramServer:
    """Serves a plan like a ``PlanServer``, but only the decoder belongs to DALI.

    Attributes:
        was_used: whether a run has started since a loader last reset this.
    """

    deterministic = False

    def __init__(self, decoder: PlanServer, plan: Plan, launcher: Launcher, format: OutputFormat) -> None:
        self._decoder, self._plan, self._launcher, self._format = decoder, plan, launcher, format
        self.was_used = False

    @property
    def pipeline(self) -> Any:
        return self._decoder.pipeline

    @property
    def num_runs(self) -> int:
        """Number of runs in flight, of all plans that share the decoder."""
        return self._decoder.num_runs

    def submit(self, inputs: Sequence[Any], schedule: Schedule | None = None) -> PipelineRun:
        """Start a run. See ``RunQueue.submit``.

        Args:
            schedule: the launches for these images, if the worker has built them.
        """
        files, *rows = inputs
        self.was_used = True
        return self._decoder.submit([files], functools.partial(self._transform, schedule, rows[0] if rows else None))

    def collect(self, run: PipelineRun) -> Outputs:
        """Wait for a run and return its outputs. See ``RunQueue.collect``."""
        return self._decoder.collect(run)

    def pause(self) -> bool:
        """See ``RunQueue.pause``."""
        return self._decoder.pause()

    def resume(self) -> None:
        self._decoder.resume()

    def _transform(self, schedule: Schedule | None, rows: Any, images: Any) -> Outputs:
        """Launch the kernels for decoded images, in the current stream. ``rows`` are the sampled parameters."""
        shapes, state = images.shape(), self._plan.output
        format = self._format.dtype, self._format.channels_last
        layout = output_dtype(self._plan, format[0]).itemsize, format[1]
        # Decoders may disagree with the header of a damaged file, and the loader's format may change after the workers
        # have started.
        if schedule is None or (schedule.shapes, schedule.layout) != (shapes, layout):
            schedule = build_schedule(self._plan, np.array(shapes)[:, :2], rows, *format)
        output = self._launcher.run(schedule, _get_addresses(images, schedule.decoded_ends), state.channels)
        count = len(shapes)
        return [output[at : at + count] for at in range(0, state.images * count, count)]


def _get_addresses(images: Any, ends: Any) -> Any:
    """Return the address of each decoded image. ``ends``: where they end if they follow one another."""
    try:
        first = images.data_ptr()
    except RuntimeError:  # they do not
        return [image.data_ptr() for image in images]
    return first + np.concatenate(([0], ends[:-1]))
