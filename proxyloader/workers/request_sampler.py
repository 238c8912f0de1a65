"""Batch sampler that issues worker requests and resumes in mid-epoch. Main process, in the iterating thread."""

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from .._random_state import make_generator, preserve_rng, seed_generators
from ..data.dataset import get_length
from ..data.sharded_sampler import ShardedSampler
from .arena import Arena
from .loader_state import RESTART, LoaderState, is_stateful, load_state, save_state

SAMPLERS_WITH_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""torch samplers that draw from the default generator unless they are given a ``generator``."""

_END: Any = object()  # of the epoch

_generator_lock = threading.RLock()
"""Held while such a sampler has a temporary generator, as threads may share a loader and its sampler."""

os.register_at_fork(after_in_child=_generator_lock._at_fork_reinit)  # type: ignore[attr-defined]


def unwrap_batch_sampler(sampler: Any) -> Any:
    """Return the sampler inside torch's BatchSampler, which yields one index at a time; any other sampler unchanged.

    Accelerate wraps torch's batch samplers in its own, which yield some of the batches and draw nothing.
    """
    while type(sampler).__module__ == "accelerate.data_loader" and hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def is_distributed(sampler: Any) -> bool:
    """Return whether several processes train together and require the same number of batches."""
    inner = unwrap_batch_sampler(sampler)
    processes = inner.num_shards if isinstance(inner, ShardedSampler) else getattr(inner, "num_replicas", 1)
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return processes > 1 or (has_group and torch.distributed.get_world_size() > 1)


@dataclass(frozen=True)
class BatchRequest:
    """A request to a worker for one batch."""

    number: int  # sequence number in its loader
    epoch: int
    indices: Any  # of the samples of the batch, or a single index if batching is disabled
    batched: bool
    slot: int | None  # that the worker may write to; None: no slot was free

    def index_list(self) -> list[Any]:
        return list(self.indices) if self.batched else [self.indices]


@dataclass(eq=False)
class RequestSampler:
    """A batch sampler that yields a request for each batch of another sampler, with a slot of the arena."""

    sampler: Any  # the user's batch sampler, or sampler if batching is disabled
    batched: bool
    arena: Arena | None = None
    seed: int | None = None  # of the order, unless the sampler has its own generator
    yields_indices: bool = False  # whether to yield indices instead of requests, for torch's own fetcher

    def __post_init__(self) -> None:
        # Where to start the next iteration, which records in it the states that reproduce the iteration.
        self.loader_state = LoaderState()
        # With ``yields_indices``, the number of samples of each batch that the training loop has not received yet.
        self.sizes = deque[int]()
        self._iterator: Any = None
        # Requests by number, until their batch arrives, which then owns the slot.
        self.pending: dict[int, BatchRequest] = {}
        self._sampler_states: dict[int, dict[str, Any]] = {}
        self._next_number = 0  # of the next request

    def __iter__(self) -> Iterator[Any]:
        self.discard_pending()  # torch begins an epoch after the workers have finished the previous one
        loader_state = self.loader_state
        self._restore_sampler(loader_state)
        # Not lazily, because torch creates the iterator before it draws seeds.
        with self._controlled_generators(loader_state, "iter"):
            return self._issue(loader_state, self._remaining(loader_state))

    def _issue(self, loader_state: LoaderState, remaining: Iterator[Any]) -> Iterator[Any]:
        """Yield a request or indices for each batch. torch's samplers draw the order on the first ``next()``."""
        with self._controlled_generators(loader_state, "next"):
            first = next(remaining, _END)
        if first is _END:
            return
        self.sizes.clear()
        for indices in itertools.chain((first,), remaining):
            if self.batched and not hasattr(indices, "__len__"):
                indices = list(indices)  # a generator cannot be pickled
            if self.yields_indices:
                self.sizes.append(len(indices) if self.batched else 1)
                yield indices
            else:
                yield self._request(indices, loader_state.epoch)

    def _request(self, indices: Any, epoch: int) -> BatchRequest:
        sampler, slot = self._inner_sampler, self.arena.acquire() if self.arena is not None else None
        request = BatchRequest(self._next_number, epoch, indices, self.batched, slot)
        self._next_number += 1
        self.pending[request.number] = request
        if is_stateful(sampler) or is_stateful(self._iterator):
            self._sampler_states[request.number] = sampler_state(sampler, self._iterator)
        return request

    def __len__(self) -> int:
        return len(self.sampler)

    def discard_pending(self) -> None:
        """Release the slots of requests that no worker will answer."""
        for request in self.pending.values():
            if self.arena is not None:
                self.arena.release(request.slot)
        self.pending.clear()
        self._sampler_states.clear()

    def record_return(self, request: BatchRequest, loader_state: LoaderState) -> None:
        """Record in the state of the epoch that the training loop received a batch."""
        loader_state.batches += 1
        loader_state.samples += self.positions(len(request.index_list()))
        loader_state.sampler_state = self._sampler_states.pop(request.number, loader_state.sampler_state)

    def has_ready_batch(self, in_order: bool) -> bool:
        """Return whether torch can return the next batch without waiting for a worker, as far as the slots tell."""
        requests = itertools.islice(self.pending.values(), 1 if in_order else None)
        return any(r.slot is None or self.arena is None or self.arena.is_ready(r.slot) for r in requests)

    # --- order ------------------------------------------------------------------------------------------------------

    @property
    def _inner_sampler(self) -> Any:
        return unwrap_batch_sampler(self.sampler)

    @property
    def _num_replicas(self) -> int:
        """Number of processes that share the samples, as with DistributedSampler."""
        return getattr(self._inner_sampler, "num_replicas", 1)

    def positions(self, size: int) -> int:
        """Return the number of samples by which a batch of this size advances the order of all processes or of a shard.

        Shards may differ in length: when one ends with a smaller batch, another may have a full one in the same step. A
        state saved in either process must work in both.
        """
        if type(self.sampler) is BatchSampler and isinstance(self.sampler.sampler, ShardedSampler):
            return self.sampler.batch_size
        return self._num_replicas * size

    def _remaining(self, loader_state: LoaderState) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch. Like a stock loader, call ``iter`` on the sampler once."""
        # Samples are dealt to the processes in turn. If the number of processes changes, the consumed samples may not
        # divide evenly: some processes then repeat a sample, or skip one if the sampler has ``drop_last``.
        drops = getattr(self._inner_sampler, "drop_last", False) * (self._num_replicas - 1)
        loader_state.samples = self._num_replicas * (done := (loader_state.samples + drops) // self._num_replicas)
        if type(self.sampler) is not BatchSampler:
            self._iterator = iter(self.sampler)
            return self._resume(loader_state, loader_state.batches if self.batched else done)
        if isinstance(self._inner_sampler, ShardedSampler):  # its __iter__ advances the epoch
            self._iterator = iter(self.sampler.sampler)
        return iter(BatchSampler(self._resume(loader_state, done), self.sampler.batch_size, self.sampler.drop_last))

    def _resume(self, loader_state: LoaderState, done: int) -> Iterator[Any]:
        """Yield the rest of the sampler's iterator, after restoring its state or skipping ``done`` items.

        If the sampler has a state, which is already restored, no items are skipped. ``iter()`` is not called on the
        iterator, because that might restart it.
        """
        if self._iterator is None:  # of torch's BatchSampler, which creates it for the first batch
            self._iterator = iter(self.sampler.sampler)
        iterator, state = self._iterator, loader_state.sampler_state if loader_state.resumes else {}
        load_state(iterator, state, "iterator")
        if not {"iterator", "sampler"} & state.keys():
            for _ in range(done):
                next(iterator, None)
        while (item := next(iterator, _END)) is not _END:
            yield item

    def _restore_sampler(self, loader_state: LoaderState) -> None:
        """Restore the state of the sampler at the start of the epoch, or record it."""
        sampler, self._iterator = self._inner_sampler, None
        if isinstance(sampler, ShardedSampler):
            # Idempotent, as torch calls iter() twice with workers.
            taken = loader_state.sampler_state.get("taken", [])
            sampler.resume(loader_state.epoch, taken)
            loader_state.sampler_state = {"epoch": loader_state.epoch, "dealt": sampler.shard_spec, "taken": taken}
        elif loader_state.resumes and loader_state.sampler_state:
            if "epoch" in loader_state.sampler_state and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(loader_state.sampler_state["epoch"])
            load_state(sampler, loader_state.sampler_state, "sampler")
            saved = loader_state.sampler_state.get("length", length := get_length(sampler))
            restores = {"iterator", "sampler"} & loader_state.sampler_state.keys()
            if loader_state.batches and not restores and saved != length:
                raise ValueError(
                    f"the state was saved with a sampler of length {saved}, but this one has length {length}, so some "
                    f"samples would be repeated and others skipped. Use a DistributedSampler, num_shards, or {RESTART}"
                )
        else:
            loader_state.sampler_state = sampler_state(sampler)

    @contextlib.contextmanager
    def _controlled_generators(self, loader_state: LoaderState, stage: str) -> Iterator[None]:
        sampler, states = self._inner_sampler, loader_state.generator_states
        own = sampler_generator(sampler)
        if self.seed is not None and own is None and type(sampler) in SAMPLERS_WITH_GENERATOR:
            with _generator_lock:
                sampler.generator = make_generator(self.seed, loader_state.epoch, "order", stage)
                try:
                    yield
                finally:
                    sampler.generator = None
            return
        if self.seed is not None and own is None:
            with preserve_rng():
                seed_generators(self.seed, loader_state.epoch, "order", stage)
                yield
            return
        generator = torch.default_generator if own is None else own
        # Whether the state was saved between epochs, before the order was drawn.
        is_between_epochs = loader_state.resumes and stage == "iter" and "next" not in states
        # During the epoch of a state, others may have drawn from the default generator.
        preserves = own is None and loader_state.resumes and stage in states and not is_between_epochs
        with preserve_rng() if preserves else contextlib.nullcontext():
            loader_state.restore_or_record(generator, stage)
            yield
        if is_between_epochs and loader_state.new_workers:
            del states["iter"]  # torch creates another iterator after drawing a seed, as when the state was saved
        elif is_between_epochs:
            states["next"] = generator.get_state()  # torch draws a seed now, but not when the state was saved


def sampler_generator(sampler: Any) -> torch.Generator | None:
    """Return the sampler's own generator, or None if it draws from the default one."""
    with _generator_lock:
        generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def sampler_state(sampler: Any, iterator: Any = None) -> dict[str, Any]:
    """Return the state of a sampler and its iterator: the epoch, and the ``state_dict`` of each."""
    state: dict[str, Any] = {}
    if hasattr(sampler, "set_epoch") and hasattr(sampler, "epoch"):
        state["epoch"] = sampler.epoch
    if not hasattr(sampler, "num_replicas") and (length := get_length(sampler)) is not None:
        state["length"] = length
    state |= save_state(sampler, "sampler")
    return state if iterator is sampler else state | save_state(iterator, "iterator")


def record_upcoming_order(loader_state: LoaderState, sampler: Any, seed: int | None, stage: str) -> None:
    """Record the generator states that determine the order of an epoch without batches so far, unless recorded before.

    ``stage`` is the next draw, "iter" or "next"; see ``LoaderState.generator_states``.
    """
    generator = sampler_generator(sampler)
    if generator is not None or seed is None:
        loader_state.generator_states.setdefault(stage, (generator or torch.default_generator).get_state())
