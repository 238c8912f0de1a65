"""Search for the fastest tuning of each case. Each tuning is measured in short loops, behind a first one.

First all combinations of the number of DALI's threads and the share of the engines are tried, with the middle number of
workers. Then the other numbers of workers are tried, with the best combination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from .case_process import Failure, Trial
from .cases import Ranges, case_of
from .config import BenchConfig, Tuning
from .process import CaseProcess, processes_of
from .runner import Tell

AT_LEAST_S = 1.5
"""Time that the loops with a tuning take at least, in seconds. Of one short loop chance decides."""

AT_MOST_S = 5.0
"""Time limit of the first loop with a tuning, in seconds. A slower loop is judged by its speed until then."""

BATCHES_OF_A_WORKER = 4
"""Batches in a loop for each of the most workers, if rounds have as many. In shorter loops the start decides."""


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
        """Return the entries of a record, one for each tuning, without figures that are false."""
        return [
            {**asdict(tuning), **{name: _rounded(value) for name, value in vars(found).items() if value}}
            for tuning, found in self.trials
        ]


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def sweep(setting: BenchConfig, names: Sequence[str], ranges: Ranges, tell: Tell) -> dict[str, Sweep]:
    """Return the sweep of each case, by name. The tuning of ``setting`` is replaced."""
    values = {name: values_of(name, setting, ranges) for name in names}
    found = {name: Sweep(first_tunings(values[name])[0]) for name in names}
    there_is_choice = [name for name in names if any(len(each) > 1 for each in vars(values[name]).values())]
    with processes_of(there_is_choice) as processes:
        for name in processes:
            _sweep_one(for_trials(setting, ranges), name, values[name], found[name], processes, tell)
            processes[name].end()
    return found


def for_trials(setting: BenchConfig, ranges: Ranges) -> BenchConfig:
    """Return the setting with as many passes as trials need to tell the tunings apart."""
    batches = BATCHES_OF_A_WORKER * max(1, *ranges.workers)
    return replace(setting, passes=min(setting.passes, -(-batches * setting.batch_size // setting.images)))


def values_of(name: str, setting: BenchConfig, ranges: Ranges) -> Ranges:
    """Return the values to try for a case: None alone for a field that it does not have."""
    case = case_of(name)
    there = {*case.needs, *case.takes} - (set() if setting.on_gpu else {"hw_decoder_load"})
    none: Any = (None,)
    return replace(ranges, **{field: none for field in vars(ranges) if field not in there})


def first_tunings(values: Ranges) -> list[Tuning]:
    workers = values.workers[len(values.workers) // 2]
    return [Tuning(workers, threads, load) for threads, load in product(values.threads, values.hw_decoder_load)]


def second_tunings(values: Ranges, best: Tuning) -> list[Tuning]:
    return [replace(best, workers=workers) for workers in values.workers if workers != best.workers]


def _sweep_one(
    setting: BenchConfig, name: str, values: Ranges, found: Sweep, processes: dict[str, CaseProcess], tell: Tell
) -> None:
    def tunings() -> Iterator[Tuning]:
        yield from first_tunings(values)
        yield from second_tunings(values, found.best)

    for tuning in tunings():
        answer = processes[name].ask("attempt", replace(setting, tuning=tuning), AT_LEAST_S, AT_MOST_S)
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
