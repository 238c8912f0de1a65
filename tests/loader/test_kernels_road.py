"""The road of a GPU, from the workers' schedules to batches, with the kernels emulated behind DALI's decoder on a CPU.

That decoder gives Pillow's pixels, so whole batches equal the stock loader's to the bit.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from PIL import ImageFilter
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from proxyloader import DataLoader, ImageError

from ..kernels.emulation import emulated_gpu
from ..undecoded import unchecked

__all__ = ["emulated_gpu"]

pytestmark = pytest.mark.usefixtures("emulated_gpu")

CROP, NORMALIZE = v1.RandomResizedCrop(48), v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
END = [v1.ToTensor(), NORMALIZE]


class Blur:
    """Of one's own, so that the transform is recorded where it stands."""

    def __call__(self, image: Any) -> Any:
        radius = random.uniform(0.1, 2.0)
        return image.filter(ImageFilter.GaussianBlur(radius)) if random.random() < 0.5 else image


PRESETS: dict[str, Any] = {
    "training": [CROP, v1.RandomHorizontalFlip(), *END],
    "evaluation": [v1.Resize(64), v1.CenterCrop(48), *END],
    "RandAugment": [CROP, v1.RandAugment(), *END],
    "TrivialAugmentWide, erasing": [CROP, v1.TrivialAugmentWide(), *END, v1.RandomErasing(value="random")],
    "AugMix": [CROP, v1.AugMix(), *END],
    "ColorJitter": [CROP, v1.ColorJitter(0.4, 0.4, 0.4, 0.1), *END],
    "SimCLR": [CROP, v1.ColorJitter(0.8, 0.8, 0.8, 0.2), v1.RandomGrayscale(), Blur(), *END],
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


def test_persistent_workers_follow_a_change_of_format(folder: ImageFolder) -> None:
    folder.transform = compose(PRESETS["training"])
    loader = DataLoader(folder, 16, num_workers=2, persistent_workers=True)
    half, last, dense = torch.float16, torch.channels_last, torch.contiguous_format
    formats = (half, dense), (None, dense), (half, dense), (half, last), (half, dense)
    for loader.dtype, loader.memory_format in formats:
        for images, _ in loader:
            assert images.dtype == (loader.dtype or torch.float32)
            assert images.is_contiguous(memory_format=loader.memory_format)


def test_floats_are_not_stored_as_uint8_behind_many_transforms(folder: ImageFolder) -> None:
    """The loader learns of the first eight transforms alone."""

    class Alike(Mixed):
        def __getitem__(self, index: int) -> Any:
            image, label = self.folder[index]
            end = v1.ToTensor() if index == 40 else v1.PILToTensor()
            steps = [v1.RandomPosterize(1 + index % 7), v1.RandomSolarize(index), v1.CenterCrop(40 + index // 16), end]
            return v1.Compose(steps)(image), label

    loader = DataLoader(Alike(folder), 1, num_workers=1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"dtype=torch\.uint8, but"):
        list(loader)


class Clips(Dataset[Any]):
    """The first sample has crops of two images, the second one a crop of the first of them."""

    def __init__(self, images: list[Any]) -> None:
        self.images = images

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return [compose([CROP, *END])(image) for image in self.images[: 2 - index]]


def test_no_other_sample_is_named_for_an_image_that_does_not_decode(folder: ImageFolder) -> None:
    (good, _), (bad, _) = folder.samples[:2]
    images = [unchecked(good), unchecked(bad, 900)]
    with pytest.raises(ImageError, match=r"dataset indices \[0, 1\]") as raised:
        list(DataLoader(Clips(images), 2, collate_fn=list, check_scans=False))
    assert (raised.value.index, raised.value.path) == (None, bad)
    del raised  # it is in a cycle with this frame, and holds the hooks through those of its traceback


def test_samples_that_share_an_image_do_not_count_as_the_workers(folder: ImageFolder) -> None:
    loader = DataLoader(Clips([unchecked(folder.samples[0][0])] * 2), 2, collate_fn=list)
    assert len(list(loader)) == 1
    assert (loader.stats().images_by_dali, loader.stats().images_by_workers) == (1, 0)
