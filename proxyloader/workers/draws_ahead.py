"""Keep generator states in step with torch's loader despite deeper prefetching. Both processes.

NOTE [ Rolling back draws ]
Decoded batches wait in addition to those that workers load, so more batches are requested ahead than by torch's loader.
If a loop is left early, the draws for the excess batches are undone. Otherwise later epochs would differ from torch's
and depend on timing, because samplers may draw from a generator that continues from epoch to epoch, as do transforms in
persistent workers.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from .._random_state import get_rng_states, set_rng_states


class RequestsAhead:
    """Requests that torch's loader would not have issued yet, and the draws of the sampler for them. Main process.

    A sampler that draws incrementally advances its own generator at each request. torch's RandomSampler draws once more
    at its end. ``requests`` is the number of requests that torch's loader issues before its first batch.

    Attributes:
        needed: number below which all requests are needed, except void ones.
        void: the numbers of issued requests that are not needed, as far as a worker may not know.
    """

    def __init__(self, requests: int) -> None:
        self._before_first, self._first, self.needed = requests, 0, requests
        self.void: tuple[range, ...] = ()
        self._states: deque[torch.Tensor] = deque()  # from the last request of torch's loader to the last one issued

    def begin(self, number: int) -> None:
        """Begin an epoch, with the number of its first request."""
        if number - self._first >= self._before_first:
            self.void = ()  # each worker has had a request
        if self.needed < number:
            self.void += (range(self.needed, number),)
        self._first, self.needed = number, number + self._before_first
        self._states.clear()

    def note(self, number: int, generator: torch.Generator | None) -> None:
        """Record the state of the sampler's generator after a request, or at the end of the epoch."""
        if number < self.needed:
            self._states.clear()
        if generator is not None:
            self._states.append(generator.get_state())

    def received(self, number: int) -> None:
        """Record that the training loop received a batch, after which torch's loader issues another request."""
        if self._first <= number:
            self.needed += 1
            if len(self._states) > 1:
                self._states.popleft()

    def undo(self, generator: torch.Generator | None) -> None:
        """Reset the generator to its state under torch's loader, unless others have drawn from it."""
        if generator is not None and len(self._states) > 1 and torch.equal(generator.get_state(), self._states[-1]):
            generator.set_state(self._states[0])


class WorkerDraws:
    """Resets the generators to their states before requests that were not needed. Worker."""

    def __init__(self) -> None:
        self._before: deque[tuple[int, tuple[Any, ...]]] = deque()

    def settle(self, number: int, needed: int, void: tuple[range, ...]) -> None:
        """Prepare for a request with its number. ``needed``, ``void``: see ``RequestsAhead``."""
        first = next((at for at, (past, _) in enumerate(self._before) if any(past in each for each in void)), None)
        if first is not None:
            set_rng_states(self._before[first][1])
            while len(self._before) > first:
                self._before.pop()
        while self._before and self._before[0][0] < needed:
            self._before.popleft()
        if number >= needed:
            self._before.append((number, get_rng_states(include_numpy_and_python=True)))
