"""World and ShardedSampler: the samples of each process. Index arithmetic, without DALI and CUDA.

Shards are those of DALI's readers: of N samples in S shards, shard k is the range [k*N//S, (k+1)*N//S) of the epoch's
order. Here, that order is one permutation of all samples, the same in every process. So the lengths of shards differ by
at most one sample, and ``LastBatchPolicy`` determines how that is handled.

NOTE [ Differences from DALI's shards ]
DALI's file reader with ``pad_last_batch=True`` returns the same samples in the same batches, with three differences.
With PARTIAL, a shard that ends one batch early returns an empty batch in DALI, but none here. With DROP, DALI starts
the next epoch with the remaining samples, but here every epoch starts at the beginning of its shard. DALI rejects fewer
samples than shards. Here, empty shards return no batch with PARTIAL and DROP. With FILL, they repeat a sample.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, Sampler

from .._random_state import make_generator
from .._validation import check_int

Auto = Literal["auto"]


@dataclasses.dataclass(frozen=True)
class World:
    """The number of processes that share a dataset, and the rank of this one.

    Attributes:
        num_shards: number of processes, 1 or more.
        shard_id: rank of this process, from 0.

    Raises:
        ValueError: a number is invalid.
    """

    num_shards: int
    shard_id: int

    def __post_init__(self) -> None:
        check_int("num_shards", self.num_shards, 1, ", or 'auto'")
        is_integer = isinstance(self.shard_id, numbers.Integral) and not isinstance(self.shard_id, bool)
        if not is_integer or self.shard_id not in range(self.num_shards):
            raise ValueError(f"shard_id must be an integer in [0, {self.num_shards - 1}], got {self.shard_id!r}")

    def __str__(self) -> str:
        return f"rank {self.shard_id} of {self.num_shards}"

    @classmethod
    def current(cls) -> World:
        """Return the processes of torch.distributed if it is initialized, else of torchrun, else of Slurm, else one.

        torchrun sets WORLD_SIZE and RANK. ``srun`` sets SLURM_STEP_NUM_TASKS and SLURM_PROCID for the processes of a
        job step.

        ValueError: only one of torchrun's variables is set, or the value of a variable is invalid.
        """
        return cls.detect() or cls(1, 0)

    @classmethod
    def detect(cls, with_slurm: bool = True) -> World | None:
        """Return the same as ``current``, or None. ``with_slurm=False`` ignores Slurm, whose tasks may start others."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(torch.distributed.get_world_size(), torch.distributed.get_rank())
        size, rank = _read_environment("WORLD_SIZE", 1), _read_environment("RANK", 0)
        if size is None and rank is None:
            if with_slurm:  # a batch script runs outside of all job steps, with only the job's number of tasks
                size, rank = _read_environment("SLURM_STEP_NUM_TASKS", 1), _read_environment("SLURM_PROCID", 0)
            return None if size is None or rank is None else cls(size, rank)
        if size is None or rank is None or rank >= size:
            raise ValueError(
                "the environment variables WORLD_SIZE and RANK must be set together, with RANK < WORLD_SIZE, as by "
                f"torchrun, got WORLD_SIZE={size} and RANK={rank}. Set or unset both"
            )
        return cls(size, rank)

    @classmethod
    def resolve(cls, num_shards: int | Auto, shard_id: int | Auto) -> World:
        """Create a World, with "auto" replaced by the value from ``current``.

        ValueError: a number is invalid, or only ``shard_id`` is "auto" and ``num_shards`` differs from ``current``.
        """
        if shard_id != "auto":
            return cls(cls.current().num_shards if num_shards == "auto" else num_shards, shard_id)
        current = cls.current()
        if num_shards != "auto" and cls(num_shards, 0).num_shards != current.num_shards:
            raise ValueError(
                f"num_shards={num_shards} requires a rank, because this process is {current}. Use num_shards='auto', "
                "start as many processes (torchrun --nproc-per-node), or pass the rank as well: "
                f"num_shards=World({num_shards}, rank) to a DataLoader, shard_id=rank to a ShardedSampler"
            )
        return current


def _read_environment(name: str, minimum: int) -> int | None:
    if not (text := os.environ.get(name)):
        return None
    if not text.isdecimal() or int(text) < minimum:
        raise ValueError(
            f"the environment variable {name} must be an integer >= {minimum}, as set by torchrun or srun, got {text!r}"
        )
    return int(text)


class LastBatchPolicy(enum.Enum):
    """How to handle an incomplete last batch of a shard. Names and meanings are those of DALI.

    FILL: all processes take the same number of steps with full batches, because the last sample is repeated.
    PARTIAL: every sample is used once. The last batch may be smaller, and some processes may have one more batch.
    DROP: all processes take the same number of steps with full batches, because the remaining samples are dropped.
    """

    FILL = "fill"
    PARTIAL = "partial"
    DROP = "drop"

    @classmethod
    def of(cls, policy: str | enum.Enum) -> LastBatchPolicy:
        """Return the member for one of this class or of DALI's ``LastBatchPolicy``, or "fill", "partial" or "drop"."""
        name = policy.name if isinstance(policy, enum.Enum) else str(policy)
        if name.upper() not in cls.__members__:
            allowed = ", ".join(f"{each.value!r}" for each in cls)
            raise ValueError(f"last_batch_policy must be {allowed} or a member of LastBatchPolicy, got {policy!r}")
        return cls[name.upper()]


class ShardedSampler(Sampler[int]):
    """Sampler of the indices of one shard of a dataset, in an order that changes every epoch.

    The order depends only on seed and epoch, so processes with the same seed agree without communication. Each
    iteration is the next epoch, starting at 0. Use ``set_epoch`` if processes iterate a different number of times.

    Args:
        data_source: dataset to share; only its length is used.
        num_shards: number of processes that share it; "auto" uses ``World.current()``.
        shard_id: rank of this process, from 0; "auto" uses ``World.current()``.
        shuffle: whether to shuffle all samples before splitting them into shards.
        seed: seed of the order.
        last_batch_policy: see ``LastBatchPolicy``; also accepts DALI's own, or "fill", "partial", "drop".
        batch_size: number of samples in the batches built from the indices; required for FILL and DROP.

    Attributes:
        num_shards, shard_id: number of processes, and rank of this one.
        epoch: number of the next epoch.

    Raises:
        ValueError: an argument or the environment is invalid; see ``World``.
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
        self.world = World.resolve(num_shards, shard_id)
        self.num_shards, self.shard_id = self.world.num_shards, self.world.shard_id
        self.last_batch_policy = LastBatchPolicy.of(last_batch_policy)
        check_int("seed", seed, 0)
        if batch_size is not None:
            check_int("batch_size", batch_size, 1)
        elif self.last_batch_policy is not LastBatchPolicy.PARTIAL:
            raise ValueError(
                f"last_batch_policy={self.last_batch_policy.value!r} requires batch_size, or use 'partial'"
            )
        self.data_source, self.shuffle, self.seed, self.batch_size = data_source, bool(shuffle), seed, batch_size
        self.epoch = 0
        self._taken: tuple[tuple[int, int], ...] = ()
        self._is_auto = (num_shards, shard_id) == ("auto", "auto")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. ValueError: it is not an integer >= 0."""
        check_int("epoch", epoch, 0)
        self.epoch, self._taken = epoch, ()

    def resume(self, epoch: int, taken: Iterable[Sequence[int]]) -> None:
        """Set the epoch of the next iteration, and the samples already taken from it; see ``indices``."""
        self.set_epoch(epoch)
        self._taken = tuple((shards, samples) for shards, samples in taken)

    def __iter__(self) -> Iterator[int]:
        epoch, taken = self.epoch, self._taken
        self.set_epoch(epoch + 1)
        return iter(self.indices(epoch, taken))

    def indices(self, epoch: int, taken: Iterable[tuple[int, int]] = ()) -> list[int]:
        """Return the indices of this shard in one epoch, in order.

        Args:
            taken: the samples already taken, possibly by other numbers of processes, as (number of shards, number of
                samples per shard). The remaining samples, shard after shard, are split into new shards.

        Raises:
            ValueError: the rank or the number of processes has changed since "auto" was resolved.
        """
        detected = World.detect() if self._is_auto else None
        if detected is not None and detected != self.world:
            raise ValueError(
                f"num_shards='auto' was resolved to {self.world}, but this process is now {detected}. Create the "
                "sampler or loader after torch.distributed is initialized"
            )
        samples = len(self.data_source)
        order = torch.arange(samples)
        if self.shuffle:
            order = torch.randperm(samples, generator=make_generator(self.seed, epoch, "shards"))
        for shards, count in taken:
            ranges = [_range(len(order), shards, shard) for shard in range(shards)]
            order = torch.cat([order[first:end][count:] for first, end in ranges])
        (first, end), length = _range(len(order), self.num_shards, self.shard_id), self._length(len(order))
        part: list[int] = order[first : max(end, first + 1)].tolist()  # an empty shard gets one sample to repeat
        indices = part[: min(length, end - first)]
        return indices + part[-1:] * (length - len(indices))

    def __len__(self) -> int:
        """Return the number of indices in an entire epoch, including repeated and without dropped ones."""
        return self._length(len(self.data_source))

    def _length(self, samples: int) -> int:
        """Return the number of indices of this shard if all shards share that many samples."""
        shards, (first, end) = self.num_shards, _range(samples, self.num_shards, self.shard_id)
        if self.last_batch_policy is LastBatchPolicy.PARTIAL:
            return end - first
        assert self.batch_size is not None
        if self.last_batch_policy is LastBatchPolicy.DROP:
            return samples // shards // self.batch_size * self.batch_size  # the full batches of the shortest shard
        return -(samples // -(shards * self.batch_size)) * self.batch_size  # rounded up twice

    @property
    def shard_spec(self) -> dict[str, Any]:
        """How samples are split into shards, equal in all processes. A mid-epoch checkpoint depends on it."""
        return {
            "num_shards": self.num_shards,
            "last_batch_policy": self.last_batch_policy.value,
            "batch_size": None if self.last_batch_policy is LastBatchPolicy.PARTIAL else self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
        }


def _range(samples: int, shards: int, shard: int) -> tuple[int, int]:
    """Return the start and end of a shard in the order of the samples."""
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
    """Return the sampler for the arguments of a loader; None without ``num_shards``. ValueError: they contradict."""
    if num_shards is None:
        if last_batch_policy is not None:
            LastBatchPolicy.of(last_batch_policy)
            raise ValueError(
                f"last_batch_policy={last_batch_policy!r} requires num_shards; otherwise each process loads all "
                "samples. Pass num_shards='auto', or 1 for a single process"
            )
        if isinstance(sampler, ShardedSampler) and sampler.shard_spec["batch_size"] not in (None, batch_size):
            raise ValueError(
                f"batch_size must be {sampler.batch_size}, as in the sampler with last_batch_policy="
                f"{sampler.last_batch_policy.value!r}, got {batch_size}"
            )
        for each in (sampler, getattr(batch_sampler, "sampler", None)):
            inner = getattr(getattr(each, "dataset", None), "_sampler", None)  # of Lightning's sampler
            if isinstance(inner, ShardedSampler) and inner.num_shards > 1 and getattr(each, "num_replicas", 1) > 1:
                raise ValueError(
                    f"{type(each).__name__} splits the shards of num_shards={inner.num_shards} again, so some samples "
                    "would never be used. Remove num_shards, or pass use_distributed_sampler=False to Lightning"
                )
        return None
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"num_shards requires a map-style dataset with a length, got {type(dataset).__name__}. Without num_shards, "
            "yield only the samples of this process, World.current(), from its __iter__ or from a sampler"
        )
    name, value = ("batch_sampler", batch_sampler) if batch_sampler is not None else ("sampler", sampler)
    if value is not None:
        raise ValueError(
            f"num_shards cannot be combined with {name}={type(value).__name__}, because it defines the order and "
            f"splits all samples itself. Remove {name} (shuffle=True shuffles), or remove num_shards and let {name} "
            "yield the indices of this process. With Lightning, pass use_distributed_sampler=False"
        )
    default = "drop" if drop_last else "partial"
    policy = LastBatchPolicy.of(default if last_batch_policy is None else last_batch_policy)
    if drop_last and policy is not LastBatchPolicy.DROP:
        raise ValueError(f"drop_last=True contradicts last_batch_policy={policy.value!r}. Remove one, or use 'drop'")
    shard: tuple[Any, ...] = dataclasses.astuple(num_shards) if isinstance(num_shards, World) else (num_shards,)
    order: dict[str, Any] = {"shuffle": bool(shuffle), "seed": seed or 0}
    sharded = ShardedSampler(dataset, *shard, **order, last_batch_policy=policy, batch_size=batch_size)
    detected = World.detect(with_slurm=False)
    if detected is not None and detected.num_shards != sharded.num_shards:
        raise ValueError(
            f"num_shards={sharded.num_shards} contradicts torch.distributed or WORLD_SIZE, which define {detected}. "
            "Use num_shards='auto'. If groups of processes should load the same samples, pass "
            "sampler=ShardedSampler(dataset, num_shards, shard_id) to the DataLoader instead"
        )
    return sharded


def check_shard_spec(saved: dict[str, Any] | None, current: dict[str, Any] | None) -> None:
    """Raise ValueError if specs, None without a ShardedSampler, imply different orders of the samples."""
    specs = [{"num_shards": None} if spec is None else spec for spec in (saved, current)]
    orders = [[spec.get(name) for name in ("shuffle", "seed")] for spec in specs]
    if orders[0] != orders[1]:
        shown = ("num_shards", "shuffle", "seed")
        described = [", ".join(f"{name}={spec[name]!r}" for name in shown if name in spec) for spec in specs]
        raise ValueError(
            f"the state was saved within an epoch by a loader with {described[0]}, but this loader has {described[1]}, "
            "so the order of the samples differs. Use the same shuffle, seed and num_shards, or restart the epoch: "
            "loader.set_epoch(state['epoch'])"
        )
