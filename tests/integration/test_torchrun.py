"""Under torchrun each process loads its share; on GPUs, each on the one of its local rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .. import scripts
from ..limits import WAIT_S

SCRIPT = Path(__file__).with_name("one_rank.py")


def test_each_process_loads_its_share_on_its_own_device(photos: Path, device: str, tmp_path: Path) -> None:
    ranks = 2 if device == "cpu" else torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("one GPU; this is about several")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with open(tmp_path / "out", "w+") as out:
        subprocess.run(
            [sys.executable, *launcher, SCRIPT, photos],
            env={**os.environ, **hidden},
            stdout=out,
            check=True,
            timeout=100,
        )
        out.seek(0)
        told = sorted((json.loads(line) for line in out if line.startswith("{")), key=lambda each: each["rank"])
    assert [each["rank"] for each in told] == list(range(ranks))
    for epoch in range(2):
        assert sorted(index for each in told for index in each["epochs"][epoch]) == list(range(48))
    assert told[0]["epochs"][0] != told[0]["epochs"][1]
    assert [each["devices"] for each in told] == [["cpu"] if device == "cpu" else [f"cuda:{k}"] for k in range(ranks)]
    assert not any(each["touched"] for each in told), "a process has a context on the GPU of another"


def test_shards_are_found_and_keep_in_step_and_a_checkpoint_of_one_does_for_all(photos: Path) -> None:
    module = "import runpy; runpy.run_module('tests.integration.one_shard', run_name='__main__')"
    done = scripts.run_ranks(module, photos, ranks=2, timeout_s=2 * WAIT_S, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    told = [json.loads(line) for each in done for line in each.stdout.splitlines() if line.startswith("{")]
    assert [(each["rank"], each["ranks"]) for each in told] == [(0, 2), (1, 2)]
    assert all(each["unsharded"] == list(range(47)) for each in told)
    sizes = {"fill": [[6, 6, 6, 6]] * 2, "partial": [[6, 6, 6, 5], [6, 6, 6, 6]], "drop": [[6, 6, 6]] * 2}
    for policy, expected in sizes.items():
        orders = []
        for epoch in range(2):
            batches = [each[policy]["epochs"][epoch] for each in told]
            assert [[len(batch) for batch in part] for part in batches] == expected
            loaded = [index for part in batches for batch in part for index in batch]
            # FILL repeats one of shard 0, DROP leaves 5 and 6 samples out.
            once = set(range(47)) if policy != "drop" else set(loaded)
            assert set(loaded) == once and len(loaded) - len(once) == (policy == "fill")
            orders.append(loaded)
        assert orders[0] != orders[1]
        assert [each[policy]["left"] for each in told] == [each[policy]["epochs"][1][2:] for each in told]
