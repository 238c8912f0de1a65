"""Which tuning of a case is the fastest: of those that are tried, one after the other, each for two short loops.

First all combinations of DALI's threads and the engines' share are tried, with the middle number of workers; then the
other numbers of workers, with the best of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from .cases import Ranges, case_of
from .config import BenchConfig, Tuning
from .figures import Failure, Trial
from .process import CaseProcess, processes_of
from .runner import Tell

AT_MOST_S = 5.0
"""For the first loop with a tuning; a slower one is judged by what it has done until then."""


@dataclass
class Sweep:
    """Of one case.

    Attributes:
        best: tuning, the first one where none could be measured.
        trials: or why there is none, of each tuning that was tried, in their order.
    """

    best: Tuning
    trials: list[tuple[Tuning, Trial | Failure]] = field(default_factory=list)

    def note(self, tuning: Tuning, found: Trial | Failure) -> None:
        self.trials.append((tuning, found))
        speeds = {each: trial.images_per_s for each, trial in self.trials if isinstance(trial, Trial)}
        self.best = max(speeds, key=speeds.__getitem__, default=self.best)

    def in_record(self) -> list[dict[str, Any]]:
        """A line for each tuning."""
        return [{**asdict(tuning), **_rounded(asdict(found))} for tuning, found in self.trials]


def sweep(setting: BenchConfig, names: Sequence[str], ranges: Ranges, tell: Tell) -> dict[str, Sweep]:
    """The best tuning of each case, by its name.

    Args:
        setting: but for the tuning.
        names: of the cases.
        ranges: what is tried.
        tell: is told how it goes.
    """
    stages = {name: _Stages(name, setting, ranges) for name in names}
    found = {name: Sweep(stages[name].first()[0]) for name in names}
    with processes_of([name for name in names if stages[name].has_choice()]) as processes:
        for name in processes:
            _sweep_one(replace(setting, passes=1), name, stages[name], found[name], processes, tell)
            processes[name].end()
    return found


class _Stages:
    def __init__(self, name: str, setting: BenchConfig, ranges: Ranges) -> None:
        case = case_of(name)
        there = {*case.needs, *case.takes} - (set() if setting.on_gpu else {"hw_decoder_load"})
        self._values: Mapping[str, Sequence[Any]] = {
            field: values if field in there else (None,) for field, values in vars(ranges).items()
        }

    def has_choice(self) -> bool:
        return any(len(values) > 1 for values in self._values.values())

    def first(self) -> list[Tuning]:
        workers = self._values["workers"]
        others = product(self._values["threads"], self._values["hw_decoder_load"])
        return [Tuning(workers[len(workers) // 2], threads, load) for threads, load in others]

    def second(self, best: Tuning) -> list[Tuning]:
        return [replace(best, workers=workers) for workers in self._values["workers"] if workers != best.workers]


def _sweep_one(
    setting: BenchConfig,
    name: str,
    stages: _Stages,
    found: Sweep,
    processes: dict[str, CaseProcess],
    tell: Tell,
) -> None:
    for tuning in _tunings(stages, found):
        answer = processes[name].ask("attempt", replace(setting, tuning=tuning), AT_MOST_S)
        found.note(tuning, answer)
        if isinstance(answer, Trial):
            tell(f"trial of {name} ({tuning.in_words()}): {answer.images_per_s:,.0f} images/s")
            continue
        tell(f"trial of {name} ({tuning.in_words()}) failed: {answer.reason}")
        if answer.has_hung or len(found.trials) == 1:
            return  # others would take long as well, or fail as well
        processes[name].end()
        processes[name] = CaseProcess(name)
        processes[name].start()
        processes[name].wait_until_ready()


def _tunings(stages: _Stages, found: Sweep) -> Iterator[Tuning]:
    yield from stages.first()
    yield from stages.second(found.best)


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Without what is false."""
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items() if value}
