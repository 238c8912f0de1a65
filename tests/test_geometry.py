"""Crops, pads, resizes and flips: the boxes and sizes are torchvision's exactly, the pixels within a stated bound."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchvision.transforms.functional as F1
import torchvision.transforms.v2.functional as F2
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from proxyloader import UnsupportedTransformError
from proxyloader.transforms.geometry import (
    CenterRegion,
    Crop,
    Flip,
    RandomRegion,
    RandomResizedRegion,
    Resize,
    interpolation_name,
    resized_size,
)
from proxyloader.transforms.plan import Step
from proxyloader.transforms.registry import plan_for

from . import compare
from .compare import BICUBIC, BILINEAR, EXACT, LARGE_BICUBIC, LARGE_BILINEAR, Bound, assert_as_torchvision, images

SEEDS = 200
BOUNDS = {
    InterpolationMode.NEAREST: EXACT,
    InterpolationMode.BILINEAR: BILINEAR,
    InterpolationMode.BICUBIC: BICUBIC,
}
LARGE_BOUNDS = BOUNDS | {InterpolationMode.BILINEAR: LARGE_BILINEAR, InterpolationMode.BICUBIC: LARGE_BICUBIC}

sides = st.integers(1, 60)
both_versions = pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])
every_interpolation = pytest.mark.parametrize("interpolation", BOUNDS, ids=lambda mode: mode.value)


def composed(*transforms: Any) -> v1.Compose:
    """Ends in a uint8 tensor, where a difference is a whole level."""
    return v1.Compose([*transforms, v1.PILToTensor()])


def steps_of(transform: Any) -> tuple[Step, ...]:
    return plan_for(composed(transform)).steps


def drawn_by(step: Step, height: int, width: int) -> list[float]:
    row: list[float] = []
    step.draw((height, width), row)
    return row


class Surrounded:
    """An image with zeros around it, to take boxes of; torchvision's crop does not allow for boxes that miss it."""

    def __init__(self, image: torch.Tensor, margin: int = 70) -> None:
        self.margin, self.padded = margin, F1.pad(image, [margin])

    def box(self, top: int, left: int, height: int, width: int) -> torch.Tensor:
        top, left = top + self.margin, left + self.margin
        return self.padded[:, top : top + height, left : left + width]


def numbered(height: int, width: int) -> torch.Tensor:
    """An image whose pixels all differ, from 1 on; 0 is outside."""
    return torch.arange(1, height * width + 1, dtype=torch.float32).reshape(1, height, width)


class TestDraws:
    """What is drawn is what torchvision would have drawn, and its generator goes on from the same state."""

    @both_versions
    @pytest.mark.parametrize(
        ("arguments", "height", "width"),
        [
            pytest.param({}, 375, 500, id="defaults"),
            pytest.param({"scale": (0.2, 1), "ratio": (0.5, 2)}, 500, 333, id="ints among scale and ratio"),
            pytest.param({}, 1, 64, id="one pixel high, so the centre after ten attempts"),
            pytest.param({}, 48, 1, id="one pixel wide, so the centre after ten attempts"),
            pytest.param({"scale": (2.0, 3.0)}, 30, 40, id="nothing fits, so the whole image"),
            pytest.param({}, 7, 9, id="tiny"),
        ],
    )
    def test_random_resized_crop(self, version: Any, arguments: Any, height: int, width: int) -> None:
        transform = version.RandomResizedCrop(32, **arguments)
        (crop, _, _) = steps_of(transform)
        image = torch.empty((3, height, width))
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            if version is v1:
                expected = transform.get_params(image, transform.scale, transform.ratio)
            else:
                params = transform.make_params([image])
                expected = tuple(params[name] for name in ("top", "left", "height", "width"))
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            assert tuple(drawn_by(crop, height, width)) == expected
            assert torch.equal(torch.get_rng_state(), state)

    @both_versions
    @pytest.mark.parametrize(
        ("arguments", "height", "width"),
        [
            pytest.param({}, 40, 50, id="larger than the crop"),
            pytest.param({}, 20, 24, id="equal to the crop, which draws nothing"),
            pytest.param({}, 20, 50, id="equal in height, where v1 and v2 draw differently"),
            pytest.param({"padding": 4}, 20, 24, id="padding of one number"),
            pytest.param({"padding": [5]}, 20, 24, id="padding of one number in a list"),
            pytest.param({"padding": (3, 7)}, 20, 24, id="padding of two numbers"),
            pytest.param({"padding": (1, 2, 3, 4)}, 20, 24, id="padding of four numbers"),
            pytest.param({"padding": 30}, 9, 7, id="the crop may miss the image"),
            pytest.param({"pad_if_needed": True}, 9, 7, id="pad_if_needed in both directions"),
            pytest.param({"pad_if_needed": True}, 9, 70, id="pad_if_needed in height"),
            pytest.param({"pad_if_needed": True}, 90, 7, id="pad_if_needed in width"),
            pytest.param({"pad_if_needed": True, "padding": (1, 2, 3, 4)}, 5, 23, id="padding and pad_if_needed"),
        ],
    )
    def test_random_crop(self, version: Any, arguments: Any, height: int, width: int) -> None:
        transform = version.RandomCrop((20, 24), **arguments)
        (crop, _) = steps_of(transform)
        image = numbered(height, width)
        surrounded = Surrounded(image)
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            expected = transform(image)
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            top, left, *size = map(int, drawn_by(crop, height, width))
            assert torch.equal(surrounded.box(top, left, *size), expected)
            assert torch.equal(torch.get_rng_state(), state)

    @both_versions
    @pytest.mark.parametrize("name", ["RandomHorizontalFlip", "RandomVerticalFlip"])
    @pytest.mark.parametrize("p", [0, 0.1, 0.5, 1 / 3, 0.9, 1])
    def test_flips(self, version: Any, name: str, p: float) -> None:
        transform = getattr(version, name)(p)
        (flip, _) = steps_of(transform)
        image = numbered(3, 3)
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            flipped = not torch.equal(transform(image), image)
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            assert drawn_by(flip, 3, 3) == [flipped]
            assert torch.equal(torch.get_rng_state(), state)

    @both_versions
    def test_of_several_transforms_come_in_their_order(self, version: Any) -> None:
        transform = composed(
            version.RandomVerticalFlip(0.3),
            version.RandomResizedCrop(24),
            version.RandomHorizontalFlip(),
            version.RandomCrop(20, padding=2),
            version.RandomHorizontalFlip(0.7),
        )
        plan = plan_for(transform)
        image = F1.to_pil_image(numbered(50, 60).to(torch.uint8))
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            transform(image)
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            plan.draw(50, 60)
            assert torch.equal(torch.get_rng_state(), state)

    @both_versions
    def test_an_image_too_small_for_the_crop_raises_as_torchvision(self, version: Any) -> None:
        (crop, _) = steps_of(version.RandomCrop(32))
        with pytest.raises(ValueError, match=r"Required crop size \(32, 32\) is larger than input image size \(9, 7\)"):
            drawn_by(crop, 9, 7)

    @pytest.mark.parametrize("region", [RandomResizedRegion, RandomRegion])
    def test_versions_that_draw_differently_make_unequal_plans(self, region: Any) -> None:
        arguments = ((0.08, 1.0), (0.75, 1.3)) if region is RandomResizedRegion else ((9, 9), (0, 0, 0, 0), False)
        assert region(*arguments, "v1") != region(*arguments, "v2")


class TestResizedSize:
    @given(
        height=st.integers(1, 3000), width=st.integers(1, 3000), shorter=st.integers(1, 600), more=st.integers(1, 900)
    )
    @settings(max_examples=300, deadline=None)
    def test_is_torchvisions(self, height: int, width: int, shorter: int, more: int) -> None:
        computed = F1._compute_resized_output_size
        assert list(resized_size(height, width, shorter, None)) == computed((height, width), [shorter])
        bounded = list(resized_size(height, width, shorter, shorter + more))
        assert bounded == computed((height, width), [shorter], max_size=shorter + more)
        longest = list(resized_size(height, width, None, more))
        assert longest == computed((height, width), None, max_size=more, allow_size_none=True)

    @given(height=sides, width=sides, shorter=sides, more=sides)
    @settings(max_examples=100, deadline=None)
    def test_is_the_size_that_comes_out_of_both_versions(
        self, height: int, width: int, shorter: int, more: int
    ) -> None:
        image = torch.empty((3, height, width), device="meta")
        for max_size in (None, shorter + more):
            expected = resized_size(height, width, shorter, max_size)
            if 0 not in expected:
                assert F1.resize(image, [shorter], max_size=max_size).shape[1:] == expected
                assert F2.resize(image, [shorter], max_size=max_size).shape[1:] == expected
        expected = resized_size(height, width, None, more)
        if 0 not in expected:
            assert F2.resize(image, None, max_size=more).shape[1:] == expected

    def test_needs_one_of_its_numbers(self) -> None:
        with pytest.raises(ValueError, match="one of shorter and max_size"):
            resized_size(3, 4, None, None)

    def test_of_nothing_raises_where_pillow_raises_too(self) -> None:
        transform = composed(v2.Resize(None, max_size=20))
        with pytest.raises(ValueError, match="must be > 0"):
            transform(compare.opened(images("one pixel high")["one pixel high"]))
        with pytest.raises(ValueError, match=r"1 x 64 \(height x width\) would be resized to \(0, 20\)"):
            plan_for(transform).draw(1, 64)


class TestCenterCrop:
    @given(height=sides, width=sides, crop_height=sides, crop_width=sides)
    @settings(max_examples=300, deadline=None)
    def test_takes_torchvisions_box(self, height: int, width: int, crop_height: int, crop_width: int) -> None:
        image, size = numbered(height, width), (crop_height, crop_width)
        ours = Surrounded(image).box(*CenterRegion(size).box(height, width))
        assert torch.equal(ours, F1.center_crop(image, list(size)))
        assert torch.equal(ours, F2.center_crop(image, list(size)))

    @both_versions
    @pytest.mark.parametrize("size", [32, [33], (50, 71), (31, 200), (300, 20), (1, 1), 601])
    def test_pixels(self, version: Any, size: Any, device: str) -> None:
        assert_as_torchvision(composed(version.CenterCrop(size)), device, bound=EXACT)


class TestCropAndPad:
    @both_versions
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"padding": 4},
            {"padding": [3, 7], "fill": 77},
            {"padding": (1, 2, 3, 4), "fill": (1, 2, 250)},
            {"padding": 2, "fill": 127.7},
        ],
    )
    def test_random_crop(self, version: Any, arguments: Any, device: str) -> None:
        files = images("landscape", "portrait", "large", "grey", "PNG")
        assert_as_torchvision(composed(version.RandomCrop((60, 50), **arguments)), device, files, bound=EXACT)

    @both_versions
    @pytest.mark.parametrize("arguments", [{}, {"padding": 2, "fill": 9}, {"fill": (9, 8, 7)}])
    def test_random_crop_pads_where_needed(self, version: Any, arguments: Any, device: str) -> None:
        transform = composed(version.RandomCrop((60, 50), pad_if_needed=True, **arguments))
        assert_as_torchvision(transform, device, bound=EXACT)

    @both_versions
    def test_a_random_crop_may_miss_the_image(self, version: Any, device: str) -> None:
        assert_as_torchvision(composed(version.RandomCrop(3, padding=40, fill=5)), device, bound=EXACT)

    @both_versions
    @pytest.mark.parametrize("padding", [4, [5], (3, 7), (1, 2, 3, 4), 0])
    @pytest.mark.parametrize("fill", [0, 77, (1, 2, 250), 127.7, (255,)])
    def test_pad(self, version: Any, padding: Any, fill: Any, device: str) -> None:
        files = images("landscape", "tiny")
        assert_as_torchvision(composed(version.Pad(padding, fill=fill)), device, files, bound=EXACT)

    @both_versions
    def test_negative_padding_crops(self, version: Any, device: str) -> None:
        assert_as_torchvision(composed(version.Pad((-3, 2, -1, -4))), device, images("landscape", "small"), bound=EXACT)

    @both_versions
    @pytest.mark.parametrize("fill", [0, 0.5, -2, 300])
    def test_fill_is_in_the_units_of_the_tensor(self, version: Any, fill: float, device: str) -> None:
        to_float = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]
        files = images("landscape", "tiny")
        assert_as_torchvision(v1.Compose([*to_float, version.Pad(3, fill=fill)]), device, files, bound=EXACT)
        unscaled = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32), v2.Pad(3, fill=fill)])
        assert_as_torchvision(unscaled, device, files, bound=EXACT)
        normalized = v1.Compose([*to_float, v1.Normalize([0.5], [0.25]), version.Pad(3, fill=fill)])
        assert_as_torchvision(normalized, device, files, bound=EXACT)

    @both_versions
    def test_fill_of_a_uint8_tensor(self, version: Any, device: str) -> None:
        transform = v1.Compose([v1.PILToTensor(), version.Pad(3, fill=99)])
        assert_as_torchvision(transform, device, images("landscape", "tiny"), bound=EXACT)

    def test_fill_of_each_channel_of_a_tensor(self, device: str) -> None:
        transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Pad(3, fill=(0.1, 0.5, -1))])
        assert_as_torchvision(transform, device, images("landscape", "tiny"), bound=EXACT)

    @both_versions
    def test_fill_of_a_grey_image(self, version: Any, device: str) -> None:
        transform = composed(v1.Grayscale(), version.Pad(3, fill=99), version.CenterCrop(200))
        assert_as_torchvision(transform, device, bound=EXACT)

    @both_versions
    @pytest.mark.parametrize("mode", ["edge", "reflect", "symmetric"])
    def test_other_padding_modes_are_refused(self, version: Any, mode: str) -> None:
        for transform in (version.Pad(2, padding_mode=mode), version.RandomCrop(9, padding=2, padding_mode=mode)):
            with pytest.raises(
                UnsupportedTransformError, match=f"padding_mode='{mode}' is not translated; .*'constant'"
            ):
                steps_of(transform)
        assert steps_of(version.RandomCrop(9, padding_mode=mode)), "nothing is padded, so the mode does not count"

    @both_versions
    @pytest.mark.parametrize("fill", [300, -1, (0, 0, 256)])
    def test_a_fill_that_pixels_cannot_hold_is_refused(self, version: Any, fill: Any) -> None:
        with pytest.raises(UnsupportedTransformError, match=r"fill=.* is outside of 0\.\.255"):
            steps_of(version.Pad(2, fill=fill))

    def test_several_numbers_around_a_tensor_are_refused_with_v1_as_by_torchvision(self) -> None:
        around = {"fill": (1, 2, 3)}
        for transform in (v1.Pad(2, **around), v1.RandomCrop(9, padding=2, **around)):
            with pytest.raises(
                UnsupportedTransformError, match=r"fill=\(1, 2, 3\) is not what torchvision pads a tensor"
            ):
                plan_for(v1.Compose([v1.PILToTensor(), transform]))
        plan_for(v1.Compose([v1.PILToTensor(), v1.RandomCrop(9, **around)]))  # nothing is padded
        plan_for(v1.Compose([v1.PILToTensor(), v2.Pad(2, **around)]))

    @pytest.mark.parametrize("fill", [(1, 2), {"others": 3}, True])
    def test_other_fills_are_refused(self, fill: Any) -> None:
        with pytest.raises(UnsupportedTransformError, match="a number or 3 numbers are"):
            steps_of(v2.Pad(2, fill=fill))


class TestResize:
    @both_versions
    @every_interpolation
    @pytest.mark.parametrize("size", [24, [96], (64, 80), (1, 1), (1, 40)], ids=str)
    def test_to_a_small_size(self, version: Any, interpolation: Any, size: Any, device: str) -> None:
        files = images(but=("large",) if interpolation is InterpolationMode.NEAREST else ())
        transform = composed(version.Resize(size, interpolation))
        if interpolation is InterpolationMode.NEAREST:
            assert_as_nearest(transform, device, files)
        else:
            assert_as_torchvision(transform, device, files, bound=BOUNDS[interpolation])

    @both_versions
    @every_interpolation
    @pytest.mark.parametrize("size", [128, (200, 150)], ids=str)
    def test_to_a_large_size(self, version: Any, interpolation: Any, size: Any, device: str) -> None:
        files = images("landscape", "portrait", "large", "grey")
        transform = composed(version.Resize(size, interpolation))
        if interpolation is InterpolationMode.NEAREST:
            assert_as_nearest(transform, device, files)
        else:
            assert_as_torchvision(transform, device, files, bound=LARGE_BOUNDS[interpolation])

    @pytest.mark.parametrize("size", [128, (200, 150)], ids=str)
    def test_to_a_large_size_is_within_a_level_but_for_the_frame(self, size: Any, device: str) -> None:
        files = images("landscape", "portrait", "large", "grey")
        assert_as_torchvision(composed(v1.Resize(size)), device, files, bound=BILINEAR, inner=1)

    def test_a_photograph_shrunk_tenfold_is_further_off_in_the_frame_only(self, device: str) -> None:
        files = {"photograph": compare.jpeg_of((1400, 1300))}
        transform = composed(v1.Resize((130, 130)))
        assert_as_torchvision(transform, device, files, bound=Bound(0.25, 6, 20))
        assert_as_torchvision(transform, device, files, bound=BILINEAR, inner=1)

    @pytest.mark.parametrize("max_size", [41, 50, 1000])
    def test_max_size(self, max_size: int, device: str) -> None:
        for version in (v1, v2):
            files = images(but=("one pixel high", "one pixel wide"))
            assert_as_torchvision(composed(version.Resize(40, max_size=max_size)), device, files, bound=BILINEAR)

    def test_max_size_alone(self, device: str) -> None:
        assert_as_torchvision(composed(v2.Resize(None, max_size=100)), device, bound=BILINEAR)

    @both_versions
    @pytest.mark.parametrize("interpolation", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
    def test_to_its_own_size_changes_nothing(self, version: Any, interpolation: Any, device: str) -> None:
        for name, size in (("landscape", (120, 160)), ("portrait", 120), ("small", (30, 40)), ("tiny", 7)):
            assert_as_torchvision(composed(version.Resize(size, interpolation)), device, images(name), bound=EXACT)

    @both_versions
    @pytest.mark.parametrize("antialias", [True, False, None])
    def test_of_a_float_tensor(self, version: Any, antialias: Any, device: str) -> None:
        to_float = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]
        transform = v1.Compose([*to_float, version.Resize((40, 50), antialias=antialias)])
        assert_as_torchvision(transform, device, bound=EXACT)  # nothing is rounded on the way
        bicubic = v1.Compose([*to_float, version.Resize((40, 50), InterpolationMode.BICUBIC)])
        # DALI has the filter in a table.
        assert_as_torchvision(bicubic, device, bound=Bound(0.02, 0.1, 0.2))

    @both_versions
    @pytest.mark.parametrize("antialias", [True, False, None])
    def test_of_a_uint8_tensor(self, version: Any, antialias: Any, device: str) -> None:
        transform = v1.Compose([v1.PILToTensor(), version.Resize((40, 50), antialias=antialias)])
        assert_as_torchvision(transform, device, bound=BILINEAR)
        bicubic = v1.Compose([v1.PILToTensor(), version.Resize((40, 50), InterpolationMode.BICUBIC)])
        assert_as_torchvision(bicubic, device, bound=BICUBIC)

    @both_versions
    def test_of_a_tensor_with_nearest_exact(self, version: Any, device: str) -> None:
        for resize in (version.Resize((40, 50), InterpolationMode.NEAREST_EXACT), version.Resize(200, interpolation=0)):
            pil = composed(resize)
            assert_as_nearest(pil, device, images("landscape", "tiny"))
        to_float = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]
        transform = v1.Compose([*to_float, version.Resize((40, 50), InterpolationMode.NEAREST_EXACT)])
        assert_as_nearest(transform, device, images())

    def test_of_a_pil_image_is_antialiased_whatever_is_asked_for(self, device: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision says so too
            assert_as_torchvision(composed(v1.Resize(24, antialias=False)), device, bound=BILINEAR)
            assert_as_torchvision(composed(v2.Resize(24, antialias=None)), device, bound=BILINEAR)

    def test_after_normalize(self, device: str) -> None:
        normalize = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        transform = v1.Compose([v1.ToTensor(), normalize, v1.Resize((40, 50)), v1.Resize((50, 31))])
        assert_as_torchvision(transform, device, bound=EXACT)

    def test_of_a_grey_image(self, device: str) -> None:
        assert_as_torchvision(composed(v1.Grayscale(), v1.Resize((40, 50))), device, bound=BILINEAR)

    @both_versions
    def test_what_has_no_equal_is_refused(self, version: Any) -> None:
        def refused(resize: Any, match: str, tensor: bool = False) -> None:
            with pytest.raises(UnsupportedTransformError, match=match):
                plan_for(v1.Compose([v1.PILToTensor(), resize]) if tensor else composed(resize))

        name = r"transforms\[0\]: (v2\.)?Resize: "
        refused(version.Resize(9, InterpolationMode.HAMMING), name + "interpolation 'hamming' is not .* lanczos are")
        refused(version.Resize(9, interpolation=4), name + "interpolation 'box' is not translated; nearest, ")
        refused(version.Resize(9, max_size=9), name + "max_size=9 must be greater than size=9")
        refused(version.Resize((9, 9), max_size=20), name + r"max_size=20 goes with one number as size.*\(?9, 9")
        name = r"transforms\[1\]: (v2\.)?Resize: "
        cubic = version.Resize(9, InterpolationMode.BICUBIC, antialias=False)
        refused(cubic, name + "bicubic without antialias .* use antialias=True", tensor=True)
        nearest = version.Resize(9, InterpolationMode.NEAREST)
        refused(
            nearest, name + "interpolation 'nearest' on a tensor .* or use InterpolationMode.NEAREST_EXACT", tensor=True
        )

    @pytest.mark.parametrize("written", [InterpolationMode.BILINEAR, "bilinear", 2])
    def test_interpolations_may_be_written_in_three_ways(self, written: Any) -> None:
        assert interpolation_name(written) == "bilinear"
        assert plan_for(composed(v2.Resize(9, written))) == plan_for(composed(v1.Resize(9)))


def assert_as_nearest(transform: Any, device: str, files: compare.Images) -> None:
    """Every row and every column is one that torchvision took too, or its neighbour where both are equally near.

    Where a sample falls exactly on the border of two pixels, Pillow's sum of many steps decides, which may have been
    rounded down or up. Such rows and columns are few.
    """
    outputs = compare.run(transform, device, files)
    for name, a, b, data in zip(files, outputs.stock, outputs.ours, files.values()):
        width, height = compare.opened(data).size
        rows = _not_on_a_border(height, a.shape[1])
        columns = _not_on_a_border(width, a.shape[2])
        difference = (a - b.to(a.dtype)).abs() if a.is_floating_point() else (a.int() - b.int()).abs() / 255
        off_border = difference[:, rows][:, :, columns]
        assert off_border.numel() == 0 or off_border.amax() * 255 <= EXACT.on(device).max + compare.FLOAT_ROUNDING, name


def _not_on_a_border(size: int, new_size: int) -> torch.Tensor:
    """Which of the new pixels have their centre inside an old one: (2 k + 1) size / (2 new_size) is no whole number."""
    return (2 * torch.arange(new_size) + 1) * size % (2 * new_size) != 0


class TestRandomResizedCrop:
    @both_versions
    @pytest.mark.parametrize("interpolation", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
    @pytest.mark.parametrize("size", [32, (96, 64)], ids=str)
    def test_to_a_small_size(self, version: Any, interpolation: Any, size: Any, device: str) -> None:
        transform = composed(version.RandomResizedCrop(size, interpolation=interpolation))
        assert_as_torchvision(transform, device, bound=BOUNDS[interpolation])

    @both_versions
    @pytest.mark.parametrize("interpolation", [InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT])
    def test_nearest(self, version: Any, interpolation: Any, device: str) -> None:
        transform = composed(version.RandomResizedCrop(compare.NEVER_ON_A_BORDER, interpolation=interpolation))
        assert_as_torchvision(transform, device, images(but=("large",)), bound=EXACT)

    @both_versions
    @pytest.mark.parametrize("interpolation", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
    def test_to_224(self, version: Any, interpolation: Any, device: str) -> None:
        transform = composed(version.RandomResizedCrop(224, interpolation=interpolation))
        files = images("landscape", "portrait", "large", "grey", "4:2:2")
        assert_as_torchvision(transform, device, files, bound=LARGE_BOUNDS[interpolation])

    def test_of_a_float_tensor(self, device: str) -> None:
        transform = v1.Compose([v1.ToTensor(), v1.RandomResizedCrop(64), v1.RandomHorizontalFlip()])
        assert_as_torchvision(transform, device, bound=EXACT)

    def test_after_flips_takes_its_box_from_the_flipped_image(self, device: str) -> None:
        flips = [v1.RandomHorizontalFlip(1), v1.RandomVerticalFlip(1)]
        assert_as_torchvision(composed(*flips, v1.RandomResizedCrop(64)), device, bound=BILINEAR)
        assert_as_torchvision(composed(flips[0], v2.RandomResizedCrop(64)), device, bound=BILINEAR)
        on_a_tensor = v1.Compose([v1.ToTensor(), v1.RandomHorizontalFlip(1), v1.RandomResizedCrop(64)])
        assert_as_torchvision(on_a_tensor, device, bound=EXACT)

    def test_crops_one_pixel_wide_are_decoded_a_little_differently(self, device: str) -> None:
        transform = composed(v1.RandomResizedCrop(8, scale=(0.1, 0.12), ratio=(0.14, 0.17)))
        tiny = images("tiny")["tiny"]
        files = {f"tiny {k}": tiny for k in range(40)}
        assert_as_torchvision(transform, device, files, bound=Bound(0.5, 10, 10))

    def test_other_interpolations_are_refused(self) -> None:
        for version in (v1, v2):
            with pytest.raises(UnsupportedTransformError, match=r"RandomResizedCrop: interpolation 'box' is not"):
                steps_of(version.RandomResizedCrop(9, interpolation=InterpolationMode.BOX))


class TestFlips:
    @both_versions
    @pytest.mark.parametrize("seed", range(4))
    def test_anywhere_and_repeated(self, version: Any, seed: int, device: str) -> None:
        transform = composed(
            version.RandomHorizontalFlip(),
            version.RandomVerticalFlip(),
            version.RandomHorizontalFlip(),
            version.CenterCrop((50, 61)),
            version.RandomHorizontalFlip(),
            version.RandomVerticalFlip(),
            version.RandomVerticalFlip(),
            version.Pad((1, 2, 3, 4), fill=7),
            version.RandomHorizontalFlip(),
        )
        assert_as_torchvision(transform, device, bound=EXACT, seed=seed)

    @pytest.mark.parametrize("times", [1, 2, 3])
    @pytest.mark.parametrize("name", ["RandomHorizontalFlip", "RandomVerticalFlip"])
    def test_the_same_again(self, name: str, times: int, device: str) -> None:
        assert_as_torchvision(composed(*[getattr(v1, name)(1)] * times), device, images("landscape"), bound=EXACT)

    @both_versions
    def test_before_and_after_normalize(self, version: Any, device: str) -> None:
        flips = [version.RandomHorizontalFlip(), version.RandomVerticalFlip()]
        normalize = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        assert_as_torchvision(v1.Compose([*flips, v1.ToTensor(), normalize]), device, bound=EXACT)
        assert_as_torchvision(v1.Compose([v1.ToTensor(), *flips, normalize]), device, bound=EXACT)
        assert_as_torchvision(v1.Compose([v1.ToTensor(), normalize, *flips]), device, bound=EXACT)


class TestStates:
    """What the plan knows of the image's size after each step."""

    @pytest.mark.parametrize(
        ("transform", "size"),
        [
            (v1.Resize((20, 30)), (20, 30)),
            (v1.Resize(20), None),
            (v1.CenterCrop((20, 30)), (20, 30)),
            (v2.RandomCrop((20, 30), padding=2), (20, 30)),
            (v2.RandomResizedCrop((20, 30)), (20, 30)),
            (v1.Pad(3), None),
            (v1.RandomHorizontalFlip(), None),
        ],
        ids=repr,
    )
    def test_size(self, transform: Any, size: Any) -> None:
        assert plan_for(composed(transform)).output.size == size

    def test_flips_and_conversions_keep_it(self) -> None:
        transform = v1.Compose([v1.CenterCrop(20), v1.RandomHorizontalFlip(), v1.Grayscale(), v1.ToTensor()])
        assert plan_for(transform).output.size == (20, 20)

    @given(height=sides, width=sides)
    @settings(max_examples=30, deadline=None)
    def test_draw_returns_the_size_that_the_row_says(self, height: int, width: int) -> None:
        steps = plan_for(
            composed(v1.RandomResizedCrop((20, 30)), v1.Pad(2), v1.Resize(15), v1.RandomVerticalFlip())
        ).steps
        size = height, width
        for step in steps:
            row: list[float] = []
            size = step.draw(size, row)
            assert len(row) == step.columns
            if isinstance(step, Crop | Resize):
                assert tuple(row[-2:]) == size
        assert min(size) == 15
        assert [type(step) for step in steps[:5]] == [Crop, Resize, Crop, Resize, Flip]
