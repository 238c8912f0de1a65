"""timm's transforms: what ``create_transform`` makes is translated, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from timm.data import (
    auto_augment as timm_auto,
    create_transform,
    random_erasing as timm_erasing,
    transforms as timm_transforms,
)
from torchvision.transforms import transforms as v1

from .. import scripts
from ..compare import CLOSE, EXACT, THIN, Images, assert_alike, composed, images, lossless
from ..limits import WAIT_S
from ..plans import has_plan

MEAN, STD = (0.5, 0.4, 0.6), (0.2, 0.3, 0.25)


def files() -> Images:
    """Of pictures with a surface: what is made of a line of pixels is enlarged by hundreds."""
    return images("landscape", "portrait", "small", "large", "grey", "4:2:2", "PNG")


def training(**settings: Any) -> Any:
    return create_transform(**{"input_size": 64, "is_training": True} | settings)


TRAINING: list[dict[str, Any]] = [
    {},
    {"interpolation": "random"},
    {"interpolation": "bicubic", "scale": (0.3, 1.0), "ratio": (0.5, 2.0)},
    {"no_aug": True},
    {"no_aug": True, "interpolation": "bicubic", "normalize": False},
    {"hflip": 0.0, "vflip": 0.7, "mean": MEAN, "std": STD},
    {"color_jitter": (0.3, 0.2, 0.4, 0.1), "hflip": 1.0},
    {"color_jitter": 0.4, "color_jitter_prob": 0.6, "grayscale_prob": 0.3, "gaussian_blur_prob": 0.5},
    {"color_jitter": None, "use_prefetcher": True},
    {"color_jitter": None, "normalize": False},
    {"input_size": (3, 48, 96), "interpolation": "random", "color_jitter": None},
    {"train_crop_mode": "rkrc", "color_jitter": None},
    {"train_crop_mode": "rkrr", "color_jitter": None, "interpolation": "random"},
    {"train_crop_mode": "rkrr", "scale": (0.5, 1.5), "ratio": (0.5, 2.0), "color_jitter": None},
    {"re_prob": 0.7, "re_mode": "const", "re_count": 3, "color_jitter": None},
    {"auto_augment": "rand-m9-mstd0.5", "interpolation": "random", "re_prob": 0.3, "re_mode": "pixel"},
    *({"auto_augment": policy, "interpolation": "bilinear"} for policy in ("rand-m6-n3-t3aw-inc1", "original", "3a")),
    {"auto_augment": "augmix-m5-w4-d2", "re_prob": 0.3, "re_mode": "pixel"},
]
EVALUATION: list[dict[str, Any]] = [
    {},
    {"interpolation": "bicubic", "crop_pct": 0.95},
    {"crop_mode": "squash", "crop_pct": 1.0},
    {"crop_mode": "border", "crop_pct": 1.0},
    {"crop_mode": "border", "crop_pct": 0.8, "interpolation": "bicubic", "mean": MEAN, "std": STD},
    {"crop_mode": "border", "interpolation": "random"},
    {"input_size": (3, 48, 96)},
    {"crop_border_pixels": 4},
    {"use_prefetcher": True},
    {"normalize": False},
]


class TestCreateTransform:
    @pytest.mark.parametrize("settings", TRAINING + [{"is_training": False} | each for each in EVALUATION], ids=str)
    def test_gives_the_same_pixels(self, settings: dict[str, Any], device: str) -> None:
        bound = CLOSE if "gaussian_blur_prob" in settings else EXACT
        assert_alike(training(**settings), device, files(), bound=bound, times=3)


class TestEachClass:
    @pytest.mark.parametrize("size", [20, (30, 200), 520], ids=str)
    @pytest.mark.parametrize("fill", [0, (9, 90, 200)], ids=str)
    @pytest.mark.parametrize("name", ["CenterCropOrPad", "RandomCropOrPad"])
    def test_crops_and_pads_with_a_constant(self, name: str, size: Any, fill: Any, device: str) -> None:
        transform = composed("pil", getattr(timm_transforms, name)(size, fill=fill))
        assert_alike(transform, device, lossless("large", "tiny") if size == 520 else lossless(), times=2)

    @pytest.mark.parametrize("size", [20, (200, 130), (31, 230)], ids=str)
    @pytest.mark.parametrize("name", ["CenterCropOrPad", "RandomCropOrPad"])
    def test_crops_and_pads_with_a_reflection(self, name: str, size: Any, device: str) -> None:
        transform = composed("pil", getattr(timm_transforms, name)(size, padding_mode="reflect"))
        assert_alike(transform, device, lossless("landscape", "portrait", "4:2:2"), times=3)

    def test_reflects_a_line_that_is_cropped_along_it_pads_at_random_and_trims(self, device: str) -> None:
        transform = composed("pil", timm_transforms.CenterCropOrPad((1, 40), padding_mode="reflect"))
        assert_alike(transform, device, lossless("one pixel high"))
        transform = composed("pil", timm_transforms.RandomPad((140, 150), fill=7), timm_transforms.TrimBorder(3))
        assert_alike(transform, device, lossless(but=("large",)), times=2)

    @pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
    def test_resizes_by_every_interpolation(self, interpolation: str, device: str) -> None:
        transform = composed("pil", timm_transforms.RandomResizedCropAndInterpolation(32, interpolation=interpolation))
        assert_alike(transform, device, lossless("landscape", "portrait", "4:2:2"))

    @pytest.mark.parametrize(
        "transform",
        [
            *(
                timm_transforms.RandomResizedCropAndInterpolation(24, scale, interpolation="random")
                for scale in ((0.08, 1.0), (0.5, 3.0))  # of the second some boxes do not fit
            ),
            timm_transforms.ResizeKeepRatio(
                *((40, 60), 0.3, "random"), random_scale_prob=0.5, random_scale_area=True, random_aspect_prob=0.5
            ),
        ],
    )
    def test_draws_boxes_sizes_and_interpolations(self, transform: Any, device: str) -> None:
        assert_alike(composed("pil", transform), device, files(), times=6)

    def test_converts(self, device: str) -> None:
        to_tensor, pil_to_tensor = timm_transforms.MaybeToTensor(), timm_transforms.MaybePILToTensor()
        for each in [to_tensor], [pil_to_tensor, to_tensor, pil_to_tensor]:
            assert_alike(v1.Compose(each), device, lossless("small", "grey"))

    @pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
    @pytest.mark.parametrize("counts", [(1, 1), (2, 5)], ids=str)
    def test_erases(self, mode: str, counts: Any, device: str) -> None:
        low, high = counts
        erase = timm_erasing.RandomErasing(0.8, mode=mode, min_count=low, max_count=high, device="cpu")
        transform = v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), erase])
        assert_alike(transform, device, lossless(but=("large",)), times=3)

    def test_erases_boxes_of_no_pixels_and_whole_levels_with_zeros(self, device: str) -> None:
        """Of a small image, a share of a small area rounds to nothing."""
        erase = timm_erasing.RandomErasing(1.0, min_area=0.001, max_area=0.02, mode="pixel", max_count=2, device="cpu")
        transform = v1.Compose([v1.ToTensor(), erase])
        assert_alike(transform, device, lossless("tiny", "one pixel high"), times=20)
        transform = v1.Compose([v1.PILToTensor(), timm_erasing.RandomErasing(0.8, device="cpu")])
        assert_alike(transform, device, lossless(), times=2)


# --- automatic augmentation ------------------------------------------------------------------------------------------

RANDOM, BILINEAR, BICUBIC = None, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC

POLICIES = [
    *("rand-m9-mstd0.5-inc1", "rand-m9-n3-mstd0.5", "rand-m15-n2-mmax20-p0.9", "rand-m9-mstd101-tweights"),
    *("rand-m7-mstd0.5-inc1-t3aw", "rand-m10-n1-t3a", "original-mstd0.5", "originalr", "v0", "v0r-mstd1", "3a"),
]
each_interpolation = pytest.mark.parametrize(
    "interpolation", [RANDOM, BILINEAR, BICUBIC], ids=["random", "bilinear", "bicubic"]
)


@pytest.fixture(autouse=True)
def posterize_to_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm posterizes to 0 bits at times and means black by it, which Pillow refuses to make from 13 on."""

    def posterize(image: Image.Image, bits: int) -> Image.Image:
        return image.point([level & ~(2 ** (8 - bits) - 1) for level in range(256)] * 3)

    monkeypatch.setattr(ImageOps, "posterize", posterize)


def augmentation(policy: str, interpolation: Any = RANDOM) -> Any:
    """As ``create_transform`` makes it."""
    known: dict[str, Any] = {"translate_const": 20, "img_mean": (124, 116, 104)}
    known |= {} if interpolation is RANDOM else {"interpolation": interpolation}
    if policy.startswith("rand"):
        return timm_auto.rand_augment_transform(policy, known)
    if policy.startswith("augmix"):
        return timm_auto.augment_and_mix_transform(policy, known | {"translate_pct": 0.3})
    return timm_auto.auto_augment_transform(policy, known)


class TestAutomaticAugmentation:
    @pytest.mark.parametrize("policy", POLICIES)
    @each_interpolation
    def test_are_timms(self, policy: str, interpolation: Any, device: str) -> None:
        transform = composed("pil", augmentation(policy, interpolation))
        assert_alike(transform, device, lossless("portrait", "small", "tiny", "4:2:2"), times=6)

    @pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "3a"])
    def test_of_images_one_pixel_high_or_wide(self, policy: str, device: str) -> None:
        assert_alike(composed("pil", augmentation(policy)), device, lossless(*THIN), times=20)

    @each_interpolation
    @pytest.mark.parametrize(
        "policy", ["augmix-m5-w4-d2", "augmix-m3", *(f"augmix-m9-w{width}-mstd0.5-a0.5" for width in (1, 2))]
    )
    def test_of_augmix(self, policy: str, interpolation: Any, device: str) -> None:
        # As behind the crop of create_transform: older timms mix squares only.
        transform = composed("pil", v1.CenterCrop(48), augmentation(policy, interpolation))
        assert_alike(transform, device, lossless("portrait", "small", "tiny", "grey"), times=6)

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


# --- without a plan ---------------------------------------------------------------------------------------------------


class MyRandomErasing(timm_erasing.RandomErasing):
    """A subclass may do anything."""


BEFORE, KINDS = (v1.PILToTensor(), v1.Grayscale()), ("rand-m9", "original", "augmix-m3")
FILLS = ((1, 2), (1, 2, 300))
"""The second is no color."""


def appended(policy: Any) -> Any:
    policy.ops.append(lambda image: image)
    return policy


WITHOUT = [
    *(augmentation("augmix-m3-b1"), augmentation("rand-m9", Image.Resampling.LANCZOS)),
    appended(augmentation("rand-m9")),
    *(timm_auto.rand_augment_transform("rand-m9", {"img_mean": fill, "translate_const": 9}) for fill in FILLS),
]


@pytest.mark.parametrize(
    "transforms",
    [
        [timm_transforms.ToNumpy()],
        [training(separate=True)],
        [training(naflex=True)],
        [training(interpolation="box")],
        [v1.ToTensor(), MyRandomErasing(device="cpu")],
        [timm_erasing.RandomErasing(device="cpu")],
        [v1.ToTensor(), timm_erasing.RandomErasing()],
        [v1.PILToTensor(), timm_erasing.RandomErasing(mode="pixel", device="cpu")],
        [timm_transforms.CenterCropOrPad(9, padding_mode="edge")],
        [v1.ToTensor(), timm_transforms.ToTensor()],
        [timm_transforms.ToTensor(torch.float16)],
        [v1.ToTensor(), timm_transforms.RandomResizedCropAndInterpolation(9)],
        [v1.ToTensor(), timm_transforms.ResizeKeepRatio(9)],
        [v1.ToTensor(), timm_transforms.CenterCropOrPad(9)],
        [v1.ToTensor(), timm_transforms.RandomPad((9, 9))],
        [v1.ToTensor(), timm_transforms.TrimBorder(1)],
        *([first, augmentation(name), v1.PILToTensor()] for first in BEFORE for name in KINDS),
        *([each, v1.PILToTensor()] for each in WITHOUT),
    ],
)
def test_has_no_plan(transforms: Any) -> None:
    assert not has_plan(v1.Compose(transforms))


def test_timm_is_imported_for_its_own_transforms_only() -> None:
    script = (
        "import sys; assert 'timm' not in sys.modules;"
        "from torchvision import transforms as v1; from proxyloader.transforms.chain import START;"
        "assert START.through(v1.Compose([v1.RandomResizedCrop(9), v1.ToTensor()])); START.through(v1.Lambda(len));"
        "assert 'timm' not in sys.modules"
    )
    done = scripts.run(script, timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr


def test_a_timm_that_is_too_old_has_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    from proxyloader.transforms import registry

    def import_module(name: str, package: str) -> None:
        raise ImportError("cannot import name 'ResizeKeepRatio'", name="timm.data.transforms")

    monkeypatch.setattr(registry.importlib, "import_module", import_module)
    registry.load_timm_rules.cache_clear()
    try:
        registry.load_timm_rules()
    finally:
        registry.load_timm_rules.cache_clear()
