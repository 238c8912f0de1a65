"""LoaderState: the position in an epoch, and the state that a checkpoint keeps. Main process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ..data.sharded_sampler import ShardedSampler, check_dealt

STATE_VERSION = 3


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
        worker_states: see ``dataset_state.WorkerStates``, after the last batch of each worker that the loop received.
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
        """Return the position in a state of a loader.

        Raises:
            ValueError: it is not a state of a loader, or it has another seed or another number of samples. Or it was
                saved in mid-epoch in another order. Or it depends on the number of workers, and that is different.
        """
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
            check_dealt(was, now)
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
    missing = {*SAVED, "num_workers"} - state.keys()
    if missing:
        raise ValueError(f"load_state_dict takes what state_dict gave; this one lacks {', '.join(sorted(missing))}")
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
    was = state["num_workers"]
    if (state["batches"] or state["worker_states"]) and None not in (was, num_workers) and was != num_workers:
        raise ValueError(
            f"the state was saved with num_workers={was}, and this loader has {num_workers}, which go through an "
            "IterableDataset, or a dataset with a state of its own, in another way: some samples would come twice, "
            "and some never. Give the loader as many workers, or begin the epoch anew: "
            "loader.set_epoch(state['epoch'])"
        )
    for name in ("epoch", "batches", "samples"):
        if not isinstance(state[name], int) or state[name] < 0:
            raise ValueError(f"{name!r} of the state is a whole number, 0 or more; got {state[name]!r}")


GENERATORS = ("random_states", "generator_states")

SAVED = tuple(each.name for each in fields(LoaderState) if each.name not in ("finished", "resumes"))
"""Attributes that a state contains."""
