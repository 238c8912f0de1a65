"""LoaderStats: what a loader has given so far, and how long the loop waited for it. Main process."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from .starvation import Starvation, Step

if TYPE_CHECKING:
    from ..workers.messages import PackedBatch

WINDOW_BATCHES = 1000
"""Number of batches, the last ones, of which times are kept."""

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


class StatsRecorder:
    """Counts what a loader gives, batch by batch. ``name`` and ``num_workers`` are those of ``Starvation``."""

    def __init__(self, name: str, num_workers: int) -> None:
        self._batches = self._images = self._by_dali = self._by_pillow = self._by_workers = self._bytes_read = 0
        self._steps: deque[Step] = deque(maxlen=WINDOW_BATCHES)
        self._starvation = Starvation(name, num_workers)

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
        self._starvation.add(step, workers_make_images=2 * self._by_workers > self._images)

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
