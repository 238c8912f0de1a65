"""The report as one HTML page, which needs nothing from elsewhere. Needs matplotlib."""

from __future__ import annotations

import io
from html import escape
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ..bench.system_info import in_words, machine
from .diagnosis import COLUMNS, Diagnosis
from .figures import NAMES, Kind
from .words import three_digits

COLORS: dict[Kind, str] = {"stock": "#3b6fb6", "proxyloader": "#2a8f5b"}
WIDTHS: dict[Kind, float] = {"stock": 1.5, "proxyloader": 4.0}
"""Of lines, so that both are seen where one covers the other."""

GREY = "#8a8f98"

SHORTEST = 50
"""How many times as short as the longest time the shortest step is that is drawn."""

SIZE_INCHES = (4.2, 2.6)
"""Size of a plot: about what a phone has, and three beside each other on a wide screen."""

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 68rem; color: #1c1f24; background: #fff;
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; line-height: 1.35; margin: 0 0 .5rem; }
h1 span { display: inline-block; max-width: 100%; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, li { max-width: 48rem; }
ul { padding-left: 1.2rem; margin: 0; }
li { margin: .3rem 0; }
.verdict { font-size: 1.1rem; padding: .8rem 1rem; border-left: .3rem solid #2a8f5b; background: #f2f7f4; }
.small { color: #5b616b; font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; }
figcaption { font-size: .9rem; color: #5b616b; }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #e3e5e8; }
th { font-weight: 600; font-size: .85rem; color: #5b616b; }
th:first-child, td:first-child { text-align: left; }
@media (max-width: 45rem) {
  thead { display: none; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid #e3e5e8; }
  td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0; }
  td:first-child { font-weight: 600; }
  td:empty { display: none; }
  td[data-name]::before { content: attr(data-name); color: #5b616b; }
}
"""


def html_of(diagnosis: Diagnosis, title: str) -> str:
    """Return the page of a diagnosis.

    Args:
        title: of the run, such as its command line.
    """
    sections = "".join(
        f"<h2>{escape(name)}</h2>\n<ul>{''.join(f'<li>{escape(each)}</li>' for each in sentences)}</ul>\n"
        for name, sentences in diagnosis.sections.items()
    )
    words = " ".join(f"<span>{escape(word)}</span>" for word in title.split())  # no line ends within an option
    figures = diagnosis.figures
    of = f"Batches of {figures.batch_size}, {figures.num_workers} workers, {figures.cores} cores"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>proxyloader diagnose: {escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{words}</h1>
<p class="verdict">{escape(diagnosis.verdict)}</p>
<div class="plots">
{_plots(diagnosis)}
</div>
{sections}
<h2>Figures</h2>
{_table(diagnosis)}
<p class="small">{escape(of)}. Estimated: the longest of the step alone, the loader alone, and what all
cores take for both. {escape(in_words(machine()))}.</p>
</body>
</html>
"""


def _table(diagnosis: Diagnosis) -> str:
    shown = [column for column in range(len(COLUMNS)) if any(row[column] for row in diagnosis.rows)]
    head = "".join(f"<th>{escape(COLUMNS[column])}</th>" for column in shown)
    rows = "".join(
        f"<tr><td>{escape(row[0])}</td>"
        + "".join(f'<td data-name="{escape(COLUMNS[column])}">{escape(row[column])}</td>' for column in shown[1:])
        + "</tr>\n"
        for row in diagnosis.rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>"


def _plots(diagnosis: Diagnosis) -> str:
    plots = [
        (_times, "Milliseconds of a step. The longest of those alone bounds the loop as it is."),
        (_waits, "How long each step of the loop as it is waited for its batch."),
        (_speeds, "Images per second by the time of the step alone. Where the lines meet, both loaders are equal."),
    ]
    return "\n".join(
        f"<figure>{_svg(draw, diagnosis, caption)}<figcaption>{caption}</figcaption></figure>"
        for draw, caption in plots
    )


def _svg(draw: Any, diagnosis: Diagnosis, caption: str) -> str:
    # Letters as paths: they are as wide on each machine as they were drawn.
    with rc_context({"svg.fonttype": "path", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        draw(figure.subplots(), diagnosis)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    _, _, drawing = text.getvalue().partition("<svg")
    return f'<svg role="img" aria-label="{escape(caption)}"{drawing}'


def _times(axes: Axes, diagnosis: Diagnosis) -> None:
    figures = diagnosis.figures
    bars = [("loop as it is", figures.both.step_s, "#1c1f24"), ("step alone", figures.step.step_s, GREY)]
    for kind, each in figures.alone.items():
        bars.append((f"{NAMES[kind]} alone", each.phase.step_s, COLORS[kind]))
    names, seconds, colors = zip(*bars)
    drawn = axes.barh(names, 1e3 * np.array(seconds), color=colors, height=0.6)
    axes.bar_label(drawn, fmt=three_digits, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("ms")


def _waits(axes: Axes, diagnosis: Diagnosis) -> None:
    waits_ms = 1e3 * np.array(diagnosis.figures.both.waits_s)
    axes.plot(np.arange(1, len(waits_ms) + 1), waits_ms, ".", color="#1c1f24", markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.1 * waits_ms.max())
    axes.set_xlabel("step")
    axes.set_ylabel("wait, ms")


def _speeds(axes: Axes, diagnosis: Diagnosis) -> None:
    figures = diagnosis.figures
    times_s = [figures.step.step_s, *(each.phase.step_s for each in figures.alone.values())]
    least_s, most_s = max(min(times_s) / 2, max(times_s) / SHORTEST), 2 * max(times_s)
    steps_s = np.geomspace(least_s, most_s, 200)
    for kind in sorted(figures.alone):  # the wider line first
        speeds = [figures.images_per_s(figures.step_s(kind, step_s)) for step_s in steps_s]
        line: dict[str, Any] = {"color": COLORS[kind], "label": NAMES[kind], "linewidth": WIDTHS[kind]}
        axes.plot(1e3 * steps_s, speeds, **line)
    axes.axvline(1e3 * max(least_s, figures.step.step_s), color=GREY, linestyle=":", label="this step")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step alone, ms")
    axes.set_ylabel("images/s")
    axes.legend(frameon=False, fontsize=8)
