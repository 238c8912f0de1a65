"""What leaves a dataset is what leaves it under torch's loader: several images, PIL images, ``tv_tensors.Image``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader as StockLoader
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader import DataLoader

from ..outcomes import outcomes
from ..side_by_side import assert_as_torch
from .test_any_dataset import Photographs, opened

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


class Twice:
    def __call__(self, image: Any) -> Any:
        return [SMALL(image)] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_twice_makes_two_batches(folder: ImageFolder, workers: int, device: str) -> None:
    folder.transform = Twice()
    for (one, other), _ in DataLoader(folder, 10, num_workers=workers, device=device):
        assert torch.equal(one, other)
        assert not torch.equal(one.add_(1), other)


# --- images of any class ----------------------------------------------------------------------------------------------

PIL: dict[str, Callable[[Any], Any]] = {
    "as opened": lambda path: Image.open(path),
    "converted": lambda path: Image.open(path).convert("RGB"),
    "grey": lambda path: Image.open(path).convert("L"),
    "a copy": lambda path: Image.open(path).copy(),
    "upright": lambda path: ImageOps.exif_transpose(Image.open(path)),
    "cropped": lambda path: v1.CenterCrop(40)(Image.open(path).convert("RGB")),
    "resized": lambda path: v1.Resize(40)(Image.open(path).convert("RGB")),
    "flipped": lambda path: v1.RandomHorizontalFlip(1)(v1.Resize(40)(Image.open(path))),
    "pickled": lambda path: pickle.loads(pickle.dumps(Image.open(path).convert("RGB"))),
}

TO_IMAGE = v2.Compose([v2.Resize((40, 48)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def with_used_values(image: Any) -> Any:
    made = TO_IMAGE(image)
    float(made.mean())
    return made


TV: dict[str, Callable[[Any], Any]] = {
    "DALI's": lambda image: TO_IMAGE(image),
    "with arithmetic": lambda image: tv_tensors.wrap(TO_IMAGE(image) * 2, like=TO_IMAGE(image)),
    "whose values were used": with_used_values,
    "with a mask": lambda image: TO_IMAGE(image, tv_tensors.Mask(torch.ones(1, 90, 90))),
}


def opened_by(use: Callable[[Any], Any], photos: Path) -> Photographs:
    return Photographs(photos, lambda path, index: (use(path), index))


def each(loader: Any, dataset: Any, **arguments: Any) -> list[Any]:
    return [sample for batch in loader(dataset, 3, collate_fn=list, **arguments) for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", PIL)
def test_a_pil_image_leaves_it(photos: Path, name: str, workers: int) -> None:
    dataset = opened_by(PIL[name], photos)
    ours, theirs = (each(kind, dataset, num_workers=workers) for kind in (DataLoader, StockLoader))
    for (mine, label), (other, right) in zip(ours, theirs, strict=True):
        assert (label, mine.mode, mine.size, mine.info) == (right, other.mode, other.size, other.info)
        assert np.array_equal(np.asarray(mine), np.asarray(other))
        assert workers == 0 or type(mine) is type(other)


def test_an_image_in_a_cache_needs_no_proxyloader(photos: Path) -> None:
    pickled = opened_by(lambda path: pickle.dumps([Image.open(path), Image.open(path).convert("RGB")]), photos)
    for data, _ in each(DataLoader, pickled, device="cpu"):
        assert b"proxyloader" not in data
        assert [type(image).__name__ for image in pickle.loads(data)] == ["JpegImageFile", "Image"]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_batch_of_pil_images_is_refused_in_torchs_words(photos: Path) -> None:
    for kind in ("as opened", "converted"):
        ours, theirs = (outcomes(each(opened_by(PIL[kind], photos), 12)) for each in (DataLoader, StockLoader))
        assert [type(each) for each in ours] == [type(each) for each in theirs] == [TypeError, TypeError]
        assert all(str(right) in str(each) for each, right in zip(ours, theirs)), ours


def assert_alike(ours: Any, theirs: Any) -> None:
    """In structure and classes; and images are as close as decoders are."""
    (found, structure), (wanted, wanted_structure) = map(tree_flatten, (ours, theirs))
    assert structure == wanted_structure and list(map(type, found)) == list(map(type, wanted))
    for each, right in zip(found, wanted):
        if isinstance(right, torch.Tensor):
            assert each.shape == right.shape and (each.cpu() - right).abs().float().mean() < 1 / 255


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", TV)
def test_an_image_of_torchvisions_leaves_it(photos: Path, name: str, workers: int, device: str) -> None:
    def sample(path: Path, index: int) -> Any:
        return {"depth": torch.ones(40, 48), "image": TV[name](opened(path)), "label": index}

    dataset = Photographs(photos, sample)
    for arguments in (dict(batch_size=None), dict(batch_size=3, collate_fn=list), dict(batch_size=3)):
        ours = list(DataLoader(dataset, num_workers=workers, device=device, **arguments))
        assert_alike(ours, list(StockLoader(dataset, num_workers=workers, **arguments)))
        if name != "DALI's" or arguments["batch_size"] is not None:
            continue
        for image in (batch["image"] for batch in ours):
            assert image.device.type == device
            flipped = v2.RandomHorizontalFlip(1)({"depth": torch.eye(40, 48), "image": image})
            assert torch.equal(flipped["image"], image.flip(-1)) and torch.equal(flipped["depth"], torch.eye(40, 48))
