"""When proxyloader wins, and when it does not: where the figures of a run would have to change for another answer.

Each sentence follows from ``Figures.step_s``: with workers a step takes as long as what is slowest. proxyloader wins if
that is less with it than with the stock loader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .figures import Figures
from .words import cores, ms, rate, three_digits

HALF = 0.5
"""Share of the time from which a worker counts as busy."""

WORTH = 1.05
"""Gain from which proxyloader is worth it."""


def winning(figures: Figures) -> tuple[str, ...]:
    """Return conditions under which proxyloader wins: three or more, if both loaders could be measured."""
    return tuple(_winning(figures)) if len(figures.alone) == 2 else ()


def losing(figures: Figures) -> tuple[str, ...]:
    """Return conditions under which it does not: two or more, if both loaders could be measured."""
    return tuple(_losing(figures)) if len(figures.alone) == 2 else ()


def _winning(figures: Figures) -> Iterator[str]:
    ours, stock = figures.alone["proxyloader"].phase, figures.alone["stock"].phase
    step_s, target_s, longest_s = figures.step.step_s, figures.step_s("proxyloader"), _longest_step_s(figures)
    needed = cores(stock.cpu_s / target_s)
    if longest_s:
        most = figures.step_s("stock", 0.0) / figures.step_s("proxyloader", 0.0)
        times = three_digits(most)
        yield f"with a step below {ms(longest_s)} ms (here {ms(step_s)}): it gives up to {times} times the images"
    else:
        yield (
            f"where it loads more than {rate(figures, stock.step_s)}, as with a faster GPU (here "
            f"{rate(figures, ours.step_s)}), and a step takes less than {ms(stock.step_s)} ms (here {ms(step_s)})"
        )
    least_s = _least_stock_s(figures)
    yield (
        f"with images or transforms that take the stock loader more than {ms(least_s)} ms a batch (here "
        f"{ms(stock.step_s)}), and proxyloader no longer than here"
    )
    if stock.cpu_s > ours.cpu_s:
        yield (
            f"with less than {needed} for the loader: a batch takes the stock loader {ms(stock.cpu_s)} ms of CPU time, "
            f"and proxyloader {ms(ours.cpu_s)} ms"
        )
    else:
        yield (
            f"where a batch takes it less than {ms(stock.cpu_s)} ms of CPU time, as with a GPU that decodes (here "
            f"{ms(ours.cpu_s)}), and there is less than {needed} for the loader"
        )
    if figures.step_s("stock") > target_s:
        if ours.bytes_read:
            least, enough = _mb_per_s(figures, stock.step_s), _mb_per_s(figures, target_s)
            yield f"if the files come at more than {least} MB/s; from {enough} MB/s on it gains all that it can"
        batches = _batches_until_even(figures)
        if batches:
            yield f"in runs of more than {batches:,} batches: then it has made up for its later start"


def _losing(figures: Figures) -> Iterator[str]:
    ours, stock = figures.alone["proxyloader"].phase, figures.alone["stock"].phase
    step_s, longest_s = figures.step.step_s, _longest_step_s(figures) or stock.step_s
    keeps_up = "the stock loader keeps up with it" if figures.num_workers else "the loaders are a small part of it"
    yield f"with a step of {ms(longest_s)} ms or more (here {ms(step_s)}): {keeps_up}"
    if not figures.num_workers or stock.cores_used >= HALF * min(figures.cores, figures.num_workers):
        needed = cores(stock.cpu_s / figures.step_s("proxyloader"))
        yield f"with {needed} or more for the stock loader: then a step takes no longer than with proxyloader"
    else:
        yield "with more workers of the stock loader, as those that there are mostly wait"
    if ours.bytes_read:
        slow = _mb_per_s(figures, max(stock.step_s, step_s))
        yield f"if the files come at less than {slow} MB/s: then both loaders wait for them"
    batches = _batches_until_even(figures)
    if batches:
        yield f"in runs of fewer than {batches:,} batches: it starts later, and has not made up for it"


def _least_stock_s(figures: Figures) -> float:
    """Return the time of a batch of the stock loader alone above which proxyloader's steps are shorter, in seconds."""
    target_s = figures.step_s("proxyloader")
    least_s = target_s if figures.num_workers else target_s - figures.step.step_s
    stock_s = figures.alone["stock"].phase.step_s
    return least_s if figures.step_s("stock") <= target_s else min(least_s, stock_s)


def _longest_step_s(figures: Figures) -> float:
    """Return the longest time of the step alone with which proxyloader is worth it, in seconds; 0 if there is none."""
    longest_s = max(figures.step.step_s, figures.alone["stock"].phase.step_s)
    steps_s = longest_s * np.geomspace(1e-3, 100, 5000)
    wins = [
        step_s for step_s in steps_s if figures.step_s("stock", step_s) > WORTH * figures.step_s("proxyloader", step_s)
    ]
    return max(wins, default=0.0)


def _mb_per_s(figures: Figures, step_s: float) -> str:
    """Return how fast files must come for a step of this time."""
    return three_digits(figures.alone["proxyloader"].phase.bytes_per_step / step_s / 1e6)


def _batches_until_even(figures: Figures) -> int:
    """Return after how many batches a later start is made up for; 0 if it starts no later or gains nothing."""
    late_s = figures.alone["proxyloader"].first_batch_s - figures.alone["stock"].first_batch_s
    gained_s = figures.step_s("stock") - figures.step_s("proxyloader")
    return math.ceil(late_s / gained_s) if late_s > 0 and gained_s > 0 else 0
