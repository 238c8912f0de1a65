"""Which samples come next: the user's sampler turned into requests to workers, from anywhere in an epoch on.

Runs in the main process, in the thread that iterates, as torch advances it there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from .arena import Arena
from .scans import KnownScans, Scan
from .seeding import generator_of, kept_generators, seed_generators
from .sharding import ShardedSampler, check_dealt, dealt_in, sharded_in

STATE_VERSION = 2

SAMPLERS_WITH_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Those of torch that draw from it; without one they draw from the default, as other threads may do meanwhile."""


def of_samples(sampler: Any) -> Any:
    """The sampler that yields one index at a time, as far as there is one to be seen in a loader's."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


@dataclass
class Progress:
    """Where the loop stands in an epoch: what a checkpoint keeps of a loader.

    Attributes:
        epoch: its number, from 0.
        batches: that the loop was given.
        samples: that were in them; of a sampler for several processes, in all of them together; of a
            ``ShardedSampler``, in this shard, if all of them had been full.
        finished: the epoch has ended.
        random_states: of torch's default generator when the order was drawn: when the sampler was asked for an
            iterator, and when that was asked for its first batch. Empty where a seed tells them.
        generator_states: the same of the sampler's own generator, where it has one.
        sampler_state: of a sampler with a ``state_dict`` (or ``set_epoch``), at the start of the epoch; of a
            ``ShardedSampler``, how it deals the samples out.
    """

    epoch: int = 0
    batches: int = 0
    samples: int = 0
    finished: bool = False
    random_states: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    generator_states: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    sampler_state: Any = field(default=None, repr=False)

    def state_dict(
        self, seed: int | None, dataset_length: int | None, order: str = "", stream_workers: int | None = None
    ) -> dict[str, Any]:
        """All of it, to be loaded by a loader with the same seed, over as many samples (None: nobody knows), in
        the same order ("": nobody knows), and, of an IterableDataset, with as many workers.

        An epoch that has ended is the next one's start.
        """
        here = Progress(self.epoch + 1) if self.finished else self
        return {
            "version": STATE_VERSION,
            "seed": seed,
            "dataset_length": dataset_length,
            "order": order,
            "stream_workers": stream_workers,
            "epoch": here.epoch,
            "batches": here.batches,
            "samples": here.samples,
            "random_states": dict(here.random_states),
            "generator_states": dict(here.generator_states),
            "sampler_state": here.sampler_state,
        }

    @classmethod
    def from_state_dict(
        cls,
        state: Any,
        seed: int | None,
        dataset_length: int | None,
        order: str = "",
        stream_workers: int | None = None,
    ) -> Progress:
        """
        Raises:
            ValueError: it is no state of a loader, or of one with another seed or another number of samples; or of
                mid-epoch, and in another order, or of a stream dealt out to another number of workers.
        """
        fields = ("epoch", "batches", "samples", "random_states", "generator_states", "sampler_state")
        if not isinstance(state, dict) or not {"version", "seed", "dataset_length", "order", *fields} <= state.keys():
            raise ValueError(
                f"load_state_dict takes what state_dict gave, got {type(state).__name__}"
                + (f" with the keys {sorted(map(str, state))}" if isinstance(state, dict) else "")
            )
        if state["version"] != STATE_VERSION:
            raise ValueError(f"the state is of version {state['version']}, and this loader reads {STATE_VERSION}")
        if state["seed"] != seed:
            raise ValueError(
                f"the state was saved by a loader with seed={state['seed']}, and this one has seed={seed}: "
                "it would draw other numbers than those that were left. Give it the same seed"
            )
        if state["dataset_length"] != dataset_length:
            raise ValueError(
                f"the state was saved over a dataset of {state['dataset_length']} samples, and this one has "
                f"{dataset_length}: it is another one, or was changed. Give the loader the same dataset, or begin the "
                "epoch anew: loader.set_epoch(state['epoch'])"
            )
        if state["batches"] and state["order"] and order and state["order"] != order:
            raise ValueError(
                f"the state was saved in mid-epoch, which was {state['order']}, and this loader's is {order}; "
                "some samples would come twice, and some never. Give the loader the same shuffle, or begin the epoch "
                "anew: loader.set_epoch(state['epoch'])"
            )
        was = state.get("stream_workers")
        if state["batches"] and None not in (was, stream_workers) and was != stream_workers:
            raise ValueError(
                f"the state was saved in mid-epoch of an IterableDataset with num_workers={was}, and this loader has "
                f"{stream_workers}, which deal its samples out otherwise: some would come twice, and some never. Give "
                "the loader as many workers, or begin the epoch anew: loader.set_epoch(state['epoch'])"
            )
        for name in ("epoch", "batches", "samples"):
            if not isinstance(state[name], int) or state[name] < 0:
                raise ValueError(f"{name!r} of the state is a whole number, 0 or more; got {state[name]!r}")
        # Copies, for the loop notes in them what it draws from, and the state is the user's.
        return cls(**{name: copy.copy(state[name]) for name in fields})

    def taken_up_by(self, sampler: ShardedSampler | None) -> Progress:
        """What is left of the epoch for a loader with that sampler, or without shards.

        Raises:
            ValueError: the epoch was begun with samples dealt out in another way.
        """
        was, now = dealt_in(self.sampler_state), None if sampler is None else sampler.dealt
        if self.batches:
            check_dealt(was, now)
        return self if was == now else Progress(self.epoch)


@dataclass(frozen=True)
class Request:
    """What a sampler yields to a worker, and what comes back with the batch.

    Attributes:
        number: counts a loader's requests.
        epoch: that it belongs to.
        indices: of the batch's samples; or one index where batching is off.
        batched: which of both it is.
        slot: that the worker may write to; None: there was none.
        scans: one ``Scan`` for each sample; None where there is nothing to look at.
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
        scans: KnownScans | None = None,
    ) -> None:
        self._sampler, self._batched, self._arena, self._seed, self._scans = sampler, batched, arena, seed, scans
        self.begin(Progress())
        self._unanswered: dict[int, Request] = {}
        self._numbers = itertools.count()

    def begin(self, progress: Progress) -> None:
        """Let the next iteration start there, and note in it what is needed to do so again."""
        self._progress = progress
        self._resumes = any((progress.batches, progress.random_states, progress.generator_states))

    def __iter__(self) -> Iterator[Request]:
        self.forget_unanswered()  # torch begins an epoch when the workers have let go of the one before
        progress = self._progress
        self._settle_sampler(progress)
        with self._known_generators(progress, "iter"):  # at once, as torch asks for the iterator before it draws seeds
            remaining = iter(self._remaining(progress))
        return self._requests(progress, remaining)

    def _requests(self, progress: Progress, remaining: Iterator[Any]) -> Iterator[Request]:
        # Samplers draw when they yield first (torch's own do), so that much happens under generators that are known.
        with self._known_generators(progress, "next"):
            first = list(itertools.islice(remaining, 1))
        for indices in itertools.chain(first, remaining):
            if self._batched and not hasattr(indices, "__len__"):
                indices = list(indices)  # a generator cannot travel
            slot = self._arena.lend() if self._arena is not None else None
            request = Request(next(self._numbers), progress.epoch, indices, self._batched, slot)
            if self._scans is not None:
                request = dataclasses.replace(request, scans=self._scans.of(request.each()))
            self._unanswered[request.number] = request
            yield request

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def forget_unanswered(self) -> None:
        """Take back the slots of batches that will not come: no worker has them any more."""
        for request in self._unanswered.values():
            if self._arena is not None:
                self._arena.give_back(request.slot)
        self._unanswered.clear()

    def answered(self, number: int) -> Request:
        """Note that a batch has come back. Its slot now belongs to whoever has the batch."""
        return self._unanswered.pop(number)

    def note_scans(self, request: Request, unreadable: Sequence[Any], damaged: Sequence[Any]) -> None:
        """Note what a worker found when it looked at the samples of a request: some could not be read at all."""
        if self._scans is not None and request.scans is not None:
            known = [index for index, scan in zip(request.each(), request.scans) if scan == Scan.DAMAGED]
            seen = [index for index in request.each() if index not in unreadable] if unreadable else request.each()
            self._scans.note(seen, [*damaged, *known])

    def handed_out(self, request: Request) -> None:
        """Note that the loop has been given the batch."""
        self._progress.batches += 1
        self._progress.samples += self._places(request)

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

    def _places(self, request: Request) -> int:
        """How far a batch takes all processes in the order of the samples, or this one in its shard.

        Shards are not all as long: where one ends with a smaller batch, another may have a full one in the same step.
        A state of either must do for both.
        """
        if request.batched and sharded_in(self._sampler) is not None:
            return int(self._sampler.batch_size)  # type: ignore[attr-defined]
        return self._shard[1] * len(request.each())

    def _remaining(self, progress: Progress) -> Iterable[Any]:
        rank, shards = self._shard
        # Processes take their samples in turn: of the first ``samples`` this one had so many.
        done = max(0, -(-(progress.samples - rank) // shards))
        if not progress.batches and sharded_in(self._sampler) is None:
            return self._sampler
        if type(self._sampler) is BatchSampler:
            rest = itertools.islice(iter(self._sampler.sampler), done, None)
            return BatchSampler(rest, self._sampler.batch_size, self._sampler.drop_last)
        return itertools.islice(iter(self._sampler), progress.batches if self._batched else done, None)

    def _settle_sampler(self, progress: Progress) -> None:
        """Put a sampler that keeps a state into that of the epoch's start, or note it."""
        sampler = self._of_samples
        if isinstance(sampler, ShardedSampler):
            sampler.set_epoch(progress.epoch)  # also where torch asks for an iterator twice, as it does with workers
            progress.sampler_state = {"epoch": progress.epoch, "dealt": sampler.dealt}
        elif hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
            if self._resumes and progress.sampler_state is not None:
                sampler.load_state_dict(progress.sampler_state)
            else:
                progress.sampler_state = sampler.state_dict()
        elif hasattr(sampler, "set_epoch") and hasattr(sampler, "epoch"):
            if self._resumes and progress.sampler_state is not None:
                sampler.set_epoch(progress.sampler_state["epoch"])
            else:
                progress.sampler_state = {"epoch": sampler.epoch}

    @contextlib.contextmanager
    def _known_generators(self, progress: Progress, moment: str) -> Iterator[None]:
        sampler = self._of_samples
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            if self._resumes and moment in progress.generator_states:
                generator.set_state(progress.generator_states[moment].cpu())
            else:
                progress.generator_states[moment] = generator.get_state()
            yield
        elif self._seed is not None and type(sampler) in SAMPLERS_WITH_GENERATOR:
            sampler.generator = generator_of(self._seed, progress.epoch, "order", moment)
            try:
                yield
            finally:
                sampler.generator = None
        elif self._seed is not None:
            with kept_generators():
                seed_generators(self._seed, progress.epoch, "order", moment)
                yield
        elif self._resumes and moment in progress.random_states:
            with kept_generators():
                torch.set_rng_state(progress.random_states[moment].cpu())  # wherever torch.load put it
                yield
        else:
            progress.random_states[moment] = torch.get_rng_state()
            yield
