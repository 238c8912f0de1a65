"""Under torchrun each process loads its share; on GPUs, each on the one of its local rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
        shards = [each["shards"][epoch] for each in told]
        assert {index for shard in shards for batch in shard for index in batch} == set(range(48))
        assert len({len(shard) for shard in shards}) == 1, "the processes keep in step"
    assert told[0]["epochs"][0] != told[0]["epochs"][1]
    assert [each["devices"] for each in told] == [["cpu"] if device == "cpu" else [f"cuda:{k}"] for k in range(ranks)]
    assert not any(each["touched"] for each in told), "a process has a context on the GPU of another"
