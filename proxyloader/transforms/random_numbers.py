"""Random numbers from torch's generator, drawn one by one or for many images at once. Runs in the worker.

NOTE [ Numbers drawn in advance ]
Drawing a hundred numbers at once takes torch hardly longer than drawing one, and its generator advances by one step per
number, whether float or integer. So the numbers of many images are drawn from one state, once as floats and once as
integers, and each draw takes the next element of the list of its type. Afterwards, the generator is advanced as if each
number had been drawn individually.

Nothing else may draw from the generator in the meantime. So this is done only in workers, and only for transforms that
all draw with ``uniform`` and ``integer``.

NOTE [ Fast parameter sampling ]
RandomResizedCrop allocates new tensors for the random numbers of each image, which takes a considerable part of a
worker's time per JPEG. The code below draws the same numbers in the same order from torch's generator, into reused
tensors. Before first use, boxes drawn one by one and in advance, and the resulting generator states, are compared with
those of the installed torchvision, for several ranges. If they differ, torchvision samples the boxes.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torchvision.transforms import transforms as v1

from .._random_state import preserve_rng

BLOCK = 512  # number of random numbers drawn at once

BoxSampler = Callable[[int, int], tuple[int, int, int, int]]
"""Function that samples a box (top, left, height, width) in an image of (height, width), in pixels."""

Range = tuple[float, float]

TRIES = 10
SIZES = ((375, 500), (333, 50), (8, 900), (1, 1))  # in narrow images, all tries may fail
RANGES = (((0.08, 1.0), (3 / 4, 4 / 3)), ((0.3, 0.35), (0.2, 3.0)), ((1.0, 1.0), (1.0, 1.0)))  # of scale and ratio

_rounded = functools.lru_cache(lambda p: float(np.float32(p)))
_log = functools.lru_cache(lambda ratio: torch.log(torch.tensor(ratio)).tolist())


class OneByOne:
    """Draws each number on request, into reused tensors. Creating a tensor takes as long as drawing a number."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # inference tensors cannot be written outside of it
            self._float, self._integer = torch.empty(1, dtype=torch.float32), torch.empty(1, dtype=torch.int64)

    def uniform(self, low: float, high: float, exp: bool = False) -> float:
        drawn = self._float.uniform_(low, high)
        return (drawn.exp_() if exp else drawn).item()

    def integer(self, end: int) -> int:
        return int(self._integer.random_(0, end).item())


class NumbersAhead:
    """The next numbers of a generator, as if drawn into float32 and int64 tensors of one element."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._begin()

    def _begin(self) -> None:
        self._state, self._at = self._generator.get_state(), 0
        self._floats: dict[tuple[float, float, bool], list[float]] = {}
        self._words: list[int] | None = None

    def uniform(self, low: float, high: float, exp: bool = False) -> float:
        """Return the number that ``uniform_(low, high)`` would draw, or if ``exp`` its ``exp_()``."""
        at, kind = self._next(), (low, high, exp)
        if kind not in self._floats:
            drawn = self._drawn(BLOCK, low, high)
            self._floats[kind] = (drawn.exp_() if exp else drawn).tolist()
        return self._floats[kind][at]

    def integer(self, end: int) -> int:
        """Return the number that ``random_(0, end)`` would draw, for ``end`` <= 2**27. Above, torch draws twice."""
        at = self._next()
        if self._words is None:
            self._generator.set_state(self._state)
            pairs = torch.empty(BLOCK // 2, dtype=torch.int64, device="cpu")
            pairs.random_(-(2**63), None, generator=self._generator)
            halves = pairs.numpy().view(np.uint64)[:, None] >> np.array([32, 0], np.uint64) & 0xFFFFFFFF
            self._words = halves.ravel().tolist()
        return self._words[at] % end

    def _next(self) -> int:
        if self._at == BLOCK:
            self.end()
            self._begin()
        self._at += 1
        return self._at - 1

    def end(self) -> None:
        """Advance the generator as if each number had been drawn individually."""
        self._drawn(self._at, 0.0, 1.0)

    def _drawn(self, count: int, low: float, high: float) -> torch.Tensor:
        self._generator.set_state(self._state)
        return torch.empty(count, dtype=torch.float32, device="cpu").uniform_(low, high, generator=self._generator)


class _InThread(threading.local):
    """Source of the random numbers of this thread."""

    def __init__(self) -> None:
        self.numbers: NumbersAhead | OneByOne = OneByOne()


in_thread = _InThread()


@contextlib.contextmanager
def drawing_ahead() -> Iterator[None]:
    """Context manager that draws this thread's numbers for many images at once."""
    before, in_thread.numbers = in_thread.numbers, (ahead := NumbersAhead(torch.default_generator))
    try:
        yield
    finally:
        in_thread.numbers = before
        ahead.end()


@functools.lru_cache(maxsize=256)
def meta_image(height: int, width: int) -> torch.Tensor:
    """Return an image without data. torchvision's parameter code uses only its size."""
    return torch.empty((3, height, width), device="meta")


def bernoulli(p: float, closed: bool = False) -> bool:
    """Return ``torch.rand(1) < p``, or if ``closed`` <=, compared in float32 as in torch, without a new tensor."""
    drawn, p = in_thread.numbers.uniform(0.0, 1.0), _rounded(p)
    return drawn <= p if closed else drawn < p


def resized_crop_box(scale: Range, ratio: Range) -> tuple[BoxSampler, bool]:
    """Return a function that samples a box like RandomResizedCrop of v1 or v2, and whether it may draw ahead."""
    is_ours = draws_alike()
    return functools.partial(_fast_box if is_ours else _torchvision_box, scale, ratio), is_ours


@functools.cache
def draws_alike() -> bool:
    """Return whether boxes drawn here, one by one and ahead, are those of the installed torch and torchvision."""
    before = in_thread.numbers
    try:
        with preserve_rng(), torch.device("cpu"):  # regardless of torch's default device
            in_thread.numbers = OneByOne()
            pairs = [[functools.partial(box, *ranges) for box in (_torchvision_box, _fast_box)] for ranges in RANGES]
            return all(
                _sample_boxes(theirs, seed) == _sample_boxes(ours, seed) == _sample_boxes(ours, seed, is_ahead=True)
                for seed, (theirs, ours) in enumerate(pairs)
            )
    finally:
        in_thread.numbers = before


def _sample_boxes(sample_box: BoxSampler, seed: int, is_ahead: bool = False) -> list[float]:
    """Return boxes in images of several sizes, from more than a block of numbers, and the number after them."""
    torch.default_generator.manual_seed(seed)
    with drawing_ahead() if is_ahead else contextlib.nullcontext():
        boxes = [number for size in SIZES * 14 for number in sample_box(*size)]
    return [*boxes, torch.rand(1).item()]


def _fast_box(scale: Range, ratio: Range, height: int, width: int) -> tuple[int, int, int, int]:
    numbers, (low, high) = in_thread.numbers, _log(ratio)
    for _ in range(TRIES):
        area = height * width * numbers.uniform(*scale)
        aspect_ratio = numbers.uniform(low, high, exp=True)
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


def _torchvision_box(scale: Range, ratio: Range, height: int, width: int) -> tuple[int, int, int, int]:
    top, left, h, w = v1.RandomResizedCrop.get_params(meta_image(height, width), list(scale), list(ratio))
    return top, left, h, w
