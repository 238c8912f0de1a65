"""ShardedSampler: which samples belong to which process. Index arithmetic, without DALI and without CUDA.

Shards are those of DALI's readers: of N samples in S shards, shard k is the range [k*N//S, (k+1)*N//S) of the epoch's
order. Here that order is one permutation of all samples, the same in every process. So shards differ in length by one
sample at most; what becomes of the difference is what ``LastBatchPolicy`` says.

NOTE [ Shards and DALI's ]
DALI's file reader with ``pad_last_batch=True`` under DALI's iterators gives the same samples in the same batches, with
three differences. A shard that ends a batch before the others gives an empty batch there with PARTIAL, and none here.
With DROP, DALI begins the next epoch with what was left; here each epoch begins at its shard's start. And fewer samples
than shards are refused by DALI; here the shards that are empty give no batch with PARTIAL and DROP, and with FILL they
repeat the sample that they would begin with, so that all processes take the same number of steps.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from .._random_state import generator_of
from .._validation import check_int
from .distributed import Auto, World


class LastBatchPolicy(enum.Enum):
    """What becomes of a shard's last batch where the samples do not fill it; names and meanings are DALI's.

    FILL: all processes take the same number of steps, and all batches are full: the shard's last sample is repeated.
    PARTIAL: each sample comes once. The last batch is smaller, and some processes may have one batch more than others.
    DROP: all processes take the same number of steps, and all batches are full: the samples that are left do not come.
    """

    FILL = "fill"
    PARTIAL = "partial"
    DROP = "drop"

    @classmethod
    def of(cls, policy: str | enum.Enum) -> LastBatchPolicy:
        """
        Args:
            policy: one of these, of DALI's ``LastBatchPolicy``, or "fill", "partial" or "drop".

        Raises:
            ValueError: it is none of them.
        """
        name = policy.name.lower() if isinstance(policy, enum.Enum) else str(policy).lower()
        if name not in [each.value for each in cls]:
            allowed = ", ".join(f"{each.value!r}" for each in cls)
            raise ValueError(f"last_batch_policy is one of {allowed}, or a member of LastBatchPolicy; got {policy!r}")
        return cls(name)


class ShardedSampler(Sampler[int]):
    """The indices of one shard of a dataset, in an order that changes with the epoch.

    The order is a function of (seed, epoch) alone, so processes with the same seed agree on it without a word. Each
    iteration is the next epoch, from 0; ``set_epoch`` says another, and must where a process iterates more often than
    others.

    Args:
        data_source: what is shared; its length counts.
        num_shards: how many processes share it; "auto" takes ``World.current()``.
        shard_id: which one this is, from 0; "auto" takes ``World.current()``.
        shuffle: all samples, before they are dealt out. Else they come as they are.
        seed: of the order.
        last_batch_policy: see ``LastBatchPolicy``; also DALI's own, or "fill", "partial", "drop".
        batch_size: of the batches that are made of the indices, in samples; needed by FILL and DROP.

    Attributes:
        epoch: that the next iteration is.

    Raises:
        ValueError: an argument is wrong, or the environment (see ``World``).
    """

    def __init__(
        self,
        data_source: Sized,
        num_shards: int | Auto = "auto",
        shard_id: int | Auto = "auto",
        *,
        shuffle: bool = False,
        seed: int = 0,
        last_batch_policy: str | enum.Enum = LastBatchPolicy.PARTIAL,
        batch_size: int | None = None,
    ) -> None:
        self.world = World.of(num_shards, shard_id)
        self.last_batch_policy = LastBatchPolicy.of(last_batch_policy)
        check_int("seed", seed, 0)
        if batch_size is not None:
            check_int("batch_size", batch_size, 1)
        elif self.last_batch_policy is not LastBatchPolicy.PARTIAL:
            raise ValueError(
                f"last_batch_policy={self.last_batch_policy.value!r} makes batches full, and batch_size is None: "
                "say how many samples a batch has, or use 'partial'"
            )
        self.data_source, self.shuffle, self.seed, self.batch_size = data_source, bool(shuffle), seed, batch_size
        self.epoch = 0
        self._found = (num_shards, shard_id) == ("auto", "auto")

    @property
    def num_shards(self) -> int:
        """How many processes share the dataset."""
        return self.world.num_shards

    @property
    def shard_id(self) -> int:
        """Which of them this is, from 0."""
        return self.world.shard_id

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is.

        Raises:
            ValueError: it is no whole number, or less than 0.
        """
        check_int("epoch", epoch, 0)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return iter(self.indices(epoch))

    def indices(self, epoch: int) -> list[int]:
        """Those of this shard in one epoch, in their order.

        Raises:
            ValueError: "auto" found another shard than this process has by now.
        """
        self._check_world()
        samples, (shards, shard) = len(self.data_source), (self.num_shards, self.shard_id)
        first, end = shard * samples // shards, (shard + 1) * samples // shards
        length = len(self)
        order = self._order(epoch, samples, slice(first, max(end, first + 1)))  # one of an empty shard, to repeat it
        taken = order[: min(length, end - first)]
        return taken + order[-1:] * (length - len(taken))

    def __len__(self) -> int:
        """Indices in an epoch, with those that are repeated and without those that are dropped."""
        samples, (shards, shard) = len(self.data_source), (self.num_shards, self.shard_id)
        if self.last_batch_policy is LastBatchPolicy.PARTIAL:
            return (shard + 1) * samples // shards - shard * samples // shards
        assert self.batch_size is not None
        if self.last_batch_policy is LastBatchPolicy.DROP:
            return samples // shards // self.batch_size * self.batch_size  # the shortest shard's full batches
        longest = -(-samples // shards)
        return -(-longest // self.batch_size) * self.batch_size

    def __repr__(self) -> str:
        return (
            f"ShardedSampler({len(self)} of {len(self.data_source)} samples, shard {self.shard_id} of "
            f"{self.num_shards}, {self.last_batch_policy.value!r}, {'shuffled' if self.shuffle else 'in order'})"
        )

    @property
    def shard_spec(self) -> dict[str, Any]:
        """How the samples are dealt out: what a checkpoint in mid-epoch depends on. The same in all processes."""
        full = self.last_batch_policy is not LastBatchPolicy.PARTIAL
        return {
            "num_shards": self.num_shards,
            "last_batch_policy": self.last_batch_policy.value,
            "batch_size": self.batch_size if full else None,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
        }

    def _order(self, epoch: int, samples: int, part: slice) -> list[int]:
        if not self.shuffle:
            return list(range(samples)[part])
        order = torch.randperm(samples, generator=generator_of(self.seed, epoch, "shards"))
        return [int(index) for index in order[part].tolist()]

    def _check_world(self) -> None:
        told = World.detect() if self._found else None
        if told is not None and told != self.world:
            raise ValueError(
                f"num_shards='auto' found {self.world.in_words()} when the sampler or loader was made, and now this "
                f"process is {told.in_words()}: make it after torch.distributed is initialised"
            )


# --- in the loader ---------------------------------------------------------------------------------------------------


def build_sampler(
    dataset: Any,
    num_shards: int | Auto | None,
    shard_id: int | Auto | None,
    last_batch_policy: str | enum.Enum | None,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    sampler: Any,
    batch_sampler: Any,
    drop_last: bool,
    seed: int | None,
) -> ShardedSampler | None:
    """The sampler that a loader's arguments ask for; None where they ask for no shards.

    Raises:
        ValueError: they contradict each other, or the processes that there are.
    """
    if num_shards is None:
        for name, value in (("shard_id", shard_id), ("last_batch_policy", last_batch_policy)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} needs num_shards: without it each process loads all samples. Give "
                    "num_shards='auto', or their number (1 for a process alone)"
                )
        _check_batch_size(sampler, batch_size)
        return None
    _refuse(dataset, sampler, batch_sampler)
    by_torch = "drop" if drop_last else "partial"
    policy = LastBatchPolicy.of(by_torch if last_batch_policy is None else last_batch_policy)
    if drop_last and policy is not LastBatchPolicy.DROP:
        raise ValueError(
            f"drop_last=True contradicts last_batch_policy={policy.value!r}: leave out one of them, or use 'drop'"
        )
    found = ShardedSampler(
        dataset,
        num_shards,
        "auto" if shard_id is None else shard_id,
        shuffle=bool(shuffle),
        seed=seed or 0,
        last_batch_policy=policy,
        batch_size=batch_size,
    )
    found.world.check_processes(
        ". Where groups of processes are to load the same samples, leave num_shards out of the DataLoader and give it "
        "sampler=ShardedSampler(dataset, num_shards, shard_id)"
    )
    return found


def _refuse(dataset: Any, sampler: Any, batch_sampler: Any) -> None:
    """What num_shards cannot deal out."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "num_shards deals out indices, and an IterableDataset has none: let its __iter__ yield the share of this "
            "process, by proxyloader.World.current(), and leave num_shards out"
        )
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"num_shards deals out the indices below len(dataset), and {type(dataset).__name__} has no __len__: "
            "give it one, or leave num_shards out and give a sampler that yields the indices of this process"
        )
    name, given = ("batch_sampler", batch_sampler) if batch_sampler is not None else ("sampler", sampler)
    if given is None:
        return
    for each in (given, getattr(given, "sampler", None)):
        if any(hasattr(each, mark) for mark in ("num_replicas", "rank", "num_shards")):
            raise ValueError(
                f"{name} is sharded already, by {type(each).__name__}, and num_shards is given, too: it would be "
                f"applied twice, and some samples would never come. Leave out num_shards, or {name}"
            )
    kind = type(given).__name__
    raise ValueError(
        f"num_shards deals out all of the dataset in an order of its own, and {name}={kind} has another: leave {name} "
        f"out (shuffle=True shuffles), or leave num_shards out and let {name} yield the indices of this process alone"
    )


def _check_batch_size(sampler: Any, batch_size: int | None) -> None:
    if isinstance(sampler, ShardedSampler) and sampler.shard_spec["batch_size"] not in (None, batch_size):
        raise ValueError(
            f"the sampler makes batches of {sampler.batch_size} full (last_batch_policy="
            f"{sampler.last_batch_policy.value!r}), and the loader has batch_size={batch_size}: give both the same"
        )


def find_sharded(sampler: Any) -> ShardedSampler | None:
    """The sharded sampler that a batch sampler of torch's takes its indices from, or that it is itself."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return inner if isinstance(inner, ShardedSampler) else None


def shard_spec_in(sampler_state: Any) -> dict[str, Any] | None:
    """How a sharded sampler dealt the samples out, of what a checkpoint keeps of a sampler; None of another sampler."""
    return sampler_state.get("dealt") if isinstance(sampler_state, dict) else None


def check_dealt(was: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """Whether an epoch that was begun in one way can go on in another.

    Args:
        was: how the samples were dealt out, as ``ShardedSampler.shard_spec``; None: not by one.
        now: the same of the loader that is to go on.

    Raises:
        ValueError: it cannot.
    """
    if was != now:
        told = [
            "without num_shards" if each is None else "with " + ", ".join(f"{name}={each[name]!r}" for name in each)
            for each in (was, now)
        ]
        raise ValueError(
            f"the state was saved in mid-epoch by a loader {told[0]}, and this one is {told[1]}: shards are ranges of "
            "the epoch's order, so what was left of them cannot be dealt out anew. Give the loader the same arguments, "
            "or begin the epoch anew: loader.set_epoch(state['epoch'])"
        )
