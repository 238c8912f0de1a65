"""Any transforms one after the other: drawn, built and run as torchvision does them, near enough."""

from __future__ import annotations

from typing import Any

import torch
import torchvision.transforms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode, v2

from ..compare import Bound, assert_alike, lossless

A_LEVEL_IN_THE_MEAN = Bound(1, 255, 255)
"""What is promised of each. After a resize, which is a level off here and there, solarising or posterising makes more
of single pixels; sizes, types and the state of the generators are equal."""

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
EQUALIZING = ("RandomEqualize", "AutoAugment", "RandAugment", "TrivialAugmentWide")
"""These count pixels, and on small images one pixel that is a level off may change all: so they come first."""

sides = st.integers(8, 60)
chances = st.sampled_from([0.0, 0.3, 0.8, 1.0])
modes = st.sampled_from([InterpolationMode.NEAREST, InterpolationMode.BILINEAR])


@st.composite
def leaves(draw: st.DrawFn, version: Any, kind: str, equalizing: bool) -> Any:
    """A transform that keeps the number of channels and the type of an image of 3 channels."""
    p, mode, size = draw(chances), draw(modes), (draw(sides), draw(sides))
    fill = draw(st.sampled_from([0, 1] if kind == "float" else [0, 77, (10, 200, 30)]))
    around = 1 if kind == "float" else 77  # v1 pads tensors with one number only
    known = {
        "RandomHorizontalFlip": lambda: version.RandomHorizontalFlip(p),
        "RandomVerticalFlip": lambda: version.RandomVerticalFlip(p),
        "CenterCrop": lambda: version.CenterCrop(size),
        "RandomCrop": lambda: version.RandomCrop(size, padding=2, pad_if_needed=True, fill=around),
        "Pad": lambda: version.Pad((1, 2, 3, 0), fill=around),
        "Resize": lambda: version.Resize(size, mode, antialias=True),
        "RandomResizedCrop": lambda: version.RandomResizedCrop(size, interpolation=mode),
        "RandomRotation": lambda: version.RandomRotation(70, mode, expand=p > 0.5, fill=fill),
        "RandomAffine": lambda: version.RandomAffine(20, (0.1, 0.2), (0.7, 1.4), 10, mode, fill=fill),
        "RandomPerspective": lambda: version.RandomPerspective(0.4, p, mode, fill=fill),
        "ColorJitter": lambda: version.ColorJitter(0.3, 0.4, 0.3, 0.1),
        "RandomGrayscale": lambda: version.RandomGrayscale(p),
        "Grayscale": lambda: version.Grayscale(3),
        "RandomInvert": lambda: version.RandomInvert(p),
        "RandomSolarize": lambda: version.RandomSolarize(0.5 if kind == "float" else 128, p),
        "RandomAdjustSharpness": lambda: version.RandomAdjustSharpness(1.5, p),
        "RandomAutocontrast": lambda: version.RandomAutocontrast(p),
        "RandomPosterize": lambda: version.RandomPosterize(4, p),
        "RandomEqualize": lambda: version.RandomEqualize(p),
        "AutoAugment": lambda: version.AutoAugment(interpolation=mode),
        "RandAugment": lambda: version.RandAugment(interpolation=mode),
        "TrivialAugmentWide": lambda: version.TrivialAugmentWide(interpolation=mode),
    }
    names = [name for name in known if (name in EQUALIZING) == equalizing]
    if kind == "float":
        names.remove("RandomPosterize")
    return known[draw(st.sampled_from(names))]()


@st.composite
def parts(draw: st.DrawFn, version: Any, kind: str, equalizing: bool = False) -> Any:
    """A leaf, or a container of leaves."""
    leaf = leaves(version, kind, equalizing)
    inner = st.lists(leaf, min_size=1, max_size=3)
    container = draw(st.sampled_from([None, None, None, "Compose", "RandomApply", "RandomChoice", "RandomOrder"]))
    return getattr(version, container)(draw(inner)) if container else draw(leaf)


@st.composite
def transforms(draw: st.DrawFn) -> Any:
    """PIL images or tensors of bytes first, then perhaps floats, perhaps normalised at the end."""
    version = draw(st.sampled_from([torchvision.transforms, v2]))

    def some(kind: str) -> list[Any]:
        return draw(st.lists(parts(version, kind), max_size=2))

    kind = draw(st.sampled_from(["pil", "uint8"]))
    first = [*draw(st.lists(parts(version, kind, equalizing=True), max_size=1)), *some(kind)]
    steps = [version.PILToTensor(), *first] if kind == "uint8" else [*first, version.PILToTensor(), *some("uint8")]
    if draw(st.booleans()):
        steps += [version.ConvertImageDtype(torch.float32), *some("float")]
        steps += [version.Normalize(MEAN, STD)] if draw(st.booleans()) else []
    return version.Compose(steps)


@given(transform=transforms(), seed=st.integers(0, 99))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_transforms_may_follow_upon_each_other(transform: Any, seed: int, device: str) -> None:
    files = lossless("landscape", "small", "tiny", "grey")
    assert_alike(transform, device, files, bound=A_LEVEL_IN_THE_MEAN, seed=seed)
