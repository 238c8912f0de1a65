"""Transforms that torchvision does itself, in the workers: what is not translated, and what is faster so on a CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.transforms.functional as F
from PIL import Image
from torch.utils.data import ConcatDataset
from torch.utils.data import DataLoader as StockLoader
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import transforms as v1
from torchvision.transforms.autoaugment import AugMix, RandAugment

from proxyloader import DataLoader, EncodedImage, compile_transforms

from ..side_by_side import assert_as_torch, used
from .test_any_dataset import Photographs


def reddened(image: Image.Image) -> Image.Image:
    """A picture of other pixels, which Pillow makes."""
    return image.point([min(255, 2 * level) for level in range(256)] + list(range(256)) * 2)


def doubled(image: torch.Tensor) -> torch.Tensor:
    return 2 * image


AUGMENTED = v1.Compose([v1.RandomResizedCrop(32), RandAugment(), v1.ToTensor()])
MIXED = v1.Compose([v1.Resize((32, 32)), v1.RandomApply([AugMix()], 0.5), v1.ToTensor()])
OF_MINE = v1.Compose([v1.RandomCrop(32), v1.ToTensor(), v1.Lambda(doubled)])


def assert_as_stock(dataset: Any, workers: int = 2, **arguments: Any) -> None:
    found = []
    for each, more in ((StockLoader, {}), (DataLoader, {"device": "cpu"} | arguments)):
        torch.manual_seed(3)
        batches: Any = each(dataset, batch_size=8, shuffle=True, num_workers=workers, **more)
        found.append(list(batches))
    for (a, a_labels), (b, b_labels) in zip(*found, strict=True):
        assert torch.equal(a, b) and torch.equal(a_labels, b_labels)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [AUGMENTED, MIXED], ids=["RandAugment", "AugMix"])
def test_on_a_cpu_what_is_faster_so_is_torchvisions_to_the_bit(
    photos: Path, transform: Any, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert_as_stock(ImageFolder(str(photos), transform), workers)
    assert caplog.text.count("on a CPU torchvision is faster") == 1


def test_on_a_gpu_or_where_it_is_cheap_or_compiled_it_is_dalis(
    photos: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    cheap = v1.Compose([v1.RandomCrop(32), v1.ToTensor()])
    for transform, on in ((cheap, "cpu"), (compile_transforms(AUGMENTED), "cpu"), (AUGMENTED, device)):
        assert not caplog.records
        loader = DataLoader(ImageFolder(str(photos), transform), 8, device=on)
        images, _ = next(iter(loader))
        assert images.device.type == on
        assert (loader.stats().images_by_dali == 8) == (transform is not AUGMENTED or on == "cuda")


class FlipsByHand(ImageFolder):
    """Touches the pixels before the transform does."""

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        image = self.loader(path)
        assert isinstance(image, Image.Image)
        return self.transform(F.hflip(image.crop((0, 0, 90, 70)))), label


def test_what_torchvision_does_starts_from_pil_images(photos: Path) -> None:
    assert_as_stock(FlipsByHand(str(photos), AUGMENTED))


@pytest.mark.parametrize("workers", [0, 2])
def test_by_default_a_function_that_uses_pixels_is_torchvisions_which_is_said_once(
    photos: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    transform = v1.Compose([v1.Lambda(reddened), v1.RandomCrop(32), v1.ToTensor()])
    assert_as_torch(lambda kind: kind(ImageFolder(str(photos), transform), 8, num_workers=workers))
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "ImageFolder, 48 samples" in warning and "48 were made in the workers" in warning
    assert "transform.transforms[0]: Lambda: it calls a Python function" in warning


def test_parts_of_a_dataset_go_the_same_way(photos: Path) -> None:
    parts = [ImageFolder(str(photos), transform) for transform in (AUGMENTED, MIXED)]
    assert_as_stock(ConcatDataset([*parts, ImageFolder(str(photos), v1.Compose(OF_MINE.transforms[:2]))]))


def test_a_dataset_that_opens_its_images_undecoded_needs_no_change(photos: Path) -> None:
    def build(kind: Any) -> Any:
        opened = pil_loader if kind is StockLoader else EncodedImage.open
        return kind(Photographs(photos, lambda path, index: (AUGMENTED(opened(str(path))), index)), 24)

    kinds = StockLoader, functools.partial(DataLoader, device="cpu")
    (stock,), (ours,) = (used(kind, build, list)["result"] for kind in kinds)
    assert torch.equal(stock[0], ours[0]) and torch.equal(stock[1], ours[1])


def test_each_loader_says_it_in_the_log_once(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        loader = DataLoader(ImageFolder(str(photos), AUGMENTED), 16, device="cpu")
        for _ in range(2):
            list(loader)
    said = [each.getMessage() for each in caplog.records if "on a CPU torchvision is faster" in each.getMessage()]
    assert len(said) == 2 and all(line.startswith("ImageFolder, 48 samples: ") for line in said)
