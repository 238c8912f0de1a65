"""Figures in words."""

from __future__ import annotations

import math

from .figures import Figures


def ms(seconds: float) -> str:
    """Return a time in milliseconds, without its unit."""
    return three_digits(1e3 * seconds)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def rate(figures: Figures, step_s: float) -> str:
    """Return a speed, from the time of a step in seconds."""
    return f"{three_digits(figures.images_per_s(step_s))} images/s"


def cores(number: float) -> str:
    """Return a number of cores, which need not be whole."""
    return f"{number:.1f} cores" if number >= 1 else f"{100 * number:.0f} % of a core"


def three_digits(number: float) -> str:
    """Return a number with three digits, 0.001 at the least, and a comma for thousands."""
    digits = 2 - math.floor(math.log10(max(number, 1e-3)))
    return f"{number:,.{min(3, max(0, digits))}f}"
