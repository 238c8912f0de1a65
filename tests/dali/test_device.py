"""Which device images arrive on, and the cores beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proxyloader.dali import device as devices
from proxyloader.dali.device import check_device, cores_near, cuda_ordinal, keep_near, keep_on


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:3", torch.device("cuda", 1)])
def test_known_devices_are_taken(device: object) -> None:
    check_device(device)


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", "cuda:x", object()])
def test_others_are_refused(device: object) -> None:
    with pytest.raises((ValueError, TypeError), match="device"):
        check_device(device)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device='cuda:99', and torch sees .* CUDA device\(s\)"):
        cuda_ordinal("cuda:99")


def test_the_cpu_has_no_ordinal() -> None:
    assert cuda_ordinal("cpu") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_local_rank_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cuda_ordinal(None) is None


@pytest.mark.parametrize(
    ("told", "cores"),
    [("0-3,8-9\n", {0, 1, 2, 3, 8, 9}), ("5\n", {5}), ("\n", set()), ("what", set())],
)
def test_the_system_tells_the_cores(
    told: str, cores: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "PCI_DEVICES", tmp_path)
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(told)
    assert cores_near("0000:3b:00.0") == cores
    assert cores_near("0000:ff:00.0") == set()


def test_processes_stay_on_the_cores_where_these_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            keep_on([child.pid, child.pid], one)
            assert os.sched_getaffinity(child.pid) == allowed, "two of them on one core"
            keep_on([child.pid], set())
            assert os.sched_getaffinity(child.pid) == allowed, "nothing is known"
            monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
            keep_near([child.pid], 0)
            assert os.sched_getaffinity(child.pid) == allowed, "the only process of its job"
            keep_on([child.pid], one | {1 << 20})
            assert os.sched_getaffinity(child.pid) == one
        finally:
            child.kill()
    keep_on([child.pid], one)  # it is gone
