"""World: the number of processes that share a dataset, and the rank of this one."""

from __future__ import annotations

import numbers
import os
from dataclasses import dataclass
from typing import Literal

import torch

from .._validation import check_int

Auto = Literal["auto"]


@dataclass(frozen=True)
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
