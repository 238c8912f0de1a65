"""Several images from one, or several in a sample: each becomes a tensor of its own in the batch, as with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as StockLoader
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader import EncodedImage

from ..side_by_side import assert_as_torch, one_epoch

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
SMALL = v1.Compose([v1.RandomResizedCrop(16, (0.05, 0.4)), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.25] * 3)])
FIVE = v2.Compose([v2.Resize(48), v2.FiveCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


class TwoCrops:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __call__(self, image: Any) -> Any:
        return [self.first(image), self.second(image)]


class Named(TwoCrops):
    def __call__(self, image: Any) -> Any:
        return {"query": self.first(image), "keys": (self.second(image), self.second(image)), "mode": image.mode}


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, folder: ImageFolder, transform: Any, opened: Any) -> None:
        self.samples, self.transform, self.opened = folder.samples, transform, opened

    def __len__(self) -> int:
        return len(self.samples) // 2

    def __getitem__(self, index: int) -> Any:
        (first, label), (second, _) = self.samples[index], self.samples[index + len(self)]
        return self.transform(self.opened(first)), self.transform(self.opened(second)), label


def stacked(samples: list[Any]) -> Any:
    """All crops of all images in one batch, as tests with FiveCrop have it."""
    crops = torch.stack([torch.stack(crops) for crops, _ in samples])
    return crops.flatten(0, 1), torch.tensor([label for _, label in samples])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("transform", "collate_fn"),
    [(TwoCrops(TRAIN, TRAIN), None), (TwoCrops(TRAIN, SMALL), None), (Named(TRAIN, SMALL), None)]
    + [(FIVE, None), (FIVE, stacked)],
    ids=["one transform twice", "two transforms", "named", "FiveCrop", "FiveCrop, stacked"],
)
def test_one_gives_several(folder: ImageFolder, transform: Any, collate_fn: Any, workers: int, device: str) -> None:
    folder.transform = transform
    assert_as_torch(lambda kind: kind(folder, 10, True, num_workers=workers, collate_fn=collate_fn), device=device)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_they_reach_workers_under_every_start_method(folder: ImageFolder, method: str) -> None:
    folder.transform = Named(TRAIN, SMALL)

    def build(kind: Any) -> Any:
        started = {} if kind is StockLoader else {"multiprocessing_context": method}
        return kind(folder, 10, True, num_workers=1, **started)

    assert_as_torch(build, one_epoch)


@pytest.mark.parametrize("transform", [TRAIN, TwoCrops(TRAIN, SMALL)], ids=["one", "two"])
def test_a_dataset_that_gives_several_images_in_a_sample(folder: ImageFolder, transform: Any, device: str) -> None:
    def build(kind: Any) -> Any:
        opened = pil_loader if kind is StockLoader else EncodedImage.open
        return kind(Pairs(folder, transform, opened), 10, True, num_workers=2)

    assert_as_torch(build, device=device)
