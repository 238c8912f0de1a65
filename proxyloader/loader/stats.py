"""What a loader has given so far, how long the loop waited for it and where the time went. Main process.

``LoaderStats`` are the numbers, which ``StatsRecorder`` counts, and ``row`` adds to the profile of torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch.autograd import profiler

from .._cores import cores_of_process

if TYPE_CHECKING:
    from ..workers.messages import PackedBatch

log = logging.getLogger(__name__)

WINDOW_BATCHES = 1000
"""Number of batches, the last ones, of which times are kept."""

STEPS = 100
"""Least number of steps in a row of which the loop waits more than half, for a warning."""

LEAST_LOOP_S = 0.001
"""A loop that takes less time than this for a batch, in seconds, does nothing that could wait."""

METRICS = {
    "batches": ("batches_total", "Batches that the loop got."),
    "images": ("images_total", "Samples in these batches."),
    "images_per_s": ("images_per_second", "Samples per second of the last batches."),
    "wait_p50_ms": ("wait_p50_seconds", "Median of the time in next() of the last batches."),
    "wait_p99_ms": ("wait_p99_seconds", "99th percentile of the time in next() of the last batches."),
    "step_p50_ms": ("step_p50_seconds", "Median of the time from one of the last batches to the next."),
    "images_by_dali": ("images_by_dali_total", "Images that DALI decoded."),
    "images_by_pillow": ("images_by_pillow_total", "Images that DALI transformed, and Pillow decoded."),
    "images_by_workers": ("images_by_workers_total", "Samples that the workers made."),
    "batches_ahead": ("batches_ahead", "Batches with DALI, or decoded, that wait for the loop."),
    "bytes_read": ("read_bytes_total", "Encoded images that DALI was given."),
    "errors": ("errors_total", "Samples that could not be read."),
}
"""Name and description of each number for Prometheus, where the names of counts end in "_total"."""


@dataclass(frozen=True, repr=False)
class LoaderStats:
    """What a loader has given since it was made, or copied, and the times of its last 1,000 batches.

    ``print(loader.stats())`` shows all of it.

    Attributes:
        batches: number of batches that the loop got.
        images: number of samples in these batches. A sample with several images counts once. So does one that DALI
            could not decode, and that was left out.
        images_per_s: samples per second of the last 1,000 batches, from the end of one ``next()`` to the end of the
            following one. What lies between two epochs does not count.
        wait_p50_ms, wait_p99_ms: median and 99th percentile of the time in ``next()``, in ms.
        step_p50_ms: median of the time from one batch to the following one, in ms: the wait, and the loop's own work.
        images_by_dali: number of images that DALI decoded, or that the pipeline of a ``server`` made.
        images_by_pillow: number of images that DALI transformed, and that Pillow decoded or that are arrays.
        images_by_workers: number of samples that torchvision or the dataset's own code made, in the workers or, without
            workers, in the loop's process.
        batches_ahead: number of batches that wait for the loop now, decoded or with DALI. It is 0 where nothing is
            decoded ahead, as without workers.
        bytes_read: number of bytes of the JPEGs that DALI decoded, and of all that a ``server`` was given.
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
            f"  made by DALI {self.images_by_dali:,}, Pillow {self.images_by_pillow:,}, "
            f"workers {self.images_by_workers:,}; {self.bytes_read / 1e6:,.1f} MB read; {self.errors:,} errors"
        )

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by their names, as for ``add_scalar`` of TensorBoard."""
        return asdict(self)

    def prometheus(self, **labels: str) -> str:
        """Return the numbers in Prometheus's text format, in seconds and bytes.

        Args:
            labels: labels of each number, such as ``loader="train", rank="0"``, which tell loaders apart.
        """
        marks = ",".join(f"{name}={json.dumps(str(value), ensure_ascii=False)}" for name, value in labels.items())
        lines = []
        for field, value in self.as_dict().items():
            name, text = METRICS[field]
            lines.append(f"# HELP proxyloader_{name} {text}")
            lines.append(f"# TYPE proxyloader_{name} {'counter' if name.endswith('_total') else 'gauge'}")
            value = value / 1000 if field.endswith("_ms") else value
            lines.append(f"proxyloader_{name}{f'{{{marks}}}' if marks else ''} {value}")
        return "\n".join(lines) + "\n"


class Step(NamedTuple):
    """One step of the training loop, which ends when it gets a batch.

    Attributes:
        loop_s: time that the loop took with the batch before; for the first one of an epoch, since ``iter(loader)``.
        wait_s: time in ``next()``.
        for_workers_s: part of ``wait_s`` in which the workers had no batch ready; without workers, in which the batch
            was read.
        images: number of samples in the batch.
        bytes_read: number of bytes of the JPEGs that DALI decoded for it.
    """

    loop_s: float
    wait_s: float
    for_workers_s: float
    images: int
    bytes_read: int = 0


class StatsRecorder:
    """Counts what a loader gives, and logs a warning once if the loop waits more than half of ``STEPS`` steps in a row.

    Workers that begin together also give their batches together: one wait is long, and the following ones are short. So
    the steps of a round, one batch of each worker, are added up. ``name`` is what the warning calls the dataset.
    """

    def __init__(self, name: str, num_workers: int) -> None:
        self._name, self._num_workers = name, num_workers
        self._batches = self._images = self._by_dali = self._by_pillow = self._by_workers = self._bytes_read = 0
        self._steps: deque[Step] = deque(maxlen=WINDOW_BATCHES)
        self._round: list[Step] = []
        self._starved: list[Step] = []
        self._has_warned = False

    def add(self, batch: PackedBatch, step: Step) -> None:
        """Count a batch that the loop gets. This takes some µs, whatever the size of the batch."""
        _, by_pillow, by_workers = batch.images_by
        by_dali = sum(map(len, batch.runs))
        self._by_dali += by_dali - by_pillow
        self._by_pillow += by_pillow
        self._bytes_read += batch.bytes_read
        self.add_step(step, max(by_workers, step.images - by_dali))

    def add_step(self, step: Step, by_workers: int) -> None:
        """Count a batch, of which the workers made this number of images."""
        self._batches += 1
        self._images += step.images
        self._by_workers += by_workers
        self._steps.append(step)
        # The first batch waits for the start of the workers and of DALI, that of a later epoch for new workers.
        if self._batches > 1 and step.loop_s >= LEAST_LOOP_S and not self._has_warned:
            self._round.append(step)
            if len(self._round) >= self._num_workers:
                self._end_round()

    def _end_round(self) -> None:
        steps, self._round = self._round, []
        round_ = _sum(steps)
        self._starved = self._starved + steps if round_.wait_s > round_.loop_s else []
        count = len(self._starved)
        if count < STEPS:
            return
        self._has_warned, total = True, _sum(self._starved)
        log.warning(
            "%s: the loop waits for its batches, %.0f ms a step in %d steps in a row, and works %.0f ms. %s",
            self._name,
            1000 * total.wait_s / count,
            count,
            1000 * total.loop_s / count,
            self._advice(total),
        )

    def _advice(self, total: Step) -> str:
        """Return what the loop waits for, and what to try. ``total`` is the sum of the steps."""
        cores = cores_of_process()
        free = cores - self._num_workers
        if not self._num_workers:
            return f"Nothing is loaded while it works, as num_workers is 0. Give the loader num_workers={cores}"
        if total.for_workers_s < total.wait_s / 2:
            rate = total.images / (total.loop_s + total.wait_s)
            size = f" of {total.bytes_read / total.images / 1000:,.0f} kB on average" if total.bytes_read else ""
            return (
                f"It waits for DALI, which delivered {rate:,.0f} images/s{size}. Try a larger prefetch or num_threads, "
                "or store smaller images"
            )
        if 2 * self._by_workers > self._images:
            return "The workers make the images themselves. print(loader.backend) says why, and what DALI could do"
        if free > 0:
            return f"The workers are behind, and {free} of {cores} cores are free. Give the loader more num_workers"
        return "The workers are behind, and take all cores. Read from a faster disk, or store the images smaller"

    def stats(self, batches_ahead: int, errors: int) -> LoaderStats:
        """Return the numbers so far. Any thread may call this."""
        steps = np.array(list(self._steps) or [Step(0.0, 0.0, 0.0, 0)])
        wait_ms, step_ms = 1000 * steps[:, 1], 1000 * (steps[:, 0] + steps[:, 1])
        return LoaderStats(
            batches=self._batches,
            images=self._images,
            images_per_s=float(1000 * steps[:, 3].sum() / max(step_ms.sum(), 1e-9)),
            wait_p50_ms=float(np.median(wait_ms)),
            wait_p99_ms=float(np.percentile(wait_ms, 99)),
            step_p50_ms=float(np.median(step_ms)),
            images_by_dali=self._by_dali,
            images_by_pillow=self._by_pillow,
            images_by_workers=self._by_workers,
            batches_ahead=batches_ahead,
            bytes_read=self._bytes_read,
            errors=errors,
        )


def _sum(steps: list[Step]) -> Step:
    return Step(*map(sum, zip(*steps)))


# --- rows of the profile ----------------------------------------------------------------------------------------------

TAKE = "proxyloader.take_from_workers"
SUBMIT = "proxyloader.submit_to_dali"
WAIT = "proxyloader.wait_for_dali"

_NOTHING = contextlib.nullcontext()


def row(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context whose time is a row of torch's profile. Without a profiler it costs next to nothing.

    ``torch.autograd.profiler.emit_nvtx()`` makes NVTX ranges of them.
    """
    # ``record_function`` takes several µs also where nothing profiles.
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING
