"""DrawsAhead: what a sampler has drawn from its own generator beyond what the stock loader would have asked for.

Decoded batches wait beside those that workers load, so the sampler is asked for more batches ahead than by torch's
loader. A sampler that draws as it goes then advances its generator further. torch's RandomSampler draws once more at
its end. After a loop that is left early the next epochs would have another order than with torch's loader.
"""

from __future__ import annotations

from collections import deque

import torch


class DrawsAhead:
    """The states of a generator, from the last request that torch's loader would have made to the last one made.

    ``requests`` is the number of requests that torch's loader makes before its first batch.
    """

    def __init__(self, requests: int) -> None:
        self._of_torch, self._made = requests, 0  # requests so far
        self._states: deque[torch.Tensor] = deque()

    def note(self, generator: torch.Generator | None) -> None:
        """Record that a request was made, and what was drawn for it."""
        self._made += 1
        if self._made <= self._of_torch:
            self._states.clear()
        if generator is not None:
            self._states.append(generator.get_state())

    def advance(self) -> None:
        """Record that the training loop received a batch, so that torch's loader would have made another request."""
        self._of_torch += 1
        if len(self._states) > 1:
            self._states.popleft()

    def undo(self, generator: torch.Generator | None) -> None:
        """Set the generator back to where torch's loader would have left it, if nothing else has drawn from it."""
        if generator is not None and len(self._states) > 1 and torch.equal(generator.get_state(), self._states[-1]):
            generator.set_state(self._states[0])
