"""Batch sampler that issues worker requests and supports mid-epoch resume.

Runs in the thread of the main process in which torch advances it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from .._random_state import generator_of, preserve_rng, seed_generators
from ..data.sharded_sampler import ShardedSampler, find_sharded_sampler
from .arena import Arena
from .draws_ahead import RequestsAhead
from .loader_state import LoaderState, is_stateful

SAMPLERS_WITH_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers of torch with a ``generator``. Without one they use the default generator, which other threads also use."""


_END: Any = object()
"""Marks the end of the epoch in place of the indices of a batch."""

_generator_is_lent = threading.RLock()
"""Held while such a sampler has a temporary generator. Threads that share a loader share its sampler."""

os.register_at_fork(after_in_child=_generator_is_lent._at_fork_reinit)  # type: ignore[attr-defined]


def of_samples(sampler: Any) -> Any:
    """Return the sampler inside torch's BatchSampler, which yields one index at a time; any other sampler unchanged.

    Accelerate puts batch samplers of its own around torch's, which give a part of the batches and draw nothing.
    """
    while type(sampler).__module__ == "accelerate.data_loader" and hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def trains_with_others(sampler: Any) -> bool:
    """Return whether other processes load batches at the same time, of which each needs as many as this one."""
    sharded = find_sharded_sampler(sampler)
    shares = sharded.num_shards if sharded is not None else getattr(of_samples(sampler), "num_replicas", 1)
    return shares > 1 or (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


@dataclass(frozen=True)
class BatchRequest:
    """A request to a worker for one batch.

    Attributes:
        number: number of the request in its loader, from 0.
        indices: indices of the samples of the batch, or one index if batching is off.
        batched: whether ``indices`` is a batch.
        slot: slot that the worker may write to; None: no slot was free.
        needed, void: see ``RequestsAhead``.
    """

    number: int
    epoch: int
    indices: Any
    batched: bool
    slot: int | None
    needed: int = 0
    void: tuple[range, ...] = ()

    def each(self) -> list[Any]:
        return list(self.indices) if self.batched else [self.indices]


class RequestSampler:
    """A batch sampler that assigns a slot of the arena to each batch of another sampler.

    Args:
        sampler: the user's batch sampler, or sampler if batching is off.
        seed: seed of the order, unless the sampler has a generator of its own.
        ahead: number of batches that torch's loader requests before it takes the first.
        yields_indices: whether the next iteration yields the indices of a batch as they are, for torch's own fetcher.

    Attributes:
        sizes: with ``yields_indices``, of each batch that the training loop did not receive yet: the number of samples,
            and that by which it advances the order.
        ahead: the requests that torch's loader would not have made.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        batched: bool,
        arena: Arena | None = None,
        seed: int | None = None,
        ahead: int = 1,
        yields_indices: bool = False,
    ) -> None:
        self._sampler, self._batched, self._arena, self._seed = sampler, batched, arena, seed
        self.yields_indices, self.sizes = yields_indices, deque[tuple[int, int]]()
        self._iterator: Any = None
        self._draws_elsewhere = False
        self.ahead = RequestsAhead(ahead)
        self.begin(LoaderState())
        self._unanswered: dict[int, BatchRequest] = {}
        self._sampler_states: dict[int, dict[str, Any]] = {}
        self._next_number = 0

    def begin(self, loader_state: LoaderState) -> None:
        """Let the next iteration start at this state, and record in it what is needed to start there again."""
        self._loader_state = loader_state

    def __iter__(self) -> Iterator[BatchRequest]:
        self.forget_unanswered()  # torch begins an epoch after the workers have finished the one before
        self.undo_draws_ahead()
        self.ahead.begin(self._next_number)
        loader_state = self._loader_state
        self._settle_sampler(loader_state)
        # At once, because torch creates the iterator before it draws seeds.
        with self._known_generators(loader_state, "iter"):
            remaining = self._remaining(loader_state)
        drawn = self._drawn(loader_state, remaining)
        return self._indices(drawn) if self.yields_indices else self._requests(drawn, loader_state.epoch)

    def _drawn(self, loader_state: LoaderState, remaining: Iterator[Any]) -> Iterator[Any]:
        """Yield the indices of each batch. Generators are in a known state when torch's samplers draw, at the first."""
        with self._known_generators(loader_state, "next"):
            first = next(remaining, _END)
        if first is _END:
            return
        for indices in itertools.chain((first,), remaining):
            # A generator cannot be pickled.
            yield list(indices) if self._batched and not hasattr(indices, "__len__") else indices

    def _indices(self, drawn: Iterator[Any]) -> Iterator[Any]:
        self.sizes.clear()
        size_before, places = 0, 0
        for indices in drawn:
            size = len(indices) if self._batched else 1
            if size != size_before:
                size_before, places = size, self.places(size)
            self.sizes.append((size, places))
            yield indices

    def _requests(self, drawn: Iterator[Any], epoch: int) -> Iterator[BatchRequest]:
        for indices in drawn:
            self.ahead.note(self._next_number, own_generator(self._of_samples))
            slot = self._arena.lend() if self._arena is not None else None
            needed, void = self.ahead.needed, self.ahead.void
            request = BatchRequest(self._next_number, epoch, indices, self._batched, slot, needed, void)
            self._next_number += 1
            self._unanswered[request.number] = request
            if is_stateful(self._of_samples) or is_stateful(self._iterator):
                self._sampler_states[request.number] = sampler_state(self._of_samples, self._iterator)
            yield request
        self.ahead.note(self._next_number, own_generator(self._of_samples))

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def forget_unanswered(self) -> None:
        """Free the slots of requests that will not be answered, because no worker has them any more."""
        for request in self._unanswered.values():
            if self._arena is not None:
                self._arena.give_back(request.slot)
        self._unanswered.clear()
        self._sampler_states.clear()

    def undo_draws_ahead(self) -> None:
        """After a loop that was left: put the sampler's own generator where torch's loader would have left it."""
        self.ahead.undo(own_generator(self._of_samples))

    def answered(self, number: int | None) -> BatchRequest:
        """Record that a batch has come back and return its request. The slot then belongs to the batch.

        A batch without a number is that of the oldest request.
        """
        return self._unanswered.pop(next(iter(self._unanswered)) if number is None else number)

    def handed_out(self, request: BatchRequest, loader_state: LoaderState) -> None:
        """Record in the state of its epoch that the training loop received a batch."""
        self.ahead.received(request.number)
        loader_state.batches += 1
        loader_state.samples += self.places(len(request.each()))
        loader_state.sampler_state = self._sampler_states.pop(request.number, loader_state.sampler_state)

    def has_ready_batch(self, in_order: bool) -> bool:
        """Return whether torch can give the next batch without waiting for a worker, judging by the slots."""
        requests = itertools.islice(self._unanswered.values(), 1 if in_order else None)
        return any(r.slot is None or self._arena is None or self._arena.is_ready(r.slot) for r in requests)

    # --- the order --------------------------------------------------------------------------------------------------

    @property
    def _of_samples(self) -> Any:
        return of_samples(self._sampler)

    @property
    def _shards(self) -> int:
        """Number of processes of a sampler that splits its samples among them, as DistributedSampler."""
        return getattr(self._of_samples, "num_replicas", 1)

    def places(self, size: int) -> int:
        """Return by how many samples a batch of this size advances the order: that of all processes, or of this shard.

        Shards may differ in length: when one ends with a smaller batch, another may have a full one in the same step. A
        state saved in either process must work in both.
        """
        if self._batched and find_sharded_sampler(self._sampler) is not None:
            return int(self._sampler.batch_size)  # type: ignore[attr-defined]
        return self._shards * size

    def _remaining(self, loader_state: LoaderState) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch. Like a stock loader, it calls ``iter`` on the sampler once."""
        # Processes take samples in turn, and each needs as many. Another number of them may not divide what was taken.
        # Then some take a sample again, or with the sampler's own ``drop_last`` leave one out.
        repeats = not getattr(self._of_samples, "drop_last", False)
        done = loader_state.samples // self._shards if repeats else -(-loader_state.samples // self._shards)
        if type(self._sampler) is not BatchSampler:
            iterator: Iterator[Any] = iter(self._sampler)
            self._iterator = iterator
            return _remaining(iterator, loader_state, loader_state.batches if self._batched else done)
        if find_sharded_sampler(self._sampler) is not None:  # it counts the epoch in __iter__
            self._iterator = iter(self._sampler.sampler)
        return self._batches(self._sampler, loader_state, done)

    def _batches(self, sampler: BatchSampler, loader_state: LoaderState, done: int) -> Iterator[list[int]]:
        """Yield the batches of torch's BatchSampler from a sampler iterator that is accessible here."""
        if self._iterator is None:
            self._iterator = iter(sampler.sampler)
        remaining = _remaining(self._iterator, loader_state, done)
        yield from BatchSampler(remaining, sampler.batch_size, sampler.drop_last)

    def _settle_sampler(self, loader_state: LoaderState) -> None:
        """Restore a stateful sampler to its state at the start of the epoch, or record that state."""
        sampler, self._iterator = self._of_samples, None
        if isinstance(sampler, ShardedSampler):
            # Also if torch calls iter() twice, as it does with workers.
            taken = loader_state.sampler_state.get("taken", [])
            sampler.resume(loader_state.epoch, taken)
            loader_state.sampler_state = {"epoch": loader_state.epoch, "dealt": sampler.shard_spec, "taken": taken}
        elif loader_state.resumes and loader_state.sampler_state:
            if "epoch" in loader_state.sampler_state and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(loader_state.sampler_state["epoch"])
            if "sampler" in loader_state.sampler_state and is_stateful(sampler):
                sampler.load_state_dict(loader_state.sampler_state["sampler"])
        else:
            loader_state.sampler_state = sampler_state(sampler)

    @contextlib.contextmanager
    def _known_generators(self, loader_state: LoaderState, moment: str) -> Iterator[None]:
        sampler = self._of_samples
        generator = own_generator(sampler)
        if generator is not None:
            with _known_own_generator(generator, loader_state, moment):
                yield
        elif self._seed is not None and type(sampler) in SAMPLERS_WITH_GENERATOR:
            with _generator_is_lent:
                sampler.generator = generator_of(self._seed, loader_state.epoch, "order", moment)
                try:
                    yield
                finally:
                    sampler.generator = None
        elif self._seed is not None:
            with preserve_rng():
                seed_generators(self._seed, loader_state.epoch, "order", moment)
                yield
        elif loader_state.resumes and moment in loader_state.random_states:
            is_between_epochs = moment == "iter" and "next" not in loader_state.random_states
            with preserve_rng():
                torch.set_rng_state(loader_state.random_states[moment])
                yield
                if is_between_epochs:
                    if loader_state.new_workers:
                        draw_seed()
                    loader_state.random_states["next"] = torch.get_rng_state()
            # Such a state was saved before the order was drawn. The default generator must advance as well: it may be
            # in that same state, and the next epoch would then have the order of this one.
            if is_between_epochs:
                self._draws_elsewhere = True
            elif moment == "next" and self._draws_elsewhere:
                self._draws_elsewhere = False
                draw_seed()
        else:
            loader_state.random_states[moment] = torch.get_rng_state()
            yield


def own_generator(sampler: Any) -> torch.Generator | None:
    """Return the generator that a sampler uses instead of the default one; None if it has none."""
    with _generator_is_lent:
        generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


@contextlib.contextmanager
def _known_own_generator(generator: torch.Generator, loader_state: LoaderState, moment: str) -> Iterator[None]:
    states = loader_state.generator_states
    loader_state.settle(generator, moment)
    yield
    if loader_state.resumes and moment == "iter" and "next" not in states:  # a state between epochs
        if loader_state.new_workers:
            del states["iter"]  # torch creates another iterator after drawing a seed, as it did there
        else:
            states["next"] = generator.get_state()  # torch draws a seed now, and did not there


def sampler_state(sampler: Any, iterator: Any = None) -> dict[str, Any]:
    """Return the state of a sampler and of its iterator: the epoch that was set, and each ``state_dict``."""
    state: dict[str, Any] = {}
    if hasattr(sampler, "set_epoch") and hasattr(sampler, "epoch"):
        state["epoch"] = sampler.epoch
    if is_stateful(sampler):
        state["sampler"] = sampler.state_dict()
    if iterator is not sampler and is_stateful(iterator):
        state["iterator"] = iterator.state_dict()
    return state


def note_the_order_to_come(loader_state: LoaderState, sampler: Any, seed: int | None, moment: str) -> None:
    """Record in a state of an epoch without batches what the order will be drawn from, if nothing has been drawn yet.

    ``moment`` is what is drawn next, "iter" or "next"; see ``LoaderState.random_states``.
    """
    generator = own_generator(sampler)
    if generator is not None:
        loader_state.generator_states.setdefault(moment, generator.get_state())
    elif seed is None:
        loader_state.random_states.setdefault(moment, torch.get_rng_state())


def draw_seed() -> None:
    """Draw a seed as torch's iterators do when they are created, and its samplers when they begin."""
    torch.empty((), dtype=torch.int64).random_()


def _remaining(iterator: Iterator[Any], loader_state: LoaderState, done: int) -> Iterator[Any]:
    """Return the rest of an iterator. The first item restores its state, or skips ``done`` items.

    Nothing is skipped if its sampler has a state, which was restored before. ``iter()`` is not called on the iterator,
    because that might restart it.
    """
    is_whole = not done and not loader_state.resumes
    if is_whole and isinstance(iterator, (GeneratorType, type(iter(range(0))))):
        return iterator  # each index would take longer through another generator
    return _restored(iterator, loader_state, done)


def _restored(iterator: Iterator[Any], loader_state: LoaderState, done: int) -> Iterator[Any]:
    state = loader_state.sampler_state if loader_state.resumes else {}
    if "iterator" in state and is_stateful(iterator):
        iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
    elif not {"iterator", "sampler"} & state.keys():
        for _ in range(done):
            next(iterator, None)
    while (item := next(iterator, _END)) is not _END:
        yield item
