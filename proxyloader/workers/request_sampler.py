"""Batch sampler that issues worker requests and supports mid-epoch resume.

Runs in the main process, in the thread that iterates, as torch advances it there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from .._random_state import generator_of, preserve_rng, seed_generators
from ..data.jpeg_integrity import IntegrityTable, ScanStatus
from ..data.sharded_sampler import ShardedSampler, find_sharded
from .arena import Arena
from .loader_state import LoaderState, is_stateful

SAMPLERS_WITH_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Those of torch that draw from it; without one they draw from the default, as other threads may do meanwhile."""


_generator_is_lent = threading.RLock()
"""Held while one of these has a generator that is not its own: threads that share a loader share its sampler."""

os.register_at_fork(after_in_child=_generator_is_lent._at_fork_reinit)  # type: ignore[attr-defined]


def of_samples(sampler: Any) -> Any:
    """The sampler that yields one index at a time, as far as there is one to be seen in a loader's."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


@dataclass(frozen=True)
class BatchRequest:
    """What a sampler yields to a worker, and what comes back with the batch.

    Attributes:
        number: counts a loader's requests.
        epoch: that it belongs to.
        indices: of the batch's samples; or one index where batching is off.
        batched: which of both it is.
        slot: that the worker may write to; None: there was none.
        scans: one ``ScanStatus`` for each sample; None where there is nothing to look at.
    """

    number: int
    epoch: int
    indices: Any
    batched: bool
    slot: int | None
    scans: bytes | None = None

    def each(self) -> list[Any]:
        """The index of each sample."""
        return list(self.indices) if self.batched else [self.indices]


class RequestSampler:
    """A batch sampler over another one, or over a sampler where batching is off, that lends a slot with each batch.

    Args:
        sampler: the user's batch sampler, or sampler where batching is off.
        batched: which of both it is.
        arena: that slots come from, if any.
        seed: that the order follows, unless the sampler has a generator of its own.
        scans: what is known of the samples' JPEGs; None where they are not looked at.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        batched: bool,
        arena: Arena | None = None,
        seed: int | None = None,
        scans: IntegrityTable | None = None,
    ) -> None:
        self._sampler, self._batched, self._arena, self._seed, self._scans = sampler, batched, arena, seed, scans
        self._iterator: Any = None
        self._draws_elsewhere = False
        self.begin(LoaderState())
        self._unanswered: dict[int, BatchRequest] = {}
        self._sampler_states: dict[int, dict[str, Any]] = {}
        self._numbers = itertools.count()

    def begin(self, loader_state: LoaderState) -> None:
        """Let the next iteration start there, and note in it what is needed to do so again."""
        self._loader_state = loader_state

    def __iter__(self) -> Iterator[BatchRequest]:
        self.forget_unanswered()  # torch begins an epoch when the workers have let go of the one before
        loader_state = self._loader_state
        self._settle_sampler(loader_state)
        with self._known_generators(
            loader_state, "iter"
        ):  # at once, as torch asks for the iterator before it draws seeds
            remaining = self._remaining(loader_state)
        return self._requests(loader_state, remaining)

    def _requests(self, loader_state: LoaderState, remaining: Iterator[Any]) -> Iterator[BatchRequest]:
        first = True
        while True:
            # Samplers draw when they yield first (torch's own do), so that happens under generators that are known.
            with self._known_generators(loader_state, "next") if first else contextlib.nullcontext():
                try:
                    indices = next(remaining)  # nobody asks it for an iterator again, which might begin anew
                except StopIteration:
                    return
            first = False
            if self._batched and not hasattr(indices, "__len__"):
                indices = list(indices)  # a generator cannot travel
            slot = self._arena.lend() if self._arena is not None else None
            request = BatchRequest(next(self._numbers), loader_state.epoch, indices, self._batched, slot)
            if self._scans is not None:
                request = dataclasses.replace(request, scans=self._scans.of(request.each()))
            self._unanswered[request.number] = request
            if is_stateful(self._of_samples) or is_stateful(self._iterator):
                self._sampler_states[request.number] = sampler_state(self._of_samples, self._iterator)
            yield request

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def forget_unanswered(self) -> None:
        """Take back the slots of batches that will not come: no worker has them any more."""
        for request in self._unanswered.values():
            if self._arena is not None:
                self._arena.give_back(request.slot)
        self._unanswered.clear()
        self._sampler_states.clear()

    def answered(self, number: int) -> BatchRequest:
        """Note that a batch has come back. Its slot now belongs to whoever has the batch."""
        return self._unanswered.pop(number)

    def note_scans(self, request: BatchRequest, unreadable: Sequence[Any], damaged: Sequence[Any]) -> None:
        """Note what a worker found when it looked at the samples of a request: some could not be read at all."""
        if self._scans is not None and request.scans is not None:
            known = [index for index, scan in zip(request.each(), request.scans) if scan == ScanStatus.DAMAGED]
            seen = [index for index in request.each() if index not in unreadable] if unreadable else request.each()
            self._scans.note(seen, [*damaged, *known])

    def handed_out(self, request: BatchRequest) -> None:
        """Note that the loop has been given the batch."""
        self._loader_state.batches += 1
        self._loader_state.samples += self._places(request)
        self._loader_state.sampler_state = self._sampler_states.pop(request.number, self._loader_state.sampler_state)

    def has_ready_batch(self, in_order: bool) -> bool:
        """Whether torch will give the next batch without waiting for a worker (as far as their slots tell)."""
        requests = itertools.islice(self._unanswered.values(), 1 if in_order else None)
        return any(r.slot is None or self._arena is None or self._arena.is_ready(r.slot) for r in requests)

    # --- the order --------------------------------------------------------------------------------------------------

    @property
    def _of_samples(self) -> Any:
        return of_samples(self._sampler)

    @property
    def _shard(self) -> tuple[int, int]:
        """(rank, number of processes) of a sampler that deals its samples out to several, as DistributedSampler."""
        sampler = self._of_samples
        return getattr(sampler, "rank", 0), getattr(sampler, "num_replicas", 1)

    def _places(self, request: BatchRequest) -> int:
        """How far a batch takes all processes in the order of the samples, or this one in its shard.

        Shards are not all as long: where one ends with a smaller batch, another may have a full one in the same step.
        A state of either must do for both.
        """
        if request.batched and find_sharded(self._sampler) is not None:
            return int(self._sampler.batch_size)  # type: ignore[attr-defined]
        return self._shard[1] * len(request.each())

    def _remaining(self, loader_state: LoaderState) -> Iterator[Any]:
        """What is left of the epoch, by an iterator that the sampler is asked for once, as by a stock loader."""
        rank, shards = self._shard
        # Processes take their samples in turn: of the first ``samples`` this one had so many.
        done = max(0, -(-(loader_state.samples - rank) // shards))
        if type(self._sampler) is not BatchSampler:
            iterator: Iterator[Any] = iter(self._sampler)
            self._iterator = iterator
            return _rest(iterator, loader_state, loader_state.batches if self._batched else done)
        if find_sharded(self._sampler) is not None:  # it counts its epochs when it is asked
            self._iterator = iter(self._sampler.sampler)
        return self._batches(self._sampler, loader_state, done)

    def _batches(self, sampler: BatchSampler, loader_state: LoaderState, done: int) -> Iterator[list[int]]:
        """Those of torch's batch sampler, whose own sampler's iterator nobody else could see."""
        if self._iterator is None:
            self._iterator = iter(sampler.sampler)
        rest = _rest(self._iterator, loader_state, done)
        yield from BatchSampler(rest, sampler.batch_size, sampler.drop_last)

    def _settle_sampler(self, loader_state: LoaderState) -> None:
        """Put a sampler that keeps a state into that of the epoch's start, or note it."""
        sampler, self._iterator = self._of_samples, None
        if isinstance(sampler, ShardedSampler):
            sampler.set_epoch(
                loader_state.epoch
            )  # also where torch asks for an iterator twice, as it does with workers
            loader_state.sampler_state = {"epoch": loader_state.epoch, "dealt": sampler.shard_spec}
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
            states = loader_state.generator_states
            if loader_state.resumes and moment in states:
                generator.set_state(states[moment])
            else:
                states[moment] = generator.get_state()
            yield
            if loader_state.resumes and moment == "iter" and "next" not in states:  # of a state between epochs
                if loader_state.new_workers:
                    del states["iter"]  # torch asks for another iterator when it has drawn a seed, as it did there
                else:
                    states["next"] = generator.get_state()  # torch draws a seed now, and did not there
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
            # Such a state is of before the order was drawn. So the default generator goes on as well: it may be in that
            # very state, and then the next epoch would have the order of this one.
            if is_between_epochs:
                self._draws_elsewhere = True
            elif moment == "next" and self._draws_elsewhere:
                self._draws_elsewhere = False
                draw_seed()
        else:
            loader_state.random_states[moment] = torch.get_rng_state()
            yield


def own_generator(sampler: Any) -> torch.Generator | None:
    """That a sampler draws from in place of the default one."""
    with _generator_is_lent:
        generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def sampler_state(sampler: Any, iterator: Any = None) -> dict[str, Any]:
    """What a sampler tells of itself, and its iterator: where it is, and the epoch that it was set to."""
    state: dict[str, Any] = {}
    if hasattr(sampler, "set_epoch") and hasattr(sampler, "epoch"):
        state["epoch"] = sampler.epoch
    if is_stateful(sampler):
        state["sampler"] = sampler.state_dict()
    if iterator is not sampler and is_stateful(iterator):
        state["iterator"] = iterator.state_dict()
    return state


def note_the_order_to_come(loader_state: LoaderState, sampler: Any, seed: int | None, moment: str) -> None:
    """Note in a state what the order will be drawn from, where nothing has been drawn yet.

    Args:
        loader_state: of an epoch that has given no batch.
        sampler: that yields the samples' indices.
        seed: of the loader.
        moment: what is drawn next, "iter" or "next"; see ``LoaderState.random_states``.
    """
    generator = own_generator(sampler)
    if generator is not None:
        loader_state.generator_states.setdefault(moment, generator.get_state())
    elif seed is None:
        loader_state.random_states.setdefault(moment, torch.get_rng_state())


def draw_seed() -> None:
    """As torch's iterators do when they are made, with or without workers, and its samplers when they begin."""
    torch.empty((), dtype=torch.int64).random_()


def _rest(iterator: Iterator[Any], loader_state: LoaderState, done: int) -> Iterator[Any]:
    """What is left in an iterator of the epoch's start: by its own state, by its sampler's, or by leaving out so many.

    It is never asked for an iterator, which might begin anew.
    """
    state = loader_state.sampler_state if loader_state.resumes else {}
    if "iterator" in state and is_stateful(iterator):
        iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
    elif not {"iterator", "sampler"} & state.keys():
        for _ in range(done):
            next(iterator, None)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item
