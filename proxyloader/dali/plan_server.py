"""PlanServer: the run queue of a Plan's pipeline, or of a decoder with kernels behind it. Main process."""

import itertools
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from ..data.jpeg import JpegHeader, read_jpeg_header
from ..errors import PipelineError
from ..kernels.launcher import get_launcher
from ..kernels.programs import Schedule
from ..transforms.plan import Plan, plan_of
from ..transforms.type_conversion import ToTensor
from . import jpeg_engines
from .build import PipelineOptions, build_pipeline
from .output_format import OutputFormat, Outputs
from .run_queue import PipelineRun, RunQueue

log = logging.getLogger(__name__)

ROOM = 1.5  # ratio of a run's size to that of the first one above which the pipeline is built again

MAX_BYTES_TOGETHER = 128 << 20  # of decoded pixels


class PlanServer(RunQueue):
    """The run queue of the pipeline of a plan. It returns images as (N, C, H, W).

    The pipeline produces the output format as far as DALI supports it; ``OutputFormat.convert`` does the rest.
    If a run has a schedule, kernels transform the output of the pipeline.
    """

    def __init__(self, plan: Plan, options: PipelineOptions, format: OutputFormat, usual_images: int = 0) -> None:
        self._usual_images = usual_images  # in a run; 0: unknown
        self._options = self._built = replace(options, channels_last=format.channels_last)
        self._fits_images = 0.0  # maximum batch size for this pipeline; 0: it has had no batch
        self._plan = plan
        super().__init__(build_pipeline(self._plan, self._options))

    def submit(self, inputs: Sequence[Any], schedule: Schedule | None = None) -> PipelineRun:
        files, *rows = inputs
        columns = [np.ascontiguousarray(each).view(np.float64).astype(np.float32) for each in rows]
        return super().submit([files, *columns], schedule)

    def submit_together(self, files: Sequence[Any], schedules: Sequence[Schedule]) -> Sequence[PipelineRun]:
        """Start a run that decodes the files of several batches. Kernels transform each batch when it is collected."""
        return self._submit([files], [PipelineRun(len(each.shapes), each) for each in schedules])

    def fits(self, schedules: Sequence[Schedule], others: int = 0) -> bool:
        """Return whether to decode these batches, and ``others`` more like them, in one run."""
        ratio = 1 + others / len(schedules)
        images, size = sum(len(each.shapes) for each in schedules), sum(each.decoded_bytes for each in schedules)
        by_engines = self._fits_images / ROOM  # CUDA decodes the rest, with slightly different pixels
        most = by_engines if by_engines and self._built.wants_engines else self.pipeline.max_batch_size
        return ratio * images <= most and ratio * size <= MAX_BYTES_TOGETHER

    def _prepare(self, inputs: Sequence[Any]) -> Sequence[Any]:
        files, *columns = inputs
        if len(files) <= self._fits_images:
            return inputs
        is_first = not self._fits_images
        self._fit(files, is_first)
        if is_first and not columns and self._built.wants_engines:  # later runs may be larger; see ``_fit``
            images = min(self._usual_images, MAX_BYTES_TOGETHER / (3 * max(1.0, _mean_pixels(_jpeg_headers(files)))))
            files = [*files, *itertools.islice(itertools.cycle(files), max(0, int(images) - len(files)))]
        self._fits_images = ROOM * len(files)
        return [files, *columns]

    def _rebuild(self) -> None:
        super()._rebuild()
        self._fits_images = 0.0

    def _fit(self, files: Sequence[Any], is_first: bool) -> None:
        """Build the pipeline again if that decodes JPEGs like those of the first batch, or a larger batch, faster.

        The engines decode as many images of a batch as the first batch had, rounded up to a multiple of the number of
        engines, and CUDA decodes the rest (nvImageCodec 0.9).
        """
        device_id = self._options.device_id
        can_gain = is_first or (  # engines decode, and will also decode for another pipeline
            self._built.wants_engines and not jpeg_engines.is_crowded(device_id) and jpeg_engines.can_use(device_id)
        )
        if not can_gain:
            return
        headers = _jpeg_headers(files)
        progressive = sum(header.is_progressive for header in headers) / max(1, len(headers))
        options = self._options.for_files_of(_mean_pixels(headers), progressive)
        if options.engine_share != self._options.engine_share and not jpeg_engines.can_use(device_id):
            options = self._options.for_files_of(0, progressive)  # CUDA decodes all of them anyway
        if is_first and (options.threads, options.engine_share) == (self._built.threads, self._built.engine_share):
            return
        self.drain()
        if not is_first and device_id is not None:
            torch.cuda.synchronize(device_id)  # the GPU may still read what the old pipeline would free
        try:
            self.pipeline, self._built = build_pipeline(self._plan, options), options
        except (torch.OutOfMemoryError, MemoryError) as error:  # no room for two pipelines; the old one is only slower
            log.warning("keeping a slower pipeline for lack of memory: %s", str(error))

    def _convert(self, part: PipelineRun, stream: Any) -> Outputs:
        """Return the outputs of a run, or with a schedule, launch its kernels for decoded images in ``stream``."""
        if (schedule := part.schedule) is None:
            outputs = super()._convert(part, stream)
            return tree_map(lambda image: image.movedim(-1, -3), outputs) if self._options.channels_last else outputs
        if part.run.decoded is None:
            part.run.decoded = _find_decoded(*part.run.outputs)
        shapes, addresses = (each[part.begin : part.begin + part.size] for each in part.run.decoded)
        if shapes != schedule.shapes:
            found, expected = next(pair for pair in zip(shapes, schedule.shapes) if pair[0] != pair[1])
            raise PipelineError(f"an image was decoded as {list(found)}, but its header says {list(expected)}")
        return get_launcher(self.pipeline.device_id).run(schedule, addresses, stream)


def _find_decoded(images: Any) -> tuple[list[Any], Any]:
    """Return the shape and the address of each decoded image."""
    shapes = images.shape()
    try:
        ends = np.prod(shapes, axis=1).cumsum()
        return shapes, images.data_ptr() + np.concatenate(([0], ends[:-1]))
    except RuntimeError:  # they do not follow one another
        return shapes, [image.data_ptr() for image in images]


def _jpeg_headers(files: Sequence[Any]) -> list[JpegHeader]:
    return [header for each in files if (header := read_jpeg_header(memoryview(each))) is not None]


def _mean_pixels(headers: Sequence[JpegHeader]) -> float:
    return sum(header.height * header.width for header in headers) / max(1, len(headers))


_decoders: weakref.WeakValueDictionary[tuple[PipelineOptions, int], PlanServer] = weakref.WeakValueDictionary()


def get_decoder(options: PipelineOptions, usual_images: int) -> PlanServer:
    """Return a queue that decodes images, (H, W, C) in DALI, for runs with a schedule.

    Loaders with equal options and equally large runs share it, such as those for training and validation, because
    another one would take 1.6 s to build (``benchmarks/results/kernels.txt``).
    """
    if (decoder := _decoders.get((options, usual_images))) is None or decoder.lost_code:
        format = OutputFormat(memory_format=torch.channels_last)
        decoder = PlanServer(plan_of((ToTensor(),)), options, format, usual_images)
        _decoders[options, usual_images] = decoder
    return decoder
