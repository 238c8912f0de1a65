"""When proxyloader wins, and when it does not: where the figures of a run would have to change for another answer.

Each sentence follows from ``Figures.step_s``. A step takes as long as what is slowest. So with the times of a batch of
proxyloader alone and the stock loader alone, and of the step alone, proxyloader wins if the longer one of stock loader
and step is longer than that of proxyloader and step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .figures import Figures
from .words import cores, ms, rate, three_digits


def winning(figures: Figures) -> tuple[str, ...]:
    """Return conditions under which proxyloader wins: three or more, if both loaders could be measured."""
    return tuple(_winning(figures)) if len(figures.alone) == 2 else ()


def losing(figures: Figures) -> tuple[str, ...]:
    """Return conditions under which it does not: two or more, if both loaders could be measured."""
    return tuple(_losing(figures)) if len(figures.alone) == 2 else ()


def _winning(figures: Figures) -> Iterator[str]:
    ours, stock = figures.alone["proxyloader"].phase, figures.alone["stock"].phase
    step_s = figures.step.step_s
    target_s = max(ours.step_s, step_s)
    needed = cores(stock.cpu_s / target_s)
    if stock.step_s > ours.step_s:
        yield (
            f"with a step below {ms(stock.step_s)} ms (here {ms(step_s)}): at {ms(ours.step_s)} ms and below it gives "
            f"{stock.step_s / ours.step_s:.2g} times the images"
        )
    else:
        yield (
            f"where it loads more than {rate(figures, stock.step_s)}, as with a faster GPU (here "
            f"{rate(figures, ours.step_s)}), and a step takes less than {ms(stock.step_s)} ms (here {ms(step_s)})"
        )
    yield (
        f"with images or transforms that take the stock loader more than {ms(target_s)} ms a batch (here "
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
    if stock.step_s > target_s:
        if ours.bytes_read:
            least, enough = _mb_per_s(figures, stock.step_s), _mb_per_s(figures, target_s)
            yield f"if the files come at more than {least} MB/s; from {enough} MB/s on it gains all that it can"
        batches = _batches_until_even(figures)
        if batches:
            yield f"in runs of more than {batches:,} batches: then it has made up for its later start"


def _losing(figures: Figures) -> Iterator[str]:
    ours, stock = figures.alone["proxyloader"].phase, figures.alone["stock"].phase
    step_s = figures.step.step_s
    yield f"with a step of {ms(stock.step_s)} ms or more (here {ms(step_s)}): the stock loader keeps up with it"
    target_s, name = max((step_s, "the step"), (ours.step_s, "proxyloader"))
    yield (
        f"with {cores(stock.cpu_s / target_s)} or more for workers of the stock loader: then it takes no longer than "
        f"{name} does"
    )
    if ours.bytes_read:
        slow = _mb_per_s(figures, max(stock.step_s, step_s))
        yield f"if the files come at less than {slow} MB/s: then both loaders wait for them"
    batches = _batches_until_even(figures)
    if batches:
        yield f"in runs of fewer than {batches:,} batches: it starts later, and has not made up for it"


def _mb_per_s(figures: Figures, step_s: float) -> str:
    """Return how fast files must come for a step of this time."""
    return three_digits(figures.alone["proxyloader"].phase.bytes_per_step / step_s / 1e6)


def _batches_until_even(figures: Figures) -> int:
    """Return after how many batches a later start is made up for; 0 if it starts no later or gains nothing."""
    late_s = figures.alone["proxyloader"].first_batch_s - figures.alone["stock"].first_batch_s
    gained_s = figures.step_s("stock") - figures.step_s("proxyloader")
    return math.ceil(late_s / gained_s) if late_s > 0 and gained_s > 0 else 0
