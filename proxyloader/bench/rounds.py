"""All cases in turn, again and again. Each waits in its own process while the others run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil

from ..make_dataset import ProgressBar, ctrl_c_held_back
from .child import Failure, Round, Start, serve
from .setting import Setting

INTERRUPTED = "interrupted"
"""In the place of a failure."""

START_LIMIT_S = 180
ROUND_LIMIT_S = 180
"""Beside ten times the seconds that it should take; a case that takes longer hangs."""


@dataclass
class Outcome:
    """
    Attributes:
        start: None where it failed before.
        rounds: as many as were asked for, or fewer where it failed.
        failure: why there are no more, in one line; "" where there are all.
        is_missing: something is not installed.
    """

    start: Start | None = None
    rounds: list[Round] = field(default_factory=list)
    failure: str = ""
    is_missing: bool = False


def run(setting: Setting, names: Sequence[str], rounds: int, seconds: float) -> dict[str, Outcome]:
    """Measure cases.

    Args:
        names: of the cases.
        rounds: how many times each is run.
        seconds: at least, for a case in a round; whole loops only.

    Returns:
        By name, in their order. After Ctrl-C with the rounds until then, if there are some.
    """
    children = {name: _Child(name, setting) for name in names}
    try:
        with ProgressBar(total=len(names) * (1 + rounds), desc="bench", unit="run", leave=False, disable=None) as bar:
            for name, child in children.items():
                bar.set_postfix_str(f"first loop of {name}")
                child.start()
                bar.update()
            for number in range(rounds):
                for name, child in children.items():
                    bar.set_postfix_str(f"round {number + 1} of {name}")
                    child.run(seconds)
                    bar.update()
    except KeyboardInterrupt:
        if not any(child.outcome.rounds for child in children.values()):
            raise
        for child in children.values():
            child.outcome.failure = child.outcome.failure or INTERRUPTED
    finally:
        for child in children.values():
            child.end()
    return {name: child.outcome for name, child in children.items()}


class _Child:
    def __init__(self, name: str, setting: Setting) -> None:
        self.outcome = Outcome()
        context = multiprocessing.get_context("spawn")
        self._connection, self._theirs = context.Pipe()
        arguments = name, setting, self._theirs, multiprocessing.get_start_method()
        self._process: SpawnProcess = context.Process(target=serve, args=arguments, name=name)

    def start(self) -> None:
        """The first loop."""
        with ctrl_c_held_back():  # for good in that process, which this one will end
            self._process.start()
        self._theirs.close()
        answer = self._answer(START_LIMIT_S)
        if isinstance(answer, Start):
            self.outcome.start = answer

    def run(self, seconds: float) -> None:
        if self.outcome.failure:
            return
        self._connection.send(seconds)
        answer = self._answer(ROUND_LIMIT_S + 10 * seconds)
        if isinstance(answer, Round):
            self.outcome.rounds.append(answer)

    def end(self) -> None:
        """Kill it, with all that it has started: it has nothing to lose."""
        if self._process.pid is not None:
            _kill(self._process.pid)
            self._process.join(10)
        self._connection.close()

    def _answer(self, limit_s: float) -> Any:
        try:
            answer = self._connection.recv() if self._connection.poll(limit_s) else Failure(f"hung for {limit_s:.0f} s")
        except (EOFError, ConnectionError):
            answer = Failure("its process died")
        if isinstance(answer, Failure):
            self.outcome.failure, self.outcome.is_missing = answer.reason, answer.is_missing
        return answer


def _kill(pid: int | None) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.suspend()  # or it might start another meanwhile, which would be left
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
