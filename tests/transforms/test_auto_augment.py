"""AutoAugment, RandAugment, TrivialAugmentWide and AugMix: each image gets the operations that torchvision draws."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torchvision.transforms as v1
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode

from ..compare import as_image, assert_alike, both_versions, composed, lossless, many
from ..plans import draw, translation_of

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
FILLED: Any = {"interpolation": InterpolationMode.BILINEAR, "fill": [10, 200, 30]}


@both_versions
@each_class
@pytest.mark.parametrize("how", [{}, FILLED, {"fill": 128}], ids=["", "filled", "grey"])
def test_pixels(version: Any, name: str, arguments: Any, how: Any, device: str) -> None:
    first = [version.Grayscale()] if how.get("fill") == 128 else []
    transform = composed("pil", *first, getattr(version, name)(*arguments, **how))
    assert_alike(transform, device, lossless("portrait", "small", "tiny", "one pixel high", "4:2:2"), times=6)


@both_versions
def test_threads_do_not_mix_their_draws(version: Any) -> None:
    translation = translation_of(version.RandAugment(4))
    count = sum(step.num_params for step in translation.steps)

    def lengths(_: int) -> list[int]:
        return [len(draw(translation, 64, 48)) for _ in range(300)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lengths, range(3))) == [[count] * 300] * 3
    finally:
        sys.setswitchinterval(before)


AUGMIXES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "deep": dict(severity=10, mixture_width=1, chain_depth=4, alpha=0.5, all_ops=False, fill=[10.0, 20.0, 30.0]),
    "wide": dict(severity=1, mixture_width=5, chain_depth=1, alpha=3.0, fill=40),
}


@both_versions
@pytest.mark.parametrize("settings", AUGMIXES.values(), ids=AUGMIXES)
def test_pixels_of_augmix(version: Any, settings: Any, device: str) -> None:
    mixed, files = version.AugMix(**settings), many("small", "portrait", times=8, of=lossless)
    assert_alike(as_image(mixed), device, files)
    steps = [v1.RandomHorizontalFlip(), v1.RandomApply([mixed]), v1.Grayscale(3), v1.RandomVerticalFlip()]
    assert_alike(as_image(*steps), device, files)
