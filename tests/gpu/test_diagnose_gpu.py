"""``diagnose`` on a GPU: a run that is bound by each of its parts, with what the GPU does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import ImageFolder

import proxyloader

from ..tools.test_diagnose import SECONDS, SlowToRead, compute, loader_of

pytestmark = pytest.mark.alone  # as others' work on the GPU is measured, too


def wait_for_the_gpu(batch: Any) -> None:
    assert batch[0].is_cuda
    weights = torch.ones(8192, 8192, device="cuda")
    for _ in range(20):
        weights @ weights
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("bound", "step", "kind"),
    [
        ("model", wait_for_the_gpu, ImageFolder),
        ("loop", lambda batch: compute(0.15), ImageFolder),
        ("disk", lambda batch: None, SlowToRead),
        ("input", lambda batch: None, ImageFolder),  # reading one of its samples does not wait
    ],
    ids=["model", "loop", "disk", "input"],
)
def test_what_bounds_a_training_is_found(photos: Path, bound: str, step: Any, kind: Any) -> None:
    workers = {"num_workers": 1, "persistent_workers": True, "device": "cuda"}
    loader = loader_of(photos, kind, proxyloader.DataLoader, **workers)
    found = proxyloader.diagnose(loader, step, seconds=3 * SECONDS)
    assert found.bound == bound and found.figures.alone.keys() == {"proxyloader", "stock"}
    if bound in ("model", "loop"):
        assert found.figures.step.gpu_percent is not None
        assert found.figures.step.gpu_percent > 50 or bound == "loop"
