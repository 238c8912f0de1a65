"""The workers of a loader and the memory they share with it: a stock torch DataLoader that yields packed batches."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from .arena import Arena, RequestSampler
from .packing import PackedBatch, Packer
from .transforms.plan import Plan
from .worker import PackedDataset, set_up_worker

BYTES_PER_IMAGE = 1 << 20
"""Room in a slot for each image of a batch; it costs memory only where it is used."""

DEFAULT_RUN_SIZE = 256


def run_size(loader: TorchDataLoader[Any]) -> int:
    """Most samples that one pipeline run takes; larger batches are decoded in several."""
    if loader.batch_size is not None:
        return loader.batch_size
    return int(getattr(loader.batch_sampler, "batch_size", 1 if loader.batch_sampler is None else DEFAULT_RUN_SIZE))


@dataclass
class Road:
    """
    Attributes:
        workers: torch's loader over the wrapped dataset. It is the one that starts processes, draws seeds and advances
            the user's sampler, so all of that is torch's.
        requests: its sampler, or None for an iterable-style dataset, whose batches travel without slots.
        arena: the memory, or None where there are no workers to share it with.
        plans: of the dataset that the workers hold, by key; persistent workers keep it, whatever becomes of the user's.
        in_order: torch gives batches in the order of the sampler.
        broken: a worker was lost; the next epoch needs new ones.
    """

    workers: TorchDataLoader[PackedBatch]
    requests: RequestSampler | None
    arena: Arena | None
    plans: dict[str, Plan]
    in_order: bool = True
    broken: bool = False
    user: weakref.ref[Any] | None = field(default=None, repr=False)

    @classmethod
    def build(cls, loader: Any, dataset: Any, plans: dict[str, Plan], arena: Arena | None) -> Road:
        """
        Args:
            loader: whose arguments count.
            dataset: the wrapped one.
            plans: that it refers to.
            arena: of an earlier epoch, to be used again; None: a new one.
        """
        size = run_size(loader) if loader.server is None else loader.server.pipeline.max_batch_size
        arguments = dict(
            num_workers=loader.num_workers,
            timeout=loader.timeout,
            worker_init_fn=functools.partial(set_up_worker, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
            persistent_workers=loader.persistent_workers,
            in_order=loader.in_order,
        )
        if isinstance(dataset, IterableDataset):
            packer = Packer(loader.collate_fn, None, size)
            batches: dict[str, Any] = dict(batch_size=loader.batch_size)
            if loader.batch_size is not None:
                batches["drop_last"] = loader.drop_last
            return cls(
                TorchDataLoader(dataset, collate_fn=packer, **batches, **arguments), None, None, plans, loader.in_order
            )
        if loader.num_workers and (arena is None or arena.wanted_bytes > arena.slot_bytes):
            # One slot for each batch that torch asks workers for, each that DALI works on or holds ready, the one
            # handed out, and two that the GPU may still be reading.
            slots = loader.num_workers * loader.prefetch_factor + loader.prefetch + 4
            images = loader.batch_size or run_size(loader)
            arena = Arena(slots, max(images * BYTES_PER_IMAGE, arena.wanted_bytes if arena else 0))
        batched = loader.batch_sampler is not None
        requests = RequestSampler(loader.batch_sampler if batched else loader.sampler, arena)
        packed = PackedDataset(dataset, Packer(loader.collate_fn, arena, size), arena, batched)
        workers = TorchDataLoader(packed, batch_sampler=requests, collate_fn=_as_it_is, **arguments)  # type: ignore[arg-type]
        return cls(workers, requests, arena, plans, loader.in_order)

    def is_free(self) -> bool:
        """No iterator uses it."""
        return self.user is None or self.user() is None


def _as_it_is(batch: PackedBatch) -> PackedBatch:
    return batch
