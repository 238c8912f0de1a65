"""How close each step says it is to torchvision, held to what it does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from timm.data.auto_augment import AugmentOp, AugMixAugment
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import CenterCropOrPad
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from proxyloader.dali.operators import OPERATORS
from proxyloader.transforms import color
from proxyloader.transforms.augment import Add, Blur, BoxBlur, Erase, EraseByColor, EraseWithNoise, JpegCompression
from proxyloader.transforms.auto_augment import Blend, Mixture
from proxyloader.transforms.geometry import Crop, Flip, IndexSelect, ReflectedCrop
from proxyloader.transforms.multi_crop import Views
from proxyloader.transforms.plan import OneOf, Step, iter_steps
from proxyloader.transforms.registry import plan_for
from proxyloader.transforms.resize import Resize
from proxyloader.transforms.type_conversion import Normalize, ToFloat, ToTensor
from proxyloader.transforms.warp import Affine, BicubicAffine, Perspective

from ..compare import FLOAT_ROUNDING, Bound, engines_decode, images, lossless, run

NEAREST, BILINEAR, BICUBIC, LANCZOS = (
    InterpolationMode(name) for name in ("nearest", "bilinear", "bicubic", "lanczos")
)

A_31ST = math.degrees(math.atan(1 / 31))
"""A shear by which each 31st line of pixels is taken from between two."""

SHOWN_BY: dict[type[Step], list[Any]] = {
    Add: [v1.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.GaussianNoise(0.1, 0.2)])],
    Affine: [
        *(v1.RandomAffine(30, (0.2, 0.3), (0.5, 1.7), (10, 20)), v2.RandomRotation(40, BILINEAR, fill=50)),
        *(v2.RandomAffine((180, 180), interpolation=BILINEAR), v1.RandomAffine(0, shear=[A_31ST, A_31ST])),
    ],
    color.Autocontrast: [v1.RandomAutocontrast(1)],
    BicubicAffine: [AugmentOp(name, 1, 9, {"interpolation": 3}) for name in ("Rotate", "ShearX", "TranslateYRel")],
    Blend: [v1.Compose([v1.CenterCrop(60), AugMixAugment([AugmentOp("Invert"), AugmentOp("SolarizeAdd")], width=1)])],
    Blur: [v1.GaussianBlur(5, (0.5, 3))],
    BoxBlur: [AugmentOp("GaussianBlur", 1, magnitude) for magnitude in (3, 10)],
    color.Brightness: [v1.ColorJitter(0.5)],
    color.ChannelOrder: [v2.RandomChannelPermutation()],
    JpegCompression: [v2.JPEG((1, 100))],
    color.Contrast: [v1.ColorJitter(0, 0.5)],
    Crop: [v1.RandomCrop(90, padding=5, pad_if_needed=True)],
    color.Equalize: [v1.RandomEqualize(1)],
    Erase: [v2.RandomErasing(1, value=(9, 90, 200))],
    EraseByColor: [v1.Compose([v2.ToImage(), v2.ToDtype(torch.float32), RandomErasing(1, mode="rand", device="cpu")])],
    Flip: [v1.RandomVerticalFlip()],
    color.Grayscale: [v1.Grayscale(3)],
    color.Hue: [v1.ColorJitter(0, 0, 0, 0.5)],
    IndexSelect: [v1.Resize(90, NEAREST), v2.Resize((91, 45), InterpolationMode.NEAREST_EXACT)],
    color.Invert: [v1.RandomInvert(1)],
    Mixture: [torchvision.transforms.AugMix()],
    Normalize: [v1.Compose([v2.ToImage(), v2.ToDtype(torch.float32), v1.Normalize([99.0] * 3, [9.0] * 3)])],
    EraseWithNoise: [v1.Compose([v2.ToImage(), v2.ToDtype(torch.float32), v1.RandomErasing(1, value="random")])],
    Perspective: [v1.RandomPerspective(0.5, 1, NEAREST), v2.RandomPerspective(0.5, 1, fill=40)],
    color.Posterize: [v1.RandomPosterize(3, 1)],
    ReflectedCrop: [v1.Compose([v1.Pad(9), CenterCropOrPad((60, 75), padding_mode="reflect")])],
    Resize: [v1.Resize(size, how) for size in (50, 200) for how in (BILINEAR, BICUBIC, LANCZOS)],
    color.Saturation: [v1.ColorJitter(0, 0, 0.5)],
    color.Sharpness: [v1.RandomAdjustSharpness(2.3, 1)],
    color.Solarize: [v1.RandomSolarize(100, 1)],
    color.SolarizeAdd: [AugmentOp("SolarizeAdd", 1, 8)],
    ToFloat: [v1.ToTensor()],
    ToTensor: [v1.PILToTensor()],
}
"""For each step with an operator, transforms that do it, and what else they do is exact."""


PIL_ALONE = {BicubicAffine, Blend, BoxBlur, ReflectedCrop, color.SolarizeAdd, ToFloat, ToTensor}


def cases() -> list[Any]:
    """(step, transform up to a tensor), where the step works on a PIL image and where it works on a tensor."""
    found = []
    for step, shown in SHOWN_BY.items():
        for each in shown:
            name = f"{step.__name__}: {each}"
            found.append(pytest.param(step, v1.Compose([each, v2.ToImage()]), id=f"{name} of a PIL image"))
            pil_alone = step in PIL_ALONE or (step is Resize and each.interpolation is LANCZOS)
            if not pil_alone:
                found.append(pytest.param(step, v1.Compose([v2.ToImage(), each]), id=f"{name} of a tensor"))
    return found


def test_every_step_with_an_operator_says_in_a_sentence_how_close_it_is() -> None:
    of_others = OneOf, Views  # and so as close as those
    missing = [kind.__name__ for kind in OPERATORS if kind not in of_others and kind not in SHOWN_BY]
    assert not missing, f"these steps are not held to what they say; add a transform to SHOWN_BY: {missing}"


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
@pytest.mark.parametrize(("step", "transform"), cases())
def test_a_step_is_as_close_as_it_says(step: type[Step], transform: Any, device: str) -> None:
    (says,) = {each.closeness for each in iter_steps(plan_for(transform).steps) if type(each) is step}
    allowed = Bound(says.mean, says.p999, says.max).on(device)
    # Where CUDA decodes, more pixels are off by more before the step, and some steps cut at a level.
    decoded_alike = images if device == "cpu" or engines_decode() else lossless
    outputs = run(transform, device, decoded_alike("landscape", "portrait", "small", "grey", "PNG"))
    found = np.concatenate([difference.ravel() for difference in outputs.differences()])
    measured = Bound(float(found.mean()), float(np.quantile(found, 0.999)), float(found.max()))
    for name in ("mean", "p999", "max"):
        assert getattr(measured, name) <= getattr(allowed, name) + FLOAT_ROUNDING, f"{measured}, and it says {says}"
