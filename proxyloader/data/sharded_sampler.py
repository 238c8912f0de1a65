"""World and ShardedSampler: which samples belong to which process. Index arithmetic, without DALI and without CUDA.

Shards are those of DALI's readers: of N samples in S shards, shard k is the range [k*N//S, (k+1)*N//S) of the order of
the epoch. Here that order is one permutation of all samples, the same in every process. So shards differ in length by
at most one sample. ``LastBatchPolicy`` says what happens to the difference.

NOTE [ Differences from DALI's shards ]
DALI's file reader with ``pad_last_batch=True`` under DALI's iterators gives the same samples in the same batches, with
three differences. With PARTIAL, a shard that ends a batch before the others gives an empty batch in DALI, and none
here. With DROP, DALI begins the next epoch with the remaining samples; here each epoch begins at the start of its
shard. DALI refuses fewer samples than shards. Here, empty shards give no batch with PARTIAL and DROP. With FILL they
repeat the sample at which they would begin, so that all processes take the same number of steps.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from .._random_state import generator_of
from .._validation import check_int

Auto = Literal["auto"]


@dataclasses.dataclass(frozen=True)
class World:
    """The number of processes that share a dataset, and the rank of this one.

    Attributes:
        num_shards: number of processes, 1 or more.
        shard_id: rank of this process, from 0.

    Raises:
        ValueError: the numbers are not valid.
    """

    num_shards: int
    shard_id: int

    def __post_init__(self) -> None:
        check_int("num_shards", self.num_shards, 1, ", or 'auto'")
        known = isinstance(self.shard_id, numbers.Integral) and not isinstance(self.shard_id, bool)
        if not known or self.shard_id not in range(self.num_shards):
            raise ValueError(
                f"shard_id is a whole number from 0 to {self.num_shards - 1}, as num_shards={self.num_shards}; "
                f"got {self.shard_id!r}"
            )

    @classmethod
    def current(cls) -> World:
        """Return the processes of torch.distributed if it is initialized, else of torchrun, else of Slurm, else one.

        The processes of torchrun are given by WORLD_SIZE and RANK in the environment. Those of a job step of Slurm,
        which ``srun`` starts, are given by SLURM_STEP_NUM_TASKS and SLURM_PROCID.

        Raises:
            ValueError: only one of the variables of torchrun is set, or the value of a variable is not valid.
        """
        return cls.detect() or cls(1, 0)

    @classmethod
    def detect(cls, with_slurm: bool = True) -> World | None:
        """Return the same as ``current``, but None if neither torch.distributed nor the environment tells.

        A job step of Slurm may be something else than the processes of a training, which each of its tasks may start.
        So it does not count without ``with_slurm``, where numbers are given.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(torch.distributed.get_world_size(), torch.distributed.get_rank())
        size, rank = _from_environment("WORLD_SIZE", 1), _from_environment("RANK", 0)
        if size is None and rank is None:
            return cls._of_slurm() if with_slurm else None
        if size is None or rank is None:
            there, missing = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
            raise ValueError(
                f"the environment has {there}={os.environ[there]!r} and no {missing}, so it does not tell which shard "
                f"this process has: set both, as torchrun does, or unset {there}"
            )
        if rank >= size:
            raise ValueError(
                f"the environment has RANK={rank} and WORLD_SIZE={size}: ranks are 0 to {size - 1}. "
                "Set both, as torchrun does, or unset both"
            )
        return cls(size, rank)

    @classmethod
    def _of_slurm(cls) -> World | None:
        # A batch script runs outside of all job steps. It has the rank 0 and the job's number of tasks, SLURM_NTASKS.
        size, rank = _from_environment("SLURM_STEP_NUM_TASKS", 1), _from_environment("SLURM_PROCID", 0)
        return None if size is None or rank is None else cls(size, rank)

    @classmethod
    def of(cls, num_shards: int | Auto, shard_id: int | Auto) -> World:
        """Create a World from numbers, with "auto" replaced by the number from ``current``.

        Raises:
            ValueError: a number is not valid. Or only ``shard_id`` is "auto", and ``num_shards`` differs from
                ``current``.
        """
        if shard_id != "auto":
            return cls(cls.current().num_shards if num_shards == "auto" else num_shards, shard_id)
        asked = None if num_shards == "auto" else cls(num_shards, 0)
        current = cls.current()
        if asked is not None and asked.num_shards != current.num_shards:
            raise ValueError(
                f"num_shards={num_shards} is given without a rank, and this process is {current.in_words()}. "
                "Use num_shards='auto', start as many processes (torchrun --nproc_per_node), or give the rank, too: "
                f"num_shards=World({num_shards}, rank) for a DataLoader, shard_id=rank for a ShardedSampler"
            )
        return current

    def check_processes(self, otherwise: str = "") -> None:
        """Raise ValueError if torch.distributed or torchrun tells another number. ``otherwise`` is advice."""
        told = World.detect(with_slurm=False)
        if told is not None and told.num_shards != self.num_shards:
            raise ValueError(
                f"num_shards={self.num_shards} contradicts torch.distributed or WORLD_SIZE, by which this process is "
                f"{told.in_words()}: use num_shards='auto'{otherwise}"
            )

    def in_words(self) -> str:
        """Return a description for messages."""
        return f"rank {self.shard_id} of {self.num_shards}"


def _from_environment(name: str, least: int) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"the environment has {name}={text!r}, where a whole number, {least} or more, is expected: "
            f"set it as torchrun or srun does, or unset it"
        )
    return int(text)


class LastBatchPolicy(enum.Enum):
    """What to do with the last batch of a shard if the samples do not fill it. Names and meanings are those of DALI.

    FILL: all processes take the same number of steps, and all batches are full: the shard's last sample is repeated.
    PARTIAL: each sample comes once. The last batch is smaller, and some processes may have one batch more than others.
    DROP: all processes take the same number of steps, and all batches are full: the remaining samples are dropped.
    """

    FILL = "fill"
    PARTIAL = "partial"
    DROP = "drop"

    @classmethod
    def of(cls, policy: str | enum.Enum) -> LastBatchPolicy:
        """
        Args:
            policy: a member of this class or of DALI's ``LastBatchPolicy``; or "fill", "partial" or "drop".

        Raises:
            ValueError: it is none of these.
        """
        name = policy.name.lower() if isinstance(policy, enum.Enum) else str(policy).lower()
        if name not in [each.value for each in cls]:
            allowed = ", ".join(f"{each.value!r}" for each in cls)
            raise ValueError(f"last_batch_policy is one of {allowed}, or a member of LastBatchPolicy; got {policy!r}")
        return cls(name)


class ShardedSampler(Sampler[int]):
    """Sampler of the indices of one shard of a dataset, in an order that changes with the epoch.

    The order depends only on seed and epoch, so processes with the same seed agree on it without communication. Each
    iteration is the next epoch, from 0. ``set_epoch`` sets another epoch; this is required if a process iterates more
    often than others.

    Args:
        data_source: dataset that is shared; only its length is used.
        num_shards: number of processes that share it; "auto" takes ``World.current()``.
        shard_id: rank of this process, from 0; "auto" takes ``World.current()``.
        shuffle: whether to shuffle all samples before they are split into shards.
        seed: seed of the order.
        last_batch_policy: see ``LastBatchPolicy``; also DALI's own, or "fill", "partial", "drop".
        batch_size: number of samples in the batches that are made from the indices; required for FILL and DROP.

    Attributes:
        epoch: number of the next epoch.

    Raises:
        ValueError: an argument or the environment is not valid; see ``World``.
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
        self._taken: tuple[tuple[int, int], ...] = ()
        self._found = (num_shards, shard_id) == ("auto", "auto")

    @property
    def num_shards(self) -> int:
        """Number of processes that share the dataset."""
        return self.world.num_shards

    @property
    def shard_id(self) -> int:
        """Rank of this process, from 0."""
        return self.world.shard_id

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Raises:
            ValueError: it is not an integer, or less than 0.
        """
        check_int("epoch", epoch, 0)
        self.epoch, self._taken = epoch, ()

    def set_rest(self, epoch: int, taken: Iterable[Sequence[int]]) -> None:
        """Set the epoch of the next iteration, and what was taken of it before; see ``indices``."""
        self.set_epoch(epoch)
        self._taken = tuple((shards, samples) for shards, samples in taken)

    def __iter__(self) -> Iterator[int]:
        epoch, taken = self.epoch, self._taken
        self.set_epoch(epoch + 1)
        return iter(self.indices(epoch, taken))

    def indices(self, epoch: int, taken: Iterable[tuple[int, int]] = ()) -> list[int]:
        """Return the indices of this shard in one epoch, in order.

        Args:
            taken: what was taken of the epoch before, by other numbers of processes, as (number of shards, number of
                samples of each shard). What they left, one shard after the other, is split into new shards.

        Raises:
            ValueError: "auto" found another rank or number of processes than this process has now.
        """
        self._check_world()
        samples = len(self.data_source)
        shuffled = torch.randperm(samples, generator=generator_of(self.seed, epoch, "shards")) if self.shuffle else None
        order = torch.arange(samples) if shuffled is None else shuffled
        for shards, each in taken:
            ranges = [_range(len(order), shards, shard) for shard in range(shards)]
            order = torch.cat([order[first:end][each:] for first, end in ranges])
        (first, end), length = _range(len(order), self.num_shards, self.shard_id), self._length(len(order))
        part: list[int] = order[first : max(end, first + 1)].tolist()  # an empty shard gets one to repeat
        own = part[: min(length, end - first)]
        return own + part[-1:] * (length - len(own))

    def __len__(self) -> int:
        """Return the number of indices in a whole epoch, with repeated ones and without dropped ones."""
        return self._length(len(self.data_source))

    def _length(self, samples: int) -> int:
        """Return the number of indices of this shard if all shards share that many samples."""
        shards, (first, end) = self.num_shards, _range(samples, self.num_shards, self.shard_id)
        if self.last_batch_policy is LastBatchPolicy.PARTIAL:
            return end - first
        assert self.batch_size is not None
        if self.last_batch_policy is LastBatchPolicy.DROP:
            return samples // shards // self.batch_size * self.batch_size  # the full batches of the shortest shard
        longest = -(-samples // shards)
        return -(-longest // self.batch_size) * self.batch_size

    def __repr__(self) -> str:
        return (
            f"ShardedSampler({len(self)} of {len(self.data_source)} samples, shard {self.shard_id} of "
            f"{self.num_shards}, {self.last_batch_policy.value!r}, {'shuffled' if self.shuffle else 'in order'})"
        )

    @property
    def shard_spec(self) -> dict[str, Any]:
        """How the samples are split into shards, the same in all processes. A checkpoint in mid-epoch depends on it."""
        full = self.last_batch_policy is not LastBatchPolicy.PARTIAL
        return {
            "num_shards": self.num_shards,
            "last_batch_policy": self.last_batch_policy.value,
            "batch_size": self.batch_size if full else None,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
        }

    def _check_world(self) -> None:
        told = World.detect() if self._found else None
        if told is not None and told != self.world:
            raise ValueError(
                f"num_shards='auto' found {self.world.in_words()} when the sampler or loader was made, and now this "
                f"process is {told.in_words()}: make it after torch.distributed is initialised"
            )


def _range(samples: int, shards: int, shard: int) -> tuple[int, int]:
    """Return where a shard begins in the order of the samples, and where it ends."""
    return shard * samples // shards, (shard + 1) * samples // shards


def build_sampler(
    dataset: Any,
    num_shards: int | Auto | World | None,
    last_batch_policy: str | enum.Enum | None,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    sampler: Any,
    batch_sampler: Any,
    drop_last: bool,
    seed: int | None,
) -> ShardedSampler | None:
    """Return the sampler for the arguments of a loader; None if they ask for no shards.

    ValueError: the arguments contradict each other, or the number of running processes.
    """
    if num_shards is None:
        if last_batch_policy is not None:
            raise ValueError(
                f"last_batch_policy={last_batch_policy!r} needs num_shards: without it each process loads all samples. "
                "Give num_shards='auto', or their number (1 for a process alone)"
            )
        if isinstance(sampler, ShardedSampler) and sampler.shard_spec["batch_size"] not in (None, batch_size):
            raise ValueError(
                f"the sampler makes batches of {sampler.batch_size} full (last_batch_policy="
                f"{sampler.last_batch_policy.value!r}), and the loader has batch_size={batch_size}: give both the same"
            )
        for each in (sampler, getattr(batch_sampler, "sampler", None)):
            _refuse_twice(each)
        return None
    _refuse(dataset, sampler, batch_sampler)
    by_torch = "drop" if drop_last else "partial"
    policy = LastBatchPolicy.of(by_torch if last_batch_policy is None else last_batch_policy)
    if drop_last and policy is not LastBatchPolicy.DROP:
        raise ValueError(
            f"drop_last=True contradicts last_batch_policy={policy.value!r}: leave out one of them, or use 'drop'"
        )
    shard: tuple[Any, ...] = dataclasses.astuple(num_shards) if isinstance(num_shards, World) else (num_shards,)
    found = ShardedSampler(
        dataset,
        *shard,
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


def _refuse_twice(sampler: Any) -> None:
    """Raise ValueError for a sampler of Lightning that divides the indices of a shard."""
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    if isinstance(inner, ShardedSampler) and inner.num_shards > 1 and getattr(sampler, "num_replicas", 1) > 1:
        raise ValueError(
            f"the loader has num_shards={inner.num_shards}, and {type(sampler).__name__} divides each shard once more: "
            "some samples would never come. Leave out num_shards, or give Lightning use_distributed_sampler=False"
        )


def _refuse(dataset: Any, sampler: Any, batch_sampler: Any) -> None:
    """Raise ValueError for datasets and samplers that num_shards does not work with."""
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
                f"applied twice, and some samples would never come. Leave out num_shards, or {name}. Lightning "
                "leaves its sampler out with use_distributed_sampler=False"
            )
    kind = type(given).__name__
    raise ValueError(
        f"num_shards deals out all of the dataset in an order of its own, and {name}={kind} has another: leave {name} "
        f"out (shuffle=True shuffles), or leave num_shards out and let {name} yield the indices of this process alone"
    )


def find_sharded_sampler(sampler: Any) -> ShardedSampler | None:
    """Return the ShardedSampler that ``sampler`` is, or that torch's BatchSampler uses; None if there is none."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return inner if isinstance(inner, ShardedSampler) else None


def check_shard_spec(was: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """Raise ValueError if an epoch that was begun with one ``shard_spec`` cannot go on with another.

    None stands for a loader without a ShardedSampler. What determines the order has to be the same.
    """
    orders = [None if each is None else (each["shuffle"], each["seed"]) for each in (was, now)]
    if orders[0] != orders[1]:
        told = [
            "without num_shards" if each is None else "with " + ", ".join(f"{name}={each[name]!r}" for name in each)
            for each in (was, now)
        ]
        raise ValueError(
            f"the state was saved in mid-epoch by a loader {told[0]}, and this one is {told[1]}: it has another order, "
            "in which other samples are left. Give the loader the same shuffle and seed, and num_shards where it had "
            "that, or begin the epoch anew: loader.set_epoch(state['epoch'])"
        )
