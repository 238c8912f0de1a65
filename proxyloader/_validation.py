"""Checks of numeric arguments."""

import numbers
from typing import Any


def check_int(name: str, value: Any, least: int, other: str = "") -> None:
    """Raise ValueError unless an argument is an integer >= ``least``. ``other`` lists further allowed values."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}{other}, got {value!r}")
