"""Run all cases in turn, in several rounds. Each case waits in its own process while the others run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .case_process import Epoch, Failure, RoundResult
from .config import BenchConfig
from .process import CaseProcess, processes_of

INTERRUPTED = "interrupted"
"""Reason of the failure of a case that was interrupted."""

Tell = Callable[[str], None]
"""Takes a line about each measurement."""


@dataclass
class Outcome:
    """Outcome of a case.

    Attributes:
        first_batch_s: time from the construction of the loader to its first batch. The libraries were imported and CUDA
            was started before. None if it failed before.
        rounds: results of the rounds, fewer than requested if the case failed.
        epochs: the first epochs, a list for each round.
        failure: reason in one line why there are fewer results than requested, or "".
        is_missing: whether a package is not installed.
    """

    setting: BenchConfig
    first_batch_s: float | None = None
    rounds: list[RoundResult] = field(default_factory=list)
    epochs: list[list[Epoch]] = field(default_factory=list)
    failure: str = ""
    is_missing: bool = False


def run(settings: Mapping[str, BenchConfig], rounds: int, seconds: float, tell: Tell) -> dict[str, Outcome]:
    """Measure cases in whole loops of at least ``seconds`` in each round.

    Returns:
        The outcomes by name, in the order of ``settings``. After Ctrl-C they have the rounds until then, if any.
    """
    outcomes = {name: Outcome(setting) for name, setting in settings.items()}
    with _until_ctrl_c(outcomes), processes_of(list(settings)) as processes:
        for name, process in processes.items():
            first_batch_s = _asked(outcomes[name], process, tell, name, "begin", settings[name])
            if first_batch_s is not None:
                outcomes[name].first_batch_s = first_batch_s
                tell(f"{name} ({settings[name].tuning.in_words()}): first batch after {first_batch_s:.1f} s")
        for number in range(1, rounds + 1):
            for name in [name for name in processes if not outcomes[name].failure]:
                title = f"round {number} of {name}"
                result = _asked(outcomes[name], processes[name], tell, title, "measure", seconds)
                if result is not None:
                    outcomes[name].rounds.append(result)
                    tell(f"{title}: {result.images_per_s:,.0f} images/s")
    return outcomes


def run_first_epochs(
    settings: Mapping[str, BenchConfig], rounds: int, epochs: int, cache: Callable[[], str], tell: Tell
) -> dict[str, Outcome]:
    """Measure the first epochs of each case, each time in a new process with a new cache folder.

    Returns:
        The outcomes by name, in the order of ``settings``. After Ctrl-C they have the rounds until then, if any.
    """
    outcomes = {name: Outcome(setting) for name, setting in settings.items()}
    with _until_ctrl_c(outcomes):
        for number in range(1, rounds + 1):
            with processes_of([name for name in settings if not outcomes[name].failure]) as processes:
                for name, process in processes.items():
                    title = f"round {number} of {name}"
                    found = _asked(
                        outcomes[name], process, tell, title, "first_epochs", settings[name], epochs, cache()
                    )
                    process.end()  # otherwise it would keep its room on the JPEG engines
                    if found is not None:
                        outcomes[name].epochs.append(found)
                        speeds = ", ".join(f"{epoch.images_per_s:,.0f}" for epoch in found)
                        tell(f"{title}: {speeds} images/s in epochs 1 to {epochs}")
    return outcomes


def _asked(outcome: Outcome, process: CaseProcess, tell: Tell, title: str, method: str, *arguments: Any) -> Any:
    """Return the answer of a case, or None after a failure, which is noted and told."""
    answer = process.ask(method, *arguments)
    if isinstance(answer, Failure):
        outcome.failure, outcome.is_missing = answer.reason, answer.is_missing
        process.end()
        tell(f"{title} failed: {answer.reason}")
        return None
    return answer


@contextmanager
def _until_ctrl_c(outcomes: Mapping[str, Outcome]) -> Iterator[None]:
    """At Ctrl-C mark the cases as interrupted, or raise KeyboardInterrupt if there is nothing to report."""
    try:
        yield
    except KeyboardInterrupt:
        if not any(outcome.rounds or outcome.epochs for outcome in outcomes.values()):
            raise
        for outcome in outcomes.values():
            outcome.failure = outcome.failure or INTERRUPTED
