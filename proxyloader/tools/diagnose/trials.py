"""Other arguments of the loader, tried on the loader alone."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler

from ..._cores import usable_cores
from ...data.dataset import length_of
from ...loader.dataloader import DataLoader
from .loaders import batches_ahead, endless, images_of, measured_alone, variation
from .phase import Phase

ENOUGH = 1.05
"""Gain from which an argument is suggested."""


@dataclass(frozen=True)
class Trial:
    """What another argument brings.

    Attributes:
        change: the argument, as it is written in a call.
        gain: how many times as many images a second the loader alone gives; the lower one of two runs if the first was
            enough to suggest it; 0 if the loader raises an error with it.
    """

    change: str
    gain: float

    @property
    def is_suggested(self) -> bool:
        return self.gain >= ENOUGH

    @property
    def caution(self) -> str:
        """What else it changes, if anything, as the end of a sentence."""
        return "; it changes the training, too" if self.change.startswith("batch_size") else ""


def trials(loader: Any, batch: Any, alone: Phase, seconds: float) -> tuple[Trial, ...]:
    """Try other arguments, all together for about this time. What gains enough is tried a second time."""
    changes = _changes(loader, batch)
    seconds_each = seconds / (2 * len(changes) + 2)
    gains: dict[str, Callable[[], float]] = {
        name: functools.partial(_gain, loader, changed, seconds_each) for name, changed in changes.items()
    }
    if loader.num_workers and not loader.persistent_workers and length_of(loader) is not None:
        gains["persistent_workers=True"] = functools.partial(_gain_of_persistent_workers, loader, alone)
    found = []
    for name, gain in gains.items():
        first = gain()
        found.append(Trial(name, min(first, gain()) if first >= ENOUGH else first))
    return tuple(found)


def _changes(loader: Any, batch: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments to try, by how they are written."""
    workers, cores = loader.num_workers, usable_cores()
    counts = {count for count in (workers // 2, 2 * workers, cores) if 0 < count <= cores} - {workers}
    changes: dict[str, dict[str, Any]] = {
        f"num_workers={count}": {"num_workers": count, "prefetch_factor": loader.prefetch_factor or 2}
        for count in sorted(counts)
    }
    if loader.batch_size is not None and 2 * loader.batch_size <= (length_of(loader.dataset) or 0):
        changes[f"batch_size={2 * loader.batch_size}"] = _of_batch_size(loader, 2 * loader.batch_size)
    images = images_of(batch)
    if isinstance(loader, DataLoader) and images is not None:
        half = torch.float16 if images.is_cuda else torch.bfloat16
        if images.dtype == torch.float32:
            changes[f"dtype={half}"] = {"dtype": half}
        if loader.memory_format == torch.contiguous_format:
            changes["memory_format=torch.channels_last"] = {"memory_format": torch.channels_last}
    return changes


def _of_batch_size(loader: Any, batch_size: int) -> dict[str, Any]:
    return {"batch_size": batch_size, "batch_sampler": BatchSampler(loader.sampler, batch_size, loader.drop_last)}


def _gain(loader: Any, changed: dict[str, Any], seconds: float) -> float:
    """Return how many times as many images a second a loader alone gives with other arguments; 0 if it does not work
    with them."""
    as_it_is = measured_alone(variation(loader), seconds).phase.step_s
    larger = changed.get("batch_size", loader.batch_size) / loader.batch_size if loader.batch_size else 1.0
    with suppress(Exception):
        return larger * as_it_is / measured_alone(variation(loader, **changed), seconds).phase.step_s
    return 0.0


def _gain_of_persistent_workers(loader: Any, alone: Phase) -> float:
    """Return how many times as fast whole epochs of the loader alone are, with what a new epoch waits for workers."""
    epoch_s = len(loader) * alone.step_s
    return (epoch_s + _pause_s(loader, alone, False)) / (epoch_s + _pause_s(loader, alone, True))


def _pause_s(loader: Any, alone: Phase, persistent: bool) -> float:
    """Return the time from the beginning of a second epoch to its first batch, in seconds."""
    varied = variation(loader, persistent_workers=persistent)
    first = endless(varied)
    next(first)
    if persistent:
        time.sleep(min(2.0, batches_ahead(loader) * alone.step_s))  # so that nothing of the first epoch is under way
    first.close()  # type: ignore[attr-defined]
    begin_s = time.perf_counter()
    second = endless(varied)
    next(second)
    pause_s = time.perf_counter() - begin_s
    second.close()  # type: ignore[attr-defined]
    return pause_s
