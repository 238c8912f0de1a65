"""Loaders that are measured alone: the one of the loop, the other kind over the same samples, and variations."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import IterableDataset

from ...loader.dataloader import DataLoader
from .figures import Alone, Kind
from .phase import Phase, recorded

ARGUMENTS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
"""The arguments of torch's loader that do not choose the samples."""


def kind_of(loader: Any) -> Kind:
    return "proxyloader" if isinstance(loader, DataLoader) else "stock"


def other_kind(loader: Any) -> Any:
    """Build a loader of the other kind over the same samples, with the same arguments."""
    arguments = {name: getattr(loader, name) for name in ARGUMENTS}
    if loader.batch_size is None and loader.batch_sampler is not None:
        arguments["batch_sampler"] = loader.batch_sampler
    else:
        arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            arguments["sampler"] = loader.sampler
    return (StockLoader if isinstance(loader, DataLoader) else DataLoader)(loader.dataset, **arguments)


def variation(loader: Any, **changed: Any) -> Any:
    """Return a copy of a loader with other arguments, and without workers."""
    copied = copy.copy(loader)
    vars(copied).update(_iterator=None, **changed)  # torch's own __setattr__ refuses some of them
    return copy.copy(copied)  # in which the size of the pipelines follows from the arguments


def batches_ahead(loader: Any) -> int:
    """Return how many batches a loader prepares before they are asked for."""
    return int(loader.num_workers) * (loader.prefetch_factor or 0) + getattr(loader, "prefetch", 0)


def images_of(batch: Any) -> torch.Tensor | None:
    """Return the first tensor of a batch that may be its images, (N, C, H, W), or None."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return next((tensor for tensor in tensors if tensor.ndim == 4), None)


def endless(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader, epoch after epoch.

    Raises:
        ValueError: it has no batch.
    """
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ValueError(
                "the loader gives no batch: its dataset is empty, or smaller than a batch with drop_last=True"
            )


def measured_alone(loader: Any, seconds: float) -> Alone:
    """Measure a loader alone for about this time, its start included."""
    begin_s = time.perf_counter()
    batches = endless(loader)
    next(batches)
    first_batch_s = time.perf_counter() - begin_s
    left_s = max(seconds - first_batch_s, seconds / 3)
    phase = drawn(batches.__next__, batches_ahead(loader), left_s)
    batches.close()  # type: ignore[attr-defined]
    return Alone(first_batch_s, phase)


def drawn(draw: Callable[[], Any], ready: int, seconds: float) -> Phase:
    """Draw batches for this time, without those that may be ready at its begin, for which a third of it is left."""
    until_s = time.perf_counter() + seconds / 3
    while ready and time.perf_counter() < until_s:
        draw()
        ready -= 1
    with recorded(until_s + seconds * 2 / 3 - time.perf_counter()) as recording:
        while recording.goes_on():
            recording.drawn(draw)
    return recording.phase
