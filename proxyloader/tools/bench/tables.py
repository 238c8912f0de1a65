"""Records as tables for a terminal and for a page, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from .cases import OURS, case_of
from .config import Tuning
from .report import Record, ours_beside
from .runner import INTERRUPTED

HEADINGS = (
    *("case", "setting", "images/s", "lowest - highest", "proxyloader is", "CPU ms/image", "first batch, s"),
    *("wait, ms: p50", "p99", "max", "first of a loop", "host MB", "GPU MB", "GPU %", "JPEG %"),
    "without workers",
)

COLUMNS = {
    "how fast": (2, 3, 4),
    "how it is tuned": (1,),
    "what it takes": (5, 15, *range(11, 15)),
    "how long one waits": range(6, 11),
}
"""Columns of each table on a terminal, which is narrow, in addition to the name of the case. "without workers" is of
the CPU time of an image."""

OF_EPOCHS = {
    "images/s, all of an epoch": ("images_per_s", ",.0f"),
    "images/s after the first batch": ("images_per_s_after_first_batch", ",.0f"),
    "first batch, s": ("first_batch_s", ".2f"),
}
"""Figures of each of the first epochs, and their formats."""


def headings(record: Record) -> list[str]:
    """Return the headings of the columns of ``rows_of``."""
    numbers = _epoch_numbers(record)
    if not numbers:
        return [*HEADINGS]
    return ["case", "setting", *(f"{title}: epoch {number}" for title in OF_EPOCHS for number in numbers)]


def _epoch_numbers(record: Record) -> range:
    """Return the numbers of the first epochs, of which there are none in a record of rounds."""
    return range(1, record["epochs"] + 1) if record["benchmark"] == "first_epochs" else range(0)


def rows_of(record: Record) -> list[list[str]]:
    """Return the cells of the table, a row for each case."""
    rows = []
    for name, case in record["cases"].items():
        shown = f"{name} (ceiling)" if case_of(name).is_ceiling else name
        failure = case.get("failure", "")
        if "epochs" in case:
            cells = [format(epoch[field], how) for field, how in OF_EPOCHS.values() for epoch in case["epochs"]]
        elif "images_per_s" in case:
            cells = _figures(record, name)
        else:
            rows.append([shown, f"failed: {failure}", *[""] * (len(headings(record)) - 2)])
            continue
        if failure:
            shown += f" ({failure})" if failure == INTERRUPTED else f" (failed later: {failure})"
        rows.append([shown, Tuning(**case["tuning"]).in_words(), *cells])
    return rows


def _figures(record: Record, name: str) -> list[str]:
    case = record["cases"][name]
    speeds, waits = case["images_per_s_rounds"], case["wait_ms"]
    ours = record["cases"].get(ours_beside(name), {}).get("images_per_s")
    return [
        f"{case['images_per_s']:,.0f}",
        f"{min(speeds):,.0f} - {max(speeds):,.0f}",
        f"{ours / case['images_per_s']:.2f} times" if ours and name != ours_beside(name) else "",
        f"{case['cpu_ms_per_image']:.2f}",
        f"{case['first_batch_s']:.1f}",
        *(f"{waits[key]:,.1f}" for key in ("p50", "p99", "max")),
        f"{case['pause_ms']:,.0f}",
        f"{case['host_mb']:,.0f}",
        *(f"{case[key]:,.0f}" if key in case else "-" for key in ("gpu_mb", "gpu_percent", "jpeg_percent")),
        f"{case['loop_cpu_ms_per_image']:.2f}" if "loop_cpu_ms_per_image" in case else "-",
    ]


def as_tables(record: Record) -> list[Table]:
    """Return the tables of a record for a terminal."""
    told = record["machine"]
    setting = (
        f"{told['gpu'] or 'CPU'}, {told['cores']} cores: {record['images']:,} images, batch "
        f"{record['batch_size']}, model {record['model']}"
    )
    names, rows, epochs = headings(record), rows_of(record), len(_epoch_numbers(record))
    columns: dict[str, Any] = dict(COLUMNS)
    if epochs:
        columns = {title: range(2 + k * epochs, 2 + (k + 1) * epochs) for k, title in enumerate(OF_EPOCHS)}
        columns["how it is tuned"] = (1,)
    if not rows:
        return []  # no case could begin: each was left out
    tables = []
    for title, numbers in columns.items():
        table = Table(title=f"{title} ({setting})")
        table.add_column(names[0], min_width=max(len(word) for name in record["cases"] for word in name.split()))
        for k in numbers:
            name = names[k].removeprefix(f"{title}: ")
            table.add_column(name, justify="right", min_width=max(map(len, name.split())))
        for row in rows:
            table.add_row(row[0], *(row[k] for k in numbers))
        tables.append(table)
    return tables


def as_markdown(record: Record) -> str:
    """Return the table of a record for a page."""
    names = headings(record)
    return "".join(f"| {' | '.join(line)} |\n" for line in [names, ["---"] * len(names), *rows_of(record)])


def plot(record: Record, path: Path) -> None:
    """Draw a bar for each case, with its slowest and fastest round. Without matplotlib it raises ImportError."""
    from matplotlib.figure import Figure

    cases = {name: case for name, case in record["cases"].items() if "images_per_s" in case}
    speeds = np.array([case["images_per_s"] for case in cases.values()])
    rounds = [case["images_per_s_rounds"] for case in cases.values()]
    spread = [speeds - [min(each) for each in rounds], [max(each) for each in rounds] - speeds]
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
