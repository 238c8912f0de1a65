"""Starvation: one warning where the training loop waits for its batches, and what to change. Main process."""

from __future__ import annotations

import logging
from typing import NamedTuple

from .._cores import cores_of_process

log = logging.getLogger(__name__)

STEPS = 100
"""Number of steps in a row after which the loop is said to starve."""

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
    """

    loop_s: float
    wait_s: float
    for_workers_s: float
    images: int


class Starvation:
    """Looks for steps in a row of which the loop waits more than half, and logs one warning.

    Args:
        name: what the dataset is called in the warning.
        num_workers: of the loader.
    """

    def __init__(self, name: str, num_workers: int) -> None:
        self._name, self._num_workers = name, num_workers
        self._steps, self._loop_s, self._wait_s, self._for_workers_s = 0, 0.0, 0.0, 0.0
        self._is_said = False

    def add(self, step: Step, workers_make_images: bool) -> None:
        """Add a step. ``workers_make_images`` says whether DALI makes less than half of the images so far."""
        if self._is_said or step.loop_s < LEAST_LOOP_S:  # as the first step of an epoch
            return
        if step.wait_s <= step.loop_s:
            self._steps, self._loop_s, self._wait_s, self._for_workers_s = 0, 0.0, 0.0, 0.0
            return
        self._steps += 1
        self._loop_s += step.loop_s
        self._wait_s += step.wait_s
        self._for_workers_s += step.for_workers_s
        if self._steps == STEPS:
            self._is_said = True
            log.warning(
                "%s: the loop waits for its batches, %.0f ms in each of %d steps in a row, and works %.0f ms. %s",
                self._name,
                1000 * self._wait_s / STEPS,
                STEPS,
                1000 * self._loop_s / STEPS,
                self._advice(workers_make_images),
            )

    def _advice(self, workers_make_images: bool) -> str:
        cores = cores_of_process()
        free = cores - self._num_workers
        if not self._num_workers:
            return f"Nothing is loaded while it works, as num_workers is 0. Give the loader num_workers={cores}"
        if self._for_workers_s < self._wait_s / 2:
            return "DALI decodes at its limit. Store the images smaller, at about twice the size that the model takes"
        if workers_make_images:
            return "The workers make the images themselves. print(loader.backend) says why, and what DALI could do"
        if free > 0:
            return f"The workers are behind, and {free} of {cores} cores are free. Give the loader more num_workers"
        return "The workers are behind, and take all cores. Read from a faster disk, or store the images smaller"
