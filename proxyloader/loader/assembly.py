"""BatchAssembler: combines a packed batch and the outputs of its runs into the user's batch. Main process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data._utils.pin_memory import pin_memory

from ..dali.output_format import stacked
from ..data.bad_samples import UnreadableSample, UnreadableSamples
from ..data.lazy_tensor import RESIZE, check_same_size
from ..errors import ImageError, PipelineError
from ..workers.messages import PackedBatch, PackedRun
from ..workers.packing import ContentUnpickler
from .feed import Feed, InFlightBatch
from .options import LoaderOptions
from .recovery import BatchRecovery, RecoveredBatch
from .stats import WAIT, row
from .strategy import ImageCounts

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.output_format import Outputs
    from ..dali.run_queue import PipelineRun

log = logging.getLogger(__name__)

RESIZE_IN_GRAPH = (
    "Give them one size in the pipeline, with fn.resize(images, size=[height, width]) or the size=... of a ready one, "
    "or give the loader a collate_fn that takes tensors of several shapes"
)
"""Advice for images of several sizes from a hand-written pipeline."""

NOTHING = object()
"""Returned instead of a batch if none of its samples could be read."""


class BatchAssembler:
    """Turns batches in flight into the batches of the training loop."""

    def __init__(
        self,
        feed: Feed,
        errors: UnreadableSamples,
        collate_fn: Callable[[Any], Any],
        counts: ImageCounts,
        pin: bool,
        options: LoaderOptions,
    ) -> None:
        pool, servers = feed.pool, feed.servers
        self._pool, self._servers, self._errors, self._collate_fn = pool, servers, errors, collate_fn
        self._pin = pin and not pool.workers.pin_memory and torch.cuda.is_available()
        self._on_error, self._format = options.on_error, options.format
        self._options, self._counts = options, counts
        self._recovery = BatchRecovery(servers, pool, options)

    def assemble(self, in_flight: InFlightBatch) -> Any:
        """Return the batch, or ``NOTHING`` if it has no readable sample.

        Raises:
            Exception: the error of this batch: from the worker, from the dataset, or an ImageError.
        """
        if in_flight.batch is not None:
            # In a batch that has failed, no sample is skipped or replaced.
            self._errors.add(in_flight.batch.unreadable, self._on_error if in_flight.error is None else "raise")
        if in_flight.error is not None:
            error, in_flight.error = in_flight.error, None
            try:
                raise error
            finally:
                del error  # the traceback keeps this frame alive
        batch = in_flight.batch
        assert batch is not None
        if batch.is_empty:
            return NOTHING
        self._counts.add(batch)
        if not batch.runs and not batch.is_computed:
            content = self._format.of_batch(batch.content)
            if not self._options.translate:
                return tree_map(self._placed, content)
            return pin_memory(content) if self._pin else content  # type: ignore[no-untyped-call]
        found = [self._collected(run, pipeline_run) for run, pipeline_run in zip(batch.runs, in_flight.pipeline_runs)]
        outputs = [each for each in found if not isinstance(each, PipelineError)]
        if len(outputs) < len(found):
            saved = self._recovery.save(batch, found)
            if saved.lost:
                return self._without_lost(batch, saved)
            outputs = saved.outputs
        by_hand = any(run.server not in self._pool.plans for run in batch.runs)
        resolve = functools.partial(_resolve, outputs, RESIZE_IN_GRAPH if by_hand else RESIZE)
        content = ContentUnpickler(batch.content, resolve, self._pin, batch.kept, self._options.images_on).load()
        if not batch.collated:
            return self._collated(batch, content)
        return self._format.of_batch(content) if batch.is_computed else content

    def warn_of_idle(self, batch: PackedBatch | None) -> None:
        """Log a warning, once a loader, if nothing in the first batch goes through the loader's server."""
        if batch is None or batch.is_empty:
            return
        is_idle = self._servers.keys() - self._pool.plans.keys() - {run.server for run in batch.runs}
        if is_idle and not self._counts.is_server_idle:
            self._counts.is_server_idle = True
            log.warning(
                "the loader was given a server=, and nothing in its first batch goes through that: let the dataset's "
                "transform be server.proxy, or call it"
            )

    def end_epoch(self, has_given: bool) -> None:
        """Log what the first epoch was made by. ImageError: every sample of an epoch was skipped."""
        self._counts.end_epoch()
        if has_given or not self._errors or self._on_error != "skip":
            return
        first = self._errors[0]
        path = f" ({first.path})" if first.path else ""
        raise first.error(
            f"not one sample of this epoch could be read; {len(self._errors)} were left out, the first of them "
            f"dataset[{first.index}]{path}: {first.reason}. Is the data where it should be?"
        )

    def _placed(self, value: Any) -> Any:
        """Return a four-dimensional tensor, which counts as images, on the device of the images."""
        is_images = isinstance(value, torch.Tensor) and value.ndim == 4
        return value.to(self._options.images_on, non_blocking=True) if is_images else value

    def _collected(self, run: PackedRun, pipeline_run: PipelineRun) -> Outputs | PipelineError:
        try:
            with row(WAIT):
                outputs = self._servers[run.server].collect(pipeline_run)
            return self._format.of_outputs(outputs)
        except PipelineError as error:
            return error.with_traceback(None)  # the traceback would keep this frame alive

    def _without_lost(self, batch: PackedBatch, saved: RecoveredBatch) -> Any:
        """Return the batch without samples whose images are lost, or with replacements, depending on ``on_error``."""
        if self._on_error == "raise":
            errors = self._recovery.errors(batch, saved)
            lost = [UnreadableSample.from_error(error.index, error) for error in errors]
            self._errors.add(lost, self._on_error)
            raise lost[0].error("; ".join(map(str, errors)), errors[0].code)
        try:
            samples, unreadable = self._recovery.samples(batch, saved)
        except ImageError as error:  # there is no replacement for one of them
            self._errors.add([UnreadableSample.from_error(error.index, error)], "raise")
            raise
        self._errors.add(unreadable, self._on_error)
        if not samples:
            return NOTHING
        return self._collated(batch, samples if batch.batched else samples[0])

    def _collated(self, batch: PackedBatch, samples: Any) -> Any:
        """Call the user's collate_fn on decoded samples, with the seed of the batch if the loader has a seed."""
        fetcher = self._pool.fetcher
        with fetcher.generators():
            if batch.request is not None:
                fetcher.seed_batch(batch.request)
            return self._format.of_batch(self._collate_fn(samples))


def _resolve(outputs: list[Outputs], advice: str, output: int, place: Any) -> Any:
    """Return the tensor of a reference to an output.

    ``place`` is the index of a run, for its whole output; (run, row), for one row; a list of these, for rows to be
    stacked.
    """
    if isinstance(place, int):
        found = outputs[place][output]
        return found if isinstance(found, torch.Tensor) else _stacked(found, advice)
    if isinstance(place, tuple):
        run, row = place
        return outputs[run][output][row]
    return _stacked([outputs[run][output][row] for run, row in place], advice)


def _stacked(images: Sequence[torch.Tensor], advice: str) -> torch.Tensor:
    check_same_size(images, advice)
    return stacked(images)
