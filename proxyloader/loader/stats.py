"""LoaderStats, the log of the first epoch, the warning about slow input, and the profiler rows. Main process."""

import contextlib
import json
import logging
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import profiler

from ..data.dataset import describe_dataset, get_length, get_sources
from ..kernels.operations import NO_KERNELS
from ..workers.messages import PackedBatch

log = logging.getLogger(__name__)

WINDOW_BATCHES = 1000  # number of recent batches whose times are kept
STARVED_STEPS = 100  # consecutive steps with more waiting than work that trigger the warning
MIN_LOOP_S = 0.001  # a faster loop does no work that could be delayed
WARN_FRACTION = 0.05  # of the first epoch's images not decoded by DALI above which a warning is logged


@dataclass(frozen=True, repr=False)
class LoaderStats:
    """Counts since a loader was created or copied, and times of its last 1,000 batches. ``print`` shows all fields.

    Attributes:
        batches: number of batches returned to the loop.
        images: number of samples in these batches. A sample with several images counts once, and so does an image that
            DALI could not decode and that was skipped. Each batch of an IterableDataset without images counts as full.
        images_per_s: samples per second over the last 1,000 batches, without the time between epochs.
        wait_p50_ms, wait_p99_ms: median and 99th percentile of the time in ``next()``, in ms.
        step_p50_ms: median time between consecutive batches, in ms: the wait and the work of the loop.
        images_by_dali: number of images decoded by DALI, or produced by the pipeline of a ``server``.
        images_by_pillow: number of images transformed by DALI that Pillow decoded or that are arrays.
        images_by_workers: number of samples produced by torchvision or the code of the dataset, in the workers or,
            without workers, in the main process.
        batches_ahead: number of batches that are decoded or submitted to DALI, and not yet returned. 0 if the loader
            does not decode ahead, for example without workers.
        bytes_read: size of the JPEGs that DALI decoded and of all inputs of a ``server``.
        errors: number of samples in ``loader.errors``.
    """

    batches: int
    images: int
    images_per_s: float
    wait_p50_ms: float
    wait_p99_ms: float
    step_p50_ms: float
    images_by_dali: int
    images_by_pillow: int
    images_by_workers: int
    batches_ahead: int
    bytes_read: int
    errors: int

    def __repr__(self) -> str:
        return (
            f"LoaderStats: {self.batches:,} batches, {self.images:,} images, {self.images_per_s:,.0f} images/s\n"
            f"  wait {self.wait_p50_ms:,.2f} ms in a step of {self.step_p50_ms:,.2f} ms (medians), "
            f"{self.wait_p99_ms:,.2f} ms at the 99th percentile; {self.batches_ahead} batches ahead\n"
            f"  produced by DALI {self.images_by_dali:,}, Pillow {self.images_by_pillow:,}, "
            f"workers {self.images_by_workers:,}; {self.bytes_read / 1e6:,.1f} MB read; {self.errors:,} errors"
        )

    def as_dict(self) -> dict[str, float]:
        """Return all fields by name, for example for TensorBoard's ``add_scalar``."""
        return asdict(self)

    def prometheus(self, **labels: str) -> str:
        """Return all fields in Prometheus's text format, times in seconds. Names of counters end in "_total".

        Args:
            labels: labels that identify the loader, such as ``loader="train", rank="0"``.
        """
        pairs = ",".join(f"{name}={json.dumps(str(value), ensure_ascii=False)}" for name, value in labels.items())
        text = ""
        for field, value in self.as_dict().items():
            is_counter = isinstance(value, int) and field != "batches_ahead"
            name = f"proxyloader_{field.replace('_ms', '_seconds')}{'_total' * is_counter}"
            value = value / 1000 if field.endswith("_ms") else value
            text += f"# TYPE {name} {'counter' if is_counter else 'gauge'}\n"
            text += f"{name}{f'{{{pairs}}}' if pairs else ''} {value}\n"
        return text


class Step(NamedTuple):
    """One step of the training loop. It ends when the loop receives a batch."""

    loop_s: float  # time since the previous batch, or since iter(loader)
    wait_s: float  # time in next()
    worker_wait_s: float  # part of wait_s in which the workers had no batch ready; without workers, all of it
    images: int


class StatsRecorder:
    """Counts what a loader returns. Logs the images of the first epoch, and a warning if the loop waits for data."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self._name, self._num_workers = f"proxyloader: {describe_dataset(dataset)}", num_workers
        # Whether the dataset creates its images from an array in memory, like CIFAR10, and so decodes none.
        self._has_arrays = all(
            isinstance(data := getattr(source, "data", None), (np.ndarray, torch.Tensor))
            and len(data) == get_length(source)
            for source in get_sources(dataset)
        )
        self._counts = Counter(
            batches=0, images=0, images_by_dali=0, images_by_pillow=0, images_by_workers=0, bytes_read=0
        )
        self._steps: deque[Step] = deque(maxlen=WINDOW_BATCHES)
        self._unchecked, self._has_warned = list[Step](), False
        self.images = 0, 0, 0  # of the first epoch; see ``PackedBatch.image_counts``
        self._is_logged = False
        self.decode_reason = ""  # why the workers decoded the first deferred image, if known
        self._logged_fallback = ""  # some workers may fall back, and others not
        self.has_fallen_back = False  # whether the workers have: NOTE [ When deferral stops ] in ``data/deferral.py``
        self.sends_pixels = False  # whether all images so far were decoded by Pillow, or are arrays
        self.has_images = False  # whether the workers have created undecoded images

    @property
    def fallback_reason(self) -> str:
        uses = "uses the pixels of its images" if self.has_images else "returns no images that DALI could decode"
        return self.decode_reason or f"the dataset {uses}"

    def begin_epoch(self) -> None:
        """Reset the counts of the first epoch, as an earlier one may have been left early."""
        if not self._is_logged:
            self.images = 0, 0, 0

    def add(self, batch: PackedBatch, step: Step) -> None:
        """Count a batch. This takes a few µs, regardless of the batch size."""
        (dali, pillow, workers), (_, new_pillow, new_workers) = self.images, batch.image_counts
        by_dali = sum(map(len, batch.runs)) - new_pillow
        self.images = dali + by_dali, pillow + new_pillow, workers + new_workers
        self.sends_pixels = new_pillow > 0 and not self.images[0]
        self.decode_reason = self.decode_reason or batch.decode_reason
        self.has_images |= batch.has_seen_images
        if batch.has_fallen_back and self.fallback_reason != self._logged_fallback:
            self._logged_fallback = self.fallback_reason
            level = logging.WARNING if self.has_images else logging.INFO
            log.log(level, "%s: falling back to torch's loading: %s", self._name, self.fallback_reason)
        self.has_fallen_back = batch.has_fallen_back or (self.has_fallen_back and not batch.runs)
        self._counts.update(images_by_dali=by_dali, images_by_pillow=new_pillow, bytes_read=batch.bytes_read)
        images = sum(len(run if run.files is None else run.files) for run in batch.runs)
        self.add_step(step, max(new_workers, step.images - images))

    def add_step(self, step: Step, worker_images: int) -> None:
        """Count a batch with this number of samples produced by the workers."""
        counts = self._counts
        counts["batches"] += 1  # update() would take longer than the rest
        counts["images"] += step.images
        counts["images_by_workers"] += worker_images
        self._steps.append(step)
        # The first batch includes the startup of workers and DALI, and that of later epochs the startup of new workers.
        if step.loop_s >= MIN_LOOP_S and counts["batches"] > 1 and not self._has_warned:
            self._unchecked.append(step)
            if len(self._unchecked) >= STARVED_STEPS:
                self._check_wait()

    def _check_wait(self) -> None:
        """Log a warning if the loop has waited longer than worked, not counting the longest wait."""
        steps, self._unchecked = self._unchecked, []
        total = Step(*map(sum, zip(*steps)))
        if total.wait_s - max(step.wait_s for step in steps) <= total.loop_s:
            return
        self._has_warned = True
        times_ms = [1000 * time_s / len(steps) for time_s in (total.wait_s, total.loop_s)]
        message = "%s: over %d steps, the training loop waited %.0f ms per step for data and worked %.0f ms. %s"
        log.warning(message, self._name, len(steps), *times_ms, self._advice(total))

    def _advice(self, total: Step) -> str:
        """Return the cause of the wait and a remedy. ``total`` is the sum of the steps."""
        if not self._num_workers:
            return "With num_workers=0, nothing is loaded in the meantime. Set num_workers to the number of cores"
        if total.worker_wait_s < total.wait_s / 2:
            return "DALI is the bottleneck. Try a larger prefetch or num_threads, or store smaller images"
        if 2 * self._counts["images_by_workers"] > self._counts["images"]:
            return "The workers decode and transform the images; print(loader.backend) shows why"
        return "The workers are the bottleneck. Increase num_workers, read from a faster disk, or store smaller images"

    def stats(self, batches_ahead: int, errors: int) -> LoaderStats:
        """Return the current statistics. Can be called from any thread."""
        steps = np.array(list(self._steps) or [Step(0.0, 0.0, 0.0, 0)])
        wait_ms, step_ms = 1000 * steps[:, 1], 1000 * (steps[:, 0] + steps[:, 1])
        return LoaderStats(
            **self._counts,
            images_per_s=float(1000 * steps[:, 3].sum() / max(step_ms.sum(), 1e-9)),
            wait_p50_ms=float(np.median(wait_ms)),
            wait_p99_ms=float(np.percentile(wait_ms, 99)),
            step_p50_ms=float(np.median(step_ms)),
            batches_ahead=batches_ahead,
            errors=errors,
        )

    def end_epoch(self) -> None:
        """Log the counts of the first epoch."""
        _, pillow, workers = self.images
        if self._is_logged or self.has_fallen_back or not any(self.images):
            return
        self._is_logged = True
        # An array needs no decoding, and DALI transforms it faster than torchvision.
        is_slow = workers + (0 if self._has_arrays else pillow) > WARN_FRACTION * sum(self.images)
        is_best = NO_KERNELS in self.decode_reason  # there is nothing that a user could change
        reason = ". Only images that DALI decodes load faster than with torch, that is, JPEGs whose pixels no code uses"
        if self.decode_reason:
            reason += f". The first image processed in a worker: {self.decode_reason}"
        log.log(
            logging.WARNING if is_slow and not is_best else logging.INFO,
            "%s, first epoch: images decoded by DALI: %s; decoded by Pillow or passed as arrays, then transformed by "
            "DALI: %s; processed in the workers: %s%s",
            self._name,
            *(f"{count:,}" for count in self.images),
            reason if is_slow else "",
        )


# --- profiler rows ----------------------------------------------------------------------------------------------------

TAKE = "proxyloader.take_from_workers"
SUBMIT = "proxyloader.submit_to_dali"
WAIT = "proxyloader.wait_for_dali"


def profile_row(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that adds a row to torch's profile, or an NVTX range under ``emit_nvtx()``."""
    # Without a profiler, record_function would still take several µs.
    return profiler.record_function(name) if profiler._is_profiler_enabled else contextlib.nullcontext()
