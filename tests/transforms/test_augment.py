"""Blur and erased boxes: torchvision's for PIL images, uint8 tensors and float tensors."""

from __future__ import annotations

from typing import Any

import pytest
from torchvision.transforms import transforms as v1, v2

from .. import compare
from ..compare import CLOSE, THIN, Images, as_image, assert_alike, both_versions, images, many, of_each_kind, of_levels
from ..plans import plan_for

NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
FLIP, BLUR_5, BLUR_3_5 = v1.RandomHorizontalFlip(), v1.GaussianBlur(5), v2.GaussianBlur((3, 5))
SIGMAS = images("landscape", "tiny", "PNG")
SMALL, SMALL_AND_TINY = many("small", times=12), images(but=("large",)) | many("small", "tiny", times=8)

BLURS: dict[str, tuple[Any, Images]] = {
    "a large kernel, as of contrastive learning": (
        as_image(v1.Resize((96, 96)), v1.RandomApply([v1.GaussianBlur(23, (0.1, 2.0))], p=0.5)),
        many("small", times=6),
    ),
    **{f"sigma {sigma}": (as_image(v2.GaussianBlur(5, sigma)), SIGMAS) for sigma in (0.01, 0.3, 30.0)},
    "a grey image": (as_image(v1.Grayscale(), v1.GaussianBlur(3)), images("grey")),
    "among others": (as_image(BLUR_5, FLIP, v2.RandomInvert(), BLUR_3_5, v1.CenterCrop(30)), SMALL),
    "just large enough": (as_image(v1.CenterCrop((4, 2)), v1.GaussianBlur((3, 7))), images("small")),
}


class TestGaussianBlur:
    @both_versions
    @of_levels
    @pytest.mark.parametrize("kernel", [3, (9, 3)], ids=str)
    def test_pixels(self, version: Any, before: list[Any], kernel: Any, device: str) -> None:
        assert_alike(as_image(*before, version.GaussianBlur(kernel)), device, images(but=THIN) | SMALL, bound=CLOSE)

    @pytest.mark.parametrize(("transform", "files"), BLURS.values(), ids=BLURS)
    def test_others(self, transform: Any, files: Images, device: str) -> None:
        assert_alike(transform, device, files, bound=CLOSE)

    def test_an_image_too_small_to_be_reflected_is_an_error_as_in_torchvision(self) -> None:
        transform = as_image(v1.GaussianBlur((3, 7)))
        with pytest.raises(RuntimeError, match="Padding"):
            compare.undecoded(transform, images("one pixel wide"))


class TestRandomErasing:
    @both_versions
    @of_each_kind
    @pytest.mark.parametrize("value", [0, 7.7, (10, 20.4, 250)], ids=str)
    def test_of_one_value_is_exact(self, version: Any, before: list[Any], value: Any, device: str) -> None:
        if before or version is v2:  # v1 takes tensors alone
            transform = as_image(*before, version.RandomErasing(0.8, value=value))
            assert_alike(transform, device, SMALL_AND_TINY)
        if value == 0 and len(before) == 1:
            grey = as_image(*before, version.Grayscale(), version.RandomErasing(0.8, value=200))
            assert_alike(grey, device, SMALL)

    @both_versions
    def test_after_normalize_as_in_the_training_reference(self, version: Any, device: str) -> None:
        erasing = version.RandomErasing(0.9, (0.1, 0.6), (0.5, 4), value=(-1.5, 0.25, 2))
        transform = v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE, erasing])
        assert_alike(transform, device, many("small", "landscape", times=12))

    @both_versions
    def test_where_no_box_fits_nothing_is_erased(self, version: Any, device: str) -> None:
        transform = as_image(v2.ToImage(), version.RandomErasing(1, (1.0, 1.0), (0.5, 2.0), value=9))
        assert_alike(transform, device, many("small", "one pixel high"))
        noise = version.RandomErasing(0.9, (0.9, 1.0), (0.5, 2.0), value="random")
        files = many("small", *THIN, "tiny", times=5)
        assert_alike(v1.Compose([v1.ToTensor(), noise]), device, files)

    @both_versions
    @pytest.mark.parametrize("channels", [1, 3])
    def test_noise_is_torchvisions(self, version: Any, channels: int, device: str) -> None:
        erasing = version.RandomErasing(0.8, scale=(0.001, 0.5), value="random")
        steps = [v1.Grayscale(channels), v1.ToTensor(), FLIP, version.Normalize([0.5], [2]), erasing, erasing]
        assert_alike(v1.Compose(steps), device, SMALL_AND_TINY)


@of_each_kind
def test_identity_and_to_pure_tensor_change_nothing(before: list[Any], device: str) -> None:
    plan = plan_for(as_image(*before, v2.Identity(), v2.ToPureTensor()))
    assert plan == plan_for(as_image(*before))
    assert_alike(as_image(*before, v2.Identity(), v2.ToPureTensor()), device, images("small"))
