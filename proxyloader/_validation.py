"""Checks of numeric arguments."""

from __future__ import annotations

import numbers
from typing import Any

MOST_THREADS = 1024
"""Most DALI threads. DALI creates all of them at once, and the process ends if the system refuses one."""


def check_int(name: str, value: Any, least: int, other: str = "") -> None:
    """Check the argument ``name``. ``other`` says what else is allowed, for the message.

    Raises:
        ValueError: the value is not an integer, or is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} is a whole number, {least} or more{other}; got {value!r}")


def check_num_threads(num_threads: Any, other: str = "") -> None:
    """Check a number of DALI's CPU threads.

    Raises:
        ValueError: it is not an integer, less than 1, or more than ``MOST_THREADS``.
    """
    check_int("num_threads", num_threads, 1, other)
    if num_threads > MOST_THREADS:
        raise ValueError(f"num_threads is at most {MOST_THREADS}{other}; got {num_threads}")
