"""What came out: the record, the table, the picture, and the comparison with an earlier record."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from .cases import case_of
from .machine import machine
from .rounds import INTERRUPTED, Outcome
from .setting import Setting

OURS = "proxyloader"
SLOWER = 0.9
"""A figure below this share of the earlier one is worse; runs of the same thing differ by as much as 10 %."""

BESIDE_SETTINGS = ("date", "benchmark", "command", "machine", "cases", "left_out", "augmentations")
"""What two records that are compared may differ in; each augmentation makes a case of its own."""

Record = dict[str, Any]


def record_of(setting: Setting, outcomes: dict[str, Outcome], command: str) -> Record:
    """One line of a file of results."""
    return {
        "date": datetime.date.today().isoformat(),
        "benchmark": "bench",
        "command": command,
        "machine": machine(),
        **{key: value for key, value in asdict(setting).items() if key != "root"},
        "cases": {name: _summary(outcome) for name, outcome in outcomes.items() if not outcome.is_missing},
        "left_out": {name: outcome.failure for name, outcome in outcomes.items() if outcome.is_missing},
    }


def _summary(outcome: Outcome) -> dict[str, Any]:
    """Medians of the rounds; of memory and of the longest wait the most."""
    rounds = outcome.rounds
    found: dict[str, Any] = {"failure": outcome.failure} if outcome.failure else {}
    if outcome.start is not None:
        found["first_batch_s"] = round(outcome.start.first_batch_s, 3)
    if not rounds:
        return found
    waits = list(zip(*(each.wait_ms for each in rounds)))
    found |= {
        "images_per_s": _median([each.images_per_s for each in rounds], 1),
        "images_per_s_rounds": [round(each.images_per_s, 1) for each in rounds],
        "cpu_ms_per_image": _median([each.cpu_ms_per_image for each in rounds], 3),
        "wait_ms": {
            "p50": _median(waits[0], 3),
            "p99": _median(waits[1], 3),
            "max": round(max(waits[2]), 3),
        },
        "pause_ms": _median([each.pause_ms for each in rounds], 3),
        "host_mb": round(max(each.host_mb for each in rounds), 1),
    }
    for name in ("gpu_mb", "gpu_percent", "jpeg_percent"):
        values = [getattr(each, name) for each in rounds if getattr(each, name) is not None]
        if values:
            found[name] = round(max(values), 1) if name == "gpu_mb" else _median(values, 1)
    return found


def _median(values: Any, digits: int) -> float:
    return round(float(statistics.median(values)), digits)


HEADINGS = (
    *("case", "images/s", "lowest - highest", "proxyloader is", "CPU ms/image", "first batch, s"),
    *("wait, ms: p50", "p99", "max", "first of a loop", "host MB", "GPU MB", "GPU %", "JPEG %"),
)

TABLES = {"how fast": range(1, 4), "what it takes": (4, *range(10, 14)), "how long one waits": range(5, 10)}
"""For a terminal, which is narrow: the columns of each beside the case's name."""


def rows_of(record: Record) -> list[list[str]]:
    """The table, a row for each case, under HEADINGS."""
    ours = record["cases"].get(OURS, {}).get("images_per_s")
    rows = []
    for name, case in record["cases"].items():
        shown = f"{name} (ceiling)" if case_of(name).is_ceiling else name
        if "images_per_s" not in case:
            rows.append([shown, f"failed: {case['failure']}", *[""] * (len(HEADINGS) - 2)])
            continue
        speeds, waits = case["images_per_s_rounds"], case["wait_ms"]
        times = f"{ours / case['images_per_s']:.2f} times" if ours and name != OURS else ""
        rows.append(
            [
                shown + _in_brackets(case.get("failure", "")),
                f"{case['images_per_s']:,.0f}",
                f"{min(speeds):,.0f} - {max(speeds):,.0f}",
                times,
                f"{case['cpu_ms_per_image']:.2f}",
                f"{case['first_batch_s']:.1f}",
                *(f"{waits[key]:,.1f}" for key in ("p50", "p99", "max")),
                f"{case['pause_ms']:,.0f}",
                f"{case['host_mb']:,.0f}",
                *(f"{case[key]:,.0f}" if key in case else "-" for key in ("gpu_mb", "gpu_percent", "jpeg_percent")),
            ]
        )
    return rows


def _in_brackets(failure: str) -> str:
    return f" ({failure})" if failure == INTERRUPTED else f" (failed later: {failure})" if failure else ""


def as_tables(record: Record) -> list[Table]:
    """For a terminal."""
    told = record["machine"]
    setting = (
        f"{told['gpu'] or 'CPU'}, {told['cores']} cores: {record['images']:,} images, batch "
        f"{record['batch_size']}, {record['workers']} workers, model {record['model']}"
    )
    tables = []
    for title, columns in TABLES.items():
        table = Table(title=f"{title} ({setting})")
        table.add_column(HEADINGS[0])
        for k in columns:
            table.add_column(HEADINGS[k], justify="right", min_width=max(map(len, HEADINGS[k].split())))
        for row in rows_of(record):
            table.add_row(row[0], *(row[k] for k in columns))
        tables.append(table)
    return tables


def as_markdown(record: Record) -> str:
    """For a page."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows_of(record)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(record: Record, path: Path) -> None:
    """A bar for each case, with its lowest and highest round.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    cases = {name: case for name, case in record["cases"].items() if "images_per_s" in case}
    speeds = [case["images_per_s"] for case in cases.values()]
    spread = [
        [speed - min(case["images_per_s_rounds"]) for speed, case in zip(speeds, cases.values())],
        [max(case["images_per_s_rounds"]) - speed for speed, case in zip(speeds, cases.values())],
    ]
    colors = [
        "tab:green" if name.startswith(OURS) else "lightgrey" if case_of(name).is_ceiling else "tab:blue"
        for name in cases
    ]
    figure = Figure(figsize=(8, 0.5 * len(cases) + 1.5), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(cases), speeds, xerr=spread, color=colors, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("images per second (grey: ceilings)")
    axes.set_title(f"{record['machine']['gpu'] or 'CPU'}, {record['machine']['cores']} cores")
    figure.savefig(path, dpi=120)


def append(record: Record, path: Path) -> None:
    """Add a line to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def last_of(path: Path) -> Record:
    """The last record of a file.

    Raises:
        ValueError: there is none in it.
    """
    lines = path.read_text().splitlines()
    try:
        record: Record = json.loads(lines[-1])
        record["cases"]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its last line is no record of proxyloader bench") from error
    return record


def check_settings(earlier: Record, record: Record) -> None:
    """
    Raises:
        ValueError: what was compared then is not what is to be compared now.
    """
    names = [name for name in record if name not in BESIDE_SETTINGS]
    pairs = {name: (earlier.get(name), record.get(name)) for name in names}
    pairs["gpu"] = earlier["machine"]["gpu"], record["machine"]["gpu"]
    others = [f"{name} {then}, now {now}" for name, (then, now) in pairs.items() if _plain(then) != _plain(now)]
    if others:
        raise ValueError(f"the record to compare with is of other settings: {'; '.join(others)}. Give the same options")


def check_cases(earlier: Record, names: Sequence[str]) -> None:
    """
    Args:
        earlier: a record.
        names: of the cases that are to be measured now.

    Raises:
        ValueError: there would be nothing to compare.
    """
    measured = [name for name, case in earlier["cases"].items() if "images_per_s" in case]
    if OURS not in measured:
        raise ValueError(f"the record to compare with has no speed of {OURS} (perhaps it was interrupted)")
    if OURS not in names:
        raise ValueError(f"{OURS} is what is compared: name it in --only, too")
    if not {*measured} & {*names} - {OURS}:
        others = " and ".join(", ".join(name for name in of if name != OURS) or "none" for of in (measured, names))
        raise ValueError(
            f"speeds are compared as shares of those of other cases, and the two runs have none in common ({others})"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def worse_than(earlier: Record, record: Record) -> list[str]:
    """What is worse than in an earlier record, a sentence each.

    Speeds are compared as shares of the other cases of their own run, so that the mood of the machine does no harm.
    """
    found = []
    then, now = earlier["cases"].get(OURS, {}), record["cases"].get(OURS, {})
    if "images_per_s" not in now:
        return [f"{OURS} failed: {now.get('failure', 'it was not run')}"]
    for name in earlier["cases"]:
        speeds = [each["cases"].get(name, {}).get("images_per_s") for each in (earlier, record)]
        if name == OURS or None in speeds:
            continue
        before, after = then["images_per_s"] / speeds[0], now["images_per_s"] / speeds[1]
        if after < SLOWER * before:
            found.append(f"{OURS} is at {after:.2f} of {name}, and was at {before:.2f}")
    return found
