"""Blur, compression, noise and erased boxes: torchvision's for PIL images, uint8 tensors and float tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from proxyloader import EncodedImage, UnsupportedTransformError, compile_transforms
from proxyloader.transforms.plan import ParamRow
from proxyloader.transforms.registry import plan_for

from ..compare import EXACT, Bound, Images, assert_as_torchvision, images, lossless, opened
from ..outcomes import raises
from ..side_by_side import assert_as_torch

BLUR = Bound(1e-3, 0, 1)
"""torch sums over both axes at once, DALI over one after the other; sums between two levels may round otherwise."""

NEAREST = InterpolationMode.NEAREST_EXACT
NOT_THIN = ("one pixel high", "one pixel wide")

both_versions = pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])

TO_FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
BEFORE = {"a PIL image": [], "a uint8 tensor": [v2.ToImage()], "a float tensor": TO_FLOAT}
of_each_kind = pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
of_tensors = pytest.mark.parametrize("before", [[v2.ToImage()], TO_FLOAT], ids=["a uint8 tensor", "a float tensor"])


def composed(before: list[Any], *transforms: Any) -> v1.Compose:
    """Ends in a tensor, whatever it begins with."""
    return v1.Compose([*before, *transforms, v2.ToImage()])


def many(*names: str, times: int = 12) -> Images:
    """Each image several times, as each time something else is drawn."""
    return {f"{name} {k}": data for name, data in images(*names).items() for k in range(times)}


class TestGaussianBlur:
    @both_versions
    @of_each_kind
    @pytest.mark.parametrize("kernel", [3, (9, 3)], ids=str)
    def test_pixels(self, version: Any, before: list[Any], kernel: Any, device: str) -> None:
        transform = composed(before, version.GaussianBlur(kernel))
        bound = EXACT if before is TO_FLOAT else BLUR
        assert_as_torchvision(transform, device, images(but=NOT_THIN) | many("small"), bound=bound)

    def test_the_large_kernels_of_contrastive_learning(self, device: str) -> None:
        transform = composed([v1.Resize((96, 96))], v1.RandomApply([v1.GaussianBlur(23, (0.1, 2.0))], p=0.5))
        assert_as_torchvision(transform, device, many("small", times=6), bound=Bound(0.25, 1, 1))
        on_floats = composed([*TO_FLOAT, v2.CenterCrop(96)], v2.GaussianBlur((33, 65), (4.0, 9.0)))
        assert_as_torchvision(on_floats, device, many("landscape", times=4), bound=EXACT)

    @pytest.mark.parametrize("sigma", [0.01, 0.3, 30.0])
    def test_any_sigma(self, sigma: float, device: str) -> None:
        transform = composed([], v2.GaussianBlur(5, sigma))
        assert_as_torchvision(transform, device, images("landscape", "tiny", "PNG"), bound=BLUR)

    def test_of_a_grey_image(self, device: str) -> None:
        assert_as_torchvision(composed([], v1.Grayscale(), v1.GaussianBlur(3)), device, images("grey"), bound=BLUR)

    def test_among_other_steps(self, device: str) -> None:
        blurs = [v1.GaussianBlur(5), v1.RandomHorizontalFlip(), v2.RandomInvert(), v2.GaussianBlur((3, 5))]
        assert_as_torchvision(composed([], *blurs, v1.CenterCrop(30)), device, many("small"), bound=BLUR)
        normalize = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        transform = composed(TO_FLOAT, normalize, *(blurs[k] for k in (0, 1, 3)))
        assert_as_torchvision(transform, device, many("small"), bound=EXACT)

    def test_an_image_too_small_to_be_reflected_is_an_error_as_in_torchvision(self) -> None:
        transform = composed([], v1.GaussianBlur((3, 7)))
        thin = EncodedImage.from_bytes(images("one pixel wide")["one pixel wide"])
        with pytest.raises(ValueError, match=r"kernel of \(7, 3\) is too large for an image of \(48, 1\)"):
            compile_transforms(transform)(thin)
        with pytest.raises(RuntimeError, match="Padding"):
            transform(torch.zeros(3, 48, 1, dtype=torch.uint8))
        just_enough = composed([], v1.CenterCrop((4, 2)), v1.GaussianBlur((3, 7)))
        assert_as_torchvision(just_enough, "cpu", images("small"), bound=BLUR)


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
class TestJPEG:
    BEFORE_LEVELS = {name: before for name, before in BEFORE.items() if before is not TO_FLOAT}
    of_levels = pytest.mark.parametrize("before", BEFORE_LEVELS.values(), ids=BEFORE_LEVELS)

    @of_levels
    @pytest.mark.parametrize("quality", [1, 10, 50, 75, 95, 100, (1, 100)], ids=str)
    def test_is_exact(self, before: list[Any], quality: Any, device: str) -> None:
        assert_as_torchvision(composed(before, v2.JPEG(quality)), device, lossless(), bound=EXACT, times=2)

    @of_levels
    def test_of_a_grey_image(self, before: list[Any], device: str) -> None:
        transform = composed(before, v2.Grayscale(), v2.JPEG((5, 60)))
        assert_as_torchvision(transform, device, lossless("grey"), bound=EXACT, times=5)

    @of_levels
    def test_among_other_steps_for_some_of_the_images(self, before: list[Any], device: str) -> None:
        jpeg = v2.RandomApply([v2.JPEG((1, 30)), v1.RandomVerticalFlip()])
        transform = composed([*before, v1.RandomHorizontalFlip()], jpeg, v2.RandomCrop((30, 20), 2, True), *TO_FLOAT)
        assert_as_torchvision(transform, device, lossless(), bound=EXACT, times=3)

    def test_of_floats_is_refused_as_by_torchvision(self) -> None:
        with pytest.raises(RuntimeError, match="uint8"):
            v2.JPEG(50)(torch.zeros(3, 8, 8))
        with raises(UnsupportedTransformError, code="wrong-place", transform="v2.JPEG"):
            plan_for(composed(TO_FLOAT, v2.JPEG(50)))

    def test_draws_are_torchvisions(self) -> None:
        transform = v2.JPEG((3, 97))
        plan = plan_for(composed([], transform))
        torch.manual_seed(5)
        expected = [transform.make_params([])["quality"] for _ in range(100)]
        state = torch.get_rng_state()
        torch.manual_seed(5)
        assert [plan.sample_params(9, 9)[0] for _ in range(100)] == expected
        assert torch.equal(torch.get_rng_state(), state)


class TestRandomErasing:
    VALUES = [0, 7.7, (10, 20.4, 250)]

    @both_versions
    @of_tensors
    @pytest.mark.parametrize("value", VALUES, ids=str)
    def test_of_a_tensor_is_exact(self, version: Any, before: list[Any], value: Any, device: str) -> None:
        transform = composed(before, version.RandomErasing(0.8, value=value))
        assert_as_torchvision(transform, device, images() | many("small", "tiny"), bound=EXACT)

    @pytest.mark.parametrize("value", VALUES, ids=str)
    def test_of_a_pil_image_in_v2(self, value: Any, device: str) -> None:
        transform = composed([], v2.RandomErasing(0.8, value=value))
        assert_as_torchvision(transform, device, images() | many("small", "tiny"), bound=EXACT)

    @both_versions
    def test_after_normalize_as_in_the_training_reference(self, version: Any, device: str) -> None:
        normalize = version.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        erasing = version.RandomErasing(0.9, (0.1, 0.6), (0.5, 4), value=(-1.5, 0.25, 2))
        transform = v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), normalize, erasing, v1.RandomVerticalFlip()])
        assert_as_torchvision(transform, device, many("small", "landscape"), bound=EXACT)

    @both_versions
    def test_where_no_box_fits_nothing_is_erased(self, version: Any, device: str) -> None:
        transform = composed([v2.ToImage()], version.RandomErasing(1, (1.0, 1.0), (0.5, 2.0), value=9))
        assert_as_torchvision(transform, device, many("small", "one pixel high", times=4), bound=EXACT)

    @both_versions
    def test_of_a_grey_image(self, version: Any, device: str) -> None:
        transform = composed([v2.ToImage(), version.Grayscale()], version.RandomErasing(0.8, value=200))
        assert_as_torchvision(transform, device, many("small"), bound=Bound(1e-3, 0, 1))

    @both_versions
    @pytest.mark.parametrize("channels", [1, 3])
    def test_noise_is_torchvisions(self, version: Any, channels: int, device: str) -> None:
        erasing = version.RandomErasing(0.8, scale=(0.001, 0.5), value="random")
        steps = [
            v1.Grayscale(channels),
            v1.ToTensor(),
            erasing,
            v1.RandomHorizontalFlip(),
            version.Normalize([0.5], [2]),
        ]
        assert_as_torchvision(v1.Compose(steps), device, images() | many("small", "tiny"), bound=EXACT)

    @both_versions
    def test_noise_where_no_box_fits(self, version: Any, device: str) -> None:
        erasing = version.RandomErasing(0.9, (0.9, 1.0), (0.5, 2.0), value="random")
        files = many("small", "one pixel high", "one pixel wide", "tiny", times=5)
        assert_as_torchvision(v1.Compose([v1.ToTensor(), erasing]), device, files, bound=EXACT)

    def test_refusals_say_which_argument(self) -> None:
        def refused(transform: Any, code: str, argument: str) -> None:
            with raises(UnsupportedTransformError, code=code, argument=argument):
                plan_for(transform)

        random = [v2.ToImage(), v2.RandomErasing(value="random")]
        refused(composed(random), "wrong-place", "value")
        refused(composed([], v1.RandomErasing()), "wrong-place", "")
        on_uint8 = composed([v2.ToImage()], v1.RandomErasing(value=300))
        refused(on_uint8, "unsupported-argument", "value")
        two = composed([v2.ToImage()], v2.RandomErasing(value=(1, 2)))
        refused(two, "unsupported-argument", "value")


NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


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
        assert_as_torchvision(transform, device, images(but=("large",)), bound=EXACT)

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
            assert_as_torchvision(transform, device, lossless(but=("large",)), bound=EXACT)

    def test_by_chance_and_several_times(self, device: str) -> None:
        noises = [v2.GaussianNoise(0.1, 0.2), v2.RandomErasing(0.5, value="random"), v2.GaussianNoise(0, 0.3)]
        choice = v2.RandomChoice([v2.GaussianNoise(0.2), v2.Identity(), v2.RandomErasing(0.9, value="random")])
        for transform in (v1.RandomApply(noises[:1]), choice):
            assert_as_torchvision(
                v1.Compose([v1.ToTensor(), transform, *noises[1:2]]), device, many("tiny"), bound=EXACT
            )
        assert_as_torchvision(v1.Compose([v1.ToTensor(), noises[0], noises[1]]), device, many("tiny"), bound=EXACT)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_comes_through_a_loader(self, workers: int, folder: ImageFolder, device: str) -> None:
        noises = [v2.GaussianNoise(0.1, 0.3), v1.RandomErasing(0.5, value="random")]
        transform = v1.Compose([v1.RandomResizedCrop(48), v1.ToTensor(), *noises])

        def build(loader_class: Any) -> Any:
            photos = ImageFolder(folder.root, transform)
            return loader_class(photos, batch_size=10, shuffle=True, num_workers=workers)

        assert_as_torch(build, device=device)

    def test_travels_behind_the_columns(self) -> None:
        plan = plan_for(v1.Compose([v1.ToTensor(), v2.GaussianNoise(), v1.RandomErasing(1, value=3)]))
        torch.manual_seed(1)
        row = plan.sample_params(10, 9)
        assert plan.num_params == 1 + 1 + 4
        assert row.shape == (6 + 5 * ParamRow.BLOCK,)  # of 270 values
        torch.manual_seed(1)
        noise = torch.randn(3, 10, 9) * 0.1
        assert torch.equal(torch.from_numpy(row[6 : 6 + 270]).reshape(10, 9, 3).permute(2, 0, 1), noise)
        assert not row[6 + 270 :].any()

    @pytest.mark.parametrize(
        "step",
        [v1.Resize((9, 9)), v2.RandomCrop(5), v1.RandomApply([v1.RandomInvert()]), v1.ColorJitter(0.3)],
        ids=repr,
    )
    def test_where_the_order_in_memory_is_not_known_it_is_refused(self, step: Any) -> None:
        with raises(UnsupportedTransformError, code="wrong-place", transform="v2.GaussianNoise"):
            plan_for(v1.Compose([v1.ToTensor(), step, v2.GaussianNoise()]))
        plan_for(v1.Compose([step, v1.ToTensor(), v2.GaussianNoise()]))

    def test_translating_draws_nothing(self) -> None:
        state = torch.get_rng_state()
        plan_for(v1.Compose([v1.ToTensor(), v2.GaussianNoise()]))
        assert torch.equal(torch.get_rng_state(), state)


class TestRow:
    def test_arrays_begin_at_blocks(self) -> None:
        row = ParamRow([7.0])
        arrays = [np.full(size, size, np.float32) for size in (1, ParamRow.BLOCK, ParamRow.BLOCK + 1, 3)]
        row.extend([row.attach(array) for array in arrays])
        assert row == [7.0, 0, 1, 2, 4]
        packed = row.packed()
        assert packed.dtype == np.float32
        for first, array in zip(row[1:], arrays):
            start = len(row) + int(first) * ParamRow.BLOCK
            assert np.array_equal(packed[start : start + array.size], array)

    def test_of_more_than_a_float32_counts(self) -> None:
        far = 2.0**24 - 1  # the last block that a column can name
        assert np.float32(far) == far
        assert far * ParamRow.BLOCK * 4 >= 4e9


@of_each_kind
def test_identity_and_to_pure_tensor_change_nothing(before: list[Any], device: str) -> None:
    plan = plan_for(composed(before, v2.Identity(), v2.ToPureTensor()))
    assert plan == plan_for(composed(before))
    assert_as_torchvision(composed(before, v2.Identity(), v2.ToPureTensor()), device, images("small"), bound=EXACT)
