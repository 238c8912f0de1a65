"""The record of a comparison, its tables and picture, and its comparison with an earlier record."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .cases import BY_DEFAULT, OURS
from .config import BenchConfig, Tuning, machine
from .runner import Outcome, Ranges

METHOD = 3
"""Number of the way of measuring. ``benchmarks/README.md`` says how the ways differ."""

SLOWER = 0.9
"""A share below this share of the earlier one counts as worse. Equal runs differ by up to 10 %."""

LEFT_OUT = ("root", "tuning", "by_default", "persistent_workers")
MAY_DIFFER = ("date", "benchmark", "command", "cases", "added")
"""Settings that are not in a record, and its keys in which two records that are compared may differ."""

Record = dict[str, Any]


def record_of(setting: BenchConfig, ranges: Ranges, outcomes: Mapping[str, Outcome], command: str) -> Record:
    """Return a record, which is one line of a file of results."""
    return {
        "date": datetime.date.today().isoformat(),
        "benchmark": "bench",
        "method": METHOD,
        "command": command,
        "machine": machine(),
        **{name: value for name, value in asdict(setting).items() if name not in LEFT_OUT},
        **ranges,
        "cases": {name: _summary(outcome) for name, outcome in outcomes.items()},
    }


def _summary(outcome: Outcome) -> dict[str, Any]:
    found = {**outcome, "tuning": outcome["tuning"]._asdict()}
    if rounds := found.pop("rounds", None):
        found |= _medians(rounds)
    if "epochs" in found:
        found["epochs"] = [_medians(rounds) for rounds in zip(*found["epochs"])]
    return found


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the medians of the rounds, of the longest wait the longest, and the speeds of all rounds."""
    found: dict[str, Any] = {"images_per_s_rounds": [round(each["images_per_s"], 1) for each in rounds]}
    for name in rounds[0]:
        summary = max if name == "wait_ms_max" else statistics.median
        found[name] = round(summary(each[name] for each in rounds), 3)
    return found


def last_of(path: Path) -> Record:
    """Return the last record of a file, or raise ValueError if it has none."""
    try:
        record: Record = json.loads(path.read_text().splitlines()[-1])
        record["cases"]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its last line is no record of proxyloader bench") from error
    return record


def check_comparable(earlier: Record, record: Record, names: Sequence[str]) -> None:
    """Raise ValueError if an earlier record has other settings than a record, or no case in common with ``names``."""
    before = {"size": "imagenet", "method": 1} | earlier  # for records without these keys
    before["machine"], record = earlier["machine"]["gpu"], record | {"machine": record["machine"]["gpu"]}
    others = [name for name in record if name not in MAY_DIFFER and before.get(name) != record[name]]
    if others:
        pairs = "; ".join(f"{name} {before.get(name)}, now {record[name]}" for name in others)
        raise ValueError(f"the record to compare with is of other settings: {pairs}. Give the same options")
    common = {name for name, case in earlier["cases"].items() if "images_per_s" in case and name in names}
    if OURS not in common or len(common) == 1:
        raise ValueError(
            f"speeds are compared as shares of those of other cases, so {OURS} and another case must be in both runs; "
            f"in common they have {', '.join(sorted(common)) or 'nothing'}"
        )


def worse_than(earlier: Record, record: Record) -> list[str]:
    """Return a sentence for each case beside which ours is slower, so that the state of the machine cancels out."""
    if "images_per_s" not in (ours := record["cases"].get(OURS, {})):
        return [f"{OURS} failed: {ours.get('failure', 'it was not run')}"]
    shares = [(name, share_of(earlier, name), share_of(record, name)) for name in earlier["cases"]]
    return [
        f"{OURS} is at {after:.2f} of {name}, and was at {before:.2f}"
        for name, before, after in shares
        if before and after and after < SLOWER * before
    ]


def share_of(record: Record, name: str) -> float | None:
    """Return our speed as a multiple of that of another case. Both are tuned, or both use defaults."""
    ours = OURS + BY_DEFAULT if name.endswith(BY_DEFAULT) else OURS
    speeds = [record["cases"].get(case, {}).get("images_per_s") for case in (ours, name)]
    return speeds[0] / speeds[1] if all(speeds) and name != ours else None


COLUMNS = {
    "images/s": "images_per_s:,.0f",
    "first batch, s": "first_batch_s:.1f",
    "CPU ms/image": "cpu_ms_per_image:.2f",
}
"""Columns of the table, their figures and formats. Of first epochs, a cell has the figures of all."""


def table_of(record: Record) -> Table:
    """Return the table of a record for a terminal."""
    of = f"{record['machine']['gpu'] or 'CPU'}, {record['machine']['cores']} cores: {record['images']:,} images"
    table = Table(title=f"{of}, batch {record['batch_size']}, model {record['model']}", box=SIMPLE_HEAD)
    table.add_column("case", min_width=max(len(word) for name in record["cases"] for word in name.split()))
    for column in (*COLUMNS, "lowest - highest", "proxyloader is", "setting"):
        table.add_column(column, justify="right", overflow="fold")
    for name, case in record["cases"].items():
        cells = []
        for key, how in (column.split(":") for column in COLUMNS.values()):
            figures = [format(each[key], how) for each in case.get("epochs", [case]) if key in each]
            cells.append(", ".join(figures))
        speeds, share = case.get("images_per_s_rounds"), share_of(record, name)
        cells.append(f"{min(speeds):,.0f} - {max(speeds):,.0f}" if speeds else "")
        cells.append(f"{share:.2f} times" if share else "")
        table.add_row(name, *cells, case.get("failure") or str(Tuning(**case["tuning"])))
    return table


def plot(record: Record, path: Path) -> None:
    """Draw a bar for each case, with its slowest and fastest round."""
    cases = {name: case for name, case in record["cases"].items() if "images_per_s" in case}
    speeds = [case["images_per_s"] for case in cases.values()]
    rounds = [case["images_per_s_rounds"] for case in cases.values()]
    spread = [[abs(speed - limit(each)) for speed, each in zip(speeds, rounds)] for limit in (min, max)]
    figure = Figure(figsize=(8, 0.5 * len(cases) + 1.5), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:green" if name.startswith(OURS) else "tab:blue" for name in cases]
    axes.barh(list(cases), speeds, xerr=spread, color=colors, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("images per second")
    axes.set_title(f"{record['machine']['gpu'] or 'CPU'}, {record['machine']['cores']} cores")
    figure.savefig(path, dpi=120)
