"""Which classes are translated, and how a Compose is walked through."""

from __future__ import annotations

from typing import Any

import pytest
import torchvision.transforms
from torchvision import models
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

from proxyloader import compile_transforms
from proxyloader.transforms.plan import ImageState, Step
from proxyloader.transforms.registry import CONTAINERS, RULES, plan_for, rule

IN_BOTH = """
AugMix AutoAugment CenterCrop ColorJitter ConvertImageDtype FiveCrop GaussianBlur Grayscale Normalize PILToTensor Pad
RandAugment RandomAdjustSharpness RandomAffine RandomAutocontrast RandomCrop RandomEqualize RandomErasing
RandomGrayscale RandomHorizontalFlip RandomInvert RandomPerspective RandomPosterize RandomResizedCrop RandomRotation
RandomSolarize RandomVerticalFlip Resize TenCrop ToTensor TrivialAugmentWide
"""
IN_V2_ONLY = """
GaussianNoise Identity JPEG RGB RandomChannelPermutation RandomPhotometricDistort RandomResize RandomShortestSize
RandomZoomOut ScaleJitter ToDtype ToImage ToPureTensor
"""
HOLD_OTHERS = {"RandomApply", "RandomChoice", "RandomOrder"}


class MyResize(v1.Resize):
    """A subclass may do anything."""


class TestTable:
    def test_holds_the_classes_that_are_promised_and_no_other(self) -> None:
        versions = torchvision.transforms, v2
        promised = [getattr(version, name) for version in versions for name in IN_BOTH.split()]
        promised += [getattr(v2, name) for name in IN_V2_ONLY.split()]
        of_torchvision = {cls for cls in RULES if cls.__module__.startswith("torchvision.")}
        unlisted = sorted(cls.__name__ for cls in of_torchvision - {*promised, ImageClassification})
        assert not unlisted, f"these classes have a rule; add them to IN_BOTH or IN_V2_ONLY: {unlisted}"
        assert of_torchvision == {*promised, ImageClassification}
        containers = {getattr(version, name) for version in versions for name in HOLD_OTHERS}
        assert set(CONTAINERS) == containers

    def test_a_class_has_one_rule_and_a_class_of_ones_own_may_have_one(self) -> None:
        before = dict(RULES)
        with pytest.raises(ValueError, match=r"torchvision\.transforms\.transforms\.Resize already has a rule: resize"):
            rule(v1.Resize)(lambda transform, state: ())
        assert before == RULES

        def mine(transform: Any, state: ImageState) -> tuple[Step, ...]:
            return plan_for(v1.ToTensor()).steps

        rule(MyResize)(mine)
        try:
            assert plan_for(v1.Compose([MyResize(9)])) == plan_for(v1.ToTensor())
        finally:
            del RULES[MyResize]


class TestComposes:
    @pytest.mark.parametrize(
        "transform",
        [
            v1.Compose([v1.CenterCrop(9), v1.ToTensor()]),
            v2.Compose([v2.CenterCrop(9), v1.ToTensor()]),
            v1.Compose([v1.Compose([v2.Compose([v1.CenterCrop(9)])]), v2.Compose([v1.ToTensor()])]),
            v1.Compose([v1.Compose([]), v1.CenterCrop(9), v1.Compose([v1.ToTensor(), v1.Compose([])])]),
        ],
        ids=["v1", "v2", "nested", "empty ones inside"],
    )
    def test_make_no_difference(self, transform: Any) -> None:
        crop, _ = plan_for(v1.Compose([v1.CenterCrop(9), v1.PILToTensor()])).steps
        assert plan_for(transform).steps == (crop, *plan_for(v1.ToTensor()).steps)

    def test_one_transform_needs_none_and_compiling_twice_changes_nothing(self) -> None:
        assert plan_for(v1.ToTensor()) == plan_for(v1.Compose([v1.ToTensor()]))
        preset = models.ResNet50_Weights.IMAGENET1K_V2.transforms()
        assert plan_for(preset) == plan_for(v1.Compose([preset]))
        compiled = compile_transforms(v1.ToTensor())
        assert compile_transforms(compiled) is compiled
        assert compiled.plan == plan_for(v1.ToTensor())
