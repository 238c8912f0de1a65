"""Error recovery: find the images that DALI fails on, and rerun the others. Main process."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from .._random_state import preserve_rng
from ..dali.output_format import stack_or_list
from ..data.bad_samples import UnreadableSample
from ..data.encoded_image import EncodedImage
from ..data.hooks import deferred
from ..errors import ImageError, PipelineError
from ..kernels.programs import Schedule
from ..workers.fetch import MAX_ATTEMPTS, no_replacement
from ..workers.messages import PackedBatch, PackedRun
from ..workers.packing import ContentUnpickler
from ..workers.pool import WorkerPool
from .options import LoaderOptions

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.output_format import Outputs
    from .plan_servers import PlanQueue


@dataclass
class RecoveredBatch:
    """A batch whose failed runs were repeated.

    Attributes:
        runs: the runs.
        outputs: the outputs of each run, in the order of the runs. The rows of failed images hold arbitrary values.
        failures: the error of each failed image, by (run, number of the decoded image).
    """

    runs: Sequence[PackedRun]
    outputs: list[Outputs] = field(default_factory=list)
    failures: dict[tuple[int, int], ImageError] = field(default_factory=dict)

    def resolve(self, place: tuple[int, int, int]) -> torch.Tensor:
        """Return the image that a reference in a sample stands for, or raise its error."""
        output, run, row = place
        if (error := self.failures.get((run, self.runs[run].find_file(output, row)))) is not None:
            raise error
        return self.outputs[run][output][row]


class BatchRecovery:
    """Finds the images that a run fails on, and repeats the run without them."""

    def __init__(self, servers: Mapping[str, PlanQueue], pool: WorkerPool, options: LoaderOptions) -> None:
        self._servers, self._pool, self._options = servers, pool, options

    def recover(self, batch: PackedBatch, results: Sequence[Outputs | PipelineError]) -> RecoveredBatch:
        """Repeat the failed runs. ``results`` has the outputs or the error of each run of the batch.

        Raises:
            PipelineError: DALI fails although Pillow decodes all images, or a hand-written pipeline fails and
                ``on_error`` is "raise".
        """
        recovered = RecoveredBatch(batch.runs)
        for number, (run, outputs) in enumerate(zip(batch.runs, results)):
            if isinstance(outputs, PipelineError):
                outputs, failures = self._rerun(batch, run, outputs)
                recovered.failures.update({(number, row): error for row, error in failures.items()})
            recovered.outputs.append(self._options.format.convert_outputs(outputs))
        return recovered

    def _rerun(self, batch: PackedBatch, run: PackedRun, error: PipelineError) -> tuple[Outputs, dict[int, ImageError]]:
        if not self._servers[run.server].pipeline.exec_dynamic:
            outputs = self._run(batch, run)  # in DALI's old executor, the batches after a bad one fail as well
            if not isinstance(outputs, PipelineError):
                return outputs, {}
        if run.schedule is not None or run.server in self._pool.plans:
            return self._run_with_pillow(batch, run)
        if self._options.on_error != "raise":
            return self._run_one_by_one(batch, run)
        advice = "on_error='skip' finds and skips the sample that fails"
        raise error.at(f"{_describe_batch(batch)} ({advice})", indices=batch.sample_indices) from error

    def errors(self, batch: PackedBatch, recovered: RecoveredBatch) -> list[ImageError]:
        """Return the error of each failed image, with the index of its sample if known."""
        indices = batch.sample_indices
        if indices is None or len(batch.runs) != 1 or not _has_one_image_each(batch.runs[0], len(indices)):
            return [error.at(_describe_batch(batch)) for error in recovered.failures.values()]
        failures = [(indices[row], error) for (_, row), error in recovered.failures.items()]
        return [error.at(f"dataset[{index}]", index=index) for index, error in failures]

    def samples(self, batch: PackedBatch, recovered: RecoveredBatch) -> tuple[list[Any], list[UnreadableSample]]:
        """Return the readable samples of the batch, and the unreadable ones.

        Samples with a failed image are skipped, or replaced if ``on_error`` is "replace". The last sample of a batch
        without readable ones is also replaced if the fetcher fills batches. ImageError: a replacement is missing.
        """
        samples: list[Any] = []
        unreadable: list[UnreadableSample] = []
        indices = batch.sample_indices or [None] * len(batch.samples)
        for number, (index, data) in enumerate(zip(indices, batch.samples), 1):
            try:
                samples.append(self._unpickle(data, recovered, batch))
            except ImageError as error:
                error.__traceback__ = None  # the traceback would reference this frame
                unreadable.append(UnreadableSample.from_error(index, error))
                is_empty = index is not None and not samples and number == len(indices)
                if self._options.on_error == "replace" or (is_empty and self._pool.fetcher.fills_batches):
                    samples.append(self._find_replacement(batch, index, unreadable))
        return samples, unreadable

    def _unpickle(self, data: bytes, recovered: RecoveredBatch, batch: PackedBatch) -> Any:
        device = self._options.image_device
        return ContentUnpickler(data, recovered.resolve, objects=batch.objects, device=device).load()

    def _run_with_pillow(self, batch: PackedBatch, run: PackedRun) -> tuple[Outputs, dict[int, ImageError]]:
        images, *rest = map(list, batch.inputs(run, self._pool.arena))
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            decoded: list[Any] = list(pool.map(_decode, images, run.sources))
        failures = {row: result for row, result in enumerate(decoded) if isinstance(result, ImageError)}
        good_row = next((row for row in range(len(decoded)) if row not in failures), None)
        if good_row is None or (failures and self._options.on_error == "raise"):
            return [], failures
        schedule = batch.schedule(run, self._pool.arena)
        for row in failures:  # the run requires an input in each row
            if schedule is not None:
                decoded[row] = _blank(schedule.shapes[row])
                continue
            for column in (decoded, *rest):
                column[row] = column[good_row]
        return self._submit(run, [decoded, *map(_stack_arrays, rest)], schedule), failures

    def _run_one_by_one(self, batch: PackedBatch, run: PackedRun) -> tuple[Outputs, dict[int, ImageError]]:
        """Run each sample of a hand-written pipeline alone to find those that it fails on."""
        inputs = batch.inputs(run, self._pool.arena)
        rows: list[Outputs] = []
        failures: dict[int, ImageError] = {}
        for row, source in enumerate(run.sources):
            try:
                rows.append(self._submit(run, [[column[row]] for column in inputs], None))
            except PipelineError as error:
                reason = f"the pipeline fails on it: {_describe_failure(error.__cause__ or error)}"
                failures[row] = ImageError(f"{source or 'an image'}: {reason}", path=source, reason=reason)
                rows.append([])
        count = max(map(len, rows))
        return [stack_or_list([row[k][0] if row else torch.empty(0) for row in rows]) for k in range(count)], failures

    def _find_replacement(self, batch: PackedBatch, index: Any, unreadable: list[UnreadableSample]) -> Any:
        epoch = batch.request.epoch if batch.request is not None else 0
        candidate, attempts = index, min(MAX_ATTEMPTS, len(self._pool.fetcher.dataset) - 1)
        for _ in range(attempts):
            with preserve_rng(), self._deferring():
                candidate, sample = self._pool.fetcher.next_readable(candidate, epoch, unreadable)
            assert self._pool.packer is not None
            single = self._pool.packer.pack_alone(sample)
            if not single.runs and not single.is_computed:
                return sample
            recovered = self.recover(single, [self._run(single, run) for run in single.runs])
            if not recovered.failures:
                return self._unpickle(single.content, recovered, single)[0]
            unreadable.extend(UnreadableSample.from_error(candidate, error) for error in recovered.failures.values())
        raise no_replacement(index, unreadable, attempts)

    def _deferring(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the dataset's images are not decoded."""
        deferral = self._pool.fetcher.deferral
        return contextlib.nullcontext() if deferral is None else deferred(deferral)

    def _submit(self, run: PackedRun, inputs: Sequence[Any], schedule: Schedule | None) -> Outputs:
        server: Any = self._servers[run.server]
        outputs: Outputs = server.collect(server.submit(inputs, *(() if schedule is None else (schedule,))))
        return outputs

    def _run(self, batch: PackedBatch, run: PackedRun) -> Outputs | PipelineError:
        server = self._servers[run.server]
        server.pause()  # in DALI's old executor, a bad batch also fails the batches in flight with it
        try:
            return self._submit(run, batch.inputs(run, self._pool.arena), batch.schedule(run, self._pool.arena))
        except PipelineError as error:
            return error.with_traceback(None)
        finally:
            server.resume()


def _has_one_image_each(run: PackedRun, samples: int) -> bool:
    """Return whether the decoded images of a run seem to be those of the samples, in their order."""
    files = None if run.schedule is None else run.schedule[0].files
    if files is None or len(run) != samples:
        return len(run) == samples
    is_in_turn = len(files) % samples == 0 and bool((files.reshape(-1, samples) == np.arange(samples)).all())
    return is_in_turn or bool((np.diff(files) >= 0).all())


def _describe_batch(batch: PackedBatch) -> str:
    indices = batch.sample_indices
    return "in a batch of an IterableDataset" if indices is None else f"in the batch of dataset indices {list(indices)}"


def _describe_failure(error: BaseException) -> str:
    """Return the failed operator and its error in one line, or DALI's message if it names no operator."""
    match = re.search(r"operator `(?:nvidia\.dali\.)?([^`]+)`.*?encountered:\s*([^\n]+)", str(error), re.DOTALL)
    return ": ".join(match.groups()) if match is not None else str(error)


def _decode(image: NDArray[np.uint8], source: str) -> NDArray[np.uint8] | ImageError:
    try:
        decoded = EncodedImage(image.tobytes(), 0, 0, source).decoded()
        return np.frombuffer(EncodedImage.from_pil(decoded, source).data, np.uint8)
    except ImageError as error:
        return error.with_traceback(None)  # the traceback would reference this frame


def _blank(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return the file of a black image of this shape."""
    height, width, _ = shape
    return np.frombuffer(EncodedImage.from_pil(Image.new("RGB", (width, height))).data, np.uint8)


def _stack_arrays(arrays: list[NDArray[Any]]) -> NDArray[Any] | list[NDArray[Any]]:
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
