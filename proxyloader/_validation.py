"""Checks of numeric arguments."""

from __future__ import annotations

import numbers
from typing import Any

MOST_THREADS = 1024
"""Of DALI's, for it asks for all at once, and where the system refuses one, the process ends."""


def check_int(name: str, value: Any, least: int, other: str = "") -> None:
    """
    Args:
        name: of the argument.
        value: that was given for it.
        least: that it may be.
        other: what else is allowed, for the message.

    Raises:
        ValueError: it is no whole number, or a smaller one.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} is a whole number, {least} or more{other}; got {value!r}")


def check_num_threads(num_threads: Any, other: str = "", name: str = "num_threads") -> None:
    """How many threads DALI is to have on the CPU.

    Raises:
        ValueError: it is no whole number, less than 1, or more than ``MOST_THREADS``.
    """
    check_int(name, num_threads, 1, other)
    if num_threads > MOST_THREADS:
        raise ValueError(f"{name} is at most {MOST_THREADS}{other}; got {num_threads}")
