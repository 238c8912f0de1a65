"""The road of a GPU, from the workers' schedules to batches, with the kernels emulated behind DALI's decoder on a CPU.

That decoder gives Pillow's pixels, so whole batches equal the stock loader's to the bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from proxyloader import DataLoader, ImageError

from ..integration.roads import Mapped
from ..kernels.test_operations import compose
from ..undecoded import unchecked
from .scenes import Blur
from .test_joint_pipelines import assert_late, assert_same_batches

pytestmark = pytest.mark.usefixtures("emulated_gpu")

CROP, NORMALIZE = v1.RandomResizedCrop(48), v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
END = [v1.ToTensor(), NORMALIZE]


PRESETS: dict[str, Any] = {
    "training": [CROP, v1.RandomHorizontalFlip(), *END],
    "evaluation": [v1.Resize(64), v1.CenterCrop(48), *END],
    "RandAugment": [CROP, v1.RandAugment(), *END],
    "TrivialAugmentWide, erasing": [CROP, v1.TrivialAugmentWide(), *END, v1.RandomErasing(value="random")],
    "SimCLR": [CROP, v1.ColorJitter(0.8, 0.8, 0.8, 0.2), v1.RandomGrayscale(), Blur(), *END],
    "floats": [v1.ToTensor(), v1.Resize(50), v1.RandomCrop(48)],
    "levels": [CROP, v1.PILToTensor()],
    "grey": [CROP, v1.Grayscale(), v1.ToTensor()],
    "five crops": [v2.FiveCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],
    "photometric": [v2.RandomResizedCrop(48), v2.RandomPhotometricDistort(), v2.ToImage(), v2.ToPureTensor()],
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("preset", PRESETS)
def test_batches_of_a_preset_are_the_stock_loaders(folder: ImageFolder, preset: str, workers: int) -> None:
    folder.transform = compose(PRESETS[preset])
    how: dict[str, Any] = {"epochs": 2, "num_workers": workers, "persistent_workers": workers > 0}
    bound = 1e-6 if preset == "floats" else 0.0
    assert_late(assert_same_batches(folder, None, bound, batch_size=16, **how), 2 * len(folder))


def test_what_a_crop_of_resized_floats_removed_does_not_reappear(folder: ImageFolder) -> None:
    folder.transform = v1.Compose([v1.ToTensor(), v1.Resize((50, 50)), v1.CenterCrop(30), v1.Pad(9)])
    assert_same_batches(folder, None, 1e-6, batch_size=16)


def mixed(folder: ImageFolder) -> Mapped:
    """Gives each image another transform, with other arguments each."""

    def sample(index: int) -> Any:
        image, label = folder[index]
        middle = [[], [v1.RandAugment(1 + index % 3)], [v1.ColorJitter(0.1 + index / 99)], [v1.RandomRotation(index)]]
        return v1.Compose([CROP, *middle[index % 4], *END])(image), label

    return Mapped(sample, range(len(folder)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_for_each_image_costs_one_run_a_batch(folder: ImageFolder, workers: int) -> None:
    assert_late(assert_same_batches(mixed(folder), None, batch_size=16, num_workers=workers), len(folder))
    loader = DataLoader(mixed(folder), 16, num_workers=workers)
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

    def alike(index: int) -> Any:
        image, label = folder[index]
        end = v1.ToTensor() if index == 40 else v1.PILToTensor()
        steps = [v1.RandomPosterize(1 + index % 7), v1.RandomSolarize(index), v1.CenterCrop(40 + index // 16), end]
        return v1.Compose(steps)(image), label

    loader = DataLoader(Mapped(alike, range(len(folder))), 1, num_workers=1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"dtype=torch\.uint8, but"):
        list(loader)


def clips(images: list[Any]) -> Mapped:
    """The first sample has crops of two images, the second one a crop of the first of them."""
    return Mapped(lambda count: [compose([CROP, *END])(image) for image in images[:count]], [2, 1])


def test_no_other_sample_is_named_for_an_image_that_does_not_decode(folder: ImageFolder) -> None:
    (good, _), (bad, _) = folder.samples[:2]
    images = [unchecked(good), unchecked(bad, lambda data: data[:900])]
    with pytest.raises(ImageError, match=r"dataset indices \[0, 1\]") as raised:
        list(DataLoader(clips(images), 2, collate_fn=list, check_scans=False))
    assert (raised.value.index, raised.value.path) == (None, bad)
    del raised  # it is in a cycle with this frame, and holds the hooks through those of its traceback


def test_samples_that_share_an_image_do_not_count_as_the_workers(folder: ImageFolder) -> None:
    loader = DataLoader(clips([unchecked(folder.samples[0][0])] * 2), 2, collate_fn=list)
    assert len(list(loader)) == 1
    assert (loader.stats().images_by_dali, loader.stats().images_by_workers) == (1, 0)
