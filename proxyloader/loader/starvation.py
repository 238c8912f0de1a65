"""Starvation: one warning where the training loop waits for its batches, and what to change. Main process."""

from __future__ import annotations

import logging
from typing import NamedTuple

from .._cores import cores_of_process

log = logging.getLogger(__name__)

STEPS = 100
"""Least number of steps in a row after which the loop is said to starve."""

LEAST_LOOP_S = 0.001
"""A loop that takes less time than this for a batch, in seconds, does nothing that could wait."""


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


class Starvation:
    """Looks for steps in a row of which the loop waits more than half, and logs one warning.

    Workers that begin together also give their batches together: one wait is long, and the following ones are short. So
    the steps of a round, one batch of each worker, are added up.

    Args:
        name: what the dataset is called in the warning.
        num_workers: of the loader.
    """

    def __init__(self, name: str, num_workers: int) -> None:
        self._name, self._num_workers = name, num_workers
        self._round: list[Step] = []
        self._starved: list[Step] = []
        self._has_begun = self._is_said = False

    def add(self, step: Step, workers_make_images: bool) -> None:
        """Add a step. ``workers_make_images`` says whether DALI makes less than half of the images so far."""
        if not self._has_begun or self._is_said:  # the first batch waits for the start of the workers and of DALI
            self._has_begun = True
            return
        if step.loop_s < LEAST_LOOP_S:  # as in the first step of an epoch, which waits for new workers
            return
        self._round.append(step)
        if len(self._round) < self._num_workers:
            return
        steps, self._round = self._round, []
        loop_s, wait_s = sum(each.loop_s for each in steps), sum(each.wait_s for each in steps)
        self._starved = self._starved + steps if wait_s > loop_s else []
        if len(self._starved) >= STEPS:
            self._is_said = True
            self._warn(workers_make_images)

    def _warn(self, workers_make_images: bool) -> None:
        count, total = len(self._starved), Step(*map(sum, zip(*self._starved)))
        log.warning(
            "%s: the loop waits for its batches, %.0f ms a step in %d steps in a row, and works %.0f ms. %s",
            self._name,
            1000 * total.wait_s / count,
            count,
            1000 * total.loop_s / count,
            self._advice(workers_make_images, total),
        )

    def _advice(self, workers_make_images: bool, total: Step) -> str:
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
        if workers_make_images:
            return "The workers make the images themselves. print(loader.backend) says why, and what DALI could do"
        if free > 0:
            return f"The workers are behind, and {free} of {cores} cores are free. Give the loader more num_workers"
        return "The workers are behind, and take all cores. Read from a faster disk, or store the images smaller"
