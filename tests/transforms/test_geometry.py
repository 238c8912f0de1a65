"""Crops, pads and flips: the boxes are torchvision's, and the pixels, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from torchvision.transforms import v2

from ..compare import Images, as_image, assert_alike, both_versions, drawn_alike, images, many, of_each_kind, undecoded
from ..plans import draw, plan_for, translation_of


def numbered(height: int, width: int) -> torch.Tensor:
    """An image whose pixels all differ, from 1 on; 0 is outside."""
    return torch.arange(1, height * width + 1, dtype=torch.float32).reshape(1, height, width)


def probabilities() -> list[float]:
    """Some, and numbers that are drawn first from some seeds, with their neighbors in float64 and float32."""
    found = [0, 0.1, 0.5, 1 / 3, 0.9, 1]
    for seed in range(3):
        drawn = torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()
        found += [drawn, *(math.nextafter(drawn, side) for side in (0, 1))]
        found += [float(np.nextafter(np.float32(drawn), np.float32(side))) for side in (0, 1)]
    return found


class TestDraws:
    """What is drawn is what torchvision would have drawn, and its generator goes on from the same state."""

    @both_versions
    @pytest.mark.parametrize("name", ["RandomHorizontalFlip", "RandomVerticalFlip"])
    @pytest.mark.parametrize("p", probabilities())
    def test_flips(self, version: Any, name: str, p: float) -> None:
        transform, image = getattr(version, name)(p), numbered(3, 3)
        flip = translation_of(transform)
        for flipped, found in drawn_alike(lambda: transform(image), lambda: draw(flip, 3, 3)):
            assert found == [not torch.equal(flipped, image)]

    @both_versions
    def test_of_a_crop_of_a_too_small_image_is_an_error(self, version: Any) -> None:
        crop = translation_of(version.RandomCrop(32))
        with pytest.raises(ValueError, match=r"Required crop size \(32, 32\) is larger than input image size \(9, 7\)"):
            draw(crop, 9, 7)


class TestCenterCrop:
    @both_versions
    @pytest.mark.parametrize("size", [32, [33], (50, 71), (31, 200), (300, 20), (1, 1), 601])
    def test_pixels(self, version: Any, size: Any, device: str) -> None:
        assert_alike(as_image(version.CenterCrop(size)), device)


CROP = (60, 50)
SOME = images("landscape", "portrait", "large", "grey", "PNG")
TWO = images("landscape", "tiny")
NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
PADDINGS, FILLS = [4, [5], (3, 7), (1, 2, 3, 4), 0], [0, 77, (1, 2, 250), 127.7, (255,)]

PIXELS: dict[str, tuple[Callable[[Any], Any], Images]] = {
    "crop": (lambda v: v.RandomCrop(CROP), SOME),
    "crop of the same size": (lambda v: v.RandomCrop((120, 160)), images("landscape")),
    "crop of the same height, where v1 and v2 draw differently": (lambda v: v.RandomCrop((120, 50)), many("landscape")),
    "padded crop": (lambda v: v.RandomCrop(CROP, padding=4), SOME),
    "crop padded by a pair": (lambda v: v.RandomCrop(CROP, padding=[3, 7], fill=77), SOME),
    "crop padded in each direction": (lambda v: v.RandomCrop(CROP, padding=(1, 2, 3, 4), fill=(1, 2, 250)), SOME),
    "crop with a fraction of a level": (lambda v: v.RandomCrop(CROP, padding=2, fill=127.7), SOME),
    "crop padded where needed": (lambda v: v.RandomCrop(CROP, pad_if_needed=True), images()),
    "and always": (lambda v: v.RandomCrop(CROP, pad_if_needed=True, padding=2, fill=9), images()),
    "with a colour": (lambda v: v.RandomCrop(CROP, pad_if_needed=True, fill=(9, 8, 7)), images()),
    "a crop that may miss the image": (lambda v: v.RandomCrop(3, padding=40, fill=5), images()),
    "negative padding": (lambda v: v.Pad((-3, 2, -1, -4)), images("landscape", "small")),
    "a uint8 tensor": (lambda v: v1.Compose([v1.PILToTensor(), v.Pad(3, fill=99)]), TWO),
    "grey": (lambda v: v1.Compose([v1.Grayscale(), v.Pad(3, fill=99), v.CenterCrop(200)]), images()),
}


class TestCropAndPad:
    @both_versions
    @pytest.mark.parametrize(("make", "files"), PIXELS.values(), ids=PIXELS)
    def test_pixels(self, version: Any, make: Callable[[Any], Any], files: Images, device: str) -> None:
        assert_alike(as_image(make(version)), device, files)

    @both_versions
    @pytest.mark.parametrize("padding", PADDINGS)
    @pytest.mark.parametrize("fill", FILLS)
    def test_pad(self, version: Any, padding: Any, fill: Any, device: str) -> None:
        assert_alike(as_image(version.Pad(padding, fill=fill)), device, TWO)

    @both_versions
    @pytest.mark.parametrize("mode", ["edge", "reflect", "symmetric"])
    def test_where_nothing_is_padded_neither_mode_nor_fill_counts(self, version: Any, mode: str) -> None:
        assert plan_for(version.RandomCrop(9, padding_mode=mode))
        plan_for(v1.Compose([v1.PILToTensor(), v1.RandomCrop(9, fill=(1, 2, 3))]))
        plan_for(v1.Compose([v1.PILToTensor(), v2.Pad(2, fill=(1, 2, 3))]))


class TestFlips:
    @both_versions
    @pytest.mark.parametrize("seed", range(4))
    def test_anywhere_and_repeated(self, version: Any, seed: int, device: str) -> None:
        across, down = version.RandomHorizontalFlip(), version.RandomVerticalFlip()
        crop, pad = version.CenterCrop((50, 61)), version.Pad((1, 2, 3, 4), fill=7)
        transform = as_image(across, down, across, crop, across, down, down, pad, across)
        assert_alike(transform, device, seed=seed)

    @both_versions
    def test_before_and_after_normalize(self, version: Any, device: str) -> None:
        flips = [version.RandomHorizontalFlip(), version.RandomVerticalFlip()]
        for at in range(3):
            steps = [v1.ToTensor(), NORMALIZE]
            steps[at:at] = flips
            assert_alike(v1.Compose(steps), device)


def test_a_padding_that_leaves_nothing_is_an_error_as_in_torchvision() -> None:
    with pytest.raises(ValueError):
        undecoded(v1.Compose([v1.Pad(-20), v1.PILToTensor()]), images("small"))


class TestRandomZoomOut:
    @of_each_kind
    def test_is_exact(self, before: list[Any], device: str) -> None:
        transform = as_image(*before, v2.RandomZoomOut(p=0.7), v2.RandomHorizontalFlip())
        assert_alike(transform, device, images(but=("large",)) | many("small", times=8))

    @pytest.mark.parametrize(
        ("transforms", "files"),
        [
            *(([v2.RandomZoomOut(fill, (1.1, 2.5), p=1)], many(*TWO, "one pixel wide")) for fill in (7, (10, 200, 30))),
            (
                [v2.RandomZoomOut((9, 8, 7), (1, 2)), v2.RandomCrop(9, pad_if_needed=True)],
                many("small", "tiny", times=10),
            ),
            ([v2.RandomZoomOut(side_range=(1, 1), p=1)], images("small")),
        ],
        ids=["one number", "a colour", "the next step sees the canvas", "a range of one number"],
    )
    def test_fills_the_canvas(self, transforms: list[Any], files: Images, device: str) -> None:
        assert_alike(as_image(*transforms), device, files)
