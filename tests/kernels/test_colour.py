"""Steps of images of the same batch, one at a time, against Pillow and torchvision."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from . import truth
from .emulation import run
from .truth import CLOSE, EXACT, Done, hard_images, program_of

ROUNDS = 3
"""Batches of each step, with other numbers."""

LAST_PIXELS = 32
"""At most so many at the end of a tensor are computed one by one, without fused multiply-add."""


def differences(images: list[truth.Pixels], done: list[list[Done]]) -> Iterator[np.ndarray]:
    """Yield how many levels each pixel of each image is off, after the steps of each image."""
    for result, steps in zip(run(images, program_of(images, done)), done, strict=True):
        yield np.abs(result.numpy().astype(int) - steps[-1].result).max(-1)


@pytest.mark.parametrize("name", [name for name in EXACT if name != "RESAMPLE"])
def test_step_is_exact(name: str) -> None:
    for seed in range(ROUNDS):
        images, rng = hard_images(), random.Random(f"{name} {seed}")
        done = [[EXACT[name](rng, image)] for image in images]
        for image, (step,), off in zip(images, done, differences(images, done), strict=True):
            assert not off.any(), f"{image.shape} {step.numbers}: {(off > 0).sum()} pixels off by up to {off.max()}"


@pytest.mark.parametrize("name", CLOSE)
def test_step_is_close(name: str) -> None:
    for seed in range(ROUNDS):
        images, rng = hard_images(), random.Random(f"{name} {seed}")
        images = [image[..., :1].repeat(3, 2) for image in images] if "of grey" in name else images
        done = [[CLOSE[name](rng, image)] for image in images]
        for image, (step,), off in zip(images, done, differences(images, done), strict=True):
            off = off.reshape(-1)
            assert off.max() <= 1, f"{image.shape} {step.numbers}"
            assert np.count_nonzero(off[:-LAST_PIXELS]) <= off.size / 1000, f"{image.shape} {step.numbers}"


@pytest.mark.parametrize("of", ["HUE", "GREY", "TENSOR_HUE", "TENSOR_GREY", "TENSOR_HUE of v1", "TENSOR_GREY of v1"])
def test_step_is_exact_for_many_colours(of: str) -> None:
    """Each 61st of all colours: hue and grey mix the channels."""
    colours = np.arange(0, 2**24, 61, dtype=np.uint32)[: 500 * 550].view(np.uint8).reshape(500, 550, 4)[..., :3].copy()
    (off,) = differences([colours], [[EXACT[of](random.Random(of), colours)]])
    assert not off.any()


def test_blur_of_tall_and_wide_images_fits_into_shared_memory() -> None:
    rng = random.Random(0)
    images = [
        np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8) for size in [(9000, 3), (2, 7000), (9, 9)]
    ]
    for off in differences(images, [[EXACT["BOX_BLUR"](rng, image)] for image in images]):
        assert not off.any()


@pytest.mark.parametrize("scale", [200, 500, 1000])
def test_size_of_the_result_decides_about_fixed_point(scale: int) -> None:
    """Which rounds the position of the first pixel up to a whole one, and holds no positions from 32768."""
    numbers = [scale, scale, 5 - scale - 1e-7, -scale, scale, 3 - 1e-7]
    images = [image for image in hard_images() if min(image.shape[:2]) > 5]
    for size in [(3, 3), (20, 40), (90, 90)]:
        done = [[truth.transformed("AFFINE_NEAREST", numbers, size, image, [0, 0, 0])] for image in images]
        assert not any(off.any() for off in differences(images, done))
