"""What the numbers mean: PIL image or tensor, uint8 or float, scaled and normalised or not."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import models
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .. import compare
from ..compare import TO_FLOAT, assert_alike, both_versions, images

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    V2_TO_TENSOR = v2.ToTensor()


class TestToTensor:
    @pytest.mark.parametrize(
        "transform",
        [
            pytest.param(v1.ToTensor(), id="ToTensor alone"),
            pytest.param(v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]), id="ConvertImageDtype"),
            pytest.param(v2.Compose([v2.PILToTensor(), v2.ConvertImageDtype()]), id="v2.ConvertImageDtype"),
            pytest.param(v2.Compose(TO_FLOAT), id="ToDtype"),
            pytest.param(V2_TO_TENSOR, id="the deprecated class of v2"),
        ],
    )
    def test_gives_floats_from_0_to_1(self, transform: Any, device: str) -> None:
        assert_alike(transform, device)
        (tensor,), _ = compare.run_ours(transform, device, images("large"))
        assert tensor.dtype is torch.float32
        assert 0 <= tensor.min() < 0.2
        assert 0.8 < tensor.max() <= 1

    def test_without_a_conversion_the_values_stay_bytes_and_without_scale_they_go_to_255(self, device: str) -> None:
        for transform in (v1.PILToTensor(), v2.PILToTensor(), v2.ToImage()):
            assert_alike(transform, device)
        assert_alike(v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)]), device)

    @pytest.mark.parametrize(
        "transforms",
        [
            pytest.param([v2.ToImage(), v2.PILToTensor(), v2.ToImage()], id="tensor to tensor"),
            pytest.param([v2.ToImage(), v2.ToDtype(torch.uint8, scale=True)], id="uint8 to uint8"),
            pytest.param([v1.PILToTensor(), v1.ConvertImageDtype(torch.uint8)], id="v1, uint8 to uint8"),
            pytest.param([*TO_FLOAT, v2.ToDtype(torch.float32, scale=True)], id="float to float"),
            pytest.param([*TO_FLOAT, v2.ToImage()], id="float tensor to image"),
            pytest.param([v2.ToImage(), V2_TO_TENSOR], id="the deprecated class of v2"),
            pytest.param([v2.ToDtype(torch.float32, scale=True), v2.ToImage()], id="ToDtype on a PIL image"),
            pytest.param([v2.ConvertImageDtype(), v2.ToImage()], id="v2.ConvertImageDtype on a PIL image"),
            pytest.param([v2.ToDtype(torch.float16), v2.ToImage()], id="ToDtype of any kind on a PIL image"),
        ],
    )
    def test_what_changes_nothing_in_torchvision_changes_nothing(self, transforms: Any, device: str) -> None:
        assert_alike(v2.Compose(transforms), device, images("landscape", "PNG"))


NORMALIZED: dict[str, list[Any]] = {
    "numbers for all": [v1.ToTensor(), v1.Normalize(0.5, 0.25)],
    "up to 255": [v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize([123.675, 116.28, 103.53], [58.4, 57.1, 57.4])],
    "in place": [v1.ToTensor(), v1.Normalize(MEAN, STD, inplace=True)],
    "before others": [v1.ToTensor(), v1.Normalize(MEAN, STD), v2.RandomVerticalFlip()],
}


class TestNormalize:
    @both_versions
    @pytest.mark.parametrize(
        ("mean", "std"),
        [(MEAN, STD), (tuple(MEAN), [0.25]), ([0.5], STD), (np.array(MEAN), np.array(STD)), ([0, 0, 0], [1, 1, 1])]
        + [(torch.tensor(MEAN), torch.tensor(STD))],
        ids=["three values", "one std for all", "one mean for all", "arrays", "whole numbers", "tensors"],
    )
    def test_values(self, version: Any, mean: Any, std: Any, device: str) -> None:
        assert_alike(v1.Compose([v1.ToTensor(), version.Normalize(mean, std)]), device)

    @pytest.mark.parametrize("transforms", NORMALIZED.values(), ids=NORMALIZED)
    def test_others(self, transforms: list[Any], device: str) -> None:
        assert_alike(v1.Compose(transforms), device)


class TestImageClassification:
    @pytest.mark.parametrize("name", ["ResNet50", "ResNet18", "EfficientNet_B0"])
    def test_of_the_weights(self, name: str, device: str) -> None:
        weights = getattr(models, f"{name}_Weights")
        assert_alike(weights.DEFAULT.transforms(), device, images(but=("one pixel high", "one pixel wide")))

    def test_of_a_tensor_with_other_numbers(self, device: str) -> None:
        preset = models.ResNet50_Weights.IMAGENET1K_V2.transforms(crop_size=50, resize_size=60, mean=(0.5,), std=(0.1,))
        for before in ([], [v1.PILToTensor()]):
            assert_alike(v1.Compose([*before, preset]), device, images("landscape", "large", "grey"))
