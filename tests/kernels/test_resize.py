"""Resizes and the formats of outputs, against Pillow and torch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F2

from proxyloader.kernels.programs import FILTERS
from proxyloader.make_dataset import photograph
from proxyloader.transforms.resize import pillow_resizes_height_first

from . import truth
from .emulation import run
from .truth import Done, Pixels, Random, hard_images, program_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TIES, ONES = (0.5, 0.25, 0.0625), (1.0, 1.0, 1.0)
"""Levels less one of these are half way between two values of 16 bits."""
DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32]


def extremes(rng: Random) -> Pixels:
    """Noise of the two extreme levels, where sums come closest to what 32 bits hold."""
    size = truth.a_size(rng, 400), truth.a_size(rng, 500), 3
    return np.random.default_rng(rng.randrange(1 << 30)).choice(np.array([0, 255], np.uint8), size)


def assert_equal(images: list[Pixels], done: list[Done]) -> None:
    for image, step, result in zip(images, done, run(images, program_of(images, [[d] for d in done])), strict=True):
        assert np.array_equal(result.numpy(), step.result), f"{image.shape} to {step.result.shape}: {step.numbers}"


@pytest.mark.parametrize("seed", range(8))
def test_resize_is_pillows(seed: int) -> None:
    """All filters, fractional boxes, crops partly or wholly outside, flips, both orders; half of them store at once."""
    rng = random.Random(seed)
    images = [*hard_images(), *(extremes(rng) for _ in range(8))]
    assert_equal(images, [truth.resample(rng, image) for image in images])


def test_resize_of_photographs_is_pillows() -> None:
    rng, photo = random.Random(0), np.asarray(photograph(1))
    done = [truth.resample(rng, photo, 240) for _ in range(30)]
    orders = {False, True} if pillow_resizes_height_first((300, 400), (30, 300)) else {False}
    assert {bool(step.numbers[13]) for step in done} == orders
    assert {step.numbers[10] for step in done} == {*FILTERS.values()}
    assert_equal([photo] * len(done), done)


@pytest.mark.parametrize("seed", range(3))
def test_resize_is_torchs(seed: int) -> None:
    """``resize`` of uint8 tensors. torch itself fails on some sizes of one pixel."""
    rng = random.Random(seed)
    images = [image for image in [*hard_images(), *(extremes(rng) for _ in range(6))] if min(image.shape[:2]) > 1]
    assert_equal(images, [truth.resample_tensor(rng, image, 150) for image in images])


def formatted(levels: Pixels, channels: int, layout: str, dtype: torch.dtype, scaled: bool) -> torch.Tensor:
    """As ToTensor and Normalize make it."""
    tensor = torch.from_numpy(levels[..., :channels].copy()).permute(2, 0, 1)
    if dtype != torch.uint8:
        mean, std = (
            torch.tensor(values[:channels]).reshape(-1, 1, 1) for values in ((MEAN, STD) if scaled else (TIES, ONES))
        )
        tensor = tensor.to(torch.float32)
        tensor = (tensor.div(255) if scaled else tensor).sub_(mean).div_(std).to(dtype)
    return tensor if layout == "CHW" else tensor.permute(1, 2, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_format(layout: str, dtype: torch.dtype) -> None:
    """Ragged and dense batches, with and without a resize before, of three channels and of one."""
    rng = random.Random(0)
    images = [np.asarray(photograph(2, size=(61, 45))), np.asarray(photograph(3, size=(64, 32))), *hard_images()[:8]]
    for channels, scaled, is_dense in [(3, True, False), (3, False, True), (1, True, False), (1, True, True)]:
        given = [images[1]] * 3 if is_dense else images
        resized = [truth.resample(rng, given[0]) if is_dense else truth.resample(rng, image) for image in given]
        done = [[step] if i % 2 and not is_dense else [] for i, step in enumerate(resized)]
        for steps in [[[]] * 3, [[resized[0]]] * 3] if is_dense else [done]:
            programs = program_of(given, steps, channels, (1, *MEAN, *STD) if scaled else (0, *TIES, *ONES))
            for image, of_image, result in zip(given, steps, run(given, programs, layout, dtype), strict=True):
                levels = of_image[-1].result if of_image else image
                assert torch.equal(result, formatted(levels, channels, layout, dtype, scaled)), (image.shape, of_image)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_erased_output(layout: str, dtype: torch.dtype) -> None:
    """Boxes of a color and of noise, in a ragged batch, behind the conversion to floats."""
    rng, noise = random.Random(0), np.random.default_rng(0)
    images = [image for image in hard_images() if min(image.shape[:2]) > 2]
    for channels in (3, 1):
        programs = program_of(images, [[] for _ in images], channels, (1, *MEAN, *STD))
        expected = [formatted(image, channels, layout, dtype, 1).clone() for image in images]
        for i, image in enumerate(images):
            height, width = (rng.randint(0, side - 1) for side in image.shape[:2])
            top, left = (rng.randint(0, side - box) for side, box in zip(image.shape[:2], (height, width)))
            values = noise.normal(size=(height, width, channels)).astype(np.float32)
            if i % 2:
                values[:] = MEAN[:channels]
            programs.add("ERASE_OUTPUT", (left, top, width, height, 1 - i % 2, *MEAN, channels), np.array([i]))
            programs.add_extras([values.reshape(-1)])
            box = slice(top, top + height), slice(left, left + width)
            place = expected[i][(slice(None), *box) if layout == "CHW" else box]
            place.copy_(torch.from_numpy(values).permute(2, 0, 1) if layout == "CHW" else torch.from_numpy(values))
        for result, wanted in zip(run(images, programs, layout, dtype), expected, strict=True):
            assert torch.equal(result, wanted)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_nothing_behind_an_output_is_written(layout: str) -> None:
    rng = random.Random(1)
    for channels in (3, 1):
        for i, image in enumerate(hard_images()):
            steps = [truth.resample(rng, image)] if i % 2 else []
            (output,) = run([image], program_of([image], [steps], channels), layout)
            levels = steps[-1].result if steps else image
            assert torch.equal(output, formatted(levels, channels, layout, torch.uint8, False))


@pytest.mark.parametrize("scaling", [0, 1, 2])
def test_values_are_torchs(scaling: int) -> None:
    """Each level: itself, as of ToTensor, and of v2's ToDtype; with many means and standard deviations."""
    rng, count = np.random.default_rng(0), 300
    mean, std = rng.normal(size=(3, count)), 10.0 ** rng.uniform(-4, 4, (3, count))
    image = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    programs = program_of([image] * count, [[]] * count, 3, (scaling, *mean, *std))
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)
    levels = (pixels.float(), pixels.float().div(255), F2.to_dtype(pixels, torch.float32, scale=True))[scaling]
    for i, result in enumerate(run([image] * count, programs, "CHW", torch.float32)):
        by = (torch.from_numpy(each[:, i]).float().reshape(3, 1, 1) for each in (mean, std))
        assert torch.equal(result, (levels - next(by)) / next(by))
