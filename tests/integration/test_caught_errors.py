"""Datasets that catch the error of a damaged file meet it where they do with the stock loader, and draw the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

import proxyloader
from proxyloader import ImageError

from .test_same_batches import TRAIN, assert_same

pytestmark = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 11, reason="Pillow 10 decodes at once")

DAMAGED = (3, 8, 9)
IMAGES = 12


@pytest.fixture(scope="module")
def paths(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Photographs, three of which have a whole header and an end, and markers between that Pillow refuses."""
    folder, found = tmp_path_factory.mktemp("damaged"), sorted(photos.rglob("*.jpg"))[:IMAGES]
    for index in DAMAGED:
        data = bytearray(found[index].read_bytes())
        at = len(data) // 2
        data[at : at + 40] = b"\xff\xc3" * 20
        found[index] = folder / f"{index}.jpg"
        found[index].write_bytes(data)
        with pytest.raises(OSError, match="broken data stream"):
            Image.open(found[index]).load()
    return found


class Own(Dataset[Any]):
    """Gives noise for a file that it cannot read, and numbers that each generator draws behind the image."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.augment = paths, TRAIN

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Any:
        return self.augment(Image.open(self.paths[index]).convert("RGB"))

    def __getitem__(self, index: int) -> Any:
        drawn = random.random(), np.random.rand()
        try:
            image = self.read(index)
        except OSError:
            return torch.rand(3, 96, 96), torch.tensor([-1, *drawn, random.random()])
        return image, torch.tensor([index, *drawn, float(torch.rand(1))])


class Looking(Own):
    """Decodes each image where it opens it, so that an error comes there."""

    def read(self, index: int) -> Any:
        image = Image.open(self.paths[index])
        image.load()
        return self.augment(image.convert("RGB"))


class InLists(Own):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Folder(ImageFolder):
    """Gives the next image in the place of one that it cannot read."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(str(paths[0].parent.parent), TRAIN)
        self.samples = [(str(path), index) for index, path in enumerate(paths)]

    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(index)
        except OSError:
            return self[index + 1]


class Trusting(Own):
    def __getitem__(self, index: int) -> Any:
        return self.read(index), index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Own, Looking, InLists, Folder])
def test_it_meets_the_error_and_draws_what_it_draws_there(
    kind: Callable[..., Any], workers: int, paths: list[Path]
) -> None:
    def epochs(loader: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(2), random.seed(2), np.random.seed(2)
        made = loader(kind(paths), 4, shuffle=True, num_workers=workers)
        return [batch for _ in range(2) for batch in made]

    assert_same(epochs(proxyloader.DataLoader), epochs(StockLoader))


def test_it_meets_the_error_with_a_seed_too(paths: list[Path]) -> None:
    loader = proxyloader.DataLoader(Own(paths), 4, seed=5, num_workers=2)
    assert [batch[1][:, 0].tolist() for batch in loader] == [[0, 1, 2, -1], [4, 5, 6, 7], [-1, -1, 10, 11]]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_that_does_not_catch_it_is_told_the_file(workers: int, paths: list[Path]) -> None:
    with pytest.raises(ImageError, match=r"dataset\[3\]: .*3.jpg: .*broken data stream"):
        list(proxyloader.DataLoader(Trusting(paths), 4, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_it_does_not_catch_is_left_out_or_replaced_where_that_is_wanted(workers: int, paths: list[Path]) -> None:
    skipping = proxyloader.DataLoader(Trusting(paths), 4, num_workers=workers, on_error="skip")
    assert [batch[1].tolist() for batch in skipping] == [[0, 1, 2], [4, 5, 6, 7], [10, 11]]
    assert sorted(each.index for each in skipping.errors) == list(DAMAGED)
    replacing = proxyloader.DataLoader(Trusting(paths), 4, num_workers=workers, on_error="replace")
    assert [batch[1].tolist() for batch in replacing] == [[0, 1, 2, 4], [4, 5, 6, 7], [10, 10, 10, 11]]
