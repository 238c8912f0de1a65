"""Records as tables for a terminal and for a page, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from .cases import OURS, case_of
from .config import Tuning
from .report import Record, ours_beside
from .runner import INTERRUPTED

HEADINGS = (
    *("case", "setting", "images/s", "lowest - highest", "proxyloader is", "CPU ms/image", "first batch, s"),
    *("wait, ms: p50", "p99", "max", "first of a loop", "host MB", "GPU MB", "GPU %", "JPEG %"),
)

COLUMNS = {
    "how fast": (2, 3, 4),
    "how it is tuned": (1,),
    "what it takes": (5, *range(11, 15)),
    "how long one waits": range(6, 11),
}
"""Columns of each table on a terminal, which is narrow, in addition to the name of the case."""

OF_EPOCHS = {
    "images/s, all of an epoch": ("images_per_s", ",.0f"),
    "images/s after the first batch": ("images_per_s_after_first_batch", ",.0f"),
    "first batch, s": ("first_batch_s", ".2f"),
}
"""Figures of each of the first epochs, and their formats."""


def headings(record: Record) -> list[str]:
    """Return the headings of the columns of ``rows_of``."""
    if not _is_of_first_epochs(record):
        return [*HEADINGS]
    numbers = range(1, record["epochs"] + 1)
    return ["case", "setting", *(f"{title}: epoch {number}" for title in OF_EPOCHS for number in numbers)]


def rows_of(record: Record) -> list[list[str]]:
    """Return the cells of the table, a row for each case."""
    rows = []
    for name, case in record["cases"].items():
        shown = f"{name} (ceiling)" if case_of(name).is_ceiling else name
        setting = Tuning(**case["tuning"]).in_words()
        cells = _epochs(case) if _is_of_first_epochs(record) else _figures(record, name)
        if not cells:
            rows.append([shown, f"failed: {case['failure']}", *[""] * (len(headings(record)) - 2)])
            continue
        rows.append([shown + _in_brackets(case.get("failure", "")), setting, *cells])
    return rows


def _is_of_first_epochs(record: Record) -> bool:
    return bool(record["benchmark"] == "first_epochs")


def _figures(record: Record, name: str) -> list[str]:
    case = record["cases"][name]
    if "images_per_s" not in case:
        return []
    speeds, waits = case["images_per_s_rounds"], case["wait_ms"]
    return [
        f"{case['images_per_s']:,.0f}",
        f"{min(speeds):,.0f} - {max(speeds):,.0f}",
        _times(record, name),
        f"{case['cpu_ms_per_image']:.2f}",
        f"{case['first_batch_s']:.1f}",
        *(f"{waits[key]:,.1f}" for key in ("p50", "p99", "max")),
        f"{case['pause_ms']:,.0f}",
        f"{case['host_mb']:,.0f}",
        *(f"{case[key]:,.0f}" if key in case else "-" for key in ("gpu_mb", "gpu_percent", "jpeg_percent")),
    ]


def _times(record: Record, name: str) -> str:
    """Return how many times as fast our case is."""
    ours = record["cases"].get(ours_beside(name), {}).get("images_per_s")
    theirs = record["cases"][name].get("images_per_s")
    return f"{ours / theirs:.2f} times" if ours and theirs and name != ours_beside(name) else ""


def _epochs(case: dict[str, Any]) -> list[str]:
    epochs = case.get("epochs", [])
    return [format(epoch[field], how) for field, how in OF_EPOCHS.values() for epoch in epochs]


def _in_brackets(failure: str) -> str:
    return f" ({failure})" if failure == INTERRUPTED else f" (failed later: {failure})" if failure else ""


def as_tables(record: Record) -> list[Table]:
    """Return the tables of a record for a terminal."""
    told = record["machine"]
    setting = (
        f"{told['gpu'] or 'CPU'}, {told['cores']} cores: {record['images']:,} images, batch "
        f"{record['batch_size']}, model {record['model']}"
    )
    names, tables = headings(record), []
    columns: dict[str, Any] = dict(COLUMNS)
    if _is_of_first_epochs(record):
        epochs = record["epochs"]
        columns = {title: range(2 + k * epochs, 2 + (k + 1) * epochs) for k, title in enumerate(OF_EPOCHS)}
        columns["how it is tuned"] = (1,)
    for title, numbers in columns.items():
        table = Table(title=f"{title} ({setting})")
        table.add_column(names[0], min_width=max(len(word) for name in record["cases"] for word in name.split()))
        for k in numbers:
            name = names[k].removeprefix(f"{title}: ")
            table.add_column(name, justify="right", min_width=max(map(len, name.split())))
        for row in rows_of(record):
            table.add_row(row[0], *(row[k] for k in numbers))
        tables.append(table)
    return tables


def as_markdown(record: Record) -> str:
    """Return the table of a record for a page."""
    lines = [headings(record), ["---"] * len(headings(record)), *rows_of(record)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(record: Record, path: Path) -> None:
    """Draw a bar for each case, with its slowest and fastest round.

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
