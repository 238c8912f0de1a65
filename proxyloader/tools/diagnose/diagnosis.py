"""The result of a diagnosis, and its report on a terminal."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .figures import NAMES, Figures
from .phase import Phase
from .trials import Trial
from .words import ms, three_digits

Bound = Literal["input", "disk", "model", "loop", "cores"]

WIDTH = 120
"""Width of ``str(diagnosis)``, in characters."""

COLUMNS = ("", "ms a step", "images/s", "wait, ms (p50, p99)", "cores", "GPU, %", "JPEG engines, %", "MB/s read")


@dataclass(frozen=True)
class Diagnosis:
    """What bounds a training run, and what this loader brings to it. ``str()`` is the report, 120 characters wide.

    Attributes:
        bound: "input": the loader computes, or waits for its GPU. "disk": it waits for what it reads. "model": the
            step, on a GPU or asleep. "loop": the step, in its thread on the CPU. "cores": step and loader share the
            cores.
        verdict: the answer, in one sentence.
        reason: what it follows from.
        most: what a loader that takes no time would bring, by Amdahl's law.
        wins: conditions under which proxyloader is faster than the stock loader, computed from the figures. Empty if
            one of the two could not be measured.
        loses: conditions under which it is not.
        trials: other arguments that were tried on the loader alone.
        figures: what was measured.
    """

    bound: Bound
    verdict: str
    reason: str
    most: str
    wins: tuple[str, ...]
    loses: tuple[str, ...]
    trials: tuple[Trial, ...]
    figures: Figures

    @property
    def suggestions(self) -> tuple[str, ...]:
        """The arguments with which the loader alone gave 5 % more images a second or above."""
        gains = sorted((trial for trial in self.trials if trial.is_suggested), key=lambda trial: -trial.gain)
        return tuple(
            f"{trial.change}: the loader alone is {trial.gain:.2f} times as fast{trial.caution}" for trial in gains
        )

    @property
    def sections(self) -> dict[str, tuple[str, ...]]:
        """The sentences of the report behind the verdict, by their titles."""
        tried = ", ".join(trial.change for trial in self.trials if trial.gain)
        failed = tuple(
            f"{trial.change} could not be tried, as it raises an error" for trial in self.trials if not trial.gain
        )
        nothing = (f"nothing: no gain of 5 % with {tried}" if tried else "nothing",)
        sections = {
            "Why": (self.reason, self.most),
            "proxyloader wins": self.wins,
            "It does not win": self.loses,
            "Suggested": (self.suggestions or nothing) + failed,
        }
        return {title: sentences for title, sentences in sections.items() if sentences}

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows of a table with ``COLUMNS``. A cell is "" if there is nothing to say."""
        figures = self.figures
        alone = [(f"{NAMES[kind]} alone", each.phase) for kind, each in figures.alone.items()]
        estimated = [(f"{NAMES[kind]}, estimated", figures.step_s(kind)) for kind in figures.alone]
        return (
            *(
                self._row(name, phase)
                for name, phase in [("loop as it is", figures.both), ("step alone", figures.step)]
            ),
            *(self._row(name, phase) for name, phase in alone),
            *((name, ms(step_s), self._speed(step_s), *[""] * 5) for name, step_s in estimated),
        )

    def _row(self, name: str, phase: Phase) -> tuple[str, ...]:
        shares = ["" if share is None else f"{share:.0f}" for share in (phase.gpu_percent, phase.jpeg_percent)]
        waits, read = "", ""
        if phase is not self.figures.step:  # which waits for nothing
            waits = ", ".join(ms(phase.wait_quantile_s(share)) for share in (0.5, 0.99))
            read = f"{phase.bytes_read / phase.wall_s / 1e6:,.1f}"
        return name, ms(phase.step_s), self._speed(phase.step_s), waits, f"{phase.cores_used:.1f}", *shares, read

    def _speed(self, step_s: float) -> str:
        return three_digits(self.figures.images_per_s(step_s))

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON: sentences, and figures with their units in their names."""
        estimated = {kind: self.figures.step_s(kind) for kind in self.figures.alone}
        figures = dataclasses.asdict(self.figures) | {"estimated_step_s": estimated}
        return dataclasses.asdict(self) | {"suggestions": self.suggestions, "figures": figures}

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim")
        shown = [column for column in range(len(COLUMNS)) if any(row[column] for row in self.rows)]
        for column in shown:
            table.add_column(COLUMNS[column], justify="right" if column else "left", no_wrap=not column)
        for row in self.rows:
            table.add_row(*(row[column] for column in shown))
        parts: list[Any] = [Text(self.verdict, "bold"), "", table]
        for title, sentences in self.sections.items():
            listed = Table.grid(padding=(0, 1))
            for sentence in sentences:
                listed.add_row("-", Text(sentence))
            parts += ["", Text(title, "bold"), listed]
        return Group(*parts)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())
