"""``diagnose`` on a GPU: a run that is bound by each of its parts, with what the GPU does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import proxyloader

from ..tools.test_diagnose import SECONDS, SlowToRead, compute, loader_of

pytestmark = pytest.mark.alone  # as others' work on the GPU is measured, too


def diagnosed(root: Path, step: Any, **arguments: Any) -> Any:
    workers = {"num_workers": 1, "persistent_workers": True, "device": "cuda"}
    loader = loader_of(root, loader=proxyloader.DataLoader, **workers, **arguments)
    return proxyloader.diagnose(loader, step, seconds=3 * SECONDS)


def test_a_step_that_waits_for_the_gpu_is_a_model(photos: Path) -> None:
    weights = torch.randn(8192, 8192, device="cuda")

    def step(batch: Any) -> None:
        assert batch[0].is_cuda
        for _ in range(20):
            weights @ weights
        torch.cuda.synchronize()

    found = diagnosed(photos, step)
    assert found.bound == "model"
    assert found.figures.step.gpu_percent is not None and found.figures.step.gpu_percent > 50


def test_a_step_of_python_is_the_cpu_of_the_loop(photos: Path) -> None:
    found = diagnosed(photos, lambda batch: compute(0.15))
    assert found.bound == "loop"
    assert found.figures.step.gpu_percent is not None


def test_reads_that_wait_are_the_disk(photos: Path) -> None:
    found = diagnosed(photos, lambda batch: None, kind=SlowToRead)
    assert found.bound == "disk"


def test_a_loader_without_a_step_is_the_input(photos: Path) -> None:
    """Its wait is not the disk's, whatever of it is busy, as reading one of its samples does not wait."""
    found = diagnosed(photos, lambda batch: None)
    assert found.bound == "input"
    assert found.figures.alone.keys() == {"proxyloader", "stock"}
