"""The promise of the swap: under the same seed, the batches of the stock DataLoader."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.transforms import v2

import proxyloader
from proxyloader import compile_transforms
from proxyloader.make_dataset import make_dataset, photograph

from ..compare import the_plan
from ..odd_formats import ODD_FORMATS
from ..reference_presets import AUGMENTED_AND_ERASED, PRESETS, Eval, Preset, Train
from ..side_by_side import assert_as_torch, epochs, one_epoch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRAIN = transforms.Compose(
    [
        transforms.RandomResizedCrop(96),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)
VALIDATION = transforms.Compose(
    [transforms.Resize(112), transforms.CenterCrop(96), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
)
TRAIN_V2 = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(96, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)
DECODE = transforms.Compose([transforms.CenterCrop((96, 120)), transforms.PILToTensor()])


def batches(loader_class: Any, dataset: Any, **arguments: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(17)
    random.seed(17)
    return [(images.cpu(), labels) for images, labels in loader_class(dataset, **arguments)]


def levels(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Difference in levels of 255, (N, pixels)."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    if ours.dtype == torch.uint8:
        return (ours.float() - theirs.float()).abs().flatten(1)
    return (255 * torch.tensor(STD).view(3, 1, 1) * (ours - theirs)).abs().flatten(1)


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, PERSISTENT | {"prefetch_factor": 1}, PERSISTENT], ids=str)
@pytest.mark.parametrize("transform", [TRAIN, VALIDATION, TRAIN_V2], ids=["train", "validation", "train v2"])
def test_shuffled_epochs_are_torchs(folder: ImageFolder, transform: Any, how: dict[str, Any], device: str) -> None:
    folder.transform = transform
    assert_as_torch(lambda kind: kind(folder, 10, True, **how), functools.partial(epochs, count=3), device=device)


MADE: dict[str, Callable[[ImageFolder], Any]] = {
    "a target_transform and a filter": lambda folder: ImageFolder(
        folder.root,
        folder.transform,
        target_transform=lambda target: -target,
        is_valid_file=lambda path: path.endswith(("0.jpg", "2.jpg", "5.jpg")),
    ),
    "a loader of its own": lambda folder: DatasetFolder(
        folder.root, lambda path: Image.open(path).convert("RGB"), ("jpg",), folder.transform
    ),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_made_of_folders_keep_their_ways(folder: ImageFolder, make: Any, workers: int, device: str) -> None:
    folder.transform = TRAIN
    assert_as_torch(lambda kind: kind(make(folder), 7, True, num_workers=workers), device=device)


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG photographs, and every odd format that Pillow reads among them."""
    root = tmp_path_factory.mktemp("odd") / "set"
    make_dataset(root, images=6, size=(150, 112), classes=2, processes=1, progress=False)
    for number, (name, encode) in enumerate(ODD_FORMATS.items()):
        (root / f"class_{number % 2:03d}" / name).write_bytes(encode(photograph(number, size=(150, 112))))
    return root


def test_every_format_that_pillow_reads_gives_pillows_pixels(odd_folder: Path, device: str) -> None:
    dataset = ImageFolder(str(odd_folder), DECODE)
    theirs = batches(StockLoader, dataset, batch_size=8)
    ours = batches(proxyloader.DataLoader, dataset, batch_size=8, num_workers=1, device=device)
    difference = torch.cat([levels(a, b) for (a, _), (b, _) in zip(ours, theirs)]).amax(1).tolist()
    worst = {Path(path).name: most for (path, _), most in zip(dataset.samples, difference)}
    # Unusual sampling, and a progressive JPEG, goes past the JPEG engine to CUDA, which rounds a little differently.
    bounds = {"cpu": 0, "cuda": 3}
    assert {name: most for name, most in worst.items() if most > bounds[device]} == {}


# --- torchvision's training reference with the one import changed -----------------------------------------------------

A_LEVEL = 1.0
"""In the mean, what is promised of every transform. Single pixels of a JPEG that a GPU decodes a level off may be far
off behind posterising and the like; another draw for one image of a batch is several levels in the mean."""

EACH_ON_ITS_DEVICES = [
    *(pytest.param(preset, "cpu", id=f"{preset}, cpu") for preset in PRESETS),
    *(
        pytest.param(preset, "cuda", id=f"{preset}, cuda", marks=pytest.mark.gpu)
        for preset in [*AUGMENTED_AND_ERASED, Eval(use_v2=True)]
    ),
]
"""On a GPU fewer: a pipeline takes seconds to build there."""


@pytest.mark.parametrize(("preset", "device"), EACH_ON_ITS_DEVICES, indirect=["device"])
def test_an_epoch_is_the_stock_loaders(folder: ImageFolder, preset: Preset, device: str) -> None:
    folder.transform = preset
    how: dict[str, Any] = dict(batch_size=8, shuffle=True, num_workers=2)
    if not augments(preset):
        assert_as_torch(lambda kind: kind(folder, **how), one_epoch, device=device)
        return
    theirs = batches(StockLoader, folder, **how)
    ours = batches(proxyloader.DataLoader, folder, device=device, **how)
    assert len(ours) == len(theirs) == 6
    for (images, labels), (stock_images, stock_labels) in zip(ours, theirs):
        assert torch.equal(labels, stock_labels)
        # On a CPU torchvision does all of it, in our workers as in the stock loader's.
        assert levels(images, stock_images).mean() <= (0 if device == "cpu" else A_LEVEL)


def augments(preset: Preset) -> bool:
    return isinstance(preset, Train) and preset.auto_augment is not None


def test_on_a_cpu_augmentation_is_left_to_torchvision_and_nothing_else() -> None:
    for preset in PRESETS:
        assert the_plan(compile_transforms(preset)).slow_on_cpu == augments(preset), preset
