"""Random numbers from torch's generator. Runs where the dataset runs.

NOTE [ Numbers from the generator's state ]
A call into torch takes 2 to 9 us if the CPU caches hold other code, as after reading a file, and augmenting an image
takes ten to twenty numbers (``benchmarks/results/recording.txt``). So workers compute them in Python: they read the
state of torch's generator, a Mersenne Twister (Matsumoto and Nishimura, 1998), and afterwards advance it as if torch
had drawn each number.

Nothing else may draw from the generator in the meantime. So only the main thread of a worker does this, while the
dataset has no other threads, and only for transforms that draw all their numbers from ``in_thread.numbers``.

NOTE [ Fast parameter sampling ]
RandomResizedCrop allocates new tensors for the random numbers of each image, which takes a considerable part of a
worker's time per JPEG. The code below draws the same numbers in the same order, without new tensors. Before first use,
boxes and the resulting states are compared with those of the installed torchvision, for several ranges, and numbers
from the generator's state with those that torch draws. If they differ, torchvision or torch draws.
"""

import contextlib
import ctypes
import functools
import logging
import math
import threading
from collections.abc import Callable

import numpy as np
import torch
from torchvision.transforms import transforms as v1

from .._random_state import preserve_rng

log = logging.getLogger(__name__)

BoxSampler = Callable[[int, int], tuple[int, int, int, int]]
"""Function that samples a box (top, left, height, width) in an image of (height, width), in pixels."""

Range = tuple[float, float]

FIRST, COUNT = 3, 624
"""The words of a Mersenne Twister in the state of torch's generator, which are 64-bit integers. The two before are the
number of words that are left, plus one, in the lower half, and the index of the next one."""

_WORDS = ctypes.c_uint64 * (FIRST + COUNT)

OWN_THREADS = frozenset({"MainThread", "proxyloader-watch", "QueueFeederThread"})
"""Threads of a worker without those of the dataset. They draw no numbers."""

TRIES = 10
MARGIN = 1e-6  # of a side before it is rounded. torch's ``exp_`` of a float32 is much closer to the exact value
SIZES = ((375, 500), (333, 50), (8, 900), (1, 1))  # in narrow images, all tries may fail
RANGES = (((0.08, 1.0), (3 / 4, 4 / 3)), ((0.3, 0.35), (0.2, 3.0)), ((1.0, 1.0), (1.0, 1.0)))  # of scale and ratio

rounded = functools.lru_cache(lambda p: float(np.float32(p)))
_log = functools.lru_cache(lambda ratio: torch.log(torch.tensor(ratio)).tolist())


class Numbers:
    """Draws each number by a call into torch, into reused tensors. Creating a tensor takes as long as drawing one.

    A context for the draws of a transform, during which ``in_thread.numbers`` is this source.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False):  # inference tensors cannot be written outside of it
            self._float = torch.empty(1, dtype=torch.float32, device="cpu")
            self._integer = torch.empty(1, dtype=torch.int64, device="cpu")

    def uniform(self, low: float, high: float) -> float:
        """Return the number that ``uniform_(low, high)`` draws into a float32 tensor."""
        return self._float.uniform_(low, high).item()

    def fraction(self) -> float:
        """Return the same as ``uniform(0.0, 1.0)``."""
        return self._float.uniform_(0.0, 1.0).item()

    def integer(self, end: int) -> int:
        """Return the number that ``random_(0, end)`` draws into an int64 tensor, for ``end`` <= 2**27."""
        return int(self._integer.random_(0, end).item())

    def permutation(self, count: int) -> list[int]:
        return torch.randperm(count, device="cpu").tolist()

    def read(self) -> torch.Tensor:
        """Return the state of torch's generator, from which the next numbers are drawn."""
        return torch.default_generator.get_state()

    def write(self) -> None:
        """Advance torch's generator by the numbers drawn since ``read``, before anything else may draw from it."""

    def __enter__(self) -> torch.Tensor:
        state = self.read()
        in_thread.numbers = self
        return state

    def __exit__(self, *_: object) -> None:
        in_thread.numbers = in_thread.by_torch
        self.write()


class NumbersFromState(Numbers):
    """Computes the numbers from the state of torch's generator."""

    def __init__(self, is_fused: bool, wraps: bool) -> None:  # see ``how_torch_draws``
        super().__init__()
        self._is_fused, self._wraps = is_fused, wraps
        self._value = self._float.numpy()
        self._at = self._end = FIRST  # in the state: where the next word is, and the end of the words

    def uniform(self, low: float, high: float) -> float:
        first, span, end = _range(low, high)
        scaled = self.fraction() * span
        if not self._is_fused:
            self._value[0] = scaled
            scaled = self._value.item()
        self._value[0] = scaled + first
        number: float = self._value.item()
        return first if number == end and self._wraps else number

    def fraction(self) -> float:
        return (self._next() & 0xFFFFFF) / 2**24

    def integer(self, end: int) -> int:
        return self._next() % end

    def permutation(self, count: int) -> list[int]:
        order = list(range(count))
        for at in range(count - 1):
            other = at + self.integer(count - at)
            order[at], order[other] = order[other], order[at]
        return order

    def _next(self) -> int:
        """Return the next 32 bits of the generator."""
        at = self._at
        if at == self._end:  # torch computes the next words, and draws one of them
            self.write()
            self._float.uniform_()
            self.read()
            at = FIRST
        self._at = at + 1
        word: int = self._words[at]
        word ^= word >> 11
        word ^= word << 7 & 0x9D2C5680
        word ^= word << 15 & 0xEFC60000
        return word ^ word >> 18

    def read(self) -> torch.Tensor:
        self._state = torch.default_generator.get_state()
        self._words = _WORDS.from_address(self._state.data_ptr())  # NumPy takes several times as long
        self._at = FIRST + self._words[2]
        self._end = FIRST + COUNT if self._words[1] & 0xFFFFFFFF > 1 else self._at
        return self._state

    def write(self) -> None:
        words, next_word = self._words, self._at - FIRST
        before = words[1], words[2]
        words[1] += (1 if self._at == self._end else COUNT + 1 - next_word) - (words[1] & 0xFFFFFFFF)
        words[2] = next_word
        torch.default_generator.set_state(self._state)
        words[1], words[2] = before  # callers keep this tensor


@functools.lru_cache(maxsize=256)
def _range(low: float, high: float) -> tuple[float, float, float]:
    """Return the start, width and end of a range in float32. RuntimeError of torch: it is not a valid range."""
    torch.empty(1, device="cpu").uniform_(low, high, generator=torch.Generator())
    first, end = np.float32(low), np.float32(high)
    return float(first), float(end - first), float(end)


class _InThread(threading.local):
    """Sources of the random numbers of this thread."""

    def __init__(self) -> None:
        self.numbers = self.by_torch = Numbers()  # the current one, and the one that is always allowed
        self.from_state: NumbersFromState | None = None
        self._num_threads = 0  # when there were none of the dataset

    @property
    def fastest(self) -> Numbers:
        """The source for transforms that draw only from ``numbers``."""
        if self.from_state is None:
            return self.by_torch
        if (count := threading.active_count()) != self._num_threads:
            if not OWN_THREADS.issuperset(each.name for each in threading.enumerate()):
                return self.by_torch  # others may draw at the same time
            self._num_threads = count
        return self.from_state

    def draw_from_state(self) -> None:
        """Let this thread, the main thread of a worker, compute its numbers from the state of torch's generator."""
        how = how_torch_draws()
        self.from_state = None if how is None else NumbersFromState(*how)


in_thread = _InThread()


@functools.lru_cache(maxsize=256)
def meta_image(height: int, width: int) -> torch.Tensor:
    """Return an image without data. torchvision's parameter code uses only its size."""
    return torch.empty((3, height, width), device="meta")


def bernoulli(p: float, closed: bool = False) -> bool:
    """Return ``torch.rand(1) < p``, or if ``closed`` <=, compared in float32 as in torch, without a new tensor."""
    drawn, p = in_thread.numbers.fraction(), rounded(p)
    return drawn <= p if closed else drawn < p


@functools.cache
def draws_alike() -> bool:
    """Return whether boxes drawn here are those of the installed torchvision."""
    with preserve_rng(), torch.device("cpu"):  # regardless of torch's default device
        is_alike = all(
            _sample(functools.partial(_torchvision_box, *ranges), in_thread.by_torch, seed)
            == _sample(functools.partial(resized_crop_box, *ranges), in_thread.by_torch, seed)
            for seed, ranges in enumerate(RANGES)
        )
    if not is_alike:
        log.info("torchvision samples the boxes of RandomResizedCrop differently, so its own code samples them")
    return is_alike


@functools.cache
def how_torch_draws() -> tuple[bool, bool] | None:
    """Return whether torch rounds only once, which depends on the instructions of the CPU, and whether it replaces a
    number that was rounded up to the end of a range with its start. None if it draws other numbers."""
    box = functools.partial(resized_crop_box, *RANGES[0])
    with contextlib.suppress(Exception), preserve_rng(), torch.device("cpu"):  # a later torch may have other states
        drawn = _sample(box, in_thread.by_torch, 0)
        ways = (True, True), (True, False), (False, True), (False, False)
        return next(each for each in ways if _sample(box, NumbersFromState(*each), 0) == drawn)
    log.info("torch draws other numbers than those computed from its generator's state, so workers let torch draw")
    return None


def _sample(sample_box: BoxSampler, numbers: Numbers, seed: int) -> list[float]:
    """Return boxes in images of several sizes, other numbers, from several blocks of words, and the next one."""
    torch.default_generator.manual_seed(seed)
    with numbers:
        drawn = [numbers.uniform(*limits) for limits in [(0.6, 1.4), (1.0, 1.0 + 2**-23)] * 300]
        drawn += [number for size in SIZES * 14 for number in (*sample_box(*size), *numbers.permutation(4))]
    return [*drawn, torch.rand(1).item()]


def resized_crop_box(scale: Range, ratio: Range, height: int, width: int) -> tuple[int, int, int, int]:
    """Sample a box like RandomResizedCrop of v1 or v2, if ``draws_alike``."""
    numbers, (low, high) = in_thread.numbers, _log(ratio)
    for _ in range(TRIES):
        area = height * width * numbers.uniform(*scale)
        w, h = _sides(area, math.exp(logarithm := numbers.uniform(low, high)))
        if abs(w % 1 - 0.5) < MARGIN * w or abs(h % 1 - 0.5) < MARGIN * h:
            w, h = _sides(area, torch.tensor([logarithm], dtype=torch.float32, device="cpu").exp_().item())
        w, h = round(w), round(h)
        if 0 < w <= width and 0 < h <= height:
            return numbers.integer(height - h + 1), numbers.integer(width - w + 1), h, w
    h, w = height, width
    if width / height < min(ratio):
        h = round(width / min(ratio))
    elif width / height > max(ratio):
        w = round(height * max(ratio))
    return (height - h) // 2, (width - w) // 2, h, w


def _sides(area: float, aspect_ratio: float) -> tuple[float, float]:
    return math.sqrt(area * aspect_ratio), math.sqrt(area / aspect_ratio)


def _torchvision_box(scale: Range, ratio: Range, height: int, width: int) -> tuple[int, int, int, int]:
    top, left, h, w = v1.RandomResizedCrop.get_params(meta_image(height, width), list(scale), list(ratio))
    return top, left, h, w
