"""How many processes there are, as torch.distributed, torchrun or Slurm tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proxyloader import World


@pytest.fixture(autouse=True)
def nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def told(monkeypatch: pytest.MonkeyPatch, size: str | None, rank: str | None) -> None:
    for name, value in (("WORLD_SIZE", size), ("RANK", rank)):
        if value is not None:
            monkeypatch.setenv(name, value)


def test_where_nothing_tells_there_is_one_process() -> None:
    assert World.current() == World(1, 0) and World.detect() is None


def test_torchruns_environment_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, "4", "3")
    assert World.current() == World.detect() == World(4, 3)


@pytest.mark.parametrize("torchruns", [None, ("2", "1")], ids=["srun alone", "torchrun below srun"])
def test_a_job_step_of_slurm_tells_where_torchrun_does_not(
    monkeypatch: pytest.MonkeyPatch, torchruns: tuple[str, str] | None
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "5")  # also a batch script has it, which is in no job step
    assert World.detect() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    told(monkeypatch, *(torchruns or (None, None)))
    assert World.current() == (World(2, 1) if torchruns else World(8, 5))


def test_numbers_that_are_given_hold_in_a_job_step_of_slurm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One task of it on each node may start the processes of the training."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    World(8, 5).check_processes()


def test_torch_distributed_knows_better_than_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told(monkeypatch, "4", "3")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        assert World.current() == World(1, 0)
    finally:
        torch.distributed.destroy_process_group()
    assert World.current() == World(4, 3)


@pytest.mark.parametrize(
    ("size", "rank", "message"),
    [
        ("4", None, "WORLD_SIZE='4' and no RANK, .* set both, as torchrun does, or unset WORLD_SIZE"),
        (None, "0", "RANK='0' and no WORLD_SIZE, .* or unset RANK"),
        ("four", "0", "WORLD_SIZE='four', where a whole number, 1 or more, .*: set it as torchrun or srun does"),
        ("0", "0", "WORLD_SIZE='0', where a whole number, 1 or more"),
        ("2", "-1", "RANK='-1', where a whole number, 0 or more"),
        ("2", "2", "RANK=2 and WORLD_SIZE=2: ranks are 0 to 1"),
    ],
)
def test_an_environment_that_cannot_be_is_an_error_that_says_which_variable(
    size: str | None, rank: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, size, rank)
    with pytest.raises(ValueError, match=message):
        World.current()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 0), "num_shards is a whole number, 1 or more, or 'auto'; got 0"),
        (("two", 0), "num_shards is a whole number.*got 'two'"),
        ((True, 0), "num_shards is a whole number.*got True"),
        ((2, 2), "shard_id is a whole number from 0 to 1, as num_shards=2; got 2"),
        ((2, -1), "shard_id is .*got -1"),
        ((2, 1.0), r"shard_id is .*got 1\.0"),
        ((2, True), "shard_id is .*got True"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        World(*numbers)


def test_auto_is_what_there_is_and_numbers_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World.of("auto", "auto") == World.of(1, "auto") == World(1, 0)
    told(monkeypatch, "4", "3")
    assert World.of("auto", "auto") == World.of(4, "auto") == World(4, 3)
    assert World.of("auto", 1) == World(4, 1)
    assert World.of(7, 5) == World(7, 5)


def test_a_number_of_shards_that_nobody_knows_the_rank_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="num_shards=2 is given without a rank, .* rank 0 of 1. Use"):
        World.of(2, "auto")
    told(monkeypatch, "4", "3")
    with pytest.raises(ValueError, match="num_shards=2 is given without a rank, .* rank 3 of 4. Use"):
        World.of(2, "auto")
