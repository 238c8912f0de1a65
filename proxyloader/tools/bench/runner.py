"""Run all cases in turn, in several rounds. Each case waits in its own process while the others run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import BenchConfig
from .figures import Epoch, Failure, RoundResult, Start
from .process import CaseProcess, processes_of

INTERRUPTED = "interrupted"
"""Reason of the failure of a case that was interrupted."""

Tell = Callable[[str], None]
"""Takes a line about each measurement."""


@dataclass
class Outcome:
    """Outcome of a case.

    Attributes:
        setting: the setting of the case.
        start: figures of the first loop. None if it failed before.
        rounds: results of the rounds, fewer than requested if the case failed.
        epochs: the first epochs, a list for each round.
        failure: reason in one line why there are fewer results than requested, or "".
        is_missing: whether a package is not installed.
    """

    setting: BenchConfig
    start: Start | None = None
    rounds: list[RoundResult] = field(default_factory=list)
    epochs: list[list[Epoch]] = field(default_factory=list)
    failure: str = ""
    is_missing: bool = False

    def failed(self, failure: Failure) -> None:
        self.failure, self.is_missing = failure.reason, failure.is_missing


def run(settings: Mapping[str, BenchConfig], rounds: int, seconds: float, tell: Tell) -> dict[str, Outcome]:
    """Measure cases.

    Args:
        settings: the setting of each case, by name.
        rounds: number of rounds.
        seconds: minimum time of a case in a round. Only whole loops are run.
        tell: takes lines about the progress.

    Returns:
        The outcomes by name, in the order of ``settings``. After Ctrl-C they have the rounds until then, if any.
    """
    outcomes = {name: Outcome(setting) for name, setting in settings.items()}
    try:
        with processes_of(list(settings)) as processes:
            for name, process in processes.items():
                answer = _asked(outcomes[name], process, "begin", settings[name])
                if isinstance(answer, Start):
                    outcomes[name].start = answer
                    tell(f"{name} ({settings[name].tuning.in_words()}): first batch after {answer.first_batch_s:.1f} s")
                else:
                    tell(f"{name} failed: {answer.reason}")
            for number in range(rounds):
                for name, process in processes.items():
                    if outcomes[name].failure:
                        continue
                    answer = _asked(outcomes[name], process, "measure", seconds)
                    if isinstance(answer, RoundResult):
                        outcomes[name].rounds.append(answer)
                        tell(f"round {number + 1} of {name}: {answer.images_per_s:,.0f} images/s")
                    else:
                        tell(f"round {number + 1} of {name} failed: {answer.reason}")
    except KeyboardInterrupt:
        _interrupted(outcomes)
    return outcomes


def run_first_epochs(
    settings: Mapping[str, BenchConfig], rounds: int, epochs: int, cache: Callable[[], str], tell: Tell
) -> dict[str, Outcome]:
    """Measure the first epochs of each case, each time in a new process.

    Args:
        settings: the setting of each case, by name.
        rounds: number of rounds.
        epochs: number of epochs in a round.
        cache: returns a new empty folder.
        tell: takes lines about the progress.

    Returns:
        The outcomes by name, in the order of ``settings``. After Ctrl-C they have the rounds until then, if any.
    """
    outcomes = {name: Outcome(setting) for name, setting in settings.items()}
    try:
        for number in range(rounds):
            with processes_of([name for name in settings if not outcomes[name].failure]) as processes:
                for name, process in processes.items():
                    answer = _asked(outcomes[name], process, "first_epochs", settings[name], epochs, cache())
                    process.end()  # otherwise it would keep its room on the JPEG engines
                    if isinstance(answer, Failure):
                        tell(f"round {number + 1} of {name} failed: {answer.reason}")
                        continue
                    outcomes[name].epochs.append(answer)
                    speeds = ", ".join(f"{epoch.images_per_s:,.0f}" for epoch in answer)
                    tell(f"round {number + 1} of {name}: {speeds} images/s in epochs 1 to {epochs}")
    except KeyboardInterrupt:
        _interrupted(outcomes)
    return outcomes


def _asked(outcome: Outcome, process: CaseProcess, method: str, *arguments: Any) -> Any:
    answer = process.ask(method, *arguments)
    if isinstance(answer, Failure):
        outcome.failed(answer)
        process.end()
    return answer


def _interrupted(outcomes: dict[str, Outcome]) -> None:
    """Mark the cases as interrupted.

    Raises:
        KeyboardInterrupt: there is nothing to report.
    """
    if not any(outcome.rounds or outcome.epochs for outcome in outcomes.values()):
        raise KeyboardInterrupt
    for outcome in outcomes.values():
        outcome.failure = outcome.failure or INTERRUPTED
