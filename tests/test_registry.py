"""Which classes are translated, how a Compose is walked through, and what is said of everything else."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest
import torch
import torchvision.transforms
from torchvision import models
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification, SemanticSegmentation

from proxyloader import UnsupportedTransformError, compile_transforms
from proxyloader.transforms.plan import ImageState, Step
from proxyloader.transforms.registry import CONTAINERS, RULES, plan_for, rule

from .compare import BILINEAR, assert_as_torchvision

IN_BOTH = {
    "AugMix",
    "AutoAugment",
    "CenterCrop",
    "ColorJitter",
    "ConvertImageDtype",
    "GaussianBlur",
    "Grayscale",
    "Normalize",
    "PILToTensor",
    "Pad",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomAutocontrast",
    "RandomCrop",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomPerspective",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSolarize",
    "RandomVerticalFlip",
    "Resize",
    "ToTensor",
    "TrivialAugmentWide",
}
IN_V2_ONLY = {
    "GaussianNoise",
    "Identity",
    "RGB",
    "RandomChannelPermutation",
    "RandomPhotometricDistort",
    "RandomResize",
    "RandomShortestSize",
    "RandomZoomOut",
    "ScaleJitter",
    "ToDtype",
    "ToImage",
    "ToPureTensor",
}

HOLD_OTHERS = {"Compose", "RandomApply", "RandomChoice", "RandomOrder"}
NOT_TRANSFORMS = {"AutoAugmentPolicy", "InterpolationMode", "Transform"}


class MyResize(v1.Resize):
    """A subclass may do anything."""


class MyCompose(v1.Compose):
    """Also this one."""


class TrainingPreset:
    """As ``ClassificationPresetTrain`` of torchvision's training reference."""

    def __init__(self, version: Any, *extra: Any) -> None:
        crop, flip = version.RandomResizedCrop(32), version.RandomHorizontalFlip()
        self.transforms = version.Compose([crop, flip, *extra, v1.PILToTensor()])

    def __call__(self, image: Any) -> Any:
        return self.transforms(image)


class ModulePreset(torch.nn.Module):
    def __init__(self, transforms: Any) -> None:
        super().__init__()
        self.transforms = transforms

    def forward(self, image: Any) -> Any:
        return self.transforms(image)


class NotCallable:
    transforms = v1.Compose([v1.ToTensor()])


def a_function(image: Any) -> Any:
    return image


def refused(transform: Any) -> str:
    with pytest.raises(UnsupportedTransformError) as caught:
        plan_for(transform)
    return str(caught.value)


class TestTable:
    def test_holds_the_classes_that_are_promised_and_no_other(self) -> None:
        versions = torchvision.transforms, v2
        promised = [getattr(version, name) for version in versions for name in IN_BOTH]
        promised += [getattr(v2, name) for name in IN_V2_ONLY]
        assert set(RULES) == {*promised, ImageClassification}
        containers = {getattr(version, name) for version in versions for name in HOLD_OTHERS - {"Compose"}}
        assert set(CONTAINERS) == containers

    @pytest.mark.parametrize(
        "cls",
        [
            pytest.param(cls, id=f"{prefix}{name}")
            for prefix, module in (("", torchvision.transforms), ("v2.", v2))
            for name, cls in vars(module).items()
            if inspect.isclass(cls) and name not in HOLD_OTHERS | NOT_TRANSFORMS
        ],
    )
    def test_every_class_of_torchvision_is_in_it_or_is_refused_by_name(self, cls: Any) -> None:
        if cls not in RULES:
            name = ("v2." if "v2" in cls.__module__ else "") + cls.__name__
            message = refused(v1.Compose([v1.ToTensor(), cls.__new__(cls)]))
            assert message.startswith(f"transform.transforms[1]: {name} is not translated to DALI. Translated are: ")
            assert message.endswith("Leave it out, or use torch.utils.data.DataLoader for this dataset")

    def test_the_list_in_a_refusal_is_the_table(self) -> None:
        names = re.search(r"Translated are: Compose, (.*)\. Leave", refused(a_function))
        assert names is not None
        assert set(names[1].split(", ")) == {cls.__name__ for cls in [*RULES, *CONTAINERS]}

    def test_a_class_has_one_rule(self) -> None:
        before = dict(RULES)
        with pytest.raises(ValueError, match=r"torchvision\.transforms\.transforms\.Resize has a rule already: resize"):
            rule(v1.Resize)(lambda transform, state: ())
        assert before == RULES

    def test_a_rule_for_a_class_of_ones_own_is_used(self) -> None:
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
            ModulePreset(v1.Compose([v1.CenterCrop(9), v1.ToTensor()])),
            v1.Compose([ModulePreset(v2.Compose([v1.CenterCrop(9)])), v1.ToTensor()]),
        ],
        ids=["v1", "v2", "nested", "empty ones inside", "module with .transforms", "such a module inside"],
    )
    def test_make_no_difference(self, transform: Any) -> None:
        (crop,), conversion = (
            plan_for(v1.Compose([v1.CenterCrop(9), v1.PILToTensor()])).steps[:1],
            plan_for(v1.ToTensor()),
        )
        assert plan_for(transform).steps == (crop, *conversion.steps)

    def test_one_transform_needs_none(self) -> None:
        assert plan_for(v1.ToTensor()) == plan_for(v1.Compose([v1.ToTensor()]))
        preset = models.ResNet50_Weights.IMAGENET1K_V2.transforms()
        assert plan_for(preset) == plan_for(v1.Compose([preset]))

    @pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])
    def test_the_presets_of_the_training_reference(self, version: Any, device: str) -> None:
        assert_as_torchvision(TrainingPreset(version), device, bound=BILINEAR)

    def test_compiling_twice_changes_nothing(self) -> None:
        compiled = compile_transforms(v1.ToTensor())
        assert compile_transforms(compiled) is compiled
        assert compiled.plan == plan_for(v1.ToTensor())


class TestRefusals:
    @pytest.mark.parametrize(
        ("transform", "where"),
        [
            pytest.param(v1.FiveCrop(9), "transform: FiveCrop", id="alone"),
            pytest.param(v1.Compose([v1.ToTensor(), v1.FiveCrop(9)]), "transform.transforms[1]: FiveCrop", id="v1"),
            pytest.param(v2.Compose([v2.ToImage(), v2.FiveCrop(9)]), "transform.transforms[1]: v2.FiveCrop", id="v2"),
            pytest.param(
                v1.Compose([v1.ToTensor(), v1.Compose([v1.Pad(1), v1.Compose([v2.TenCrop(9)])])]),
                "transform.transforms[1].transforms[1].transforms[0]: v2.TenCrop",
                id="nested",
            ),
            pytest.param(
                TrainingPreset(v1, v1.ToPILImage()),
                "transform.transforms.transforms[2]: ToPILImage",
                id="in an object with .transforms",
            ),
            pytest.param(v1.Compose([MyResize(9)]), f"transform.transforms[0]: {__name__}.MyResize", id="subclass"),
            pytest.param(MyCompose([v1.ToTensor()]), f"transform: {__name__}.MyCompose", id="subclass of Compose"),
            pytest.param(v1.Compose([a_function]), f"transform.transforms[0]: {__name__}.a_function", id="function"),
            pytest.param(
                v1.Compose([lambda image: image]),
                f"transform.transforms[0]: {__name__}.TestRefusals.<lambda>",
                id="lambda",
            ),
            pytest.param(
                v1.Compose([functools.partial(a_function)]), "transform.transforms[0]: functools.partial", id="partial"
            ),
            pytest.param(v1.Compose([v1.Lambda(a_function)]), "transform.transforms[0]: Lambda", id="Lambda"),
            pytest.param(
                v1.Compose([v1.RandomApply([v1.Pad(1), v1.TenCrop(9)]), v1.ToTensor()]),
                "transform.transforms[0].transforms[1]: TenCrop",
                id="in RandomApply",
            ),
            pytest.param(
                v2.RandomChoice([v2.Pad(1), v2.RandomOrder([v2.Pad(1), a_function])]),
                f"transform.transforms[1].transforms[1]: {__name__}.a_function",
                id="in RandomChoice and RandomOrder",
            ),
            pytest.param(
                torch.nn.Sequential(v1.Pad(1)), "transform: torch.nn.modules.container.Sequential", id="Sequential"
            ),
            pytest.param(
                SemanticSegmentation(resize_size=9), "transform: SemanticSegmentation", id="preset for another task"
            ),
            pytest.param(NotCallable(), f"transform: {__name__}.NotCallable", id="nothing that can be called"),
            pytest.param([v1.ToTensor()], "transform: builtins.list", id="list"),
            pytest.param(
                v1.Compose([v1.CenterCrop(9), v1.ToTensor]),
                "transform.transforms[1]: the class ToTensor, where an instance, ToTensor(...), is expected,",
                id="class where an instance was meant",
            ),
        ],
    )
    def test_names_position_and_class_and_what_to_do(self, transform: Any, where: str) -> None:
        message = refused(transform)
        assert message.startswith(f"{where} is not translated to DALI. Translated are: Compose, AugMix, AutoAugment, ")
        assert message.endswith(". Leave it out, or use torch.utils.data.DataLoader for this dataset")

    def test_of_a_known_class_give_the_reason_after_the_position(self) -> None:
        message = refused(v1.Compose([v1.Pad(1), v2.Compose([v2.Pad(2, padding_mode="reflect")])]))
        expected = "padding_mode='reflect' is not translated; padding_mode='constant' is"
        assert message == f"transform.transforms[1].transforms[0]: v2.Pad: {expected}"

    def test_the_first_fault_is_named(self) -> None:
        assert refused(v1.Compose([v1.FiveCrop(9), v1.TenCrop(9)])).startswith("transform.transforms[0]")

    def test_is_a_value_error(self) -> None:
        with pytest.raises(ValueError, match="FiveCrop"):
            compile_transforms(v1.FiveCrop(9))
