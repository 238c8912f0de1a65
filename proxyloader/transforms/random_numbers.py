"""Numbers of torch's generator, drawn one by one, or for many images at once. Runs in the worker.

NOTE [ Numbers ahead ]
torch takes hardly longer to draw a hundred numbers at once than to draw one. Whether it draws a float or an
integer, its generator goes one step for each. So the numbers of many images are drawn from one state, once as floats
and once as integers, and each draw takes the next place of the list of its kind. At the end the generator is put where
it would be if each number had been drawn alone. Before this is used, it is compared with drawing them alone.

Meanwhile nobody else may draw from the generator. So it is done in workers alone, and for plans whose steps all draw
by ``uniform``, ``exp_uniform`` and ``integer``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import numpy as np
import torch

BLOCK = 512
"""How many numbers are drawn at once."""

SEEDS = range(4)


class OneByOne(threading.local):
    """Draws each number when it is asked for, into tensors that are used again.

    Creating a tensor takes as long as drawing a number. So there is one set of tensors for each thread.
    """

    def __init__(self, dtype: torch.dtype, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        with torch.inference_mode(False):  # else nobody could write to them outside of it
            self._float, self._integer = torch.empty(1, dtype=dtype), torch.empty(1, dtype=torch.int64)

    def uniform(self, low: float, high: float) -> float:
        return self._float.uniform_(low, high, generator=self._generator).item()

    def exp_uniform(self, low: float, high: float) -> float:
        return self._float.uniform_(low, high, generator=self._generator).exp_().item()

    def integer(self, end: int) -> int:
        return int(self._integer.random_(0, end, generator=self._generator).item())


class NumbersAhead:
    """The next numbers of a generator, as one draws them into float32 and int64 tensors of one element."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._begin()

    def _begin(self) -> None:
        self._state, self._at = self._generator.get_state(), 0
        self._floats: dict[tuple[float, float, bool], list[float]] = {}
        self._words: list[int] | None = None

    def uniform(self, low: float, high: float) -> float:
        """Return what ``uniform_(low, high)`` draws."""
        return self._float(low, high, False)

    def exp_uniform(self, low: float, high: float) -> float:
        """Return what ``uniform_(low, high).exp_()`` makes."""
        return self._float(low, high, True)

    def integer(self, end: int) -> int:
        """Return what ``random_(0, end)`` draws, for an ``end`` up to 2**27. For larger ones torch draws twice."""
        at = self._next()
        if self._words is None:
            self._generator.set_state(self._state)
            pairs = torch.empty(BLOCK // 2, dtype=torch.int64, device="cpu")
            pairs.random_(-(2**63), None, generator=self._generator)
            halves = pairs.numpy().view(np.uint64)[:, None] >> np.array([32, 0], np.uint64) & 0xFFFFFFFF
            self._words = halves.ravel().tolist()
        return self._words[at] % end

    def _float(self, low: float, high: float, exp: bool) -> float:
        at, kind = self._next(), (low, high, exp)
        if kind not in self._floats:
            drawn = self._drawn(BLOCK, low, high)
            self._floats[kind] = (drawn.exp_() if exp else drawn).tolist()
        return self._floats[kind][at]

    def _next(self) -> int:
        if self._at == BLOCK:
            self.end()
            self._begin()
        self._at += 1
        return self._at - 1

    def end(self) -> None:
        """Put the generator where it would be if each number had been drawn alone."""
        self._drawn(self._at, 0.0, 1.0)

    def _drawn(self, count: int, low: float, high: float) -> torch.Tensor:
        self._generator.set_state(self._state)
        return torch.empty(count, dtype=torch.float32, device="cpu").uniform_(low, high, generator=self._generator)


class _InThread(threading.local):
    ahead: NumbersAhead | None = None
    """Where the draws of this thread come from; None: from torch's default generator."""


in_thread = _InThread()


@contextlib.contextmanager
def drawing_ahead() -> Iterator[None]:
    """Context in which the draws of this thread are made for many images at once."""
    in_thread.ahead = ahead = NumbersAhead(torch.default_generator)
    try:
        yield
    finally:
        in_thread.ahead = None
        ahead.end()


@functools.cache
def are_alike_ahead() -> bool:
    """Return whether the installed torch draws the same numbers ahead and one by one.

    Workers are told, as each would take a while to find out.
    """
    with torch.device("cpu"):  # also where another device is torch's default
        return all(_numbers_of(seed, is_ahead=True) == _numbers_of(seed, is_ahead=False) for seed in SEEDS)


def _numbers_of(seed: int, is_ahead: bool) -> list[float]:
    """Return more than a block of numbers of all kinds, and the next one behind them."""
    generator = torch.Generator().manual_seed(seed)
    numbers: NumbersAhead | OneByOne = NumbersAhead(generator) if is_ahead else OneByOne(torch.float32, generator)
    drawn: list[float] = []
    while len(drawn) < BLOCK + 40 * seed:  # seeds end at different places
        drawn += [numbers.uniform(0.08, 1.0), numbers.exp_uniform(-seed, 0.3), numbers.integer(1 + len(drawn) ** 2)]
        drawn += [numbers.uniform(0.0, 1.0)]
    if isinstance(numbers, NumbersAhead):
        numbers.end()
    return [*drawn, torch.rand(1, generator=generator).item()]
