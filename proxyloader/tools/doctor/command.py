"""All checks, one after the other, and their report."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ... import __version__
from . import decoders, machine, packages
from .finding import Finding, Status
from .subject import Subject

Check = Callable[[Subject], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (*packages.CHECKS, *decoders.CHECKS, *machine.CHECKS)

STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(as_json: bool, limit_s: float) -> bool:
    """Examine this machine, print the report, and return whether no check has failed.

    Args:
        as_json: print JSON, for programs and bug reports, in place of a table.
        limit_s: how long each child process may take, in seconds.

    Raises:
        ValueError: the limit is not above 0.
    """
    if not limit_s > 0:
        raise ValueError(f"limit={limit_s:g}: it is a number of seconds above 0")
    findings = _shown_as_json(limit_s) if as_json else _shown_as_table(limit_s)
    return all(finding.status != "fail" for finding in findings)


def examine(subject: Subject, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """Yield the findings of all checks. One that itself fails is a finding, as the others are still of use."""
    for check in checks:
        try:
            yield from check(subject)
        except Exception as error:
            found = f"this check itself failed: {type(error).__name__}: {error}"
            yield Finding(check.__name__, "warn", found, "Report it, with the output of proxyloader doctor --json")


def _examined(limit_s: float) -> list[Finding]:
    subject = Subject(limit_s)
    subject.ask_at_once()
    return list(examine(subject))


def _shown_as_json(limit_s: float) -> list[Finding]:
    findings = _examined(limit_s)
    report: dict[str, Any] = {
        "proxyloader": __version__,
        "system": platform.platform(),
        "status": worst(findings),
        "findings": [vars(finding) for finding in findings],
    }
    print(json.dumps(report, indent=2))
    return findings


def _shown_as_table(limit_s: float) -> list[Finding]:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    console = Console()
    with console.status("imports packages and decodes pictures, each in a process of its own"):
        findings = _examined(limit_s)
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        text = [Text(finding.found), *([Text(f"-> {finding.remedy}")] if finding.remedy else [])]
        table.add_row(Text(finding.status, STYLES[finding.status]), Text(finding.name), Group(*text))
    console.print(table)
    numbers = {status: sum(finding.status == status for finding in findings) for status in STYLES}
    console.print(f"\n{numbers['ok']} ok, {numbers['warn']} to look at, {numbers['fail']} failed", highlight=False)
    return findings


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status of all."""
    order = list(STYLES)
    return max((finding.status for finding in findings), key=order.index, default="ok")
