"""torchvision's training reference with the one import changed: the batches of the stock loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as StockLoader
from torchvision.datasets import ImageFolder

import proxyloader
from proxyloader import compile_transforms

from ..compare import the_plan
from ..reference_presets import AUGMENTED_AND_ERASED, PRESETS, Eval, Preset, Train
from .test_same_batches import assert_same, batches, levels

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
    theirs = batches(StockLoader, folder, 1, **how)
    ours = batches(proxyloader.DataLoader, folder, 1, device=device, **how)
    if not augments(preset):
        assert_same(ours, theirs)
        return
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
