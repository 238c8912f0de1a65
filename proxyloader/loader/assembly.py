"""BatchAssembler: combines a packed batch and the outputs of its runs into the final batch. Main process.

It also finds the images that a run fails on, and repeats the run without them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils._pytree import tree_map
from torch.utils.data._utils.pin_memory import pin_memory

from .._random_state import preserve_rng
from ..dali.output_format import OutputFormat, Outputs, is_size, stack, stack_or_list
from ..data.bad_samples import UnreadableSample, UnreadableSamples
from ..data.encoded_image import EncodedImage
from ..data.hooks import deferred
from ..data.lazy_tensor import check_same_size
from ..errors import ImageError, PipelineError
from ..kernels.programs import Schedule
from ..workers.fetch import MAX_ATTEMPTS, no_replacement
from ..workers.masks import MaskReader, is_mask
from ..workers.messages import PackedBatch, PackedRun
from ..workers.packing import ContentUnpickler
from .feed import Feed
from .options import LoaderOptions
from .stats import WAIT, profile_row

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.run_queue import PipelineRun

SKIPPED_BATCH = object()  # sentinel for a batch without readable samples

Failures = dict[tuple[int, int], ImageError]
"""The error of each image that DALI failed on, by (run, number of the decoded image)."""


class BatchAssembler:
    """Converts in-flight batches to the batches of the training loop."""

    def __init__(self, feed: Feed, loader: Any) -> None:
        assert feed.pool.packer is not None
        self.feed, self._pool, self._servers, self._packer = feed, feed.pool, feed.servers, feed.pool.packer
        self._errors: UnreadableSamples = loader.errors
        self._collate_fn: Callable[[Any], Any] = loader.collate_fn
        self._pin = loader.pin_memory and not feed.pool.workers.pin_memory and torch.cuda.is_available()
        self._options: LoaderOptions = loader._options
        self._on_error = self._options.on_error
        self._format: OutputFormat = self._options.format

    def assemble(self, batch: PackedBatch) -> Any:
        """Return the batch, or ``SKIPPED_BATCH`` if it has no readable sample. Raises the error of a failed batch."""
        # A failed batch skips or replaces no samples.
        self._errors.add(batch.unreadable, self._on_error if batch.failure is None else "raise")
        if isinstance(batch.failure, Exception):
            error, batch.failure = batch.failure, None
            try:
                raise error
            finally:
                del error  # its traceback references this frame
        if batch.indices is not None and not batch.indices:  # all samples are unreadable
            return SKIPPED_BATCH
        if not batch.runs and not batch.is_computed and batch.masks is None:
            content = self._format.convert_batch(batch.content)
            if self._pin:
                content = pin_memory(content)  # type: ignore[no-untyped-call]
            moves = not self._options.translate or self._options.moves_masks
            return tree_map(self._to_device, content, is_leaf=is_size) if moves else content
        outputs: list[Any] = [self._collect(run, each) for run, each in zip(batch.runs, batch.pipeline_runs)]
        if failures := self._recover(batch, outputs):
            return self._handle_failures(batch, outputs, failures)
        content = self._unpickle(batch.content, batch, outputs, {}, self._pin)
        if not batch.collated:
            return self._collate(batch, content)
        return self._format.convert_batch(content) if batch.is_computed or not batch.runs else content

    def end_epoch(self, has_batches: bool) -> None:
        """Raise ImageError if all samples of the epoch were skipped."""
        if has_batches or not self._errors or self._on_error != "skip":
            return
        first = self._errors[0]
        path = f" ({first.path})" if first.path else ""
        raise first.error(
            f"could not read any sample in this epoch: skipped {len(self._errors)}, starting with "
            f"dataset[{first.index}]{path}: {first.reason}. Check the dataset path"
        )

    def _to_device(self, value: Any) -> Any:
        """Move a target, or without DALI a four-dimensional tensor, which counts as images, to the device of images."""
        if not isinstance(value, torch.Tensor):
            return value
        is_images = not self._options.translate and value.ndim == 4
        moves = is_images or self._options.targets_on_device or (self._options.masks_on_device and is_mask(value))
        return value.to(self._options.image_device, non_blocking=True) if moves else value

    def _collect(self, run: PackedRun, pipeline_run: PipelineRun) -> Outputs | PipelineError:
        try:
            with profile_row(WAIT):
                return self._servers[run.server].collect(pipeline_run)
        except PipelineError as error:
            return error.with_traceback(None)  # the traceback would reference this frame

    def _collate(self, batch: PackedBatch, samples: Any) -> Any:
        """Call the user's collate_fn on decoded samples, seeded for the batch if the loader has a seed."""
        fetcher = self._pool.fetcher
        with fetcher.preserve_generators():
            if batch.request is not None:
                fetcher.seed_batch(batch.request)
            return self._format.convert_batch(self._collate_fn(samples))

    # --- failed runs --------------------------------------------------------------------------------------------------

    def _handle_failures(self, batch: PackedBatch, outputs: list[Outputs], failures: Failures) -> Any:
        """Raise, skip or replace the samples whose images DALI failed on, depending on ``on_error``."""
        if self._on_error == "raise":
            indices, run = batch.sample_indices, batch.runs[0]
            if indices and len(batch.runs) == 1 and run.files is None and len(run) == len(indices):  # one image each
                errors = [error.at(f"dataset[{indices[k]}]", index=indices[k]) for (_, k), error in failures.items()]
            else:
                errors = [error.at(_describe_batch(batch)) for error in failures.values()]
            unreadable = [UnreadableSample.from_error(error.index, error) for error in errors]
            self._errors.add(unreadable, "raise")
            raise unreadable[0].error("; ".join(map(str, errors)), errors[0].code)
        try:
            samples, unreadable = self._readable_samples(batch, outputs, failures)
        except ImageError as error:  # a replacement is missing
            self._errors.add([UnreadableSample.from_error(error.index, error)], "raise")
            raise
        self._errors.add(unreadable, self._on_error)
        return self._collate(batch, samples if self._packer.batched else samples[0]) if samples else SKIPPED_BATCH

    def _readable_samples(
        self, batch: PackedBatch, outputs: list[Outputs], failures: Failures
    ) -> tuple[list[Any], list[UnreadableSample]]:
        """Return the readable samples of the batch with replacements, and the unreadable ones.

        The last sample of a batch without readable ones is also replaced if the fetcher fills batches.
        """
        samples: list[Any] = []
        unreadable: list[UnreadableSample] = []
        indices = batch.sample_indices or [None] * len(batch.samples)
        for number, (index, data) in enumerate(zip(indices, batch.samples), 1):
            try:
                samples.append(self._unpickle(data, batch, outputs, failures))
            except ImageError as error:
                error.__traceback__ = None  # the traceback would reference this frame
                unreadable.append(UnreadableSample.from_error(index, error))
                is_empty = index is not None and not samples and number == len(indices)
                if self._on_error == "replace" or (is_empty and self._pool.fetcher.fills_batches):
                    samples.append(self._find_replacement(batch, index, unreadable))
        return samples, unreadable

    def _find_replacement(self, batch: PackedBatch, index: Any, unreadable: list[UnreadableSample]) -> Any:
        epoch = batch.request.epoch if batch.request is not None else 0
        fetcher = self._pool.fetcher
        candidate, attempts = index, min(MAX_ATTEMPTS, len(fetcher.dataset) - 1)
        for _ in range(attempts):
            is_deferred = contextlib.nullcontext() if fetcher.deferral is None else deferred(fetcher.deferral)
            with preserve_rng(), is_deferred:
                candidate, sample = fetcher.next_readable(candidate, epoch, unreadable)
            single = self._packer.pack_alone(sample)
            if not single.runs and not single.is_computed and single.masks is None:
                return sample
            outputs: list[Any] = [PipelineError("not run yet")] * len(single.runs)
            if not (failures := self._recover(single, outputs)):
                return self._unpickle(single.content, single, outputs, failures)[0]
            unreadable.extend(UnreadableSample.from_error(candidate, error) for error in failures.values())
        raise no_replacement(index, unreadable, attempts)

    def _unpickle(
        self, data: bytes, batch: PackedBatch, outputs: list[Outputs], failures: Failures, pin: bool = False
    ) -> Any:
        """Return the batch or a sample, or raise the error of one of its images."""

        def get_image(output: int, run: int, row: int) -> torch.Tensor:
            if failures and (error := failures.get((run, batch.runs[run].find_file(output, row)))) is not None:
                raise error
            return outputs[run][output][row]

        def resolve(place: Any) -> Any:  # not recursive, as a cycle would keep the outputs alive
            if isinstance(place, tuple) and len(place) == 3:
                return get_image(*place)
            if isinstance(place, tuple):
                if isinstance(whole := outputs[place[1]][place[0]], torch.Tensor) and not failures:
                    return whole
                place = [(*place, row) for row in range(len(whole))]
            images = [get_image(*each) for each in place]
            check_same_size(images)
            return stack(images)

        masks, device = None, self._options.image_device
        if batch.masks is not None:
            begin, sizes = batch.masks
            masks = MaskReader(batch.memory(self._pool.arena)[begin : begin + sum(sizes)], sizes, device)
        moves = self._options.targets_on_device and self._options.on_gpu
        # On a CPU, a loader without runs falls back to torch, after which the images of a list keep their dtype.
        converts = not self._format.is_default and (bool(batch.runs) or self._options.on_gpu)
        convert = self._format.convert if converts else None
        return ContentUnpickler(data, resolve, pin, batch.objects, device, masks, moves, convert).load()

    def _recover(self, batch: PackedBatch, outputs: list[Any]) -> Failures:
        """Repeat the failed runs, and replace their errors in ``outputs``, with arbitrary values for failed images.

        PipelineError: DALI fails although Pillow decodes all images, or a hand-written pipeline fails.
        """
        failures: Failures = {}
        for number, (run, result) in enumerate(zip(batch.runs, outputs)):
            if isinstance(result, PipelineError):
                outputs[number], errors = self._rerun(batch, run, result)
                failures |= {(number, row): error for row, error in errors.items()}
        return failures

    def _rerun(self, batch: PackedBatch, run: PackedRun, error: PipelineError) -> tuple[Outputs, dict[int, ImageError]]:
        server = self._servers[run.server]
        if not server.pipeline.exec_dynamic:
            with server.paused():  # in DALI's old executor, a bad batch also fails the batches in flight with it
                try:
                    return self._submit(run, *batch.read(run, self._pool.arena)), {}
                except PipelineError as failed_again:
                    error = failed_again.with_traceback(None)
        if run.schedule is not None or run.server in self._pool.plans:
            return self._run_with_pillow(batch, run)
        if self._on_error != "raise":
            return self._run_one_by_one(batch, run)
        advice = "set on_error='skip' to find and skip the failing sample"
        raise error.at(f"{_describe_batch(batch)} ({advice})", indices=batch.sample_indices) from error

    def _run_with_pillow(self, batch: PackedBatch, run: PackedRun) -> tuple[Outputs, dict[int, ImageError]]:
        inputs, schedule = batch.read(run, self._pool.arena)
        images, *rest = map(list, inputs)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # errors thus do not reference this frame
            decoded: list[Any] = list(pool.map(_decode, images, run.sources))
        failures = {row: result for row, result in enumerate(decoded) if isinstance(result, ImageError)}
        good_row = next((row for row in range(len(decoded)) if row not in failures), None)
        if good_row is None or (failures and self._on_error == "raise"):
            return [], failures
        for row in failures:  # the run requires an input in each row
            if schedule is not None:
                height, width, _ = schedule.shapes[row]
                black = EncodedImage.from_pil(Image.new("RGB", (width, height)))
                decoded[row] = np.frombuffer(black.data, np.uint8)
                continue
            for column in (decoded, *rest):
                column[row] = column[good_row]
        return self._submit(run, [decoded, *rest], schedule), failures

    def _run_one_by_one(self, batch: PackedBatch, run: PackedRun) -> tuple[Outputs, dict[int, ImageError]]:
        """Run each sample of a hand-written pipeline alone to find those that it fails on."""
        inputs, _ = batch.read(run, self._pool.arena)
        rows: list[Outputs] = []
        failures: dict[int, ImageError] = {}
        for row, source in enumerate(run.sources):
            try:
                rows.append(self._submit(run, [[column[row]] for column in inputs], None))
            except PipelineError as error:
                text = str(error.__cause__ or error)
                match = re.search(r"operator `(?:nvidia\.dali\.)?([^`]+)`.*?encountered:\s*([^\n]+)", text, re.DOTALL)
                reason = f"the pipeline failed on this sample: {text if match is None else ': '.join(match.groups())}"
                failures[row] = ImageError(f"{source or 'an image'}: {reason}", path=source, reason=reason)
                rows.append([])
        count = max(map(len, rows))
        return [stack_or_list([row[k][0] if row else torch.empty(0) for row in rows]) for k in range(count)], failures

    def _submit(self, run: PackedRun, inputs: Sequence[Any], schedule: Schedule | None) -> Outputs:
        server = self._servers[run.server]
        return server.collect(server.submit(inputs, schedule))


def _describe_batch(batch: PackedBatch) -> str:
    indices = batch.sample_indices
    return "in a batch of an IterableDataset" if indices is None else f"in the batch of dataset indices {list(indices)}"


def _decode(image: NDArray[np.uint8], source: str) -> NDArray[np.uint8] | ImageError:
    try:
        decoded = EncodedImage(image.tobytes(), 0, 0, source).decoded()
        return np.frombuffer(EncodedImage.from_pil(decoded, source).data, np.uint8)
    except ImageError as error:
        return error.with_traceback(None)  # the traceback would reference this frame
