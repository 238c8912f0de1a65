"""AutoAugment, RandAugment, TrivialAugmentWide and AugMix: what each image gets, and how near the pixels are."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torchvision.transforms as v1
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from proxyloader.transforms.color import Equalize
from proxyloader.transforms.registry import plan_for

from ..compare import (
    Bound,
    Images,
    as_image,
    assert_alike,
    assert_nearly_exact_but_for,
    both_versions,
    composed,
    images,
    lossless,
    many,
)

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
        pytest.param("RandAugment", (0,), id="RandAugment of no operation"),
        pytest.param("TrivialAugmentWide", (), id="TrivialAugmentWide"),
        pytest.param("TrivialAugmentWide", (5,), id="TrivialAugmentWide of few magnitudes"),
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

    def lengths(_: int) -> list[int]:
        draws = (plan.steps[0].source.draw((64, 48)) for _ in range(300))  # type: ignore[attr-defined]
        return [len(chain) for chains, _ in draws for chain in chains]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lengths, range(3))) == [[4] * 300] * 3
    finally:
        sys.setswitchinterval(before)


# --- AugMix -----------------------------------------------------------------------------------------------------------

MIXED = Bound(0.3, 1, 25)
"""The weights sum up to about one, and whole levels are cut off: where the sum is nearly whole, the last bit of a float
decides, in a pixel of 50. And a warp may fetch a pixel from the other side of a border."""

DEEP = Bound(0.3, 16, 64)
"""As MIXED; and where one operation upon the other differs in a pixel, Equalize makes levels of it. (On a CPU 16 and at
most 17 of v1, 16 and 77 of v2, in 3 pixels of image 7.)"""


@both_versions
@pytest.mark.parametrize("before", [[], [v2.ToImage()]], ids=["a PIL image", "a uint8 tensor"])
def test_pixels_of_augmix(version: Any, before: list[Any], device: str) -> None:
    pictures = images(but=("large",)) | many("small", times=40, of=lossless)
    assert_alike(as_image(*before, version.AugMix()), device, pictures, bound=MIXED)


@both_versions
def test_other_chains_and_fills(version: Any, device: str) -> None:
    nearest = InterpolationMode.NEAREST
    deep = version.AugMix(10, 1, 4, 0.5, False, interpolation=nearest, fill=[10.0, 20.0, 30.0])
    bound, files = replace(DEEP, max=80 if version is v2 else 64), many("small", times=16, of=lossless)
    assert_alike(as_image(deep), device, files, bound=bound)
    wide = version.AugMix(severity=1, mixture_width=5, chain_depth=1, alpha=3.0, fill=40)
    assert_alike(as_image(v2.ToImage(), wide), device, files, bound=MIXED)


@both_versions
def test_augmix_of_grey_images_and_among_other_steps(version: Any, device: str) -> None:
    grey = as_image(v1.Grayscale(), version.AugMix(mixture_width=2))
    assert_alike(grey, device, many("small", times=16, of=lossless), bound=MIXED)
    steps = [v1.RandomHorizontalFlip(), v1.RandomApply([version.AugMix(mixture_width=2, chain_depth=1)]), v1.ToTensor()]
    transform = v1.Compose([*steps, v1.RandomVerticalFlip()])
    assert_alike(transform, device, many("small", times=8, of=lossless), bound=MIXED)
