"""Steps and programs of several, against Pillow and torchvision; resizes, and the formats of outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F2
from hypothesis import given, settings, strategies as st

from proxyloader.kernels.programs import FILTERS
from proxyloader.transforms.resize import pillow_resizes_height_first

from ..compare import picture
from . import truth
from .emulation import run
from .truth import CLOSE, EXACT, Done, Pixels, Random, hard_images, program_of

ROUNDS = 3
"""Batches of each step, with other numbers."""

LAST_PIXELS = 32
"""At most so many at the end of a tensor are computed one by one, without fused multiply-add."""


def differences(images: list[Pixels], done: list[list[Done]]) -> Iterator[np.ndarray]:
    """Yield how many levels each pixel of each image is off, after the steps of each image."""
    for result, steps in zip(run(images, program_of(images, done)), done, strict=True):
        yield np.abs(result.numpy().astype(int) - steps[-1].result).max(-1)


def assert_exact(images: list[Pixels], done: list[Done]) -> None:
    for image, step, off in zip(images, done, differences(images, [[step] for step in done]), strict=True):
        assert not off.any(), f"{image.shape} {step.numbers}: {(off > 0).sum()} pixels off by up to {off.max()}"


@pytest.mark.parametrize("name", [name for name in EXACT if name != "RESAMPLE"])
def test_step_is_exact(name: str) -> None:
    for seed in range(ROUNDS):
        images, rng = hard_images(), random.Random(f"{name} {seed}")
        assert_exact(images, [EXACT[name](rng, image) for image in images])


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
    assert_exact([colours], [EXACT[of](random.Random(of), colours)])


def test_blur_of_tall_and_wide_images_fits_into_shared_memory() -> None:
    rng = random.Random(0)
    sizes = (9000, 3), (2, 7000), (9, 9)
    images = [np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    assert_exact(images, [EXACT["BOX_BLUR"](rng, image) for image in images])


@pytest.mark.parametrize("scale", [200, 500, 1000])
def test_size_of_the_result_decides_about_fixed_point(scale: int) -> None:
    """Which rounds the position of the first pixel up to a whole one, and holds no positions from 32768."""
    numbers = [scale, scale, 5 - scale - 1e-7, -scale, scale, 3 - 1e-7]
    images = [image for image in hard_images() if min(image.shape[:2]) > 5]
    for size in [(3, 3), (20, 40), (90, 90)]:
        assert_exact(images, [truth.transformed("AFFINE_NEAREST", numbers, size, image, [0] * 3) for image in images])


# --- resizes and formats ---------------------------------------------------------------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TIES, ONES = (0.5, 0.25, 0.0625), (1.0, 1.0, 1.0)
"""Levels less one of these are half way between two values of 16 bits."""
DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32]


def extremes(rng: Random) -> Pixels:
    """Noise of the two extreme levels, where sums come closest to what 32 bits hold."""
    size = truth.a_size(rng, 400), truth.a_size(rng, 500), 3
    return np.random.default_rng(rng.randrange(1 << 30)).choice(np.array([0, 255], np.uint8), size)


@pytest.mark.parametrize("seed", range(8))
def test_resize_is_pillows(seed: int) -> None:
    """All filters, fractional boxes, crops partly or wholly outside, both orders."""
    rng = random.Random(seed)
    images = [*hard_images(), *(extremes(rng) for _ in range(8))]
    assert_exact(images, [truth.resample(rng, image) for image in images])


def test_resize_of_photographs_is_pillows() -> None:
    rng, photo = random.Random(0), np.asarray(picture(1))
    done = [truth.resample(rng, photo, 240) for _ in range(30)]
    orders = {False, True} if pillow_resizes_height_first((300, 400), (30, 300)) else {False}
    assert {bool(step.numbers[11]) for step in done} >= orders
    assert {step.numbers[8] for step in done} == {*FILTERS.values()}
    assert_exact([photo] * len(done), done)


@pytest.mark.parametrize("seed", range(3))
def test_resize_is_torchs(seed: int) -> None:
    """``resize`` of uint8 tensors. torch itself fails on some sizes of one pixel."""
    rng = random.Random(seed)
    images = [image for image in [*hard_images(), *(extremes(rng) for _ in range(6))] if min(image.shape[:2]) > 1]
    assert_exact(images, [truth.resample_tensor(rng, image, 150) for image in images])


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
    images = [np.asarray(picture(2, (61, 45))), np.asarray(picture(3, (64, 32))), *hard_images()[:8]]
    for channels, scaled, is_dense in [(3, True, False), (3, False, True), (1, True, False), (1, True, True)]:
        given = [images[1]] * 3 if is_dense else images
        resized = [truth.resample(rng, given[0]) if is_dense else truth.resample(rng, image) for image in given]
        done = [[step] if i % 2 and not is_dense else [] for i, step in enumerate(resized)]
        for steps in [[[]] * 3, [[resized[0]]] * 3] if is_dense else [done]:
            scaling = (1, *MEAN, *STD) if scaled else (0, *TIES, *ONES)
            programs = program_of(given, steps, channels, () if dtype == torch.uint8 else scaling)
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
            numbers = left, top, width, height, 1 - i % 2, *MEAN, channels
            programs.add("ERASE_OUTPUT", numbers, np.array([i]), extras=[values.reshape(-1)])
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


# --- programs of many steps ------------------------------------------------------------------------------------------

MOST_STEPS = 12
IMAGES = [image for image in hard_images() if image.shape != (256, 256, 3)]  # which Pillow takes long for


def steps_of(names: list[str], rng: Random, image: Pixels) -> list[Done]:
    """Return steps of these names, each from the result of the one before."""
    done: list[Done] = []
    for name in names:
        done.append(EXACT[name](rng, done[-1].result if done else image))
    return done


names = st.lists(st.sampled_from(list(EXACT)), max_size=MOST_STEPS)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(range(len(IMAGES))), names), min_size=1, max_size=5), st.integers(0, 99))
def test_programs(batch: list[tuple[int, list[str]]], seed: int) -> None:
    rng = random.Random(seed)
    images = [IMAGES[number] for number, _ in batch]
    done = [steps_of(names, rng, image) for image, (_, names) in zip(images, batch)]
    for image, steps, result in zip(images, done, run(images, program_of(images, done)), strict=True):
        assert np.array_equal(result.numpy(), steps[-1].result if steps else image)
