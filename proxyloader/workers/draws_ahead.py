"""Keep generator states in step with torch's loader despite deeper prefetching. Both processes.

NOTE [ Rolling back draws ]
Decoded batches wait beside those that workers load, so the sampler and the workers are asked for more batches ahead
than by torch's loader. After a loop that is left early these batches are not needed, and what was drawn for them is
undone. Otherwise the next epochs would differ from those of torch's loader, and depend on timing: samplers may draw
from a generator that goes on from epoch to epoch, and transforms in persistent workers do.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from .._random_state import set_states, states_now


class RequestsAhead:
    """Requests to the workers that torch's loader would not have made, and what the sampler has drawn for them.

    A sampler that draws as it goes advances its own generator for each request. torch's RandomSampler draws once more
    at its end. Main process.

    ``requests`` is the number of requests that torch's loader makes before its first batch.

    Attributes:
        needed: number below which all requests are needed that are not void.
        void: the numbers of requests that were made and are not needed, of which some worker may not know yet.
    """

    def __init__(self, requests: int) -> None:
        self._before_first, self._first, self.needed = requests, 0, requests
        self.void: tuple[range, ...] = ()
        self._states: deque[torch.Tensor] = deque()  # from the last request of torch's loader to the last one made

    def begin(self, number: int) -> None:
        """Begin an epoch, with the number of its first request."""
        if number - self._first >= self._before_first:
            self.void = ()  # each worker has had a request
        if self.needed < number:
            self.void += (range(self.needed, number),)
        self._first, self.needed = number, number + self._before_first
        self._states.clear()

    def note(self, number: int, generator: torch.Generator | None) -> None:
        """Record what was drawn from the sampler's generator for a request, or for the end of the epoch after it."""
        if number < self.needed:
            self._states.clear()
        if generator is not None:
            self._states.append(generator.get_state())

    def received(self, number: int) -> None:
        """Record that the training loop received a batch, so that torch's loader would have made another request."""
        if self._first <= number:
            self.needed += 1
            if len(self._states) > 1:
                self._states.popleft()

    def undo(self, generator: torch.Generator | None) -> None:
        """Set the generator back to where torch's loader would have left it, if nothing else has drawn from it."""
        if generator is not None and len(self._states) > 1 and torch.equal(generator.get_state(), self._states[-1]):
            generator.set_state(self._states[0])


class DrawsOfWorker:
    """Sets the generators back to where they were before requests that were not needed. Worker."""

    def __init__(self) -> None:
        self._before: deque[tuple[int, tuple[Any, ...]]] = deque()

    def settle(self, number: int, needed: int, void: tuple[range, ...]) -> None:
        """Prepare for a request with its number. ``needed``, ``void``: see ``RequestsAhead``."""
        first = next((at for at, (past, _) in enumerate(self._before) if any(past in each for each in void)), None)
        if first is not None:
            set_states(self._before[first][1])
            while len(self._before) > first:
                self._before.pop()
        while self._before and self._before[0][0] < needed:
            self._before.popleft()
        if number >= needed:
            self._before.append((number, states_now(beside_torch=True)))
