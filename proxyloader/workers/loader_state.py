"""Contents of a checkpoint: the position in an epoch, and the states of datasets and their iterators.

As in ``torchdata.stateful_dataloader``, each worker's dataset has its own state, which is recorded with each batch. A
checkpoint contains the state after the worker's last batch that the training loop received.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .._random_state import seed_generators
from ..data.sharded_sampler import ShardedSampler, check_shard_spec
from .arena import Arena

STATE_VERSION = 4

STATE_BYTES = 1 << 28  # more than the state of a worker's dataset; small enough for limits on address space

RESTART = "restart the epoch: loader.set_epoch(state['epoch'])"

WorkerStates = Mapping[int, dict[str, Any]]
"""States by worker number, which is 0 without workers. The keys of a state are "dataset" and "iterator", for those that
are stateful. "itself" is the state of a dataset that is its own iterator. "ended" means that the worker has no more
samples in this epoch; the dataset may then already be at the start of the next epoch."""


def is_stateful(obj: Any) -> bool:
    """Return whether the object implements ``torchdata.stateful_dataloader.Stateful``."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


@dataclass
class LoaderState:
    """Position of the training loop in an epoch, as stored in a checkpoint.

    ``sampler_state`` has the "epoch" of a sampler with ``set_epoch``; "dealt", the ``shard_spec`` of a
    ``ShardedSampler``, and "taken", the part of the epoch consumed by other numbers of processes, see
    ``ShardedSampler.indices``; "sampler" and "iterator", the ``state_dict`` of a sampler and of its iterator after the
    last batch that the training loop received, if they have one.

    ``generator_states`` has the states of the generator from which the order was drawn, the sampler's own or torch's
    default: when the iterator of the sampler was created ("iter"), and when its first batch was requested ("next"); not
    if a seed determines the order. "workers" is that of the generator of worker seeds.
    """

    epoch: int = 0
    batches: int = 0  # that the training loop received
    samples: int = 0  # in these batches, in all processes of a distributed sampler; in this shard, counted as full
    finished: bool = False
    resumes: bool = field(default=False, compare=False)  # whether states from a checkpoint are restored
    generator_states: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    # In a state between epochs, whether torch creates a new iterator for the next epoch, which draws a seed for its
    # workers between "iter" and "next".
    new_workers: bool = True
    sampler_state: dict[str, Any] = field(default_factory=dict, repr=False)
    worker_states: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)  # after each worker's last batch
    next_worker: int = 0  # that returns the next batch

    def copy(self) -> LoaderState:
        return LoaderState(**{name: copy.copy(value) for name, value in vars(self).items()})

    def restore_or_record(self, generator: torch.Generator, stage: str) -> None:
        """Restore the state of a generator from the checkpoint, or record it."""
        if self.resumes and stage in self.generator_states:
            generator.set_state(self.generator_states[stage])
        else:
            self.generator_states[stage] = generator.get_state()

    def state_dict(self, fingerprint: dict[str, Any]) -> dict[str, Any]:
        """Return the position as a dict, with the properties that a loader must match to load it.

        ``fingerprint``: the seed; the dataset_length, None if unknown; the order, "" if unknown; and num_workers, None
        if any number is allowed.
        """
        state = {name: copy.copy(getattr(self, name)) for name in SAVED_FIELDS}
        # As text, so that a state can be saved as JSON.
        state["generator_states"] = {stage: each.numpy().data.hex() for stage, each in self.generator_states.items()}
        return {"version": STATE_VERSION, **fingerprint, **state}

    @classmethod
    def from_state_dict(cls, state: Any, fingerprint: dict[str, Any]) -> LoaderState:
        """Convert the ``state_dict`` of a loader to a position. ValueError: see ``DataLoader.load_state_dict``."""
        _check_saved(state, **fingerprint)
        # Copy the values, which change during the epoch, as the given state belongs to the user.
        values = {name: copy.copy(state[name]) for name in SAVED_FIELDS}
        values["generator_states"] = {
            stage: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
            for stage, text in state["generator_states"].items()
        }
        values["worker_states"] = {int(worker): saved for worker, saved in state["worker_states"].items()}  # from JSON
        return cls(**values, resumes=True)

    def resume_for(self, sampler: ShardedSampler | None) -> LoaderState:
        """Return the position for a loader with this sampler, or without shards.

        ValueError: the order of the epoch differs.
        """
        saved, current = self.sampler_state.get("dealt"), None if sampler is None else sampler.shard_spec
        taken = [*self.sampler_state.get("taken", ())]
        if self.samples or taken:
            check_shard_spec(saved, current)
        if saved == current:
            return self
        if saved is None or not (self.samples or taken):
            return LoaderState(self.epoch)
        taken.append([saved["num_shards"], self.samples])
        return replace(self, samples=0, sampler_state={"epoch": self.epoch, "dealt": current, "taken": taken})


def _check_saved(state: Any, seed: int | None, dataset_length: int | None, order: str, num_workers: int | None) -> None:
    if not isinstance(state, dict) or not {"version", "seed", "dataset_length", "order"} <= state.keys():
        raise ValueError(
            f"state_dict must be the result of DataLoader.state_dict, got {type(state).__name__}"
            + (f" with the keys {sorted(map(str, state))}" if isinstance(state, dict) else "")
        )
    if state["version"] != STATE_VERSION:
        raise ValueError(f"the state must have version {STATE_VERSION}, got version {state['version']}")
    if state["seed"] != seed:
        raise ValueError(
            f"the state was saved with seed={state['seed']}, but this loader has seed={seed}, so the remaining random "
            "numbers would differ. Use the same seed"
        )
    if state["dataset_length"] != dataset_length:
        raise ValueError(
            f"the state was saved with a dataset of {state['dataset_length']} samples, but this one has "
            f"{dataset_length}. Use the same dataset, or {RESTART}"
        )
    if state["batches"] and state["order"] and order and state["order"] != order:
        raise ValueError(
            f"the state was saved in the middle of an epoch with {state['order']} order, but this loader's is {order}, "
            f"so some samples would be repeated and others skipped. Use the same shuffle, or {RESTART}"
        )
    saved_workers = state["num_workers"]
    is_used = state["batches"] or state["worker_states"]
    if is_used and None not in (saved_workers, num_workers) and saved_workers != num_workers:
        raise ValueError(
            f"the state was saved with num_workers={saved_workers}, but this loader has num_workers={num_workers}. For "
            "an IterableDataset, or a dataset with its own state, some samples would be repeated and others skipped. "
            f"Use the same num_workers, or {RESTART}"
        )


SAVED_FIELDS = tuple(field.name for field in fields(LoaderState) if field.name not in ("finished", "resumes"))
"""Attributes stored in a checkpoint."""


def save_state(obj: Any, name: str = "dataset") -> dict[str, Any]:
    """Return the state of an object by name; {} if it has none."""
    return {name: obj.state_dict()} if is_stateful(obj) else {}


def load_state(obj: Any, states: dict[str, Any], name: str = "dataset") -> None:
    """Restore the state of an object from states by name, if it is there."""
    if name in states and is_stateful(obj):
        obj.load_state_dict(states[name])


def carry_over(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a state that carries over to the next epoch: the dataset's, as its iterator is new."""
    states = [state[name] for name in ("dataset", "itself") if name in state]
    return {"dataset": states[0]} if states else {}


class StateBoard:
    """Shared memory of a stream for what is not sent with a batch: the epoch, and the states of workers at its end."""

    def __init__(self, workers: int) -> None:
        self._arena = Arena(workers + 1, STATE_BYTES)  # the last slot holds the epoch

    def begin(self, epoch: int) -> None:
        """Publish the number of the next epoch, and discard all states. Main process."""
        for slot in range(self._arena.slots):
            self._arena.mark_ready(slot, False)
        self.write(self._arena.slots - 1, epoch)

    def epoch(self) -> int:
        """Return the number of the epoch. Worker."""
        return int(self._read(self._arena.slots - 1))

    def write(self, slot: int, value: Any) -> None:
        """Write the epoch, or the state of a worker at its end."""
        data = pickle.dumps(value)
        self._arena.memory(slot)[: len(data)] = np.frombuffer(data, np.uint8)
        self._arena.mark_ready(slot)

    def _read(self, slot: int) -> Any:
        return pickle.loads(self._arena.memory(slot).data)

    def states(self) -> dict[int, dict[str, Any]]:
        """Return the states of the workers that have finished the epoch, by worker number. Main process."""
        return {slot: self._read(slot) for slot in range(self._arena.slots - 1) if self._arena.is_ready(slot)}


class StatefulStream(IterableDataset[Any]):
    """An IterableDataset that can return the state of its current iterator. The first one starts from ``states``.

    With a seed, each epoch seeds the default generators of a worker, because persistent workers outlive it.
    """

    def __init__(self, dataset: Any, states: WorkerStates, board: StateBoard | None, seed: int | None) -> None:
        self.dataset, self._states, self._board, self._seed = dataset, states, board, seed
        self._iterator: Any = None
        self._has_ended = False

    def __repr__(self) -> str:
        return repr(self.dataset)  # shown by torch's warning about a wrong length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info is not None and info.dataset is self.dataset else 0
        if info is not None and self._board is not None and self._seed is not None:
            seed_generators(self._seed, self._board.epoch(), "stream", info.id)
        state, self._states = self._states.get(worker, {}), {}
        load_state(self.dataset, state)
        self._has_ended = "ended" in state
        if self._has_ended:
            return iter(())
        self._iterator = iterator = iter(self.dataset)
        for name in ("iterator", "itself"):
            load_state(iterator, state, name)
        return self._iterate(iterator, worker) if self.state() else iterator

    def _iterate(self, iterator: Iterator[Any], worker: int) -> Iterator[Any]:
        end: Any = object()
        while (sample := next(iterator, end)) is not end:
            yield sample
        self._has_ended = True
        if self._board is not None:
            self._board.write(worker, self.state())

    def state(self) -> dict[str, Any]:
        ended = {"ended": True} if self._has_ended else {}
        if self._iterator is self.dataset:
            return ended | save_state(self.dataset, "itself")
        return ended | save_state(self.dataset) | save_state(self._iterator, "iterator")
