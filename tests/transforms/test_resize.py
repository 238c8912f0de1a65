"""Resizes, also to sizes that are drawn: the sizes are torchvision's exactly, and the pixels, too."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import PIL
import pytest
import torch
import torchvision.transforms.functional as F1
import torchvision.transforms.v2.functional as F2
from hypothesis import given, settings, strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode, transforms as v1, v2

from proxyloader.transforms.resize import Target, interpolation_value, nearest_pixels, pillow_resizes_height_first

from .. import compare
from ..compare import THIN, as_image, assert_alike, both_versions, images, lossless, many, of_levels
from ..plans import plan_for

INTERPOLATIONS = [InterpolationMode(name) for name in ("nearest", "bilinear", "bicubic", "lanczos")]
BICUBIC = Image.Resampling.BICUBIC
LARGE = images("landscape", "portrait", "large", "grey")

sides = st.integers(1, 60)
edges = st.integers(1, 900)
every_interpolation = pytest.mark.parametrize("interpolation", INTERPOLATIONS, ids=lambda mode: mode.value)
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

    @pytest.mark.parametrize("resize", [v2.Resize(None, max_size=20), v2.ScaleJitter((20, 20), (0.1, 0.2))])
    def test_of_nothing_raises_where_pillow_raises_too(self, resize: Any) -> None:
        with pytest.raises(ValueError, match="must be > 0"):
            compare.undecoded(as_image(resize), images("one pixel high"))


def test_pillow_begins_with_the_side_that_we_say() -> None:
    """Where the order does not matter, either is right."""
    noise = Image.effect_noise((90, 120), 100)
    found = set()
    for height, width in itertools.product((5, 50, 100, 119, 120, 121, 200), (5, 40, 60, 70, 80, 89, 90, 91, 300)):
        first = {True: (90, height), False: (width, 120)}
        said = pillow_resizes_height_first((120, 90), (height, width))
        in_passes = noise.resize(first[said], BICUBIC).resize((width, height), BICUBIC)
        assert noise.resize((width, height), BICUBIC) == in_passes, (height, width)
        found.add(said)
    newest = int(PIL.__version__.split(".")[0]) >= 13
    assert found == ({True, False} if newest else {False})


class TestResize:
    @both_versions
    @every_interpolation
    @pytest.mark.parametrize("size", [24, [96], (64, 80), (1, 1), (1, 40), 128, (200, 150)], ids=str)
    def test_pixels(self, version: Any, interpolation: Any, size: Any, device: str) -> None:
        files = LARGE if size in (128, (200, 150)) else images()
        assert_alike(as_image(version.Resize(size, interpolation)), device, files)

    @pytest.mark.filterwarnings("ignore:Anti-alias option")  # PIL images are antialiased in any case
    @pytest.mark.parametrize(
        "transform",
        [
            *(v2.Resize(None, max_size=100), v2.Resize(24, antialias=None), v1.Resize(24, antialias=False)),
            *(version.Resize(40, max_size=most) for version in (v1, v2) for most in (41, 50, 1000)),
            *(v1.Compose([v1.Grayscale(), v1.Resize((9, 5))]), v1.Compose([v1.Resize((40, 50)), v1.Resize((50, 31))])),
        ],
    )
    def test_others(self, transform: Any, device: str) -> None:
        assert_alike(as_image(transform), device, images(but=THIN))

    @both_versions
    @pytest.mark.parametrize("interpolation", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
    def test_to_its_own_size_changes_nothing(self, version: Any, interpolation: Any, device: str) -> None:
        for name, size in (("landscape", (120, 160)), ("portrait", 120), ("small", (30, 40)), ("tiny", 7)):
            assert_alike(as_image(version.Resize(size, interpolation)), device, images(name))

    @pytest.mark.parametrize("written", [InterpolationMode.BILINEAR, "bilinear", 2])
    def test_interpolations_may_be_written_in_three_ways(self, written: Any) -> None:
        assert interpolation_value(written) == "bilinear"
        assert plan_for(as_image(v2.Resize(9, written))) == plan_for(as_image(v1.Resize(9)))


class TestNearest:
    """The rows and columns that Pillow takes of a PIL image, and torch of a tensor, also from the border of two."""

    @both_versions
    @of_levels
    @each_nearest
    @pytest.mark.parametrize("size", [90, (90, 91), (1, 1), (5, 700), (120, 160)], ids=str)
    def test_pixels(self, version: Any, before: list[Any], nearest: Any, size: Any, device: str) -> None:
        assert_alike(as_image(*before, version.Resize(size, nearest)), device, lossless())

    @both_versions
    @of_levels
    @each_nearest
    def test_of_random_crops(self, version: Any, before: list[Any], nearest: Any, device: str) -> None:
        for size in (96, (224, 150)):
            transform = as_image(*before, version.RandomResizedCrop(size, interpolation=nearest))
            assert_alike(transform, device, lossless(), times=2)

    @of_levels
    @each_nearest
    def test_to_sizes_that_are_drawn(self, before: list[Any], nearest: Any, device: str) -> None:
        sizes = v2.RandomResize(20, 90, nearest), v2.ScaleJitter((90, 120), (0.3, 1.1), nearest)
        transform = as_image(*before, v2.RandomShortestSize([50, 80], 90, nearest), v2.RandomHorizontalFlip(), *sizes)
        assert_alike(transform, device, lossless(but=THIN), times=3)

    @of_levels
    def test_in_branches_beside_noise(self, before: list[Any], device: str) -> None:
        nearest = [v1.Resize((90, 60), InterpolationMode.NEAREST), v2.Resize(91, InterpolationMode.NEAREST_EXACT)]
        containers = v1.RandomApply([v1.Grayscale(3), nearest[0]]), v2.RandomChoice([*nearest, v2.RandomVerticalFlip()])
        noise = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v1.RandomErasing(value="random")]
        assert_alike(as_image(*before, *containers, *noise), device, lossless(but=("large",)), times=3)

    @pytest.mark.parametrize("nearest", ["pil", "nearest", "nearest-exact"])
    @given(size=st.tuples(edges, edges), new_size=st.tuples(edges, edges))
    @settings(max_examples=100)
    def test_lines_say_what_is_taken_in_images(self, nearest: Any, size: Any, new_size: Any) -> None:
        self.assert_lines_of_images(nearest, size, new_size)

    @pytest.mark.parametrize("nearest", ["pil", "nearest", "nearest-exact"])
    def test_so_do_those_of_all_small_images_beside_a_short_and_a_long_side(self, nearest: Any) -> None:
        for count, new_count, new_other in itertools.product(range(1, 17), range(1, 65), (1, 64)):
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
        assert_alike(transform, device, LARGE | images("4:2:2") if size == 224 else images())

    def test_takes_its_box_of_what_flips_return(self, device: str) -> None:
        flips = [v1.RandomHorizontalFlip(1), v1.RandomVerticalFlip(1)]
        assert_alike(as_image(*flips, v1.RandomResizedCrop(64)), device)
        assert_alike(as_image(flips[0], v2.RandomResizedCrop(64)), device)


SIZES = [v2.RandomResize(20, 60), v2.RandomShortestSize([20, 40, 70], 90), v2.RandomShortestSize(33)]


@pytest.mark.parametrize("transform", [*SIZES, v2.ScaleJitter((90, 110), (0.3, 1.1))])
@of_levels
def test_pixels_of_sizes_that_are_drawn(transform: Any, before: list[Any], device: str) -> None:
    files = images(but=(*THIN, "large")) | many("small", "portrait")
    assert_alike(as_image(*before, transform, v2.RandomVerticalFlip()), device, files)
