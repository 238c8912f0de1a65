"""The promise of the swap: under the same seed, the batches of the stock DataLoader."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader as StockLoader, Subset, default_collate
from torchvision import transforms
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.transforms import v2

import proxyloader

from ..compare import engines_decode
from ..reference_presets import AUGMENTED_AND_ERASED, PRESETS, Preset
from ..side_by_side import assert_as_torch, used

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TO_FLOATS = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
TRAIN = transforms.Compose([transforms.RandomResizedCrop(96), transforms.RandomHorizontalFlip(), *TO_FLOATS])
VALIDATION = transforms.Compose([transforms.Resize(112), transforms.CenterCrop(96), *TO_FLOATS])
TO_FLOATS_V2 = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
TRAIN_V2 = v2.Compose(
    [v2.ToImage(), v2.RandomResizedCrop(96, antialias=True), v2.RandomHorizontalFlip(), *TO_FLOATS_V2]
)
DECODE = transforms.Compose([transforms.CenterCrop((96, 120)), transforms.PILToTensor()])


def batches(loader_class: Any, dataset: Any, epochs: int, **arguments: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(17)
    random.seed(17)
    loader = loader_class(dataset, **arguments)
    found = [batch for _ in range(epochs) for batch in loader]
    assert len(found) == epochs * len(loader)
    return [(images.cpu(), labels) for images, labels in found]


def levels(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Difference in levels of 255, (N, pixels)."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    if ours.dtype == torch.uint8:
        return (ours.float() - theirs.float()).abs().flatten(1)
    return (255 * torch.tensor(STD).view(3, 1, 1) * (ours - theirs)).abs().flatten(1)


def assert_same(ours: list[Any], theirs: list[Any], mean: float = 0.5, most: float = 4.0) -> None:
    """
    Args:
        most: at the 99.9th percentile; where CUDA decodes in place of a GPU's engines, a level more.
    """
    assert len(ours) == len(theirs)
    if torch.cuda.is_available() and not engines_decode():
        most += 1
    for (images, labels), (stock_images, stock_labels) in zip(ours, theirs):
        assert torch.equal(labels, stock_labels)
        difference = levels(images, stock_images)
        assert difference.mean() <= mean
        assert difference.flatten().kthvalue(int(0.999 * difference.numel())).values <= most


def assert_same_epochs(dataset: Any, device: str, count: int = 2, **arguments: Any) -> None:
    theirs = batches(StockLoader, dataset, count, shuffle=True, **arguments)
    assert_same(batches(proxyloader.DataLoader, dataset, count, shuffle=True, device=device, **arguments), theirs)


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, PERSISTENT | {"prefetch_factor": 1}, PERSISTENT], ids=str)
@pytest.mark.parametrize("transform", [TRAIN, VALIDATION, TRAIN_V2], ids=["train", "validation", "train v2"])
def test_shuffled_epochs_are_torchs(folder: ImageFolder, transform: Any, how: dict[str, Any], device: str) -> None:
    folder.transform = transform
    assert_same_epochs(folder, device, count=3, batch_size=10, **how)


def test_decoding_is_exact_on_the_cpu_and_within_levels_on_a_gpu(folder: ImageFolder, device: str) -> None:
    folder.transform = DECODE
    theirs = batches(StockLoader, folder, 1, batch_size=12)
    ours = batches(proxyloader.DataLoader, folder, 1, batch_size=12, device=device)
    most = max(levels(a, b).max().item() for (a, _), (b, _) in zip(ours, theirs))
    assert most <= (0 if device == "cpu" else 1 if engines_decode() else 3)


MADE: dict[str, Callable[[ImageFolder], Any]] = {
    "a concatenation of two transforms": lambda folder: ConcatDataset(
        [Subset(folder, range(0, 48, 5)), Subset(ImageFolder(folder.root, VALIDATION), range(1, 48, 5))]
    ),
    "a target_transform and a filter": lambda folder: ImageFolder(
        folder.root, folder.transform, lambda target: -target, is_valid_file=lambda path: path[-5] in "025"
    ),
    "a loader of its own": lambda folder: DatasetFolder(
        folder.root, lambda path: Image.open(path).convert("RGB"), ("jpg",), folder.transform
    ),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_made_of_folders_keep_their_ways(folder: ImageFolder, make: Any, workers: int, device: str) -> None:
    folder.transform = TRAIN
    assert_same_epochs(make(folder), device, batch_size=7, num_workers=workers)


# --- torchvision's training reference with the one import changed -----------------------------------------------------

A_LEVEL = 1.0
"""In the mean, what is promised of every transform. Single pixels of a JPEG that a GPU decodes a level off may be far
off behind posterising and the like; another draw for one image of a batch is several levels in the mean."""

EACH_ON_ITS_DEVICES = [
    *(pytest.param(preset, "cpu", id=f"{preset}, cpu") for preset in PRESETS),
    *(
        pytest.param(preset, "cuda", id=f"{preset}, cuda", marks=pytest.mark.gpu)
        for preset in [*AUGMENTED_AND_ERASED, Preset(is_training=False, use_v2=True)]
    ),
]
"""On a GPU fewer: a pipeline takes seconds to build there."""


@pytest.mark.parametrize(("preset", "device"), EACH_ON_ITS_DEVICES, indirect=["device"])
def test_an_epoch_is_the_stock_loaders(folder: ImageFolder, preset: Preset, device: str) -> None:
    folder.transform = preset
    how: dict[str, Any] = dict(batch_size=8, shuffle=True, num_workers=2)
    theirs = batches(StockLoader, folder, 1, **how)
    ours = batches(proxyloader.DataLoader, folder, 1, device=device, **how)
    if preset.auto_augment is None:
        assert_same(ours, theirs)
        return
    assert len(ours) == len(theirs) == 6
    for (images, labels), (stock_images, stock_labels) in zip(ours, theirs):
        assert torch.equal(labels, stock_labels)
        # On a CPU torchvision does all of it, in our workers as in the stock loader's.
        assert levels(images, stock_images).mean() <= (0 if device == "cpu" else A_LEVEL)


def test_on_a_cpu_augmentation_and_erasing_are_left_to_torchvision(folder: ImageFolder) -> None:
    for preset in PRESETS:
        folder.transform = preset.transforms
        is_left = proxyloader.DataLoader(folder, device="cpu").backend.startswith("torch: ")
        assert is_left == bool(preset.auto_augment or preset.random_erase), preset


# --- MixUp, CutMix and other collate functions built on default_collate ----------------------------------------------


CLASSES = 4
MIXERS = {
    "MixUp": v2.MixUp(num_classes=CLASSES),
    "CutMix": v2.CutMix(num_classes=CLASSES),
    "one of both": v2.RandomChoice([v2.CutMix(num_classes=CLASSES), v2.MixUp(alpha=0.2, num_classes=CLASSES)]),
    "often neither": v2.RandomApply([v2.MixUp(num_classes=CLASSES)], p=0.5),
}

each_mixer = pytest.mark.parametrize("mix", MIXERS.values(), ids=MIXERS)
each_number_of_workers = pytest.mark.parametrize("workers", [0, 2])

Mix = Callable[[Any, Any], Any]


def mixing_collate(samples: list[Any], mix: Mix) -> Any:
    """As torchvision's documentation has it."""
    return mix(*default_collate(samples))


def mixing_by_label_collate(samples: list[Any], mix: Mix) -> Any:
    """Draws numbers that follow from the labels alone, and leaves the generator of its process as it was."""
    images, labels = default_collate(samples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int((labels * torch.arange(1, len(labels) + 1)).sum()))
        return mix(images, labels)


@each_mixer
@each_number_of_workers
def test_in_a_collate_fn(folder: ImageFolder, mix: Mix, workers: int, device: str) -> None:
    def build(kind: Any, **arguments: Any) -> Any:
        return kind(folder, 10, True, num_workers=workers, **arguments)

    for unwrap_batch_sampler, folder.transform in ((mixing_collate, TRAIN_V2), (mixing_by_label_collate, TRAIN)):
        with_collate = functools.partial(build, collate_fn=functools.partial(unwrap_batch_sampler, mix=mix))
        theirs = assert_as_torch(with_collate, device=device)["epochs"][0]["batches"]
        plain = used(StockLoader, build, list)["result"]
        assert any(not torch.equal(mixed, image) for (mixed, _), (image, _) in zip(theirs, plain)), "nothing was mixed"


def labels_first(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return labels, [images[0::2], images[1::2]], {"flipped": images.flip(-1)}


@each_number_of_workers
def test_in_a_collate_fn_that_changes_the_structure(folder: ImageFolder, workers: int, device: str) -> None:
    folder.transform = TRAIN

    def build(kind: Any) -> Any:
        return kind(folder, 10, True, num_workers=workers, collate_fn=labels_first)

    assert len(assert_as_torch(build, list, device=device)) == 5
