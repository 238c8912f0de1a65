"""Submit the runs of a batch that came from a worker; in a thread beside the model where that helps. Main process.

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
from ..workers.pool import WorkerPool

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.run import PipelineRun
    from ..dali.run_queue import RunQueue


@dataclass(eq=False)
class InFlightBatch:
    """A batch under way.

    Attributes:
        batch: what came from the worker.
        pipeline_runs: for each of its runs.
        error: what went wrong with it.
        is_to_start: its runs are still to be started.
        starting: of the thread that starts them, or did.
        is_forgotten: nobody will ask for it.
    """

    batch: PackedBatch | None = None
    pipeline_runs: list[PipelineRun] = field(default_factory=list)
    error: Exception | None = None
    is_to_start: bool = False
    starting: Future[None] | None = None
    is_forgotten: bool = False

    def inputs_released(self) -> bool:
        is_being_started = self.starting is not None and not self.starting.done()
        return not is_being_started and all(pipeline_run.inputs_released() for pipeline_run in self.pipeline_runs)

    def wait_until_read(self) -> None:
        if self.starting is not None:
            wait([self.starting])
        for pipeline_run in self.pipeline_runs:
            pipeline_run.wait_until_read()


class RunSubmitter:
    """
    Args:
        pool: that batches come from.
        servers: by the key that runs name them with.
    """

    def __init__(self, pool: WorkerPool, servers: Mapping[str, RunQueue]) -> None:
        self._pool, self._servers = pool, servers
        self._thread: ThreadPoolExecutor | None = None
        self._has_no_thread = False

    def start(self, in_flight: InFlightBatch) -> None:
        """Start its runs now, or wait for the thread that is to start them. What goes wrong is ``in_flight.error``."""
        if in_flight.starting is not None:
            in_flight.starting.result()
        self._start(in_flight)

    def start_soon(self, in_flight: InFlightBatch) -> None:
        """Start its runs beside the model."""
        if not in_flight.is_to_start or in_flight.starting is not None or self._has_no_thread:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "proxyloader-run-starter")
        try:
            in_flight.starting = self._thread.submit(self._start, in_flight)
        except RuntimeError:  # the interpreter is about to end, or there are too many threads
            self._has_no_thread, self._thread = True, None

    def forget(self, in_flight: InFlightBatch) -> None:
        """Nobody will ask for it. Waits for nothing: the garbage collector may call this in any thread, at any time."""
        in_flight.is_forgotten = True
        if in_flight.starting is not None:
            in_flight.starting.cancel()
        for pipeline_run in in_flight.pipeline_runs:
            pipeline_run.cancel()

    def close(self) -> None:
        """Let the thread end, when it has done what it was given."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _start(self, in_flight: InFlightBatch) -> None:
        if not in_flight.is_to_start or in_flight.is_forgotten:
            return
        try:
            if in_flight.batch is not None:
                self._submit(in_flight.batch, in_flight.pipeline_runs)
        except Exception as error:
            in_flight.error = error
        in_flight.is_to_start = False
        if in_flight.is_forgotten:  # meanwhile
            for pipeline_run in in_flight.pipeline_runs:
                pipeline_run.cancel()

    def _submit(self, batch: PackedBatch, pipeline_runs: list[PipelineRun]) -> None:
        if batch.failure is not None:
            batch.failure.reraise()
        if not batch.runs:
            return
        memory = batch.memory(self._pool.arena)
        for run in batch.runs:
            if run.server not in self._servers:
                raise InputError(
                    "a sample was made by the proxy of another server than the loader's; "
                    "give the loader the server whose proxy the dataset calls: DataLoader(dataset, server=server)",
                    code="foreign-server",
                )
            pipeline_runs.append(self._servers[run.server].submit([part.views(memory) for part in run.inputs]))
