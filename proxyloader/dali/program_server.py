"""ProgramServer: kernels behind a queue that only decodes. Main process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import PipelineError
from ..kernels.launcher import get_launcher
from ..kernels.programs import Schedule
from ..transforms.plan import plan_of
from ..transforms.type_conversion import ToTensor
from .build import PipelineOptions
from .output_format import OutputFormat, Outputs
from .plan_server import PlanServer
from .run_queue import PipelineRun

_decoders: weakref.WeakValueDictionary[PipelineOptions, PlanServer] = weakref.WeakValueDictionary()


def get_decoder(options: PipelineOptions) -> PlanServer:
    """Return a queue that decodes images, (H, W, C) in DALI.

    Loaders with equal options share it, such as those for training and validation, because another one would take 1.6 s
    to build (``benchmarks/results/kernels.txt``).
    """
    decoder = _decoders.get(options)
    if decoder is None or decoder.is_lost:
        format = OutputFormat(memory_format=torch.channels_last)
        decoder = _decoders[options] = PlanServer(plan_of((ToTensor(),)), options, format)
    return decoder


class ProgramServer:
    """Decodes images with DALI, and transforms them with kernels by the schedules that workers have built.

    Attributes:
        was_used: whether a run has started since a loader last reset this.
    """

    deterministic = False

    def __init__(self, decoder: PlanServer) -> None:
        self._decoder, self.was_used = decoder, False

    @property
    def pipeline(self) -> Any:
        return self._decoder.pipeline

    @property
    def num_runs(self) -> int:
        """Number of runs in flight, of all loaders that share the decoder."""
        return self._decoder.num_runs

    def submit(self, inputs: Sequence[Any], schedule: Schedule) -> PipelineRun:
        """Start a run. See ``RunQueue.submit``. ``inputs`` are the files, and ``schedule`` the launches for them."""
        self.was_used = True
        return self._decoder.submit(inputs, functools.partial(self._transform, schedule))

    def collect(self, run: PipelineRun) -> Outputs:
        """Wait for a run and return its outputs. See ``RunQueue.collect``."""
        return self._decoder.collect(run)

    def pause(self) -> bool:
        """See ``RunQueue.pause``."""
        return self._decoder.pause()

    def resume(self) -> None:
        self._decoder.resume()

    def _transform(self, schedule: Schedule, images: Any, stream: Any) -> Outputs:
        """Launch the kernels for decoded images, in the current stream."""
        shapes = images.shape()
        if shapes != schedule.shapes:
            found, expected = next(pair for pair in zip(shapes, schedule.shapes) if pair[0] != pair[1])
            raise PipelineError(f"an image was decoded as {list(found)}, but its header says {list(expected)}")
        launcher = get_launcher(self.pipeline.device_id, schedule.dtype, schedule.channels_last)
        return launcher.run(schedule, _get_addresses(images, schedule.decoded_ends), stream)


def _get_addresses(images: Any, ends: Any) -> Any:
    """Return the address of each decoded image. ``ends``: where they end if they follow one another."""
    try:
        first = images.data_ptr()
    except RuntimeError:  # they do not
        return [image.data_ptr() for image in images]
    return first + np.concatenate(([0], ends[:-1]))
