"""Keep generator states in step with torch's loader despite deeper prefetching. Both processes.

NOTE [ Rolling back draws ]
Decoded batches are prefetched in addition to those that workers load, so more requests are issued than by torch's
loader. If a loop is left early, the draws for the excess requests are rolled back. Otherwise later epochs would differ
from torch's and depend on timing, because samplers, and transforms in persistent workers, may draw from a generator
that continues from epoch to epoch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from .._random_state import get_rng_states, set_rng_states


class SamplerDraws:
    """Rolls back the sampler's draws for excess requests, which torch's loader would not have issued yet. Main process.

    A sampler that draws incrementally advances its own generator at each request. torch's RandomSampler draws once more
    at its end. ``num_prefetched`` is the number of requests that torch's loader issues before its first batch.

    Attributes:
        first_excess: number of the first excess request.
        discarded: numbers of earlier requests whose draws were rolled back, until every worker knows.
    """

    def __init__(self, num_prefetched: int) -> None:
        self._num_prefetched, self._first, self.first_excess = num_prefetched, 0, num_prefetched
        self.discarded: tuple[range, ...] = ()
        self._states: deque[torch.Tensor] = deque()  # from torch's last request to our last one

    def begin(self, number: int) -> None:
        """Begin an epoch whose first request has this number."""
        if number - self._first >= self._num_prefetched:
            self.discarded = ()  # each worker has received a request
        if self.first_excess < number:
            self.discarded += (range(self.first_excess, number),)
        self._first, self.first_excess = number, number + self._num_prefetched
        self._states.clear()

    def record(self, number: int, generator: torch.Generator | None) -> None:
        """Record the state of the sampler's generator after a request, or at the end of the epoch."""
        if number < self.first_excess:
            self._states.clear()
        if generator is not None:
            self._states.append(generator.get_state())

    def advance(self, number: int) -> None:
        """Record that the training loop received a batch, after which torch's loader issues another request."""
        if self._first <= number:
            self.first_excess += 1
            if len(self._states) > 1:
                self._states.popleft()

    def roll_back(self, generator: torch.Generator | None) -> None:
        """Reset the generator to its state under torch's loader, unless others have drawn from it."""
        if generator is not None and len(self._states) > 1 and torch.equal(generator.get_state(), self._states[-1]):
            generator.set_state(self._states[0])


class WorkerDraws:
    """Rolls back a worker's draws for discarded requests. Worker."""

    def __init__(self) -> None:
        self._history: deque[tuple[int, tuple[Any, ...]]] = deque()

    def rewind(self, number: int, first_excess: int, discarded: tuple[range, ...]) -> None:
        """Prepare for a request with this number. ``first_excess``, ``discarded``: see ``SamplerDraws``."""
        stale = (k for k, (past, _) in enumerate(self._history) if any(past in numbers for numbers in discarded))
        if (first := next(stale, None)) is not None:
            set_rng_states(self._history[first][1])
            while len(self._history) > first:
                self._history.pop()
        while self._history and self._history[0][0] < first_excess:
            self._history.popleft()
        if number >= first_excess:
            self._history.append((number, get_rng_states(include_numpy_and_python=True)))
