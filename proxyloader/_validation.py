"""Checks of numeric arguments."""

from __future__ import annotations

import numbers
from typing import Any


def check_int(name: str, value: Any, least: int, other: str = "") -> None:
    """Check the argument ``name``. ``other`` says what else is allowed, for the message.

    Raises:
        ValueError: the value is not an integer, or is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}{other}, got {value!r}")
