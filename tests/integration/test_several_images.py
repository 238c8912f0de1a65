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

import proxyloader
from proxyloader import EncodedImage

MEAN_LEVELS_ALLOWED = 0.5
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
    """Two images in a sample, each through the transform."""

    def __init__(self, folder: ImageFolder, transform: Any, opened: Any) -> None:
        self.samples, self.transform, self.opened = folder.samples, transform, opened

    def __len__(self) -> int:
        return len(self.samples) // 2

    def __getitem__(self, index: int) -> Any:
        (first, label), (second, _) = self.samples[index], self.samples[index + len(self)]
        return self.transform(self.opened(first)), self.transform(self.opened(second)), label


def epochs(loader_class: Any, dataset: Any, count: int = 2, **arguments: Any) -> list[Any]:
    torch.manual_seed(3)
    loader = loader_class(dataset, batch_size=10, shuffle=True, **arguments)
    return [batch for _ in range(count) for batch in loader]


def assert_same(ours: Any, theirs: Any) -> None:
    """Same structure, same shapes, same values."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert 255 * (ours.cpu() - theirs).abs().mean() <= 4 * MEAN_LEVELS_ALLOWED  # a level is four times as much
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_same(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs):
            assert_same(a, b)
    else:
        assert ours == theirs


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "transform",
    [TwoCrops(TRAIN, TRAIN), TwoCrops(TRAIN, SMALL), Named(TRAIN, SMALL), FIVE],
    ids=["one transform twice", "two transforms", "named", "FiveCrop"],
)
def test_a_transform_that_gives_several(folder: ImageFolder, transform: Any, workers: int, device: str) -> None:
    folder.transform = transform
    theirs = epochs(StockLoader, folder, num_workers=workers)
    ours = epochs(proxyloader.DataLoader, folder, num_workers=workers, device=device)
    assert_same(ours, theirs)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_they_reach_workers_under_every_start_method(folder: ImageFolder, method: str) -> None:
    folder.transform = Named(TRAIN, SMALL)
    theirs = epochs(StockLoader, folder, 1, num_workers=1)
    ours = epochs(proxyloader.DataLoader, folder, 1, num_workers=1, multiprocessing_context=method, device="cpu")
    assert_same(ours, theirs)


def test_a_dataset_that_gives_several_images_in_a_sample(folder: ImageFolder, device: str) -> None:
    theirs = epochs(StockLoader, Pairs(folder, TRAIN, pil_loader), num_workers=2)
    dataset = Pairs(folder, TRAIN, EncodedImage.open)
    assert_same(epochs(proxyloader.DataLoader, dataset, num_workers=2, device=device), theirs)


def test_such_a_dataset_with_a_transform_that_gives_several(folder: ImageFolder) -> None:
    two = TwoCrops(TRAIN, SMALL)
    theirs = epochs(StockLoader, Pairs(folder, two, pil_loader), num_workers=2)
    dataset = Pairs(folder, two, EncodedImage.open)
    assert_same(epochs(proxyloader.DataLoader, dataset, num_workers=2, device="cpu"), theirs)


def stacked(samples: list[Any]) -> Any:
    """All crops of all images in one batch, as tests with FiveCrop have it."""
    crops = torch.stack([torch.stack(crops) for crops, _ in samples])
    return crops.flatten(0, 1), torch.tensor([label for _, label in samples])


def test_a_collate_fn_stacks_the_crops(folder: ImageFolder, device: str) -> None:
    folder.transform = FIVE
    theirs = epochs(StockLoader, folder, num_workers=2, collate_fn=stacked)
    ours = epochs(proxyloader.DataLoader, folder, num_workers=2, collate_fn=stacked, device=device)
    assert ours[0][0].shape == (50, 3, 32, 32)
    assert_same(ours, theirs)


def test_a_bad_file_takes_its_whole_sample_along(folder: ImageFolder, tmp_path: Any) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    folder.samples[4] = (str(bad), folder.samples[4][1])
    folder.transform = TwoCrops(TRAIN, SMALL)
    loader = proxyloader.DataLoader(folder, batch_size=48, num_workers=1, on_error="skip", device="cpu")
    (((first, second), labels),) = loader
    assert len(first) == len(second) == len(labels) == 47 and [each.index for each in loader.errors] == [4]
