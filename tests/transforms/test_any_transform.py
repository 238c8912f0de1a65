"""Any transforms of PIL images one after the other: drawn and run as torchvision does them, to the level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision.transforms
from hypothesis import HealthCheck, given, settings, strategies as st
from torchvision.transforms import InterpolationMode, v2

from ..compare import CLOSE, EXACT, assert_alike, lossless
from ..reference_presets import PRESETS, Preset

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

sides = st.integers(8, 60)
chances = st.sampled_from([0.0, 0.3, 0.8, 1.0])
modes = st.sampled_from([InterpolationMode.NEAREST, InterpolationMode.BILINEAR])


@st.composite
def leaves(draw: st.DrawFn, version: Any) -> Any:
    """A transform that keeps the number of channels of an image of 3 channels."""
    p, mode, size = draw(chances), draw(modes), (draw(sides), draw(sides))
    fill = draw(st.sampled_from([0, 77, (10, 200, 30)]))
    known = {
        "RandomHorizontalFlip": lambda: version.RandomHorizontalFlip(p),
        "RandomVerticalFlip": lambda: version.RandomVerticalFlip(p),
        "CenterCrop": lambda: version.CenterCrop(size),
        "RandomCrop": lambda: version.RandomCrop(size, padding=2, pad_if_needed=True, fill=fill),
        "Pad": lambda: version.Pad((1, 2, 3, 0), fill=fill),
        "Resize": lambda: version.Resize(size, mode, antialias=True),
        "RandomResizedCrop": lambda: version.RandomResizedCrop(size, interpolation=mode),
        "RandomRotation": lambda: version.RandomRotation(70, mode, expand=p > 0.5, fill=fill),
        "RandomAffine": lambda: version.RandomAffine(20, (0.1, 0.2), (0.7, 1.4), 10, mode, fill=fill),
        "RandomPerspective": lambda: version.RandomPerspective(0.4, p, mode, fill=fill),
        "ColorJitter": lambda: version.ColorJitter(0.3, 0.4, 0.3, 0.1),
        "RandomGrayscale": lambda: version.RandomGrayscale(p),
        "Grayscale": lambda: version.Grayscale(3),
        "RandomInvert": lambda: version.RandomInvert(p),
        "RandomSolarize": lambda: version.RandomSolarize(128, p),
        "RandomAdjustSharpness": lambda: version.RandomAdjustSharpness(1.5, p),
        "RandomAutocontrast": lambda: version.RandomAutocontrast(p),
        "RandomPosterize": lambda: version.RandomPosterize(4, p),
        "RandomEqualize": lambda: version.RandomEqualize(p),
        "AutoAugment": lambda: version.AutoAugment(interpolation=mode),
        "RandAugment": lambda: version.RandAugment(interpolation=mode),
        "TrivialAugmentWide": lambda: version.TrivialAugmentWide(interpolation=mode),
    }
    return known[draw(st.sampled_from([*known]))]()


@st.composite
def parts(draw: st.DrawFn, version: Any) -> Any:
    """A leaf, or a container of leaves."""
    leaf = leaves(version)
    inner = st.lists(leaf, min_size=1, max_size=3)
    container = draw(st.sampled_from([None, None, None, "Compose", "RandomApply", "RandomChoice", "RandomOrder"]))
    return getattr(version, container)(draw(inner)) if container else draw(leaf)


@st.composite
def transforms(draw: st.DrawFn) -> Any:
    version = draw(st.sampled_from([torchvision.transforms, v2]))
    steps = [*draw(st.lists(parts(version), max_size=4)), version.PILToTensor()]
    if draw(st.booleans()):
        steps += [
            version.ConvertImageDtype(torch.float32),
            version.RandomHorizontalFlip(),
            version.Normalize(MEAN, STD),
        ]
    return version.Compose(steps)


@given(transform=transforms(), seed=st.integers(0, 99))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_transforms_may_follow_upon_each_other(transform: Any, seed: int, device: str) -> None:
    assert_alike(transform, device, lossless("landscape", "small", "tiny", "grey"), seed=seed)


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_a_preset_of_the_training_reference_is_as_torchvisions(preset: Preset) -> None:
    assert_alike(preset.transforms, "cpu", lossless(), bound=CLOSE if preset.backend == "tensor" else EXACT, times=2)
