"""EarlyDraws: random numbers of an epoch that begins before it is asked for, and may be dropped. Main process.

See NOTE [ The next epoch, early ] in ``loader/early_epoch.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils.data import RandomSampler

MOST_SEEDS = 8
"""Most seeds that are looked for between two epochs."""


class EarlyDraws:
    """What an early epoch draws from torch's default generator, which stays as it is. Main process.

    Args:
        seeds: number of seeds that will be drawn from the generator before the epoch is asked for.

    Attributes:
        before: state of the generator when the epoch is asked for.
    """

    def __init__(self, seeds: int = 0) -> None:
        self._at_first = torch.get_rng_state()
        self.before = _behind(self._at_first, seeds)
        self._after: torch.Tensor | None = None

    @contextlib.contextmanager
    def lend_generator(self, sampler: RandomSampler) -> Iterator[None]:
        """Let a sampler draw its order as it would from the default generator."""
        drawn_from = torch.Generator().set_state(self.before)
        sampler.generator = _generator_of_order(drawn_from)
        self._after = drawn_from.get_state()
        try:
            yield
        finally:
            sampler.generator = None

    def accept(self) -> bool:
        """Let the default generator go on behind the draws. False: it has drawn something else in the meantime."""
        if self._after is None:
            return True
        if not torch.equal(torch.get_rng_state(), self.before):
            return False
        torch.set_rng_state(self._after)
        return True

    def seeds_drawn_meanwhile(self) -> int | None:
        """Return how many seeds were drawn from the default generator; None: too many, or something else was drawn."""
        now = torch.get_rng_state()
        return next((n for n in range(1, MOST_SEEDS + 1) if torch.equal(_behind(self._at_first, n), now)), None)


def _behind(state: torch.Tensor, seeds: int) -> torch.Tensor:
    """Return the state of the default generator behind some seeds, as loops over torch's loaders draw them."""
    generator = torch.Generator().set_state(state)
    for _ in range(seeds):
        _seed_of(generator)
    return generator.get_state() if seeds else state


def _seed_of(default: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=default).item())


def _generator_of_order(default: torch.Generator) -> torch.Generator:
    """Return the generator that torch's RandomSampler makes of a seed from the default one."""
    return torch.Generator().manual_seed(_seed_of(default))


def draws_one_seed() -> bool:
    """Return whether torch's RandomSampler draws from the default generator what ``EarlyDraws`` takes it to draw."""
    before, sampler = torch.get_rng_state(), RandomSampler(range(32))
    try:
        expected, after = list(sampler), torch.get_rng_state()
    except RuntimeError:  # the default device is another
        return False
    finally:
        torch.set_rng_state(before)
    drawn_from = torch.Generator().set_state(before)
    sampler.generator = _generator_of_order(drawn_from)
    return list(sampler) == expected and torch.equal(drawn_from.get_state(), after)


DRAWS_ONE_SEED = draws_one_seed()
"""Found out at import, as other threads may draw later."""
