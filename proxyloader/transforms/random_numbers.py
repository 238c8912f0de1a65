"""Random numbers from torch's generator, drawn one by one or for many images at once. Runs in the worker.

NOTE [ Numbers drawn in advance ]
Drawing a hundred numbers at once takes torch hardly longer than drawing one, and its generator advances by one step per
number, whether float or integer. So the numbers of many images are drawn from one state, once as floats and once as
integers, and each draw takes the next element of the list of its type. Afterwards, the generator is advanced as if each
number had been drawn individually. Before first use, the results are compared with individual draws.

Nothing else may draw from the generator in the meantime. So this is done only in workers, and only for plans whose
steps all draw with ``uniform``, ``exp_uniform`` and ``integer``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import numpy as np
import torch

BLOCK = 512
"""Number of random numbers drawn at once."""

SEEDS = range(4)


class OneByOne(threading.local):
    """Draws each number on request, into reused tensors.

    Creating a tensor takes as long as drawing a number, so each thread has one set of tensors.
    """

    def __init__(self, dtype: torch.dtype, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        with torch.inference_mode(False):  # inference tensors cannot be written outside of it
            self._float, self._integer = torch.empty(1, dtype=dtype), torch.empty(1, dtype=torch.int64)

    def uniform(self, low: float, high: float) -> float:
        return self._float.uniform_(low, high, generator=self._generator).item()

    def exp_uniform(self, low: float, high: float) -> float:
        return self._float.uniform_(low, high, generator=self._generator).exp_().item()

    def integer(self, end: int) -> int:
        return int(self._integer.random_(0, end, generator=self._generator).item())


class NumbersAhead:
    """The next numbers of a generator, as if drawn into float32 and int64 tensors of one element."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._begin()

    def _begin(self) -> None:
        self._state, self._at = self._generator.get_state(), 0
        self._floats: dict[tuple[float, float, bool], list[float]] = {}
        self._words: list[int] | None = None

    def uniform(self, low: float, high: float) -> float:
        """Return the number that ``uniform_(low, high)`` would draw."""
        return self._float(low, high, False)

    def exp_uniform(self, low: float, high: float) -> float:
        """Return the number that ``uniform_(low, high).exp_()`` would yield."""
        return self._float(low, high, True)

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
        """Advance the generator as if each number had been drawn individually."""
        self._drawn(self._at, 0.0, 1.0)

    def _drawn(self, count: int, low: float, high: float) -> torch.Tensor:
        self._generator.set_state(self._state)
        return torch.empty(count, dtype=torch.float32, device="cpu").uniform_(low, high, generator=self._generator)


class _InThread(threading.local):
    ahead: NumbersAhead | None = None
    """Source of this thread's random numbers; None: torch's default generator."""


in_thread = _InThread()


@contextlib.contextmanager
def drawing_ahead() -> Iterator[None]:
    """Context manager that draws this thread's numbers for many images at once."""
    in_thread.ahead = ahead = NumbersAhead(torch.default_generator)
    try:
        yield
    finally:
        in_thread.ahead = None
        ahead.end()


@functools.cache
def are_alike_ahead() -> bool:
    """Return whether the installed torch draws the same numbers ahead and one by one.

    The main process passes the result to workers, because the check takes a while.
    """
    with torch.device("cpu"):  # regardless of torch's default device
        return all(_draw_numbers(seed, is_ahead=True) == _draw_numbers(seed, is_ahead=False) for seed in SEEDS)


def _draw_numbers(seed: int, is_ahead: bool) -> list[float]:
    """Return more than a block of numbers of all types, and the number after them."""
    generator = torch.Generator().manual_seed(seed)
    numbers: NumbersAhead | OneByOne = NumbersAhead(generator) if is_ahead else OneByOne(torch.float32, generator)
    drawn: list[float] = []
    while len(drawn) < BLOCK + 40 * seed:  # each seed ends at a different position
        drawn += [numbers.uniform(0.08, 1.0), numbers.exp_uniform(-seed, 0.3), numbers.integer(1 + len(drawn) ** 2)]
        drawn += [numbers.uniform(0.0, 1.0)]
    if isinstance(numbers, NumbersAhead):
        numbers.end()
    return [*drawn, torch.rand(1, generator=generator).item()]
