"""What the numbers mean: PIL image or tensor, uint8 or float, scaled and normalised or not."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import models
from torchvision.transforms import transforms as v1, v2

from ..compare import TO_FLOAT, assert_alike, both_versions, images

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    V2_TO_TENSOR = v2.ToTensor()

OF_LEVELS = [v2.ToImage(), v2.ToDtype(torch.float32)]
CONVERSIONS: dict[str, list[Any]] = {
    "ToTensor alone": [v1.ToTensor()],
    "ConvertImageDtype": [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)],
    "v2.ConvertImageDtype": [v2.PILToTensor(), v2.ConvertImageDtype()],
    "ToDtype": TO_FLOAT,
    "the deprecated class of v2 alone": [V2_TO_TENSOR],
    "bytes by v1": [v1.PILToTensor()],
    "bytes by v2": [v2.PILToTensor()],
    "bytes of an image": [v2.ToImage()],
    "without a scale": OF_LEVELS,
    "tensor to tensor": [v2.ToImage(), v2.PILToTensor(), v2.ToImage()],
    "uint8 to uint8": [v2.ToImage(), v2.ToDtype(torch.uint8, scale=True)],
    "v1, uint8 to uint8": [v1.PILToTensor(), v1.ConvertImageDtype(torch.uint8)],
    "float to float": [*TO_FLOAT, v2.ToDtype(torch.float32, scale=True)],
    "float tensor to image": [*TO_FLOAT, v2.ToImage()],
    "the deprecated class of v2": [v2.ToImage(), V2_TO_TENSOR],
    "ToDtype on a PIL image": [v2.ToDtype(torch.float32, scale=True), v2.ToImage()],
    "v2.ConvertImageDtype on a PIL image": [v2.ConvertImageDtype(), v2.ToImage()],
    "ToDtype of any kind on a PIL image": [v2.ToDtype(torch.float16), v2.ToImage()],
    "normalized, numbers for all": [v1.ToTensor(), v1.Normalize(0.5, 0.25)],
    "normalized, up to 255": [*OF_LEVELS, v2.Normalize([123.675, 116.28, 103.53], [58.4, 57.1, 57.4])],
    "normalized in place": [v1.ToTensor(), v1.Normalize(MEAN, STD, inplace=True)],
    "normalized before others": [v1.ToTensor(), v1.Normalize(MEAN, STD), v2.RandomVerticalFlip()],
}


@pytest.mark.parametrize("transforms", CONVERSIONS.values(), ids=CONVERSIONS)
def test_conversions(transforms: list[Any], device: str) -> None:
    assert_alike(v1.Compose(transforms), device)


@both_versions
@pytest.mark.parametrize(
    ("mean", "std"),
    [(MEAN, STD), (tuple(MEAN), [0.25]), ([0.5], STD), (np.array(MEAN), np.array(STD)), ([0, 0, 0], [1, 1, 1])]
    + [(torch.tensor(MEAN), torch.tensor(STD))],
    ids=["three values", "one std for all", "one mean for all", "arrays", "whole numbers", "tensors"],
)
def test_normalize(version: Any, mean: Any, std: Any, device: str) -> None:
    assert_alike(v1.Compose([v1.ToTensor(), version.Normalize(mean, std)]), device)


class TestImageClassification:
    @pytest.mark.parametrize("name", ["ResNet50", "ResNet18", "EfficientNet_B0"])
    def test_of_the_weights(self, name: str, device: str) -> None:
        weights = getattr(models, f"{name}_Weights")
        assert_alike(weights.DEFAULT.transforms(), device, images(but=("one pixel high", "one pixel wide")))

    def test_of_a_tensor_with_other_numbers(self, device: str) -> None:
        preset = models.ResNet50_Weights.IMAGENET1K_V2.transforms(crop_size=50, resize_size=60, mean=(0.5,), std=(0.1,))
        for before in ([], [v1.PILToTensor()]):
            assert_alike(v1.Compose([*before, preset]), device, images("landscape", "large", "grey"))
