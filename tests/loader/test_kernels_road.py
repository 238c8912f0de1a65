"""The road of a GPU, from the workers' schedules to batches, with the kernels emulated behind DALI's decoder on a CPU.

That decoder gives Pillow's pixels, so whole batches equal the stock loader's to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as F
from torchvision.transforms import v2

from proxyloader import DataLoader, ImageError

from ..kernels.emulation import emulated_gpu

__all__ = ["emulated_gpu"]

pytestmark = pytest.mark.usefixtures("emulated_gpu")

CROP, NORMALIZE = v1.RandomResizedCrop(48), v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
END = [v1.ToTensor(), NORMALIZE]

PRESETS: dict[str, Any] = {
    "training": [CROP, v1.RandomHorizontalFlip(), *END],
    "evaluation": [v1.Resize(64), v1.CenterCrop(48), *END],
    "RandAugment": [CROP, v1.RandAugment(), *END],
    "TrivialAugmentWide, erasing": [CROP, v1.TrivialAugmentWide(), *END, v1.RandomErasing(value="random")],
    "AutoAugment": [CROP, v1.AutoAugment(), *END],
    "AugMix": [CROP, v1.AugMix(), *END],
    "ColorJitter": [CROP, v1.ColorJitter(0.4, 0.4, 0.4, 0.1), *END],
    "floats": [v1.ToTensor(), v1.Resize(50), v1.RandomCrop(48)],
    "levels": [CROP, v1.PILToTensor()],
    "grey": [CROP, v1.Grayscale(), v1.ToTensor()],
    "five crops": [v2.FiveCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],
    "photometric": [v2.RandomResizedCrop(48), v2.RandomPhotometricDistort(), v2.ToImage(), v2.ToPureTensor()],
}


def compose(parts: list[Any]) -> Any:
    return v2.Compose(parts) if isinstance(parts[0], v2.Transform) else v1.Compose(parts)


def assert_same_batches(dataset: Any, is_exact: bool = True, **options: Any) -> DataLoader[Any]:
    """Two epochs under the same seed are those of the stock loader."""
    found = []
    for loader_class in (StockLoader, DataLoader):
        torch.manual_seed(7)
        random.seed(7)
        loader = loader_class(dataset, 16, shuffle=True, **options)
        found.append([batch for _ in range(2) for batch in loader])
    for (theirs, wanted), (ours, labels) in zip(*found, strict=True):
        assert torch.equal(labels, wanted)
        for a, b in zip(theirs, ours) if isinstance(theirs, (list, tuple)) else [(theirs, ours)]:
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.equal(a, b) if is_exact else (a - b).abs().max() <= 1e-6 * a.abs().max()
    assert loader.stats().images_by_dali == 2 * len(dataset)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("preset", PRESETS)
def test_batches_of_a_preset_are_the_stock_loaders(folder: ImageFolder, preset: str, workers: int) -> None:
    folder.transform = compose(PRESETS[preset])
    loader = assert_same_batches(folder, preset != "floats", num_workers=workers, persistent_workers=workers > 0)
    assert list(loader._servers.queues) == ["kernels"]


class Mixed(Dataset[Any]):
    """Gives each image another transform, with other arguments each."""

    def __init__(self, folder: ImageFolder) -> None:
        self.folder, self.used = folder, 0

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> Any:
        image, label = self.folder[index]
        middle = [[], [v1.RandAugment(1 + index % 3)], [v1.ColorJitter(0.1 + index / 99)], [v1.RandomRotation(index)]]
        return v1.Compose([CROP, *middle[index % 4], *END])(image), label


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_for_each_image_costs_one_run_a_batch(folder: ImageFolder, workers: int) -> None:
    loader = assert_same_batches(Mixed(folder), num_workers=workers)
    assert list(loader._servers.queues) == ["kernels"]
    loader = DataLoader(Mixed(folder), 16, num_workers=workers)
    for _ in loader:
        assert len(loader._servers.queues) == 1


def by_functionals(image: Image.Image) -> Any:
    if random.random() < 0.5:
        image = F.hflip(image)
    image = F.resized_crop(image, *v1.RandomResizedCrop.get_params(image, [0.2, 1.0], [0.75, 1.3]), [48, 48])
    image = F.adjust_brightness(image, random.uniform(0.6, 1.4))
    image = F.rotate(image, random.uniform(-20, 20), fill=[9, 9, 9])
    return F.normalize(F.to_tensor(image), [0.5] * 3, [0.2] * 3)


def by_pillow(image: Image.Image) -> Any:
    image = ImageOps.mirror(image) if random.random() < 0.5 else image
    image = ImageEnhance.Color(image).enhance(random.uniform(0.3, 1.8))
    image = image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))
    image = ImageOps.contain(image, (64, 64))
    canvas = Image.new("RGB", (64, 64), (124, 116, 104))
    canvas.paste(image, ((64 - image.width) // 2, (64 - image.height) // 2))
    return F.pil_to_tensor(ImageOps.solarize(canvas, 128))


def by_joint_functionals(image: Image.Image) -> Any:
    """As a reference for segmentation does, with a mask."""
    mask = Image.new("L", image.size, 1)
    size = random.randint(60, 90)
    image, mask = F.resize(image, [size]), F.resize(mask, [size], F.InterpolationMode.NEAREST)
    box = v1.RandomCrop.get_params(image, (48, 48))
    image, mask = F.crop(image, *box), F.crop(mask, *box)
    return F.convert_image_dtype(F.pil_to_tensor(image), torch.float32), torch.as_tensor(np.array(mask))


class ByHand(Dataset[Any]):
    def __init__(self, folder: ImageFolder, function: Callable[[Image.Image], Any]) -> None:
        self.samples, self.function = folder.samples, function

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        torch.manual_seed(index)
        random.seed(index)
        with open(path, "rb") as file:
            return self.function(Image.open(file).convert("RGB")), label


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("function", [by_functionals, by_pillow, by_joint_functionals], ids=lambda each: each.__name__)
def test_code_by_hand_arrives_at_the_kernels(folder: ImageFolder, function: Any, workers: int) -> None:
    loader = assert_same_batches(ByHand(folder, function), num_workers=workers)
    assert list(loader._servers.queues) == ["kernels"]


@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_an_image_that_does_not_decode_leaves_the_others(folder: ImageFolder, tmp_path: Path, on_error: Any) -> None:
    """Its header is whole, so that only DALI finds the damage."""
    copies = tmp_path / "set"
    for path, _ in folder.samples[:24]:
        copy = copies / Path(path).relative_to(folder.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(Path(path).read_bytes())
    dataset = ImageFolder(str(copies), v1.Compose(PRESETS["RandAugment"]))
    bad = Path(dataset.samples[5][0])
    bad.write_bytes(bad.read_bytes()[:900])
    loader = DataLoader(dataset, 8, num_workers=2, on_error=on_error, check_scans=False)
    if on_error == "raise":
        with pytest.raises(ImageError, match=bad.name):
            list(loader)
        return
    torch.manual_seed(1)
    sizes = [len(images) for images, _ in loader]
    assert sizes == ([7, 8, 8] if on_error == "skip" else [8, 8, 8])
    (error,) = loader.errors
    assert error.path == str(bad)
