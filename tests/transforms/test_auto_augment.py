"""AutoAugment, RandAugment and TrivialAugmentWide: what each image gets, and how near the pixels are."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torchvision.transforms as v1
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from proxyloader.transforms.color import Equalize
from proxyloader.transforms.registry import plan_for

from ..compare import Bound, Images, assert_alike, assert_nearly_exact_but_for, both_versions, composed, lossless
from ..limits import WAIT_S

WITHOUT_EQUALIZE = Bound(0.01, 1, 255)
"""All other operations on PIL images are nearly exact. ``NEAREST_OF_PIL`` in ``test_warp.py`` says which pixels may be
another one's."""

OF_PIL = Bound(0.4, 8, 255)
"""Equalisation is within a level, of which contrast, solarising and the like make more."""

OF_TENSORS = Bound(0.5, 30, 255)
"""As OF_PIL; and a shear of 1/5 or 1/15 takes each 5th or 15th line, and a quarter turn of sides that differ by an odd
number every pixel, of a tensor from the border of two, which torch's rounding decides. Of the policy SVHN that is one
operation in 30, of the others one in hundreds; an image that it meets is a level off in the mean."""

EQUALIZED_TWICE = replace(OF_TENSORS, mean=0.6)
"""By v2's CIFAR10, which draws Equalize twice for one of 8 grey images: it is 2.75 off in the mean, all 0.56."""

BLENDED = Bound(0.5, 10, 255)
"""As OF_PIL; and blended pixels may be a level off, too."""

pil_and_tensor = pytest.mark.parametrize("kind", ["pil", "uint8"])
each_class = pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(pytest.param("AutoAugment", (policy,), id=f"AutoAugment, {policy.value}") for policy in AutoAugmentPolicy),
        pytest.param("RandAugment", (), id="RandAugment"),
        pytest.param("RandAugment", (3, 20, 41), id="RandAugment, stronger"),
        pytest.param("TrivialAugmentWide", (), id="TrivialAugmentWide"),
    ],
)


@pytest.fixture(scope="module")
def files() -> Images:
    return lossless("portrait", "small", "tiny", "4:2:2")


@both_versions
@pil_and_tensor
@each_class
def test_pixels(version: Any, kind: str, name: str, arguments: Any, files: Images, device: str) -> None:
    transform = composed(kind, getattr(version, name)(*arguments))
    assert_alike(transform, device, files, bound=OF_PIL if kind == "pil" else OF_TENSORS, times=6)


@both_versions
@each_class
def test_pil_images_that_are_not_equalized_are_nearly_exact(
    version: Any, name: str, arguments: Any, files: Images, device: str
) -> None:
    transform = composed("pil", getattr(version, name)(*arguments))
    assert_nearly_exact_but_for(Equalize, transform, device, files, bound=WITHOUT_EQUALIZE, times=6)


@both_versions
@pil_and_tensor
@each_class
def test_pixels_when_blended_into_a_fill(
    version: Any, kind: str, name: str, arguments: Any, files: Images, device: str
) -> None:
    how: Any = {"interpolation": InterpolationMode.BILINEAR, "fill": [10, 200, 30]}
    transform = composed(kind, getattr(version, name)(*arguments, **how))
    assert_alike(transform, device, files, bound=BLENDED, times=3)


@both_versions
@pil_and_tensor
@each_class
def test_of_a_grey_image(version: Any, kind: str, name: str, arguments: Any, files: Images, device: str) -> None:
    transform = composed(kind, version.Grayscale(), getattr(version, name)(*arguments, fill=128))
    of_tensors = EQUALIZED_TWICE if version is v2 and AutoAugmentPolicy.CIFAR10 in arguments else OF_TENSORS
    assert_alike(transform, device, files, bound=OF_PIL if kind == "pil" else of_tensors, times=2)


@both_versions
@pil_and_tensor
def test_of_images_one_pixel_high_or_wide(version: Any, kind: str, device: str) -> None:
    transform = composed(kind, version.AutoAugment())
    files = lossless("one pixel high", "one pixel wide")
    assert_alike(transform, device, files, bound=OF_PIL, times=20)


@both_versions
def test_threads_do_not_mix_their_draws(version: Any) -> None:
    plan = plan_for(v1.Compose([version.RandAugment(4), v1.ToTensor()]))
    found = []

    def draw() -> None:
        for _ in range(300):
            chains, _ = plan.steps[0].source.draw((64, 48))  # type: ignore[attr-defined]
            found.append([len(chain) for chain in chains])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=draw) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    finally:
        sys.setswitchinterval(before)
    assert found == [[4]] * 900
