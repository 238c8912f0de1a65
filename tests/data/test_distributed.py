"""How many processes there are, as torch.distributed, torchrun or Slurm tell it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from proxyloader import World

Tell = Callable[..., None]


@pytest.fixture(autouse=True)
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Of a number of processes and a rank, which nobody tells of before."""
    for name in ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)

    def tell(size: Any = None, rank: Any = None, names: tuple[str, str] = ("WORLD_SIZE", "RANK")) -> None:
        for name, value in zip(names, (size, rank)):
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return tell


SLURMS = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


def test_where_nothing_tells_there_is_one_process_and_torchruns_environment_tells(tell: Tell) -> None:
    assert World.current() == World(1, 0) and World.detect() is None
    tell(4, 3)
    assert World.current() == World.detect() == World(4, 3)


def test_a_job_step_of_slurm_tells_where_torchrun_does_not(tell: Tell) -> None:
    tell(None, 5, SLURMS)  # also a batch script has it, which is in no job step
    assert World.detect() is None
    tell(8, 5, SLURMS)
    assert World.current() == World(8, 5)
    World(9, 7).check_processes()  # one task on each node may start the processes of the training
    tell(2, 1)
    assert World.current() == World(2, 1)


def test_torch_distributed_knows_better_than_the_environment(tell: Tell, tmp_path: Path) -> None:
    tell(4, 3)
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
    size: Any, rank: Any, message: str, tell: Tell
) -> None:
    tell(size, rank)
    with pytest.raises(ValueError, match=message):
        World.current()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 0), "num_shards must be an integer >= 1, or 'auto', got 0"),
        (("two", 0), "num_shards must be an integer.*got 'two'"),
        ((True, 0), "num_shards must be an integer.*got True"),
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


def test_auto_is_what_there_is_and_numbers_are_as_they_are(tell: Tell) -> None:
    unknown = "num_shards=2 is given without a rank, .* rank {} of {}. Use"
    assert World.of("auto", "auto") == World.of(1, "auto") == World(1, 0)
    with pytest.raises(ValueError, match=unknown.format(0, 1)):
        World.of(2, "auto")
    tell(4, 3)
    assert World.of("auto", "auto") == World.of(4, "auto") == World(4, 3)
    assert (World.of("auto", 1), World.of(7, 5)) == (World(4, 1), World(7, 5))
    with pytest.raises(ValueError, match=unknown.format(3, 4)):
        World.of(2, "auto")
