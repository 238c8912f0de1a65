"""What torch's profiler shows of a loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import proxyloader
from proxyloader.loader.stats import profile_row

# Torch 2.11 says so of each profile that is told no schedule, though it has a single cycle.
pytestmark = pytest.mark.filterwarnings("ignore:.*clears events at the end of each cycle:UserWarning")

TRANSFORM = transforms.Compose([transforms.CenterCrop(32), transforms.ToTensor()])


def rows_of(loader: Iterable[Any]) -> Counter[str]:
    """How often each row of a loader is in the profile of a loop."""
    with profile(activities=[ProfilerActivity.CPU]) as of_loop:
        for _ in loader:
            pass
    names = [event.name for event in of_loop.events() or ()]
    return Counter(name for name in names if name.startswith(("enumerate(DataLoader)", "proxyloader.")))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_row_of_next_is_torchs_and_its_parts_have_rows_too(num_workers: int, photos: Path, device: str) -> None:
    dataset = ImageFolder(str(photos), TRANSFORM)
    stock = rows_of(StockLoader(dataset, 16, num_workers=num_workers))
    ours = rows_of(proxyloader.DataLoader(dataset, 16, num_workers=num_workers, device=device))
    assert {name: count for name, count in ours.items() if not name.startswith("proxyloader.")} == stock
    assert ours["proxyloader.take_from_workers"] == 4
    assert ours["proxyloader.submit_to_dali"] == 3  # one batch has nothing for DALI
    assert ours["proxyloader.wait_for_dali"] >= 3


def test_a_loader_that_torch_loads_has_torchs_row_and_unprofiled_nothing_is_recorded(photos: Path) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(6))
    stock, ours = (rows_of(kind(dataset, 2)) for kind in (StockLoader, proxyloader.DataLoader))
    assert ours == stock
    assert not isinstance(profile_row("proxyloader.anything"), profiler.record_function)
    with profile(activities=[ProfilerActivity.CPU]):
        assert isinstance(profile_row("proxyloader.anything"), profiler.record_function)
    assert not isinstance(profile_row("proxyloader.anything"), profiler.record_function)


@pytest.mark.gpu
def test_under_emit_nvtx_a_loader_has_ranges_and_gives_the_same_batches(photos: Path) -> None:
    loader = proxyloader.DataLoader(ImageFolder(str(photos), TRANSFORM), 16, num_workers=1)
    expected = list(loader)
    with profiler.emit_nvtx():
        assert isinstance(profile_row("proxyloader.anything"), profiler.record_function)
        found = list(loader)
    assert [torch.equal(ours, theirs) for (ours, _), (theirs, _) in zip(found, expected, strict=True)] == [True] * 3
