"""A check that several rooms make of the numbers they are given."""

from __future__ import annotations

import numbers
from typing import Any


def at_least(name: str, value: Any, least: int, other: str = "") -> None:
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
