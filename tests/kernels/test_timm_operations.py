"""The same for timm's automatic augmentation, which draws from Python's and NumPy's generators as well."""

from __future__ import annotations

import pytest
import torch
from torchvision import transforms as v1

from .test_operations import CROP, outputs_of

auto_augment = pytest.importorskip("timm.data.auto_augment")

EXACT = {
    "rand-m9-mstd0.5-inc1": auto_augment.rand_augment_transform("rand-m9-mstd0.5-inc1", {"img_mean": (124, 116, 104)}),
    "rand-m7-n4": auto_augment.rand_augment_transform("rand-m7-n4", {"interpolation": 3}),
    "AugMix": auto_augment.augment_and_mix_transform("augmix-m5-w4-d3", {}),
    "AutoAugment": auto_augment.auto_augment_transform("original-mstd0.5", {}),
    "3-augment": auto_augment.auto_augment_transform("3a", {}),
}


@pytest.mark.parametrize("name", EXACT)
def test_plan_is_exact(name: str) -> None:
    for ours, theirs in outputs_of([CROP, EXACT[name], v1.RandomHorizontalFlip(), v1.ToTensor()]):
        assert torch.equal(ours, theirs), f"{(ours != theirs).sum()} values of {ours.numel()} differ"
