"""Resizes, also to sizes that are drawn: the sizes are torchvision's exactly, the pixels within a stated bound."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import PIL
import pytest
import torch
import torchvision.transforms.functional as F1
import torchvision.transforms.v2.functional as F2
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from proxyloader import EncodedImage, compile_transforms
from proxyloader.transforms.registry import plan_for
from proxyloader.transforms.resize import Target, interpolation_value, nearest_pixels, pillow_resizes_height_first

from .. import compare
from ..compare import (
    BEFORE,
    BICUBIC,
    BILINEAR,
    EXACT,
    LARGE_BICUBIC,
    LARGE_BILINEAR,
    THIN,
    Bound,
    as_image,
    assert_alike,
    both_versions,
    drawn_alike,
    images,
    lossless,
    many,
    of_each_kind,
)

BOUNDS = {InterpolationMode.NEAREST: EXACT, InterpolationMode.BILINEAR: BILINEAR, InterpolationMode.BICUBIC: BICUBIC}
LARGE_BOUNDS = BOUNDS | {InterpolationMode.BILINEAR: LARGE_BILINEAR, InterpolationMode.BICUBIC: LARGE_BICUBIC}

LANCZOS = Bound(0.1, 1, 12)
"""As BICUBIC, with more overshoots that are cut off."""

RANDOM = Bound(0.05, 1, 3)
LARGE_RANDOM = Bound(0.25, 3, 12, gpu_mean=0.05)
"""Of crops of any size few pixels are half-way between two levels."""

NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])

LARGE = images("landscape", "portrait", "large", "grey")

sides = st.integers(1, 60)
edges = st.integers(1, 900)
every_interpolation = pytest.mark.parametrize("interpolation", BOUNDS, ids=lambda mode: mode.value)
each_nearest = pytest.mark.parametrize(
    "nearest", [InterpolationMode.NEAREST, InterpolationMode.NEAREST_EXACT], ids=lambda mode: mode.value
)


class TestResizedSize:
    @given(height=sides, width=sides, shorter=sides, more=sides)
    @settings(max_examples=300)
    def test_is_the_size_that_comes_out_of_both_versions(
        self, height: int, width: int, shorter: int, more: int
    ) -> None:
        image = torch.empty((3, height, width), device="meta")
        for max_size in (None, shorter + more):
            expected = Target((shorter,), max_size).resolve((height, width))
            if 0 not in expected:
                assert F1.resize(image, [shorter], max_size=max_size).shape[1:] == expected
                assert F2.resize(image, [shorter], max_size=max_size).shape[1:] == expected
        expected = Target(None, more).resolve((height, width))
        if 0 not in expected:
            assert F2.resize(image, None, max_size=more).shape[1:] == expected

    def test_of_nothing_raises_where_pillow_raises_too(self) -> None:
        transform = as_image(v2.Resize(None, max_size=20))
        with pytest.raises(ValueError, match="must be > 0"):
            transform(compare.opened(images("one pixel high")["one pixel high"]))
        with pytest.raises(ValueError, match=r"\(1, 64\) \(height, width\) to \(0, 20\)"):
            plan_for(transform).sample_params(1, 64)


def test_pillow_begins_with_the_side_that_we_say() -> None:
    """Where the order does not matter, either is right."""
    noise = Image.effect_noise((90, 120), 100)
    found = set()
    for height, width in itertools.product((5, 50, 100, 119, 120, 121, 200), (5, 40, 60, 70, 80, 89, 90, 91, 300)):
        first = {True: (90, height), False: (width, 120)}
        said = pillow_resizes_height_first((120, 90), (height, width))
        resized = noise.resize((width, height), Image.Resampling.BICUBIC)
        in_passes = noise.resize(first[said], Image.Resampling.BICUBIC).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        assert resized == in_passes, (height, width)
        found.add(said)
    newest = int(PIL.__version__.split(".")[0]) >= 13
    assert found == ({True, False} if newest else {False})


class TestResize:
    @both_versions
    @every_interpolation
    @pytest.mark.parametrize("size", [24, [96], (64, 80), (1, 1), (1, 40), 128, (200, 150)], ids=str)
    def test_pixels(self, version: Any, interpolation: Any, size: Any, device: str) -> None:
        is_large = size in (128, (200, 150))
        files, bounds = (LARGE, LARGE_BOUNDS) if is_large else (images(), BOUNDS)
        transform = as_image(version.Resize(size, interpolation))
        assert_alike(transform, device, files, bound=bounds[interpolation])
        if is_large and interpolation is InterpolationMode.BILINEAR:
            assert_alike(transform, device, files, bound=BILINEAR, inner=1)

    def test_a_photograph_shrunk_tenfold_is_further_off_in_the_frame_only(self, device: str) -> None:
        files = {"photograph": compare.jpeg_of((1400, 1300))}
        transform = as_image(v1.Resize((130, 130)))
        assert_alike(transform, device, files, bound=Bound(0.25, 6, 20))
        assert_alike(transform, device, files, bound=BILINEAR, inner=1)

    @pytest.mark.parametrize("size", [(160, 160), (224, 224), (384, 384)], ids=str)
    def test_hard_borders_are_further_off_where_bicubic_and_on_a_cpu(self, size: Any) -> None:
        # Filtered beyond 0 and 255, which Pillow cuts off between its passes.
        numbers = np.random.default_rng(0)
        halves = {f"{w} x {h}": numbers.integers(0, 2, (h, w, 3)) for w, h in ((130, 130), (300, 240), (500, 375))}
        files = {name: compare.png_of(Image.fromarray(np.uint8(255 * half))) for name, half in halves.items()}
        bicubic, bilinear = (
            as_image(v1.Resize(size, mode)) for mode in (InterpolationMode.BICUBIC, InterpolationMode.BILINEAR)
        )
        assert_alike(bicubic, "cpu", files, bound=Bound(4, 28, 36))
        assert_alike(bilinear, "cpu", files, bound=BILINEAR, inner=1)

    @both_versions
    @pytest.mark.parametrize("max_size", [41, 50, 1000])
    def test_max_size(self, version: Any, max_size: int, device: str) -> None:
        transform = as_image(version.Resize(40, max_size=max_size))
        assert_alike(transform, device, images(but=THIN), bound=BILINEAR)

    @pytest.mark.filterwarnings("ignore:Anti-alias option")  # PIL images are antialiased in any case
    @pytest.mark.parametrize(
        ("transform", "bound"),
        [
            *((v2.Resize(None, max_size=100), BILINEAR), (v2.Resize(24, antialias=None), BILINEAR)),
            *((v1.Resize(24, antialias=False), BILINEAR), (v1.Compose([v1.Grayscale(), v1.Resize((9, 5))]), BILINEAR)),
            (v1.Compose([v1.ToTensor(), NORMALIZE, v1.Resize((40, 50)), v1.Resize((50, 31))]), EXACT),
        ],
    )
    def test_others(self, transform: Any, bound: Bound, device: str) -> None:
        assert_alike(as_image(transform), device, bound=bound)

    @both_versions
    @pytest.mark.parametrize("interpolation", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
    def test_to_its_own_size_changes_nothing(self, version: Any, interpolation: Any, device: str) -> None:
        for name, size in (("landscape", (120, 160)), ("portrait", 120), ("small", (30, 40)), ("tiny", 7)):
            assert_alike(as_image(version.Resize(size, interpolation)), device, images(name))

    @both_versions
    @pytest.mark.parametrize("antialias", [True, False, None])
    def test_of_a_tensor(self, version: Any, antialias: Any, device: str) -> None:
        to_float = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)]
        # Of floats nothing is rounded on the way; DALI has the bicubic filter in a table.
        bounds = (to_float, EXACT, Bound(0.02, 0.1, 0.2)), (to_float[:1], BILINEAR, BICUBIC)
        for before, bilinear, bicubic in bounds:
            transform = v1.Compose([*before, version.Resize((40, 50), antialias=antialias)])
            assert_alike(transform, device, bound=bilinear)
            transform = v1.Compose([*before, version.Resize((40, 50), InterpolationMode.BICUBIC)])
            assert_alike(transform, device, bound=bicubic)

    @pytest.mark.parametrize("written", [InterpolationMode.BILINEAR, "bilinear", 2])
    def test_interpolations_may_be_written_in_three_ways(self, written: Any) -> None:
        assert interpolation_value(written) == "bilinear"
        assert plan_for(as_image(v2.Resize(9, written))) == plan_for(as_image(v1.Resize(9)))


class TestNearest:
    """The rows and columns that Pillow takes of a PIL image, and torch of a tensor, also from the border of two."""

    @both_versions
    @of_each_kind
    @each_nearest
    @pytest.mark.parametrize("size", [90, (90, 91), (1, 1), (5, 700), (120, 160)], ids=str)
    def test_pixels(self, version: Any, before: list[Any], nearest: Any, size: Any, device: str) -> None:
        assert_alike(as_image(*before, version.Resize(size, nearest)), device, lossless())

    @both_versions
    @of_each_kind
    @each_nearest
    def test_of_random_crops(self, version: Any, before: list[Any], nearest: Any, device: str) -> None:
        for size in (96, (224, 150)):
            transform = as_image(*before, version.RandomResizedCrop(size, interpolation=nearest))
            assert_alike(transform, device, lossless(), times=2)

    @of_each_kind
    @each_nearest
    def test_to_sizes_that_are_drawn(self, before: list[Any], nearest: Any, device: str) -> None:
        sizes = v2.RandomResize(20, 90, nearest), v2.ScaleJitter((90, 120), (0.3, 1.1), nearest)
        transform = as_image(*before, v2.RandomShortestSize([50, 80], 90, nearest), v2.RandomHorizontalFlip(), *sizes)
        assert_alike(transform, device, lossless(but=THIN), times=3)

    @of_each_kind
    def test_in_branches_beside_noise(self, before: list[Any], device: str) -> None:
        nearest = [v1.Resize((90, 60), InterpolationMode.NEAREST), v2.Resize(91, InterpolationMode.NEAREST_EXACT)]
        containers = v1.RandomApply([v1.Grayscale(3), nearest[0]]), v2.RandomChoice([*nearest, v2.RandomVerticalFlip()])
        noise = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v1.RandomErasing(value="random")]
        assert_alike(as_image(*before, *containers, *noise), device, lossless(), times=3)

    @pytest.mark.parametrize("nearest", ["pil", "nearest", "nearest-exact"])
    @given(size=st.tuples(edges, edges), new_size=st.tuples(edges, edges))
    @settings(max_examples=100)
    def test_lines_say_what_is_taken_in_images(self, nearest: Any, size: Any, new_size: Any) -> None:
        self.assert_lines_of_images(nearest, size, new_size)

    @pytest.mark.parametrize("nearest", ["pil", "nearest", "nearest-exact"])
    def test_so_do_those_of_all_small_images_beside_a_short_and_a_long_side(self, nearest: Any) -> None:
        for count, new_count, new_other in itertools.product(range(1, 17), range(1, 129), (1, 128)):
            self.assert_lines_of_images(nearest, (count, 1), (new_count, new_other))
            self.assert_lines_of_images(nearest, (1, count), (new_other, new_count))

    def assert_lines_of_images(self, nearest: Any, size: Any, new_size: Any) -> None:
        rows, columns = nearest_pixels(size, new_size, nearest)
        image = 1000 * torch.arange(size[0])[:, None] + torch.arange(size[1])
        if nearest == "pil":
            picture = Image.fromarray(image.numpy().astype(np.int32))
            found = np.asarray(picture.resize(new_size[::-1], Image.Resampling.NEAREST))
        else:
            found = F2.resize(image[None].float(), list(new_size), InterpolationMode(nearest))[0].numpy()
        assert np.array_equal(found, 1000 * rows[:, None] + columns), (size, new_size)


class TestRandomResizedCrop:
    @both_versions
    @pytest.mark.parametrize("interpolation", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
    @pytest.mark.parametrize("size", [32, (96, 64), 224], ids=str)
    def test_pixels(self, version: Any, interpolation: Any, size: Any, device: str) -> None:
        transform = as_image(version.RandomResizedCrop(size, interpolation=interpolation))
        files, bound = (LARGE | images("4:2:2"), LARGE_RANDOM) if size == 224 else (images(), RANDOM)
        assert_alike(transform, device, files, bound=bound)

    def test_of_a_float_tensor_and_after_flips_of_which_it_takes_its_box(self, device: str) -> None:
        transform = v1.Compose([v1.ToTensor(), v1.RandomResizedCrop(64), v1.RandomHorizontalFlip()])
        assert_alike(transform, device)
        flips = [v1.RandomHorizontalFlip(1), v1.RandomVerticalFlip(1)]
        assert_alike(as_image(*flips, v1.RandomResizedCrop(64)), device, bound=BILINEAR)
        assert_alike(as_image(flips[0], v2.RandomResizedCrop(64)), device, bound=BILINEAR)
        on_a_tensor = v1.Compose([v1.ToTensor(), v1.RandomHorizontalFlip(1), v1.RandomResizedCrop(64)])
        assert_alike(on_a_tensor, device)

    def test_crops_one_pixel_wide_are_decoded_a_little_differently(self, device: str) -> None:
        transform = as_image(v1.RandomResizedCrop(8, scale=(0.1, 0.12), ratio=(0.14, 0.17)))
        tiny = images("tiny")["tiny"]
        files = {f"tiny {k}": tiny for k in range(40)}
        assert_alike(transform, device, files, bound=Bound(0.5, 10, 10))


class TestRandomSizes:
    SIZES = {
        "RandomResize": v2.RandomResize(20, 60),
        "RandomShortestSize": v2.RandomShortestSize([20, 40, 70], 90),
        "RandomShortestSize without a bound": v2.RandomShortestSize(33),
        "ScaleJitter": v2.ScaleJitter((90, 110), (0.3, 1.1)),
    }
    each = pytest.mark.parametrize("transform", SIZES.values(), ids=SIZES)

    @each
    @pytest.mark.parametrize(("height", "width"), [(375, 500), (50, 31), (7, 9)], ids=str)
    def test_are_torchvisions(self, transform: Any, height: int, width: int) -> None:
        def new_size(params: dict[str, Any]) -> Any:
            size = params["size"]
            if len(size) == 2:
                return size
            return v1.Resize(size[0])(torch.empty((3, height, width), device="meta")).shape[1:]

        plan, image = plan_for(as_image(transform)), torch.empty((3, height, width))
        draws = drawn_alike(lambda: transform.make_params([image]), lambda: plan.sample_params(height, width))
        assert all(tuple(found[2:4]) == tuple(new_size(wanted)) for wanted, found in draws)

    @each
    @of_each_kind
    def test_pixels(self, transform: Any, before: list[Any], device: str) -> None:
        files = images(but=(*THIN, "large")) | many("small", "portrait")
        bound = EXACT if before is BEFORE["a float tensor"] else BILINEAR
        assert_alike(as_image(*before, transform, v2.RandomVerticalFlip()), device, files, bound=bound)

    def test_large_ones_are_as_large_resizes_and_nothing_is_an_error_as_in_torchvision(self, device: str) -> None:
        transform = as_image(v2.RandomShortestSize([130, 180], 300))
        assert_alike(transform, device, images("landscape", "large", "PNG"), bound=LARGE_BILINEAR)
        compiled = compile_transforms(as_image(v2.ScaleJitter((20, 20), (0.1, 0.2))))
        thin = EncodedImage.from_bytes(images("one pixel high")["one pixel high"])
        with pytest.raises(ValueError, match=r"\(1, 64\) \(height, width\) to \(0, [123]\)"):
            compiled(thin)


class TestLanczos:
    @both_versions
    @pytest.mark.parametrize("size", [24, (40, 50), (130, 200)], ids=str)
    def test_resize_and_of_a_crop_of_a_large_image(self, version: Any, size: Any, device: str) -> None:
        transform = as_image(version.Resize(size, InterpolationMode.LANCZOS))
        files = images(but=(*THIN, "large") if size == 24 else ("large",))
        assert_alike(transform, device, files, bound=LANCZOS)
        transform = as_image(version.RandomResizedCrop(200, interpolation=InterpolationMode.LANCZOS))
        assert_alike(transform, device, images("large"), bound=LANCZOS)
