"""What a checkpoint keeps: the position in an epoch, and the states of datasets and their iterators.

As in ``torchdata.stateful_dataloader``, each worker's dataset has its own state, which is recorded with each batch. A
checkpoint has the one after the last batch of the worker that the training loop received.
"""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from .._random_state import seed_generators
from ..data.sharded_sampler import ShardedSampler, check_shard_spec
from .arena import Arena

STATE_VERSION = 3

ANEW = "begin the epoch anew: loader.set_epoch(state['epoch'])"

START_BYTES = 1 << 12
LENGTH_BYTES = 8
LOOK_AGAIN_S = 0.001

WorkerStates = Mapping[int, dict[str, Any]]
"""States by worker number, which is 0 without workers. The keys of a state are "dataset" and "iterator", each present
if the object has a state. "itself" is the state of a dataset that is its own iterator. "ended" means that the worker
has no more samples in this epoch; the dataset may then already be at the start of the next epoch."""


def is_stateful(thing: Any) -> bool:
    """Return whether the object has the two methods of ``torchdata.stateful_dataloader.Stateful``."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


@dataclass
class LoaderState:
    """Position of the training loop in an epoch: what a checkpoint keeps of a loader.

    Attributes:
        epoch: number of the epoch, from 0.
        batches: number of batches that the training loop received.
        samples: number of samples in these batches. For a sampler for several processes, the number in all of them
            together. For a ``ShardedSampler``, the number in this shard, counting each batch as full.
        finished: whether the epoch has ended.
        resumes: whether the position comes from a checkpoint, so that states of samplers and generators are restored.
        random_states: states of torch's default generator when the order was drawn: when the iterator of the sampler
            was created ("iter"), and when its first batch was requested ("next"). Empty if a seed determines the order.
        generator_states: the same for the sampler's own generator, and "workers" for one that torch draws seeds from.
        new_workers: for a state between epochs: the next epoch creates a new iterator in torch, which draws a seed for
            its workers between "iter" and "next".
        sampler_state: "epoch" of a sampler with ``set_epoch``; "dealt", the ``shard_spec`` of a ``ShardedSampler``, and
            "taken", what was taken of the epoch by other numbers of processes, see ``ShardedSampler.indices``;
            "sampler" and "iterator", the ``state_dict`` of a sampler and of its iterator after the last batch that the
            training loop received, if they have one.
        worker_states: see ``WorkerStates``, after the last batch of each worker that the loop received.
        next_worker: number of the worker that gives the next batch.
    """

    epoch: int = 0
    batches: int = 0
    samples: int = 0
    finished: bool = False
    resumes: bool = field(default=False, compare=False)
    random_states: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    generator_states: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    new_workers: bool = True
    sampler_state: dict[str, Any] = field(default_factory=dict, repr=False)
    worker_states: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)
    next_worker: int = 0

    def following(self) -> LoaderState:
        return LoaderState(self.epoch + 1)

    def copied(self) -> LoaderState:
        return LoaderState(**{name: copy.copy(value) for name, value in vars(self).items()})

    def settle(self, generator: torch.Generator, moment: str) -> None:
        """Restore the state of a generator from the checkpoint, or record it."""
        if self.resumes and moment in self.generator_states:
            generator.set_state(self.generator_states[moment])
        else:
            self.generator_states[moment] = generator.get_state()

    def state_dict(
        self, seed: int | None, dataset_length: int | None, order: str = "", num_workers: int | None = None
    ) -> dict[str, Any]:
        """Return the position as a dict, with the properties that the loader which loads it must share.

        ``dataset_length`` is None and ``order`` "" if unknown; ``num_workers`` is None if any number will do.
        """
        state = {name: copy.copy(getattr(self, name)) for name in SAVED}
        for name in GENERATORS:  # as text, so that a state can be written as JSON
            state[name] = {moment: each.numpy().tobytes().hex() for moment, each in state[name].items()}
        fingerprint = {"seed": seed, "dataset_length": dataset_length, "order": order, "num_workers": num_workers}
        return {"version": STATE_VERSION, **fingerprint, **state}

    @classmethod
    def from_state_dict(
        cls,
        state: Any,
        seed: int | None,
        dataset_length: int | None,
        order: str = "",
        num_workers: int | None = None,
    ) -> LoaderState:
        """Return the position in a state of a loader. ValueError: see ``DataLoader.load_state_dict``."""
        _check_saved(state, seed, dataset_length, order, num_workers)
        # Copies, because they change during the epoch and the given state belongs to the user.
        own = {name: copy.copy(state[name]) for name in SAVED}
        for name in GENERATORS:
            found = {moment: bytearray.fromhex(text) for moment, text in own[name].items()}
            own[name] = {moment: torch.frombuffer(each, dtype=torch.uint8) for moment, each in found.items()}
        own["worker_states"] = {int(worker): each for worker, each in own["worker_states"].items()}  # text in JSON
        return cls(**own, resumes=True)

    def resume_for(self, sampler: ShardedSampler | None) -> LoaderState:
        """Return the remainder of the epoch for a loader with that sampler, or without shards.

        ValueError: the epoch was begun in another order.
        """
        was, now = self.sampler_state.get("dealt"), None if sampler is None else sampler.shard_spec
        taken = [*self.sampler_state.get("taken", ())]
        if self.samples or taken:
            check_shard_spec(was, now)
        if was == now:
            return self
        if was is None or not (self.samples or taken):
            return LoaderState(self.epoch)
        taken.append([was["num_shards"], self.samples])
        return replace(self, samples=0, sampler_state={"epoch": self.epoch, "dealt": now, "taken": taken})


def _check_saved(state: Any, seed: int | None, dataset_length: int | None, order: str, num_workers: int | None) -> None:
    if not isinstance(state, dict) or not {"version", "seed", "dataset_length", "order"} <= state.keys():
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
            f"{dataset_length}: it is another one, or was changed. Give the loader the same dataset, or {ANEW}"
        )
    if state["batches"] and state["order"] and order and state["order"] != order:
        raise ValueError(
            f"the state was saved in mid-epoch, which was {state['order']}, and this loader's is {order}; "
            f"some samples would come twice, and some never. Give the loader the same shuffle, or {ANEW}"
        )
    was = state["num_workers"]
    if (state["batches"] or state["worker_states"]) and None not in (was, num_workers) and was != num_workers:
        raise ValueError(
            f"the state was saved with num_workers={was}, and this loader has {num_workers}, which go through an "
            "IterableDataset, or a dataset with a state of its own, in another way: some samples would come twice, "
            f"and some never. Give the loader as many workers, or {ANEW}"
        )


GENERATORS = ("random_states", "generator_states")

SAVED = tuple(each.name for each in fields(LoaderState) if each.name not in ("finished", "resumes"))
"""Attributes that a state contains."""


def dataset_state(dataset: Any) -> dict[str, Any]:
    return {"dataset": dataset.state_dict()} if is_stateful(dataset) else {}


def load_dataset_state(dataset: Any, state: dict[str, Any]) -> None:
    if "dataset" in state and is_stateful(dataset):
        dataset.load_state_dict(state["dataset"])


def between_epochs(state: dict[str, Any]) -> dict[str, Any]:
    """Return the dataset's part of a state, which is kept between epochs. The next epoch has a new iterator."""
    kept = [state[name] for name in ("dataset", "itself") if name in state]
    return {"dataset": kept[0]} if kept else {}


class StateBoard:
    """Shared memory for what is not sent with a batch: dataset states at the start and at the end of an epoch, and the
    number of the epoch.

    It raises OSError if the system cannot provide shared memory.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._arena = workers, Arena(2 * workers + 1, START_BYTES)

    @classmethod
    def of(cls, dataset: Any, workers: int) -> StateBoard | None:
        """Return a board if the dataset may have a state and memory can be shared with workers; otherwise None."""
        may_have = isinstance(dataset, IterableDataset) or is_stateful(dataset)
        return cls(workers) if workers and may_have and hasattr(os, "memfd_create") else None

    def begin(self, epoch: int) -> None:
        """Tell the workers the number of the epoch that begins. Main process."""
        self._epoch[0] = epoch

    def epoch(self) -> int:
        """Return the number of the epoch. Worker."""
        return int(self._epoch[0])

    @property
    def _epoch(self) -> NDArray[np.int64]:
        return self._arena.memory(2 * self._workers, LENGTH_BYTES)[:LENGTH_BYTES].view(np.int64)

    def write(self, worker: int, state: dict[str, Any], is_end: bool = False) -> None:
        """Write the state at the start or at the end of an epoch. Worker."""
        slot, data = worker + is_end * self._workers, np.frombuffer(pickle.dumps(state), np.uint8)
        memory = self._arena.memory(slot, LENGTH_BYTES + len(data))
        memory[:LENGTH_BYTES].view(np.int64)[0] = len(data)
        memory[LENGTH_BYTES : LENGTH_BYTES + len(data)] = data
        self._arena.mark_ready(slot)

    def forget(self) -> None:
        """Discard all states before an epoch begins. Main process."""
        for slot in range(2 * self._workers):
            self._arena.mark_ready(slot, False)

    def read_start(self, worker: int, is_alive: Callable[[], bool]) -> dict[str, Any]:
        """Wait for a worker that is starting. Return its state at the epoch's start; {} if it died. Main process."""
        while not self._arena.is_ready(worker) and is_alive():
            time.sleep(LOOK_AGAIN_S)
        return self._read(worker)

    def read_ends(self) -> dict[int, dict[str, Any]]:
        """Return the states of the workers that have reached the end of the epoch, by worker number. Main process."""
        found = {worker: self._read(worker + self._workers) for worker in range(self._workers)}
        return {worker: state for worker, state in found.items() if state}

    def _read(self, slot: int) -> dict[str, Any]:
        if not self._arena.is_ready(slot):
            return {}
        length = int(self._arena.memory(slot, LENGTH_BYTES)[:LENGTH_BYTES].view(np.int64)[0])
        found: dict[str, Any] = pickle.loads(self._arena.memory(slot, LENGTH_BYTES + length)[LENGTH_BYTES:].data)
        return found


class StatefulStream(IterableDataset[Any]):
    """An IterableDataset that can return the state of its current iterator.

    The first iteration begins with ``states``. Workers write states to the board, if there is one. With a seed, the
    default generators of a worker are seeded anew in each epoch, because persistent workers outlive it.
    """

    def __init__(self, dataset: Any, states: WorkerStates, board: StateBoard | None, seed: int | None) -> None:
        self.dataset, self._states, self._board, self._seed = dataset, states, board, seed
        self._iterator: Any = None
        self._has_ended = False

    def __repr__(self) -> str:
        return repr(self.dataset)  # torch's warning about a wrong length prints it

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info is not None and info.dataset is self.dataset else 0
        if info is not None and self._board is not None and self._seed is not None:
            seed_generators(self._seed, self._board.epoch(), "stream", info.id)
        state = self._states.get(worker, {})
        self._states = {}
        load_dataset_state(self.dataset, state)
        self._has_ended = "ended" in state
        if self._has_ended:
            return iter(())
        iterator: Iterator[Any] = iter(self.dataset)
        self._iterator = iterator
        for name in ("iterator", "itself"):
            if name in state and is_stateful(iterator):
                iterator.load_state_dict(state[name])  # type: ignore[attr-defined]
        started = self.state()
        if self._board is not None:
            self._board.write(worker, started)
        return self._with_end(iterator, worker) if started else iterator

    def _with_end(self, iterator: Iterator[Any], worker: int) -> Iterator[Any]:
        end: Any = object()
        while (sample := next(iterator, end)) is not end:
            yield sample
        self._has_ended = True
        if self._board is not None:
            self._board.write(worker, self.state(), is_end=True)

    def state(self) -> dict[str, Any]:
        ended = {"ended": True} if self._has_ended else {}
        if self._iterator is self.dataset:
            return ended | ({"itself": self.dataset.state_dict()} if is_stateful(self.dataset) else {})
        iterator = {"iterator": self._iterator.state_dict()} if is_stateful(self._iterator) else {}
        return ended | dataset_state(self.dataset) | iterator
