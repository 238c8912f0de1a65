"""What is fed to DALI while it works: the workers are not forgotten meanwhile."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms

import proxyloader

from ..limits import WAIT_S


class LateByOneBatch(Dataset[Any]):
    """Large photographs; those of the second batch come a little later than those of the first."""

    def __init__(self, path: Path, transform: Any) -> None:
        self.path, self.transform = path, transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.03 * (index == 4))
        return self.transform(proxyloader.EncodedImage.open(self.path))


@pytest.fixture(scope="module")
def large_photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.jpg"
    Image.effect_noise((2000, 1500), 100).convert("RGB").save(path, quality=90)
    return path


def test_the_second_batch_is_decoded_with_the_first_though_it_comes_later(large_photo: Path, device: str) -> None:
    transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    dataset = LateByOneBatch(large_photo, transform)
    loader = proxyloader.DataLoader(dataset, 4, num_workers=2, persistent_workers=True, device=device)
    under_way = []
    for _ in range(3):
        batches = iter(loader)
        first = next(batches)
        under_way.append(len(batches._feed._in_flight))
        assert all(torch.equal(batch, first) for batch in batches)
    assert all(under_way[1:]), under_way  # of the first epoch nothing is known


def test_nobody_waits_for_a_worker_that_takes_longer_than_dali(photos: Path) -> None:
    transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    path = next(photos.rglob("*.jpg"))

    handed_out = multiprocessing.get_context("fork").Event()

    class Slow(LateByOneBatch):
        def __getitem__(self, index: int) -> Any:
            if index == 4:
                handed_out.wait(WAIT_S)
            return super().__getitem__(index)

    loader = proxyloader.DataLoader(
        Slow(path, transform), 4, num_workers=2, persistent_workers=True, multiprocessing_context="fork", device="cpu"
    )
    for _ in range(2):
        handed_out.clear()
        batches = iter(loader)
        next(batches)
        assert not batches._feed._in_flight, "the first batch is handed out before the second is there"
        handed_out.set()
        assert len(list(batches)) == 2
