"""A Ray cluster of this machine: each process loads its share, and one that is lost is replaced in mid-epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .. import scripts
from ..limits import WAIT_S

pytest.importorskip("ray.train.torch")

MODULE = "import runpy; runpy.run_module('tests.integration.ray_cluster', run_name='__main__')"


@pytest.fixture(scope="module")
def told(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
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
