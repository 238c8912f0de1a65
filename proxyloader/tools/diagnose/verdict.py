"""The result of ``diagnose``: figures, verdict, report and plot."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..files import as_text

Kind = Literal["stock", "proxyloader"]
Bound = Literal["input", "disk", "model", "loop", "cores"]

WORTH = 1.05
"""Speedup from which proxyloader is worth it, or more workers are."""

APART = 1.15
"""Ratio from which one time is significantly longer than another."""

INTERFERE = 1.25
"""Ratio of measured and estimated step time from which step and loader slow each other down."""

BUSY = 0.7
"""Utilization from which a GPU, its engines, a thread or all cores count as busy. For workers and reads, 0.5."""

TITLES: dict[Bound, str] = {
    "input": "Input-bound",
    "disk": "Disk-bound",
    "model": "Model-bound",
    "loop": "Bound by the CPU time of the training loop",
    "cores": "Bound by the cores, which step and loader share",
}


@dataclass(frozen=True)
class Phase:
    """Means over some steps."""

    step_s: float  #: time of a step
    cpu_s: float  #: CPU time of a step, in all processes
    thread: float  #: share of the time in which the thread of the loop computed or waited for a core
    workers: float  #: number of child processes that did
    disk_share: float  #: share of what was read, from files, pipes and the page cache, that came from a disk
    gpu_percent: float | None = None  #: GPU utilization; None if unknown
    jpeg_percent: float | None = None  #: utilization of its JPEG engines

    @property
    def cores(self) -> float:
        return self.cpu_s / self.step_s


@dataclass(frozen=True)
class Figures:
    """What was measured."""

    watched: Kind  #: the kind of the training's loader
    both: Phase  #: the loop as it is
    step: Phase  #: the step alone, with the same batch again and again
    alone: dict[Kind, Phase]  #: each kind of loader alone, as far as it could be measured
    batch_size: int  #: images per batch
    num_workers: int
    cores: int
    waiting: float | None  #: share of the time that reading a sample waits instead of computing; None if unknown
    speedups: dict[int, float]  #: of the loader alone with other numbers of workers
    unmeasured: dict[str, str] = field(default_factory=dict)  #: what could not be measured, and why

    def step_s(self, kind: Kind, step_alone_s: float | None = None) -> float:
        """Estimate the time of a step with a loader: the longest of the step alone, the loader alone, and the CPU time
        of both on all cores. Without workers, step and loader take turns. A step that takes ``step_alone_s`` instead of
        the measured time takes CPU time in proportion."""
        ratio = 1.0 if step_alone_s is None else step_alone_s / self.step.step_s
        times = (ratio * self.step.step_s, self.alone[kind].step_s)
        shared_s = (ratio * self.step.cpu_s + self.alone[kind].cpu_s) / self.cores
        return max(max(times) if self.num_workers else sum(times), shared_s)

    def speed(self, step_s: float) -> str:
        return three_digits(self.batch_size / step_s)


@dataclass(frozen=True)
class Diagnosis:
    """What bounds a training, and what proxyloader gains. ``str()`` returns the report.

    ``bound`` is "input" if the loader computes, or waits for its GPU; "disk" if it waits for reads; "model" for a step
    on the GPU, or asleep; "loop" for a step that computes in its thread; "cores" if step and loader compete.
    """

    bound: Bound
    verdict: str  #: the answer, in one sentence
    reasons: tuple[str, ...]  #: the measurements behind it, when proxyloader is faster, and what was not measured
    suggestions: tuple[str, ...]  #: numbers of workers with which the loader alone is at least 5 % faster
    figures: Figures

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        estimated = {kind: self.figures.step_s(kind) for kind in self.figures.alone}
        return {**dataclasses.asdict(self), "estimated_step_s": estimated}

    def __rich__(self) -> Group:
        figures = self.figures
        phases = {"loop as it is": figures.both, "step alone": figures.step}
        phases |= {f"{kind} alone": phase for kind, phase in figures.alone.items()}
        table = Table("", "ms/step", "images/s", "cores", "GPU", box=None, pad_edge=False)
        table.columns[0].no_wrap = True
        for name, phase in phases.items():
            gpu = "-" if phase.gpu_percent is None else f"{phase.gpu_percent:.0f} %"
            table.add_row(name, ms(phase.step_s), figures.speed(phase.step_s), f"{phase.cores:.1f}", gpu)
        for kind in figures.alone:
            step_s = figures.step_s(kind)
            table.add_row(f"with {kind}, estimated", ms(step_s), figures.speed(step_s))
        listed = Table.grid(padding=(0, 1))
        for sentence in (*self.reasons, *self.suggestions):
            listed.add_row("-", Text(sentence))
        return Group(Text(self.verdict, "bold"), "", table, "", listed)

    def __str__(self) -> str:
        return as_text(self)


def diagnosed(figures: Figures) -> Diagnosis:
    """Return what follows from the figures."""
    bound, step, loader = bound_of(figures), figures.step, figures.alone[figures.watched]
    times = [ms(phase.step_s) for phase in (figures.both, step, loader)]
    verdict = f"{TITLES[bound]}: a step takes {times[0]} ms, {times[1]} ms without loading, and loading {times[2]} ms."
    reasons = []
    if figures.num_workers:
        reasons.append(f"Alone, the workers are {min(100.0, 100 * loader.workers / figures.num_workers):.0f} % busy")
    if figures.waiting is not None:
        reasons.append(f"Reading a sample waits {max(0.0, 100 * figures.waiting):.0f} % of its time")
    interference = figures.both.step_s / figures.step_s(figures.watched)
    if interference > INTERFERE:
        reasons.append(f"A step takes {interference:.1f}x the estimate: step and loader, or other programs, interfere")
    base: Kind = "stock" if "stock" in figures.alone else figures.watched
    left = step.step_s / figures.step_s(base)
    limit = f"{1 / left:.2f}x" if left > 0.01 else "100x or more"
    cost = f"With {base}, loading costs {100 * (1 - left):.0f} % of a step"
    reasons.append(f"{cost}: a loader that takes no time gives {limit}")
    if len(figures.alone) < 2:
        verdict += " There is no other loader to compare with"
    else:
        stock_s, ours_s = figures.step_s("stock"), figures.step_s("proxyloader")
        verb = ("may be", "may not be") if interference > INTERFERE else ("is", "is not")
        worth = f"{verb[stock_s <= WORTH * ours_s]} worth it"
        gain = f"{figures.speed(ours_s)} instead of {figures.speed(stock_s)} images/s, {stock_s / ours_s:.2f}x"
        verdict += f" proxyloader {worth}: {gain}"
        reasons.append(_condition(figures))
    reasons += [f"Not measured: {name} ({reason})" for name, reason in figures.unmeasured.items()]
    gains = sorted(figures.speedups.items(), key=lambda each: -each[1])
    faster = [f"num_workers={count}: the loader alone is {gain:.2f}x as fast" for count, gain in gains if gain >= WORTH]
    return Diagnosis(bound, verdict, tuple(reasons), tuple(faster), figures)


def bound_of(figures: Figures) -> Bound:
    """Return what takes longest alone, or the cores that the step and the loader share."""
    step, loader = figures.step, figures.alone[figures.watched]
    longest_s = APART * max(step.step_s, loader.step_s)
    if min((step.cpu_s + loader.cpu_s) / figures.cores, figures.both.step_s) > longest_s:
        return "cores"
    if step.step_s >= loader.step_s:
        computes = step.thread > BUSY and step.cores < APART * step.thread and (step.gpu_percent or 0) < 50
        return "loop" if computes else "model"
    is_busy = (
        max(loader.gpu_percent or 0, loader.jpeg_percent or 0) > 100 * BUSY
        or loader.cores > BUSY * figures.cores
        or loader.workers > 0.5 * figures.num_workers > 0
        or loader.thread > (BUSY if figures.num_workers else 0.5)
    )
    return "disk" if not is_busy and max(loader.disk_share, figures.waiting or 0) > 0.5 else "input"


def _condition(figures: Figures) -> str:
    """Return when proxyloader is faster."""
    stock_s, ours_s, step_s = figures.alone["stock"].step_s, figures.alone["proxyloader"].step_s, figures.step.step_s
    lengths = max(step_s, stock_s) * np.geomspace(1e-3, 100, 5000)
    faster = [s for s in lengths if figures.step_s("stock", s) > WORTH * figures.step_s("proxyloader", s)]
    if faster:
        return f"proxyloader is faster with steps of less than {ms(max(faster))} ms (here {ms(step_s)})"
    return f"proxyloader would be faster if a batch took less than {ms(stock_s)} ms (here {ms(ours_s)})"


def plot(diagnosis: Diagnosis, file: Path) -> None:
    """Plot the speed of both loaders by the time of the step alone."""
    from matplotlib.figure import Figure

    figures = diagnosis.figures
    times_s = [figures.step.step_s, *(phase.step_s for phase in figures.alone.values())]
    steps_s = np.geomspace(max(min(times_s) / 2, max(times_s) / 50), 2 * max(times_s), 200)
    drawing = Figure(figsize=(7, 4), layout="constrained")
    axes = drawing.subplots()
    for kind in sorted(figures.alone):  # the wider line first
        speeds = [figures.batch_size / figures.step_s(kind, step_s) for step_s in steps_s]
        axes.plot(1e3 * steps_s, speeds, linewidth=4 if kind == "proxyloader" else 1.5, label=kind)
    axes.axvline(1e3 * max(figures.step.step_s, steps_s[0]), color="grey", linestyle=":", label="this step")
    axes.set(xscale="log", xlabel="step alone, ms", ylabel="images/s", title=TITLES[diagnosis.bound], ylim=(0, None))
    axes.legend(frameon=False)
    drawing.savefig(file)


def ms(seconds: float) -> str:
    return three_digits(1e3 * seconds)


def three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"
