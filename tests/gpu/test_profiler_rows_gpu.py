"""Rows of a profile as NVTX ranges, and with what runs on the GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader
from proxyloader.loader import stats


def test_a_loop_under_emit_nvtx_has_ranges_and_gives_the_same_batches(photos: Path) -> None:
    transform = transforms.Compose([transforms.CenterCrop(32), transforms.ToTensor()])
    loader = DataLoader(ImageFolder(str(photos), transform), 16, num_workers=1)
    expected = list(loader)
    with torch.autograd.profiler.emit_nvtx():
        assert isinstance(stats.row(stats.WAIT), torch.autograd.profiler.record_function)
        found = list(loader)
    assert [torch.equal(ours, theirs) for (ours, _), (theirs, _) in zip(found, expected, strict=True)] == [True] * 3
