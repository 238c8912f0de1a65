"""Colours: Pillow's arithmetic for PIL images and torch's for tensors, to the level or nearly so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader.transforms.registry import plan_for

from ..compare import (
    EXACT,
    TO_FLOAT,
    Bound,
    Images,
    assert_alike,
    both_versions,
    composed,
    each_kind,
    images,
    lossless,
    png_of,
)

NEARLY_EXACT = Bound(1e-3, 0, 1)
"""In float32, 20 of the 16.8 million colours end on the other side of a whole number."""

CUT_OFF = Bound(0.07, 1, 1)
"""Where a sum on a uint8 tensor should be a whole number, the last bit of float32 decides whether it is cut off to that
or to the level below. v1 and v2 of torchvision order their sums in different ways, and are as far from each other."""

STRETCHED = Bound(0.005, 1, 1)
"""As CUT_OFF, where few pixels are concerned."""

STRETCHED_GREY = Bound(0.02, 1, 1)
"""By v2.RandomAutocontrast, of grey images: 0.0114."""

EQUALIZED = Bound(0.35, 1, 1)
"""DALI's levels are rounded before they are brought to Pillow's."""

HUE_OF_PIL = Bound(0.01, 2, 6)
"""Pillow goes by way of whole levels of hue; the last bit of float32 decides a few of them, each of which moves the
colour of a pixel by some levels."""

ONE_AFTER_THE_OTHER = Bound(0.01, 2, 12)
"""A pixel that is a level off after one step may be some levels off after the next."""

SOME = ("landscape", "portrait", "small", "tiny", "one pixel high", "one pixel wide", "grey", "4:2:2")

TO_LEVELS = [v2.ToImage(), v2.ToDtype(torch.float32)]


@pytest.fixture(scope="module")
def colors() -> Images:
    """A quarter of a million colours, without the decoder's part in it."""
    return {"colours": png_of(Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)))}


MEAN_AND_STD = [0.1, 0.2, 0.3], [2, 3, 4]

GREYS: dict[str, tuple[Callable[[Any, int], list[Any]], Bound]] = {
    "a PIL image": (lambda v, channels: [v.Grayscale(channels), v1.PILToTensor()], EXACT),
    "a uint8 tensor": (lambda v, channels: [v1.PILToTensor(), v.Grayscale(channels)], NEARLY_EXACT),
    "a float tensor": (lambda v, channels: [*TO_FLOAT, v.Grayscale(channels)], EXACT),
    "levels as floats": (lambda v, channels: [*TO_LEVELS, v.Grayscale(channels)], EXACT),
    "normalized": (lambda v, channels: [*TO_FLOAT, v2.Normalize(*MEAN_AND_STD), v.Grayscale(channels)], EXACT),
    "normalized levels": (lambda v, channels: [*TO_LEVELS, v2.Normalize(*MEAN_AND_STD), v.Grayscale(channels)], EXACT),
    "a grey image": (lambda v, channels: [v.Grayscale(1), v.Grayscale(channels), v1.PILToTensor()], EXACT),
    # The v1 class leaves a grey tensor at one channel, whatever it is asked for; the shapes are compared too.
    "a grey tensor": (lambda v, channels: [v1.PILToTensor(), v.Grayscale(1), v.Grayscale(channels)], NEARLY_EXACT),
    "among flips": (
        lambda v, channels: [
            *(v.RandomHorizontalFlip(), v.Grayscale(channels), v.RandomVerticalFlip(), v.CenterCrop(70)),
            *(v1.ToTensor(), v.RandomHorizontalFlip(), v.Normalize([0.5], [0.25])),
        ],
        EXACT,
    ),
}


@both_versions
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("steps", "bound"), GREYS.values(), ids=GREYS)
def test_grayscale(version: Any, channels: int, steps: Any, bound: Bound, colors: Images, device: str) -> None:
    assert_alike(v1.Compose(steps(version, channels)), device, images() | colors, bound=bound)


class TestColorJitter:
    @both_versions
    @each_kind
    @pytest.mark.parametrize(
        ("ranges", "bounds"),
        [
            ({"brightness": 0.7}, {}),
            ({"contrast": 0.7}, {"uint8": STRETCHED}),
            ({"saturation": 0.7}, {"uint8": STRETCHED}),
            ({"hue": 0.5}, {"pil": HUE_OF_PIL, "uint8": NEARLY_EXACT}),
            (
                {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
                {"pil": ONE_AFTER_THE_OTHER, "uint8": ONE_AFTER_THE_OTHER},
            ),
        ],
        ids=["brightness", "contrast", "saturation", "hue", "all"],
    )
    def test_pixels(self, version: Any, kind: str, ranges: Any, bounds: dict[str, Bound], device: str) -> None:
        transform = composed(kind, version.ColorJitter(**ranges))
        assert_alike(transform, device, lossless(*SOME), bound=bounds.get(kind, EXACT), times=4)

    @both_versions
    @each_kind
    def test_of_a_grey_image_has_no_saturation_and_no_hue(self, version: Any, kind: str, device: str) -> None:
        transform = composed(kind, version.Grayscale(), version.ColorJitter(0.4, 0.4, 0.4, 0.4))
        assert_alike(transform, device, lossless(*SOME), bound=EXACT if kind == "float" else STRETCHED, times=4)

    @both_versions
    def test_of_every_color_and_nothing_costs_nothing(self, version: Any, colors: Images, device: str) -> None:
        for kind in ("pil", "uint8", "float"):
            transform = composed(kind, version.ColorJitter(0.4, 0.4, 0.4, 0.4))
            bound = EXACT if kind == "float" else ONE_AFTER_THE_OTHER
            assert_alike(transform, device, colors, bound=bound, times=2)
        (step, _) = plan_for(composed("pil", version.ColorJitter())).steps
        assert (step.operations, step.num_params) == ((), 0)


@each_kind
def test_what_v2_has_alone(kind: str, device: str) -> None:
    bound = EXACT if kind == "float" else ONE_AFTER_THE_OTHER
    distort, permute = composed(kind, v2.RandomPhotometricDistort(p=0.7)), composed(kind, v2.RandomChannelPermutation())
    assert_alike(distort, device, lossless(*SOME), bound=bound, times=4)
    assert_alike(permute, device, lossless(*SOME), times=4)
    assert_alike(composed(kind, v2.RGB()), device, lossless(*SOME))
    bound = NEARLY_EXACT if kind == "uint8" else EXACT
    assert_alike(composed(kind, v2.Grayscale(), v2.RGB()), device, lossless(*SOME), bound=bound)


DONE_OR_NOT = {
    "RandomGrayscale": ((), {"uint8": NEARLY_EXACT}),
    "RandomInvert": ((), {}),
    "RandomPosterize": ((3,), {}),
    "RandomSolarize": ((100,), {}),
    "RandomAdjustSharpness": ((1.3,), {"uint8": CUT_OFF}),
    "RandomAutocontrast": ((), {"uint8": STRETCHED}),
    "RandomEqualize": ((), {"pil": EQUALIZED, "uint8": EQUALIZED}),
}
"""Arguments, and what is not exact."""


def one_of(version: Any, name: str, kind: str, p: float) -> Any:
    arguments, _ = DONE_OR_NOT[name]
    if name == "RandomSolarize" and kind == "float":
        arguments = (0.4,)
    return getattr(version, name)(*arguments, p=p)


class TestDoneOrNot:
    @both_versions
    @each_kind
    @pytest.mark.parametrize("name", DONE_OR_NOT)
    @pytest.mark.parametrize("grey", [False, True], ids=["", "grey"])
    def test_pixels(self, version: Any, kind: str, name: str, grey: bool, device: str) -> None:
        if kind == "float" and name in ("RandomPosterize", "RandomEqualize"):
            return  # test_unsupported.py
        first = [version.Grayscale()] if grey else []
        bound = DONE_OR_NOT[name][1].get(kind, NEARLY_EXACT if grey and kind == "uint8" else EXACT)
        if grey and bound is STRETCHED and version is v2:
            bound = STRETCHED_GREY
        transform = composed(kind, *first, one_of(version, name, kind, 0.7))
        assert_alike(transform, device, lossless(*SOME), bound=bound, times=2)

    @both_versions
    @each_kind
    def test_sharpness_of_0_blurs_and_of_more_than_2_is_cut_off(self, version: Any, kind: str, device: str) -> None:
        for factor in (0, 4.5):
            transform = composed(kind, version.RandomAdjustSharpness(factor, p=1.0))
            assert_alike(transform, device, lossless(*SOME), bound=CUT_OFF if kind == "uint8" else EXACT)

    @both_versions
    @pytest.mark.parametrize(
        ("name", "number"),
        [
            *(("RandomPosterize", bits) for bits in (1, 2, 7, 8)),
            *(("RandomSolarize", threshold) for threshold in (0, 99.5, 255 * 2 / 3 + 1e-6, 255)),
        ],
    )
    def test_to_any_bits_and_from_any_threshold(
        self, version: Any, name: str, number: float, colors: Images, device: str
    ) -> None:
        for kind in ("pil", "uint8"):
            assert_alike(composed(kind, getattr(version, name)(number, p=1.0)), device, colors)

    @both_versions
    @each_kind
    @pytest.mark.parametrize("name", ["RandomAutocontrast", "RandomEqualize"])
    def test_of_an_image_of_one_color_or_two(self, version: Any, kind: str, name: str, device: str) -> None:
        if kind == "float" and name == "RandomEqualize":
            return
        files = {"one": plain((9, 7), 77), "two": plain((8, 8), 3, 200), "black and white": plain((8, 8), 0, 255)}
        transform = composed(kind, getattr(version, name)(p=1.0))
        assert_alike(transform, device, files, bound=STRETCHED if kind == "uint8" else EXACT)

    @both_versions
    @pytest.mark.parametrize("size", [(15, 17), (16, 16), (23, 23), (40, 51), (200, 200)], ids=str)
    @pytest.mark.parametrize(
        "levels", [(9,), (0, 255), (7, 9, 9, 200), tuple(range(0, 256, 5)), tuple(range(256))], ids=len
    )
    def test_equalization_of_few_pixels_and_few_levels(
        self, version: Any, size: tuple[int, int], levels: tuple[int, ...], device: str
    ) -> None:
        files = {"stripes": plain(size, *levels)}
        for kind in ("pil", "uint8"):
            transform = composed(kind, version.RandomEqualize(p=1.0))
            assert_alike(transform, device, files, bound=Bound(1, 1, 1))

    @both_versions
    def test_of_values_beyond_0_to_1(self, version: Any, device: str) -> None:
        normalize = version.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        for name in ("RandomInvert", "RandomSolarize", "RandomAdjustSharpness", "RandomAutocontrast"):
            transform = composed("float", normalize, one_of(version, name, "float", 0.8))
            assert_alike(transform, device, lossless(*SOME))
        assert_alike(
            composed("float", normalize, version.ColorJitter(0.4, 0.4, 0.4)), device, lossless(*SOME), bound=EXACT
        )


def plain(size: tuple[int, int], *levels: int) -> bytes:
    """Stripes of these levels."""
    stripes = np.resize(np.array(levels, np.uint8), (size[1], size[0]))
    return png_of(Image.fromarray(np.stack([stripes] * 3, axis=2)))
