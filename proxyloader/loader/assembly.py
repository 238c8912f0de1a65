"""BatchAssembler: combines a packed batch and the outputs of its runs into the final batch. Main process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data._utils.pin_memory import pin_memory

from ..dali.output_format import stack
from ..data.bad_samples import UnreadableSample, UnreadableSamples
from ..data.lazy_tensor import RESIZE, check_same_size
from ..errors import ImageError, PipelineError
from ..workers.messages import PackedBatch, PackedRun
from ..workers.packing import KERNELS, ContentUnpickler
from .backend import ImageCounts
from .feed import Feed, InFlightBatch
from .options import LoaderOptions
from .recovery import BatchRecovery, RecoveredBatch
from .stats import WAIT, profile_row

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.output_format import Outputs
    from ..dali.run_queue import PipelineRun

log = logging.getLogger(__name__)

RESIZE_IN_GRAPH = (
    "Resize them in the pipeline, with fn.resize(images, size=[height, width]) or the size=... of a predefined one, or "
    "give the loader a collate_fn that accepts tensors of different shapes"
)
"""Advice for images of different sizes from a hand-written pipeline."""

SKIPPED_BATCH = object()
"""Sentinel for a batch without readable samples."""


class BatchAssembler:
    """Converts in-flight batches to the batches of the training loop."""

    def __init__(
        self,
        feed: Feed,
        errors: UnreadableSamples,
        collate_fn: Callable[[Any], Any],
        counts: ImageCounts,
        pin: bool,
        options: LoaderOptions,
    ) -> None:
        self._pool, self._servers, self._errors, self._collate_fn = feed.pool, feed.servers, errors, collate_fn
        self._pin = pin and not feed.pool.workers.pin_memory and torch.cuda.is_available()
        self._options, self._on_error, self._format = options, options.on_error, options.format
        self._counts = counts
        counts.begin_epoch()
        self._recovery = BatchRecovery(feed.servers, feed.pool, options)

    def assemble(self, in_flight: InFlightBatch) -> Any:
        """Return the batch, or ``SKIPPED_BATCH`` if it has no readable sample.

        Raises:
            Exception: the error of this batch, from the worker or the dataset, or an ImageError.
        """
        batch = in_flight.batch
        if batch is not None:
            # A failed batch skips or replaces no samples.
            self._errors.add(batch.unreadable, self._on_error if in_flight.error is None else "raise")
        if in_flight.error is not None:
            error, in_flight.error = in_flight.error, None
            try:
                raise error
            finally:
                del error  # its traceback references this frame
        assert batch is not None
        if batch.is_empty:
            return SKIPPED_BATCH
        self._counts.add(batch)
        if not batch.runs and not batch.is_computed:
            content = self._format.convert_batch(batch.content)
            if not self._options.translate:
                return tree_map(self._to_device, content)
            return pin_memory(content) if self._pin else content  # type: ignore[no-untyped-call]
        results = [self._collect(run, pipeline_run) for run, pipeline_run in zip(batch.runs, in_flight.pipeline_runs)]
        outputs = [result for result in results if not isinstance(result, PipelineError)]
        if len(outputs) < len(results):
            recovered = self._recovery.recover(batch, results)
            if recovered.failures:
                return self._handle_failures(batch, recovered)
            outputs = recovered.outputs
        is_custom = any(run.schedule is None and run.server not in self._pool.plans for run in batch.runs)
        resolve = functools.partial(_resolve, outputs, RESIZE_IN_GRAPH if is_custom else RESIZE)
        content = ContentUnpickler(batch.content, resolve, self._pin, batch.objects, self._options.image_device).load()
        if not batch.collated:
            return self._collate(batch, content)
        return self._format.convert_batch(content) if batch.is_computed else content

    def warn_if_idle(self, batch: PackedBatch | None) -> None:
        """Log a warning, once per loader, if no sample of the first batch uses the loader's server."""
        if batch is None or batch.is_empty:
            return
        is_idle = self._servers.keys() - self._pool.plans.keys() - {KERNELS, *(run.server for run in batch.runs)}
        if is_idle and not self._counts.is_server_idle:
            self._counts.is_server_idle = True
            log.warning(
                "no sample of the first batch uses the server of the loader; set the dataset's transform to "
                "server.proxy, or call server.proxy in the dataset"
            )

    def end_epoch(self, has_batches: bool) -> None:
        """Log the counts of the first epoch. Raise ImageError if all samples of the epoch were skipped."""
        self._counts.end_epoch()
        if has_batches or not self._errors or self._on_error != "skip":
            return
        first = self._errors[0]
        path = f" ({first.path})" if first.path else ""
        raise first.error(
            f"no sample of this epoch could be read; {len(self._errors)} were skipped, the first of them "
            f"dataset[{first.index}]{path}: {first.reason}. Check the location of the data"
        )

    def _to_device(self, value: Any) -> Any:
        """Move a four-dimensional tensor, which counts as images, to the device of the images."""
        is_images = isinstance(value, torch.Tensor) and value.ndim == 4
        return value.to(self._options.image_device, non_blocking=True) if is_images else value

    def _collect(self, run: PackedRun, pipeline_run: PipelineRun) -> Outputs | PipelineError:
        try:
            with profile_row(WAIT):
                outputs = self._servers[run.server].collect(pipeline_run)
            return self._format.convert_outputs(outputs)
        except PipelineError as error:
            return error.with_traceback(None)  # the traceback would reference this frame

    def _handle_failures(self, batch: PackedBatch, recovered: RecoveredBatch) -> Any:
        """Raise, skip or replace the samples whose images DALI failed on, depending on ``on_error``."""
        if self._on_error == "raise":
            errors = self._recovery.errors(batch, recovered)
            unreadable = [UnreadableSample.from_error(error.index, error) for error in errors]
            self._errors.add(unreadable, self._on_error)
            raise unreadable[0].error("; ".join(map(str, errors)), errors[0].code)
        try:
            samples, unreadable = self._recovery.samples(batch, recovered)
        except ImageError as error:  # a replacement is missing
            self._errors.add([UnreadableSample.from_error(error.index, error)], "raise")
            raise
        self._errors.add(unreadable, self._on_error)
        return self._collate(batch, samples if batch.batched else samples[0]) if samples else SKIPPED_BATCH

    def _collate(self, batch: PackedBatch, samples: Any) -> Any:
        """Call the user's collate_fn on decoded samples, seeded for the batch if the loader has a seed."""
        fetcher = self._pool.fetcher
        with fetcher.preserve_generators():
            if batch.request is not None:
                fetcher.seed_batch(batch.request)
            return self._format.convert_batch(self._collate_fn(samples))


def _resolve(outputs: list[Outputs], advice: str, place: Any) -> Any:
    """Return the image or the batch that a reference stands for; see ``_ContentPickler.reference``."""
    if isinstance(place, list):
        images: Any = [outputs[run][output][row] for output, run, row in place]
    elif len(place) == 3:
        output, run, row = place
        return outputs[run][output][row]
    else:
        output, run = place
        images = outputs[run][output]
        if isinstance(images, torch.Tensor):
            return images
    check_same_size(images, advice)
    return stack(images)
