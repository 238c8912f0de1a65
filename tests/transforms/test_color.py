"""Colours: Pillow's arithmetic for PIL images and torch's for tensors. ``tests/kernels/`` has each step alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import transforms as v1, v2

from proxyloader.transforms.chain import START

from ..compare import CLOSE, EXACT, Images, assert_alike, both_versions, composed, kinds_of_levels, lossless, png_of
from ..plans import plan_for

SOME = ("landscape", "small", "tiny", "one pixel high", "one pixel wide", "grey")
BOUNDS = {"pil": EXACT, "uint8": CLOSE}


@pytest.fixture(scope="module")
def colors() -> Images:
    """A quarter of a million colours."""
    return {"colours": png_of(Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)))}


GREYS: dict[str, Any] = {
    "a PIL image": lambda v, channels: [v.Grayscale(channels), v1.PILToTensor()],
    "a uint8 tensor": lambda v, channels: [v1.PILToTensor(), v.Grayscale(channels)],
    "a grey image": lambda v, channels: [v.Grayscale(1), v.Grayscale(channels), v1.PILToTensor()],
    # The v1 class leaves a grey tensor at one channel, whatever it is asked for; the shapes are compared too.
    "a grey tensor": lambda v, channels: [v1.PILToTensor(), v.Grayscale(1), v.Grayscale(channels)],
    "among flips": lambda v, channels: [
        *(v.RandomHorizontalFlip(), v.Grayscale(channels), v.RandomVerticalFlip(), v.CenterCrop(70)),
        *(v1.ToTensor(), v.RandomHorizontalFlip(), v.Normalize([0.5], [0.25])),
    ],
}


@both_versions
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("steps", GREYS.values(), ids=GREYS)
def test_grayscale(version: Any, channels: int, steps: Any, colors: Images, device: str) -> None:
    assert_alike(v1.Compose(steps(version, channels)), device, lossless(*SOME) | colors)


@both_versions
@kinds_of_levels
@pytest.mark.parametrize("grey", [False, True], ids=["", "grey"])
def test_color_jitter(version: Any, kind: str, grey: bool, device: str) -> None:
    first = [version.Grayscale()] if grey else []  # without saturation and hue
    transform = composed(kind, *first, version.ColorJitter(0.7, 0.7, 0.7, 0.5))
    assert_alike(transform, device, lossless(*SOME), bound=BOUNDS[kind], times=4)


def test_a_color_jitter_of_nothing_costs_nothing() -> None:
    assert plan_for(v1.ColorJitter()).steps == ()


@pytest.mark.parametrize("arguments", [{"hue": (0.4, 0.9)}, {"brightness": (-1, 1)}, {"contrast": (1.2, 0.5)}], ids=str)
def test_a_distortion_that_may_be_an_error_is_left_to_torchvision(arguments: Any) -> None:
    assert START.then(v2.RandomPhotometricDistort(**arguments)) is None


@kinds_of_levels
def test_what_v2_has_alone(kind: str, device: str) -> None:
    distort, permute = composed(kind, v2.RandomPhotometricDistort(p=0.7)), composed(kind, v2.RandomChannelPermutation())
    assert_alike(distort, device, lossless(*SOME), bound=BOUNDS[kind], times=4)
    assert_alike(permute, device, lossless(*SOME), times=4)
    assert_alike(composed(kind, v2.RGB()), device, lossless(*SOME))
    assert_alike(composed(kind, v2.Grayscale(), v2.RGB()), device, lossless(*SOME))


DONE_OR_NOT = {
    "RandomGrayscale": [()],
    "RandomInvert": [()],
    "RandomPosterize": [(1,), (3,), (8,)],
    "RandomSolarize": [(0,), (99.5,), (255,)],
    "RandomAdjustSharpness": [(0,), (1.3,), (4.5,)],
    "RandomAutocontrast": [()],
    "RandomEqualize": [()],
}


@both_versions
@kinds_of_levels
@pytest.mark.parametrize("name", DONE_OR_NOT)
@pytest.mark.parametrize("grey", [False, True], ids=["", "grey"])
def test_done_or_not(version: Any, kind: str, name: str, grey: bool, device: str) -> None:
    first = [version.Grayscale()] if grey else []
    for arguments in DONE_OR_NOT[name]:
        transform = composed(kind, *first, getattr(version, name)(*arguments, p=0.7))
        bound = BOUNDS[kind] if name == "RandomAdjustSharpness" else EXACT
        assert_alike(transform, device, lossless(*SOME), bound=bound, times=2)
