"""A line of the report: what was looked at, what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        name: what was looked at.
        status: "fail" if the library cannot do its work, or images may be wrong; "warn" if it works, but slower or only
            in part.
        found: what is there.
        remedy: what to do; "" if the status is "ok".
    """

    name: str
    status: Status
    found: str
    remedy: str = ""
