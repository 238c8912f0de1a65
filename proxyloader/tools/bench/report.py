"""Record of a benchmark, its table and its plot."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .cases import DEFAULTS_SUFFIX, OURS
from .config import BenchConfig, Tuning, machine
from .runner import Outcome, Ranges

METHOD = 3  # version of the measurement; benchmarks/README.md describes the differences
UNRECORDED = ("root", "tuning", "use_defaults", "persistent_workers")  # omitted settings

Record = dict[str, Any]


def make_record(config: BenchConfig, ranges: Ranges, outcomes: Mapping[str, Outcome], command: str) -> Record:
    """Return a record, a line of a results file."""
    return {
        "date": datetime.date.today().isoformat(),
        "benchmark": "bench",
        "method": METHOD,
        "command": command,
        "machine": machine(),
        **{name: value for name, value in asdict(config).items() if name not in UNRECORDED},
        **ranges,
        "cases": {name: _summary(outcome) for name, outcome in outcomes.items()},
    }


def _summary(outcome: Outcome) -> dict[str, Any]:
    summary = {**outcome, "tuning": outcome["tuning"]._asdict()}
    if rounds := summary.pop("rounds", None):
        summary |= _medians(rounds)
    if "epochs" in summary:
        summary["epochs"] = [_medians(rounds) for rounds in zip(*summary["epochs"])]
    return summary


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the median of each metric, the maximum of ``wait_ms_max``, and the speeds of all rounds."""
    summary: dict[str, Any] = {"images_per_s_rounds": [round(figures["images_per_s"], 1) for figures in rounds]}
    for name in rounds[0]:
        reduce = max if name == "wait_ms_max" else statistics.median
        summary[name] = round(reduce(figures[name] for figures in rounds), 3)
    return summary


def relative_speed(record: Record, name: str) -> float | None:
    """Return our speed relative to another case, both tuned or both with defaults."""
    ours = OURS + DEFAULTS_SUFFIX if name.endswith(DEFAULTS_SUFFIX) else OURS
    speeds = [record["cases"].get(case, {}).get("images_per_s") for case in (ours, name)]
    return speeds[0] / speeds[1] if all(speeds) and name != ours else None


COLUMNS = {
    "images/s": "images_per_s:,.0f",
    "first batch, s": "first_batch_s:.1f",
    "CPU ms/image": "cpu_ms_per_image:.2f",
}
"""Key and format of each column. For first epochs, a cell lists the values of all epochs."""


def make_table(record: Record) -> Table:
    title = f"{_title(record)}: {record['images']:,} images, batch {record['batch_size']}, model {record['model']}"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("case", min_width=max(len(word) for name in record["cases"] for word in name.split()))
    for column in (*COLUMNS, "lowest - highest", "proxyloader is", "setting"):
        table.add_column(column, justify="right", overflow="fold")
    for name, case in record["cases"].items():
        cells = []
        for key, spec in (column.split(":") for column in COLUMNS.values()):
            cells.append(", ".join(format(run[key], spec) for run in case.get("epochs", [case]) if key in run))
        speeds, ratio = case.get("images_per_s_rounds"), relative_speed(record, name)
        cells.append(f"{min(speeds):,.0f} - {max(speeds):,.0f}" if speeds else "")
        cells.append(f"{ratio:.2f} times" if ratio else "")
        table.add_row(name, *cells, case.get("failure") or str(Tuning(**case["tuning"])))
    return table


def plot(record: Record, path: Path) -> None:
    """Plot a bar for each case, with error bars from the slowest to the fastest round."""
    cases = {name: case for name, case in record["cases"].items() if "images_per_s" in case}
    speeds = [case["images_per_s"] for case in cases.values()]
    rounds = [case["images_per_s_rounds"] for case in cases.values()]
    spread = [[abs(speed - limit(values)) for speed, values in zip(speeds, rounds)] for limit in (min, max)]
    figure = Figure(figsize=(8, 0.5 * len(cases) + 1.5), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:green" if name.startswith(OURS) else "tab:blue" for name in cases]
    axes.barh(list(cases), speeds, xerr=spread, color=colors, capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="images per second", title=_title(record))
    figure.savefig(path, dpi=120)


def _title(record: Record) -> str:
    return f"{record['machine']['gpu'] or 'CPU'}, {record['machine']['cores']} cores"
