"""Faster sampling of torchvision's random parameters, where that takes a good part of a worker's time.

NOTE [ The same draws, for less ]
RandomResizedCrop asks torch for its numbers through tensors that it makes anew for each image, which takes a good part
of what a worker does for a JPEG. Ours asks torch's generator for the same numbers in the same order. Whether it does is
not taken for granted: before it is used, and so with whatever torchvision is installed, its boxes and what they leave
of the generator are compared with torchvision's. Where they differ, torchvision draws.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable

import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .params import Version, meta_image, v2_transform

BoxOf = Callable[[int, int], tuple[int, int, int, int]]
"""(top, left, height, width) of a box in an image of (height, width), in pixels."""

TRIES = 10
SEEDS = range(24)
SIZES = ((375, 500), (333, 50), (8, 900), (1, 1))  # in the narrow ones all tries fail now and then


def resized_crop_box(scale: tuple[float, ...], ratio: tuple[float, ...], version: Version) -> BoxOf:
    """How the box of a RandomResizedCrop is drawn: ``torchvision.transforms.RandomResizedCrop.get_params``."""
    return _compared(scale, ratio, version, torch.get_default_dtype())


@functools.lru_cache(maxsize=64)
def _compared(scale: tuple[float, ...], ratio: tuple[float, ...], version: Version, dtype: torch.dtype) -> BoxOf:
    low, high = torch.log(torch.tensor(ratio)).tolist()
    ours: BoxOf = functools.partial(_ours, _Drawn(dtype), scale, ratio, (low, high))
    theirs: BoxOf = functools.partial(_theirs, scale, ratio, version)
    return ours if _draw_alike(ours, theirs) else theirs


class _Drawn(threading.local):
    """Where numbers are drawn to: making a tensor takes as long as drawing one. Each thread has its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.number, self.place = torch.empty(1, dtype=dtype), torch.empty(1, dtype=torch.int64)


def _ours(
    drawn: _Drawn,
    scale: tuple[float, ...],
    ratio: tuple[float, ...],
    log_ratio: tuple[float, float],
    height: int,
    width: int,
) -> tuple[int, int, int, int]:
    number, place = drawn.number, drawn.place
    for _ in range(TRIES):
        area = height * width * number.uniform_(*scale).item()
        aspect_ratio = number.uniform_(*log_ratio).exp_().item()
        w, h = round(math.sqrt(area * aspect_ratio)), round(math.sqrt(area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            top = place.random_(0, height - h + 1).item()
            left = place.random_(0, width - w + 1).item()
            return int(top), int(left), h, w
    h, w = height, width
    if width / height < min(ratio):
        h = round(width / min(ratio))
    elif width / height > max(ratio):
        w = round(height * max(ratio))
    return (height - h) // 2, (width - w) // 2, h, w


def _theirs(
    scale: tuple[float, ...], ratio: tuple[float, ...], version: Version, height: int, width: int
) -> tuple[int, int, int, int]:
    if version == "v1":
        top, left, h, w = v1.RandomResizedCrop.get_params(meta_image(height, width), list(scale), list(ratio))
        return top, left, h, w
    drawn = v2_transform(v2.RandomResizedCrop, 1, scale, ratio).make_params([meta_image(height, width)])
    return drawn["top"], drawn["left"], drawn["height"], drawn["width"]


def _draw_alike(ours: BoxOf, theirs: BoxOf) -> bool:
    state = torch.get_rng_state()
    try:
        return all(_drawn_by(ours, seed) == _drawn_by(theirs, seed) for seed in SEEDS)
    finally:
        torch.set_rng_state(state)


def _drawn_by(box_of: BoxOf, seed: int) -> list[float]:
    """Boxes in images of some sizes, and the number that torch's generator would give next."""
    torch.default_generator.manual_seed(seed)
    return [number for size in SIZES for number in box_of(*size)] + [torch.rand(1).item()]
