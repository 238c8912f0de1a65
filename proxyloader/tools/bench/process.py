"""The process of a case, as the main process controls it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil

from ..processes import ctrl_c_held_back
from .case_process import Failure, kill, serve

START_LIMIT_S = 180
"""Limit of the time for imports, which all cases do at the same time."""

HUNG_S = 60
"""A case without a new batch for this time is considered to hang."""

LOOK_S = 1.0


class CaseProcess:
    """The process of a case, with the ``failure`` that ended it, or None."""

    def __init__(self, name: str) -> None:
        self.failure: Failure | None = None
        context = multiprocessing.get_context("spawn")
        self._connection, self._theirs = context.Pipe()
        self._seen = context.Value("Q", 0, lock=False)
        arguments = name, self._theirs, self._seen, multiprocessing.get_start_method()
        self._process: SpawnProcess = context.Process(target=serve, args=arguments, name=name)

    def start(self) -> None:
        with ctrl_c_held_back():  # Ctrl-C stays blocked in the new process, which this one will kill
            self._process.start()
        self._theirs.close()

    def wait_until_ready(self) -> None:
        """Wait until the process has imported its modules."""
        self._answer(START_LIMIT_S)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of ``case_process._Measured`` in the process.

        Returns:
            The result of the method, or a ``Failure``, after which the process answers no more.
        """
        if self.failure is None:
            with suppress(OSError):  # it has died, and its answer will be a Failure
                self._connection.send((method, arguments))
            return self._answer(HUNG_S)
        return self.failure

    def end(self) -> None:
        """Kill the process and its children."""
        if self._process.is_alive():
            process = psutil.Process(self._process.pid)
            process.suspend()  # otherwise it might start another process meanwhile, which would not be killed
            kill(process)
            self._process.join(10)
        self._connection.close()

    def _answer(self, limit_s: float) -> Any:
        seen, since = self._seen.value, time.monotonic()
        try:
            while not self._connection.poll(min(LOOK_S, limit_s)):
                if self._seen.value != seen:
                    seen, since = self._seen.value, time.monotonic()
                elif time.monotonic() - since >= limit_s:
                    answer: Any = Failure(f"hung for {limit_s:.0f} s", has_hung=True)
                    break
            else:
                answer = self._connection.recv()
        except (EOFError, ConnectionError):
            answer = Failure("its process died")
        if isinstance(answer, Failure):
            self.failure = answer
        return answer


@contextmanager
def processes_of(names: Sequence[str]) -> Iterator[dict[str, CaseProcess]]:
    """Start a process for each case, by name, with all modules imported. They are killed at the end."""
    processes = {name: CaseProcess(name) for name in names}
    try:
        for each in processes.values():
            each.start()
        for each in processes.values():
            each.wait_until_ready()
        yield processes
    finally:
        for each in processes.values():
            each.end()
