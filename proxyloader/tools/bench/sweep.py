"""Search for the fastest tuning of each case. Each tuning is measured in two short loops.

First all combinations of the number of DALI's threads and the share of the engines are tried, with the middle number of
workers. Then the other numbers of workers are tried, with the best combination.
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
"""Time limit of the first loop with a tuning, in seconds. A slower loop is judged by its speed until then."""


@dataclass
class Sweep:
    """Search for the tuning of one case.

    Attributes:
        best: the fastest tuning, or the first one if none could be measured.
        trials: the figures, or the failure, of each tuning that was tried, in order.
    """

    best: Tuning
    trials: list[tuple[Tuning, Trial | Failure]] = field(default_factory=list)

    def note(self, tuning: Tuning, found: Trial | Failure) -> None:
        self.trials.append((tuning, found))
        speeds = {each: trial.images_per_s for each, trial in self.trials if isinstance(trial, Trial)}
        self.best = max(speeds, key=speeds.__getitem__, default=self.best)

    def in_record(self) -> list[dict[str, Any]]:
        """Return the entries of a record, one for each tuning."""
        return [{**asdict(tuning), **_rounded(asdict(found))} for tuning, found in self.trials]


def sweep(setting: BenchConfig, names: Sequence[str], ranges: Ranges, tell: Tell) -> dict[str, Sweep]:
    """Return the sweep of each case, by name.

    Args:
        setting: the setting, whose tuning is replaced.
        names: names of the cases.
        ranges: the values to try.
        tell: takes lines about the progress.
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
            return  # the other tunings would also hang or fail
        processes[name].end()
        processes[name] = CaseProcess(name)
        processes[name].start()
        processes[name].wait_until_ready()


def _tunings(stages: _Stages, found: Sweep) -> Iterator[Tuning]:
    yield from stages.first()
    yield from stages.second(found.best)


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Round figures, and leave out those that are false."""
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items() if value}
