"""LoaderState: the position in an epoch, and the state that a checkpoint keeps. Main process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from ..data.sharded_sampler import ShardedSampler, check_dealt, shard_spec_in

STATE_VERSION = 3


def is_stateful(thing: Any) -> bool:
    """Whether it has the two methods of ``torchdata.stateful_dataloader.Stateful``."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


@dataclass
class LoaderState:
    """Where the loop stands in an epoch: what a checkpoint keeps of a loader.

    Attributes:
        epoch: its number, from 0.
        batches: that the loop was given.
        samples: that were in them; of a sampler for several processes, in all of them together; of a
            ``ShardedSampler``, in this shard, if all of them had been full.
        finished: the epoch has ended.
        resumes: it comes from a state, so samplers and generators are put back into theirs.
        random_states: of torch's default generator when the order was drawn: when the sampler was asked for an
            iterator ("iter"), and when that was asked for its first batch ("next"). Empty where a seed tells them.
        generator_states: the same of the sampler's own generator, where it has one.
        new_workers: of a state between epochs: the next epoch begins with a new iterator of torch's, which draws a
            seed for its workers between "iter" and "next".
        sampler_state: "epoch" of a sampler with ``set_epoch``; "dealt", how a ``ShardedSampler`` deals the samples
            out; "sampler" and "iterator", the ``state_dict`` of a sampler and of its iterator after the last batch
            that the loop was given, where they have one.
        worker_states: by the worker's number, 0 without workers, "dataset" and "iterator": the ``state_dict`` of the
            dataset, and of its iterator, after the last batch of that worker that the loop was given.
        next_worker: number of the worker whose batch comes next.
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
        """The start of the next epoch."""
        return LoaderState(self.epoch + 1)

    def copied(self) -> LoaderState:
        """Another one, whose dicts are its own."""
        return LoaderState(**{name: copy.copy(value) for name, value in vars(self).items()})

    def state_dict(
        self, seed: int | None, dataset_length: int | None, order: str = "", num_workers: int | None = None
    ) -> dict[str, Any]:
        """All of it, to be loaded by a loader with the same seed, over as many samples (None: nobody knows), in
        the same order ("": nobody knows), and with as many workers (None: any number will do)."""
        state = {name: copy.copy(getattr(self, name)) for name in SAVED}
        for name in GENERATORS:  # as text, so that a state can be written as JSON, too
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
        """
        Raises:
            ValueError: it is no state of a loader, or of one with another seed or another number of samples; or of
                mid-epoch, and in another order, or of a dataset whose state depends on the number of workers, and
                that is another one.
        """
        _check_saved(state, seed, dataset_length, order, num_workers)
        # Copies, for the loop notes in them what it draws from, and the state is the user's.
        own = {name: copy.copy(state[name]) for name in SAVED}
        for name in GENERATORS:
            found = {moment: bytearray.fromhex(text) for moment, text in own[name].items()}
            own[name] = {moment: torch.frombuffer(each, dtype=torch.uint8) for moment, each in found.items()}
        own["worker_states"] = {int(worker): each for worker, each in own["worker_states"].items()}  # text in JSON
        return cls(**own, resumes=True)

    def resume_for(self, sampler: ShardedSampler | None) -> LoaderState:
        """What is left of the epoch for a loader with that sampler, or without shards.

        Raises:
            ValueError: the epoch was begun with samples dealt out in another way.
        """
        was, now = shard_spec_in(self.sampler_state), None if sampler is None else sampler.shard_spec
        if self.batches:
            check_dealt(was, now)
        return self if was == now else LoaderState(self.epoch)


def _check_saved(state: Any, seed: int | None, dataset_length: int | None, order: str, num_workers: int | None) -> None:
    """
    Raises:
        ValueError: as of ``LoaderState.from_state_dict``.
    """
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

SAVED = (
    "epoch",
    "batches",
    "samples",
    "random_states",
    "generator_states",
    "new_workers",
    "sampler_state",
    "worker_states",
    "next_worker",
)
"""What of it is in a state."""
