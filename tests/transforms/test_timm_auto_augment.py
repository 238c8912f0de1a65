"""timm's automatic augmentation: the pixels are timm's."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image, ImageOps
from timm.data import auto_augment as timm_auto
from torchvision.transforms import transforms as v1

from ..compare import assert_alike, composed, lossless
from ..plans import has_plan

RANDOM, BILINEAR, BICUBIC = None, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC

POLICIES = [
    "rand-m9-mstd0.5-inc1",
    "rand-m9-n3-mstd0.5",
    "rand-m15-n2-mmax20-p0.9",
    "rand-m9-mstd101-tweights",
    "rand-m7-mstd0.5-inc1-t3aw",
    "rand-m10-n1-t3a",
    "original-mstd0.5",
    "originalr",
    "v0",
    "v0r-mstd1",
    "3a",
]

each_policy = pytest.mark.parametrize("policy", POLICIES)
each_interpolation = pytest.mark.parametrize(
    "interpolation", [RANDOM, BILINEAR, BICUBIC], ids=["random", "bilinear", "bicubic"]
)


@pytest.fixture(autouse=True)
def posterize_to_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm posterizes to 0 bits at times and means black by it, which Pillow refuses to make from 13 on."""

    def posterize(image: Image.Image, bits: int) -> Image.Image:
        return image.point([level & ~(2 ** (8 - bits) - 1) for level in range(256)] * 3)

    monkeypatch.setattr(ImageOps, "posterize", posterize)


def augmentation(policy: str, interpolation: Any = RANDOM, translate_const: int = 20) -> Any:
    """As ``create_transform`` makes it."""
    known: dict[str, Any] = {"translate_const": translate_const, "img_mean": (124, 116, 104)}
    if interpolation is not None:
        known["interpolation"] = interpolation
    if policy.startswith("rand"):
        return timm_auto.rand_augment_transform(policy, known)
    if policy.startswith("augmix"):
        return timm_auto.augment_and_mix_transform(policy, known | {"translate_pct": 0.3})
    return timm_auto.auto_augment_transform(policy, known)


class TestPixels:
    @each_policy
    @each_interpolation
    def test_are_timms(self, policy: str, interpolation: Any, device: str) -> None:
        files = lossless("portrait", "small", "tiny", "4:2:2")
        transform = composed("pil", augmentation(policy, interpolation))
        assert_alike(transform, device, files, times=6)

    @pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "3a"])
    def test_of_images_one_pixel_high_or_wide(self, policy: str, device: str) -> None:
        files = lossless("one pixel high", "one pixel wide")
        transform = composed("pil", augmentation(policy))
        assert_alike(transform, device, files, times=20)

    @each_interpolation
    @pytest.mark.parametrize(
        "policy", ["augmix-m5-w4-d2", "augmix-m3", *(f"augmix-m9-w{width}-mstd0.5-a0.5" for width in (1, 2))]
    )
    def test_of_augmix(self, policy: str, interpolation: Any, device: str) -> None:
        files = lossless("portrait", "small", "tiny", "grey")
        # As behind the crop of create_transform: older timms mix squares only.
        transform = composed("pil", v1.CenterCrop(48), augmentation(policy, interpolation))
        assert_alike(transform, device, files, times=6)

    def test_of_one_operation_and_of_some_of_all(self, device: str) -> None:
        transform = composed("pil", timm_auto.AugmentOp("SolarizeAdd", 0.7, 8))
        assert_alike(transform, device, lossless(but=("large",)), times=4)
        operations = [timm_auto.AugmentOp(name, 0.9, 7) for name in timm_auto.NAME_TO_OP]
        transform = composed("pil", timm_auto.RandAugment(operations, 2))
        assert_alike(transform, device, lossless("portrait", "small"), times=20)

    @pytest.mark.parametrize("magnitude", [0, 2, 0.9 / 0.19, 7, 9, 10])
    def test_of_a_blur_are_pillows(self, magnitude: float, device: str) -> None:
        """The radius is 0.1 + 0.19 times the magnitude; by one of 1 or 2 pixels many means lie between two levels."""
        transform = composed("pil", timm_auto.AugmentOp("GaussianBlur", 1.0, magnitude))
        assert_alike(transform, device, lossless())
        at_random = timm_auto.AugmentOp("GaussianBlurRand", 0.4, magnitude, {"magnitude_std": 1.0})
        assert_alike(composed("pil", at_random), device, lossless("small", "tiny"), times=5)


POLICIES = ("rand-m9", "original", "augmix-m3")
FILLS = ((1, 2), (1, 2, 300))
"""The second is no color."""


def appended(policy: Any) -> Any:
    policy.ops.append(lambda image: image)
    return policy


@pytest.mark.parametrize(
    "transforms",
    [
        [augmentation("augmix-m3-b1")],
        [augmentation("rand-m9", Image.Resampling.LANCZOS)],
        *([before, augmentation(policy)] for before in (v1.PILToTensor(), v1.Grayscale()) for policy in POLICIES),
        [appended(augmentation("rand-m9"))],
        *([timm_auto.rand_augment_transform("rand-m9", {"img_mean": fill, "translate_const": 9})] for fill in FILLS),
    ],
)
def test_has_no_plan(transforms: list[Any]) -> None:
    assert not has_plan(v1.Compose([*transforms, v1.PILToTensor()]))
