"""Blur, compression, noise and erased boxes: torchvision's for PIL images, uint8 tensors and float tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from proxyloader import EncodedImage, UnsupportedTransformError, compile_transforms
from proxyloader.transforms.registry import plan_for

from ..compare import (
    EXACT,
    THIN,
    TO_FLOAT,
    Bound,
    Images,
    as_image,
    assert_alike,
    both_versions,
    images,
    lossless,
    many,
    of_each_kind,
    opened,
)
from ..outcomes import raises
from ..side_by_side import assert_as_torch

BLUR = Bound(1e-3, 0, 1)
"""torch sums over both axes at once, DALI over one after the other; sums between two levels may round otherwise."""

NEAREST = InterpolationMode.NEAREST_EXACT


NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
FLIP, BLUR_5, BLUR_3_5 = v1.RandomHorizontalFlip(), v1.GaussianBlur(5), v2.GaussianBlur((3, 5))
SIGMAS = images("landscape", "tiny", "PNG")
SMALL, SMALL_AND_TINY = many("small", times=12), images() | many("small", "tiny", times=12)

BLURS: dict[str, tuple[Any, Images, Bound]] = {
    "a large kernel, as of contrastive learning": (
        as_image(v1.Resize((96, 96)), v1.RandomApply([v1.GaussianBlur(23, (0.1, 2.0))], p=0.5)),
        many("small", times=6),
        Bound(0.25, 1, 1),
    ),
    "larger ones, of floats": (
        as_image(*TO_FLOAT, v2.CenterCrop(96), v2.GaussianBlur((33, 65), (4.0, 9.0))),
        many("landscape"),
        EXACT,
    ),
    **{f"sigma {sigma}": (as_image(v2.GaussianBlur(5, sigma)), SIGMAS, BLUR) for sigma in (0.01, 0.3, 30.0)},
    "a grey image": (as_image(v1.Grayscale(), v1.GaussianBlur(3)), images("grey"), BLUR),
    "among others": (as_image(BLUR_5, FLIP, v2.RandomInvert(), BLUR_3_5, v1.CenterCrop(30)), SMALL, BLUR),
    "among others, of floats": (as_image(*TO_FLOAT, NORMALIZE, BLUR_5, FLIP, BLUR_3_5), SMALL, EXACT),
    "just large enough": (as_image(v1.CenterCrop((4, 2)), v1.GaussianBlur((3, 7))), images("small"), BLUR),
}


class TestGaussianBlur:
    @both_versions
    @of_each_kind
    @pytest.mark.parametrize("kernel", [3, (9, 3)], ids=str)
    def test_pixels(self, version: Any, before: list[Any], kernel: Any, device: str) -> None:
        bound = EXACT if before is TO_FLOAT else BLUR
        files = images(but=THIN) | SMALL
        assert_alike(as_image(*before, version.GaussianBlur(kernel)), device, files, bound=bound)

    @pytest.mark.parametrize(("transform", "files", "bound"), BLURS.values(), ids=BLURS)
    def test_others(self, transform: Any, files: Images, bound: Bound, device: str) -> None:
        assert_alike(transform, device, files, bound=bound)

    def test_an_image_too_small_to_be_reflected_is_an_error_as_in_torchvision(self) -> None:
        transform = as_image(v1.GaussianBlur((3, 7)))
        thin = EncodedImage.from_bytes(images("one pixel wide")["one pixel wide"])
        with pytest.raises(ValueError, match=r"kernel of size \(7, 3\) is too large for an image of size \(48, 1\)"):
            compile_transforms(transform)(thin)
        with pytest.raises(RuntimeError, match="Padding"):
            transform(torch.zeros(3, 48, 1, dtype=torch.uint8))


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
class TestJPEG:
    of_levels = pytest.mark.parametrize("before", [[], [v2.ToImage()]], ids=["a PIL image", "a uint8 tensor"])

    @of_levels
    @pytest.mark.parametrize("quality", [1, 10, 50, 75, 95, 100, (1, 100)], ids=str)
    def test_is_exact(self, before: list[Any], quality: Any, device: str) -> None:
        assert_alike(as_image(*before, v2.JPEG(quality)), device, lossless(), times=2)

    @of_levels
    def test_of_a_grey_image_and_among_other_steps_for_some_of_the_images(self, before: list[Any], device: str) -> None:
        grey = as_image(*before, v2.Grayscale(), v2.JPEG((5, 60)))
        assert_alike(grey, device, lossless("grey"), times=5)
        jpeg = v2.RandomApply([v2.JPEG((1, 30)), v1.RandomVerticalFlip()])
        transform = as_image(*before, v1.RandomHorizontalFlip(), jpeg, v2.RandomCrop((30, 20), 2, True), *TO_FLOAT)
        assert_alike(transform, device, lossless(), times=3)

    def test_of_floats_is_refused_as_by_torchvision(self) -> None:
        with pytest.raises(RuntimeError, match="uint8"):
            v2.JPEG(50)(torch.zeros(3, 8, 8))
        with raises(UnsupportedTransformError, code="wrong-place", transform="v2.JPEG"):
            plan_for(as_image(*TO_FLOAT, v2.JPEG(50)))


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
            assert_alike(grey, device, SMALL, bound=Bound(1e-3, 0, 1))

    @both_versions
    def test_after_normalize_as_in_the_training_reference(self, version: Any, device: str) -> None:
        erasing = version.RandomErasing(0.9, (0.1, 0.6), (0.5, 4), value=(-1.5, 0.25, 2))
        transform = v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE, erasing, v1.RandomVerticalFlip()])
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
        steps = [v1.Grayscale(channels), v1.ToTensor(), erasing, FLIP, version.Normalize([0.5], [2])]
        assert_alike(v1.Compose(steps), device, SMALL_AND_TINY)


BY_ARRAYS: dict[str, list[Any]] = {
    "noise": [v1.RandomResizedCrop(48), v1.ToTensor(), v2.GaussianNoise(0.1, 0.3), v1.RandomErasing(value="random")],
    "a nearest resize": [v1.RandomResizedCrop(90, interpolation=InterpolationMode.NEAREST), v1.ToTensor()],
    "an upright warp": [v2.CenterCrop(90), v2.RandomAffine(0, scale=(0.5, 0.5)), v1.ToTensor()],
}
"""Steps whose rows of numbers travel with arrays."""


class TestGaussianNoise:
    IN_MEMORY = {
        "channel after channel": [v1.ToTensor()],
        "channel after channel in v2": [v1.ToTensor(), v2.RandomVerticalFlip()],
        "pixel after pixel": [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)],
        "pixel after pixel in v2": TO_FLOAT,
        "flipped": [v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32), v1.RandomVerticalFlip()],
        "normalised": [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), NORMALIZE],
        "normalised in v2": [*TO_FLOAT, v2.Normalize(NORMALIZE.mean, NORMALIZE.std), v2.Identity()],
        "grey": [v1.Grayscale(), *TO_FLOAT],
        "resized before": [v1.RandomResizedCrop(128, interpolation=NEAREST), v1.ToTensor()],
    }

    @pytest.mark.parametrize("clip", [True, False], ids=["clipped", "as it comes"])
    @pytest.mark.parametrize("before", IN_MEMORY.values(), ids=IN_MEMORY)
    def test_is_dealt_out_as_the_tensor_lies_in_memory(self, before: list[Any], clip: bool, device: str) -> None:
        transform = v1.Compose([*before, v2.GaussianNoise(0.05, 0.2, clip)])
        assert_alike(transform, device, images(but=("large",)))

    @pytest.mark.parametrize("clip", [True, False], ids=["clipped", "beginning anew"])
    @pytest.mark.parametrize("before", [[v2.ToImage()], [v1.PILToTensor()], []], ids=["v2", "v1", "a PIL image"])
    def test_of_whole_levels_is_torchvisions_or_refused_as_there(
        self, before: list[Any], clip: bool, device: str
    ) -> None:
        transform = v1.Compose([*before, v2.GaussianNoise(0.1, 0.4, clip), v2.ToImage()])
        try:
            transform(opened(images("tiny")["tiny"]))
        except (TypeError, ValueError) as error:  # older versions take floats only, and none PIL images
            with raises(UnsupportedTransformError, code="wrong-place") as caught:
                plan_for(transform)
            assert str(error) in caught.value.reason
        else:
            assert_alike(transform, device, lossless(but=("large",)))

    def test_by_chance_and_several_times(self, device: str) -> None:
        noises = v2.GaussianNoise(0.1, 0.2), v2.RandomErasing(0.5, value="random")
        choice = v2.RandomChoice([v2.GaussianNoise(0.2), v2.Identity(), v2.RandomErasing(0.9, value="random")])
        for transform in (v1.RandomApply(noises[:1]), choice, noises[0]):
            steps = [v1.ToTensor(), transform, noises[1]]
            assert_alike(v1.Compose(steps), device, many("tiny", times=12))

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("steps", BY_ARRAYS.values(), ids=BY_ARRAYS)
    def test_comes_through_a_loader(self, workers: int, steps: list[Any], folder: ImageFolder, device: str) -> None:
        def build(loader_class: Any) -> Any:
            photos = ImageFolder(folder.root, v1.Compose(steps))
            return loader_class(photos, batch_size=10, shuffle=True, num_workers=workers)

        assert_as_torch(build, device=device)

    @pytest.mark.parametrize(
        "step",
        [v1.Resize((9, 9)), v2.RandomCrop(5), v1.RandomApply([v1.RandomInvert()]), v1.ColorJitter(0.3)],
        ids=repr,
    )
    def test_where_the_order_in_memory_is_not_known_it_is_refused(self, step: Any) -> None:
        with raises(UnsupportedTransformError, code="wrong-place", transform="v2.GaussianNoise"):
            plan_for(v1.Compose([v1.ToTensor(), step, v2.GaussianNoise()]))
        plan_for(v1.Compose([step, v1.ToTensor(), v2.GaussianNoise()]))


@of_each_kind
def test_identity_and_to_pure_tensor_change_nothing(before: list[Any], device: str) -> None:
    plan = plan_for(as_image(*before, v2.Identity(), v2.ToPureTensor()))
    assert plan == plan_for(as_image(*before))
    assert_alike(as_image(*before, v2.Identity(), v2.ToPureTensor()), device, images("small"))
