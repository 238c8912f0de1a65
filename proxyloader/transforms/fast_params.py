"""Faster sampling of torchvision's random parameters, for transforms that are expensive in a worker.

NOTE [ Fast parameter sampling ]
RandomResizedCrop allocates new tensors for the random numbers of each image, which takes a considerable part of a
worker's time per JPEG. The code below draws the same numbers in the same order from torch's generator, into reused
tensors. Before first use, its boxes and the resulting generator states are compared with those of the installed
torchvision, for several ranges. If they differ, torchvision samples the boxes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .params import Version, meta_image, v2_transform
from .random_numbers import OneByOne, in_thread

BoxSampler = Callable[[int, int], tuple[int, int, int, int]]
"""Function that samples a box (top, left, height, width) in an image of (height, width), in pixels."""

TRIES = 10
SEEDS = range(24)
SIZES = ((375, 500), (333, 50), (8, 900), (1, 1))  # in narrow images, all tries may fail
RANGES = (((0.08, 1.0), (3 / 4, 4 / 3)), ((0.3, 0.35), (0.2, 3.0)), ((1.0, 1.0), (1.0, 1.0)))  # of scale and ratio


def resized_crop_box(scale: tuple[float, ...], ratio: tuple[float, ...], version: Version) -> BoxSampler:
    """Return a function that samples a box like ``torchvision.transforms.RandomResizedCrop.get_params``."""
    return _sampler(scale, ratio, version, torch.get_default_dtype())


@functools.lru_cache(maxsize=64)
def _sampler(scale: tuple[float, ...], ratio: tuple[float, ...], version: Version, dtype: torch.dtype) -> BoxSampler:
    ours, theirs = _samplers(scale, ratio, version, dtype)
    return ours if _matches_torchvision(version, dtype) else theirs


def has_fast_sampling(version: Version) -> bool:
    """Return whether boxes are sampled by the code below rather than by torchvision."""
    return _matches_torchvision(version, torch.get_default_dtype())


@functools.cache
def _matches_torchvision(version: Version, dtype: torch.dtype) -> bool:
    """Return whether the code below matches the installed torchvision."""
    return all(_same_boxes(*_samplers(scale, ratio, version, dtype)) for scale, ratio in RANGES)


def _samplers(
    scale: tuple[float, ...], ratio: tuple[float, ...], version: Version, dtype: torch.dtype
) -> tuple[BoxSampler, BoxSampler]:
    """Return the functions that sample a box here and in torchvision."""
    low, high = torch.log(torch.tensor(ratio)).tolist()
    ours = functools.partial(_fast_box, OneByOne(dtype), scale, ratio, (low, high))
    return ours, functools.partial(_torchvision_box, scale, ratio, version)


def _fast_box(
    one_by_one: OneByOne,
    scale: tuple[float, ...],
    ratio: tuple[float, ...],
    log_ratio: tuple[float, float],
    height: int,
    width: int,
) -> tuple[int, int, int, int]:
    numbers = in_thread.ahead or one_by_one
    for _ in range(TRIES):
        area = height * width * numbers.uniform(*scale)
        aspect_ratio = numbers.exp_uniform(*log_ratio)
        w, h = round(math.sqrt(area * aspect_ratio)), round(math.sqrt(area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            top = numbers.integer(height - h + 1)
            left = numbers.integer(width - w + 1)
            return top, left, h, w
    h, w = height, width
    if width / height < min(ratio):
        h = round(width / min(ratio))
    elif width / height > max(ratio):
        w = round(height * max(ratio))
    return (height - h) // 2, (width - w) // 2, h, w


def _torchvision_box(
    scale: tuple[float, ...], ratio: tuple[float, ...], version: Version, height: int, width: int
) -> tuple[int, int, int, int]:
    if version == "v1":
        top, left, h, w = v1.RandomResizedCrop.get_params(meta_image(height, width), list(scale), list(ratio))
        return top, left, h, w
    drawn = v2_transform(v2.RandomResizedCrop, 1, scale, ratio).make_params([meta_image(height, width)])
    return drawn["top"], drawn["left"], drawn["height"], drawn["width"]


def _same_boxes(ours: BoxSampler, theirs: BoxSampler) -> bool:
    state, ahead, in_thread.ahead = torch.get_rng_state(), in_thread.ahead, None
    try:
        return all(_sample_boxes(ours, seed) == _sample_boxes(theirs, seed) for seed in SEEDS)
    finally:
        torch.set_rng_state(state)
        in_thread.ahead = ahead


def _sample_boxes(sample_box: BoxSampler, seed: int) -> list[float]:
    """Return boxes in images of several sizes, and the next number of torch's generator."""
    torch.default_generator.manual_seed(seed)
    return [number for size in SIZES for number in sample_box(*size)] + [torch.rand(1).item()]
