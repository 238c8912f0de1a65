"""Starts the runs of a batch that came from a worker. Main process; beside the model, where there is time for it.

NOTE [ Beside the model ]
Giving DALI a large batch takes a good part of ``next()``. Many training loops wait for the GPU in each step (a
GradScaler often does), and ask for the next batch when the GPU has nothing left to do: what ``next()`` takes then is
lost. So a batch that is not urgent, since others are under way and the steps of the loop are long, is left to a thread.
It begins when ``next()`` is over, and gets the interpreter when the training thread waits for the GPU, or has queued
work for it. The thread does nothing else: it touches neither the sampler nor torch's iterator nor a random generator,
unpickles nothing (which may import modules), and a batch that is asked for is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import InputError
from ..workers.messages import PackedBatch
from ..workers.pool import Road

if TYPE_CHECKING:  # importing the server imports DALI
    from ..dali.run import Ticket
    from ..dali.server import ProxyServer


@dataclass(eq=False)
class Fed:
    """A batch under way.

    Attributes:
        batch: what came from the worker.
        tickets: for each of its runs.
        error: what went wrong with it.
        is_to_start: its runs are still to be started.
        starting: of the thread that starts them, or did.
        is_forgotten: nobody will ask for it.
    """

    batch: PackedBatch | None = None
    tickets: list[Ticket] = field(default_factory=list)
    error: Exception | None = None
    is_to_start: bool = False
    starting: Future[None] | None = None
    is_forgotten: bool = False

    def was_read(self) -> bool:
        is_being_started = self.starting is not None and not self.starting.done()
        return not is_being_started and all(ticket.was_read() for ticket in self.tickets)

    def wait_until_read(self) -> None:
        if self.starting is not None:
            wait([self.starting])
        for ticket in self.tickets:
            ticket.wait_until_read()


class RunStarter:
    """
    Args:
        road: that batches come from.
        servers: by the key that runs name them with.
    """

    def __init__(self, road: Road, servers: Mapping[str, ProxyServer]) -> None:
        self._road, self._servers = road, servers
        self._thread: ThreadPoolExecutor | None = None
        self._has_no_thread = False

    def start(self, fed: Fed) -> None:
        """Start its runs now, or wait for the thread that is to start them. What goes wrong is ``fed.error``."""
        if fed.starting is not None:
            fed.starting.result()
        self._start(fed)

    def start_soon(self, fed: Fed) -> None:
        """Start its runs beside the model."""
        if not fed.is_to_start or fed.starting is not None or self._has_no_thread:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "proxyloader-run-starter")
        try:
            fed.starting = self._thread.submit(self._start, fed)
        except RuntimeError:  # the interpreter is about to end, or there are too many threads
            self._has_no_thread, self._thread = True, None

    def forget(self, fed: Fed) -> None:
        """Nobody will ask for it. Waits for nothing: the garbage collector may call this in any thread, at any time."""
        fed.is_forgotten = True
        if fed.starting is not None:
            fed.starting.cancel()
        for ticket in fed.tickets:
            ticket.abandon()

    def close(self) -> None:
        """Let the thread end, when it has done what it was given."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _start(self, fed: Fed) -> None:
        if not fed.is_to_start or fed.is_forgotten:
            return
        try:
            if fed.batch is not None:
                self._submit(fed.batch, fed.tickets)
        except Exception as error:
            fed.error = error
        fed.is_to_start = False
        if fed.is_forgotten:  # meanwhile
            for ticket in fed.tickets:
                ticket.abandon()

    def _submit(self, batch: PackedBatch, tickets: list[Ticket]) -> None:
        if batch.failure is not None:
            batch.failure.reraise()
        if not batch.runs:
            return
        memory = batch.memory(self._road.arena)
        for run in batch.runs:
            if run.server not in self._servers:
                raise InputError(
                    "a sample was made by the proxy of another server than the loader's; "
                    "give the loader the server whose proxy the dataset calls: DataLoader(dataset, server=server)"
                )
            tickets.append(self._servers[run.server].submit([part.views(memory) for part in run.inputs]))
