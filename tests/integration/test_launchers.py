"""Under torchrun and Ray each process loads its share; on GPUs, each on the one of its local rank."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from .. import scripts
from ..faults import await_true
from ..limits import WAIT_S

MODULE = "import runpy; runpy.run_module('tests.integration.ray_cluster', run_name='__main__')"


@pytest.fixture(scope="module")
def told(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Ray cluster of this machine."""
    pytest.importorskip("ray.train.torch")
    folder = tmp_path_factory.mktemp("ray")
    quiet = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = scripts.run(MODULE, photos, folder, timeout_s=4 * WAIT_S, environment=quiet, afresh=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_actor_that_is_killed_is_replaced_in_mid_epoch(told: Any) -> None:
    before, after, by_three = (told["actors"][name] for name in ("before", "after", "by_three"))
    assert [len(each) for each in before] == [10, 10]
    for left in (after, by_three):
        assert sorted(number for each in [*before, *left] for number in each) == list(range(48))


def test_processes_of_ray_train_find_their_shards(told: Any) -> None:
    for epoch in range(2):
        assert sorted(number for each in told["train"] for number in each["epochs"][epoch]) == list(range(48))
    assert all(each["backends"][0].startswith("DALI on cpu") for each in told["train"])


def test_the_rows_of_ray_data_are_decoded_by_dali_and_come_once(told: Any, photos: Path) -> None:
    names = [name for each in told["train"] for name in each["names"]]
    assert sorted(names) == sorted(path.name for path in photos.rglob("*.jpg"))
    assert all(each["backends"][1].startswith("DALI on cpu") for each in told["train"])


# --- torchrun --------------------------------------------------------------------------------------------------------


SCRIPT = Path(__file__).with_name("one_rank.py")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def test_each_process_loads_its_share_on_its_own_device(photos: Path, device: str, tmp_path: Path) -> None:
    ranks = 2 if device == "cpu" else torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("one GPU; this is about several")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with open(tmp_path / "out", "w+") as out:
        subprocess.run(
            [*LAUNCHER, f"--nproc_per_node={ranks}", SCRIPT, photos],
            env={**os.environ, **hidden},
            stdout=out,
            check=True,
            timeout=2 * WAIT_S,
        )
        out.seek(0)
        told = sorted((json.loads(line) for line in out if line.startswith("{")), key=lambda each: each["rank"])
    assert [each["rank"] for each in told] == list(range(ranks))
    for epoch in range(2):
        assert sorted(index for each in told for index in each["epochs"][epoch]) == list(range(48))
        shards = [each["shards"][epoch] for each in told]
        assert {index for shard in shards for batch in shard for index in batch} == set(range(48))
        assert len({len(shard) for shard in shards}) == 1, "the processes keep in step"
    assert told[0]["epochs"][0] != told[0]["epochs"][1]
    assert [each["devices"] for each in told] == [["cpu"] if device == "cpu" else [f"cuda:{k}"] for k in range(ranks)]
    assert not any(each["touched"] for each in told), "a process has a context on the GPU of another"


def test_when_a_process_is_killed_the_others_and_all_workers_end(photos: Path, tmp_path: Path) -> None:
    command = [*LAUNCHER, "--nproc_per_node=2", SCRIPT, photos, tmp_path]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=WAIT_S)
    assert done.returncode == 1 and b"Signal 9 (SIGKILL)" in done.stderr
    processes = functools.partial(psutil.process_iter, ["cmdline"])
    await_true(lambda: not any(str(tmp_path) in (each.info["cmdline"] or ()) for each in processes()))
