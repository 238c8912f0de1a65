"""Submit the runs of a batch that came from a worker; in a thread beside the model where that helps. Main process.

NOTE [ Beside the model ]
Submitting a large batch to DALI takes a considerable part of ``next()``. Many training loops wait for the GPU in each
step, for example in a GradScaler, and ask for the next batch when the GPU is idle. The time of ``next()`` is lost then.
So a batch that is not urgent, because others are in flight and the steps of the loop are long, is submitted by a
thread. The thread starts when ``next()`` has returned. It gets the interpreter lock when the training thread waits for
the GPU, or has queued work for it. It uses neither the sampler nor torch's iterator nor a random generator. It
unpickles nothing, as that may import modules. If the loop asks for the batch, it waits for the thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import InputError
from ..workers.messages import PackedBatch
from ..workers.pool import WorkerPool
from .profiler_rows import SUBMIT, row

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.run_queue import PipelineRun, RunQueue


@dataclass(eq=False)
class InFlightBatch:
    """A batch between the workers and the training loop.

    Attributes:
        batch: the batch from the worker; None if there was an error before it arrived.
        pipeline_runs: the DALI runs that were started for ``batch.runs``, in their order.
        error: the error of the batch, or None.
        is_to_start: whether its runs are still to be started.
        starting: the future of the thread's work on it; None if it was not given to the thread.
        is_forgotten: whether the loop has dropped it.
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
    """Starts the runs of batches, in the calling thread or in a thread of its own."""

    def __init__(self, pool: WorkerPool, servers: Mapping[str, RunQueue]) -> None:
        self._pool, self._servers = pool, servers
        self._thread: ThreadPoolExecutor | None = None
        self._has_no_thread = False

    def start(self, in_flight: InFlightBatch) -> None:
        """Start the runs of a batch now, or wait for the thread to start them. Errors go to ``in_flight.error``."""
        if in_flight.starting is not None:
            in_flight.starting.result()
        self._start(in_flight)

    def start_soon(self, in_flight: InFlightBatch) -> None:
        """Let the thread start the runs of a batch, beside the model."""
        if not in_flight.is_to_start or in_flight.starting is not None or self._has_no_thread:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "proxyloader-run-starter")
        try:
            in_flight.starting = self._thread.submit(self._start, in_flight)
        except RuntimeError:  # the interpreter is about to end, or there are too many threads
            self._has_no_thread, self._thread = True, None

    def forget(self, in_flight: InFlightBatch) -> None:
        """Cancel a batch. This does not wait, as the garbage collector may call it in any thread at any time."""
        in_flight.is_forgotten = True
        if in_flight.starting is not None:
            in_flight.starting.cancel()
        for pipeline_run in in_flight.pipeline_runs:
            pipeline_run.cancel()

    def close(self) -> None:
        """Let the thread end after its remaining work. This does not wait."""
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
        for run in batch.runs:
            if run.server not in self._servers:
                raise InputError(
                    "a sample was made by the proxy of another server than the loader's; "
                    "give the loader the server whose proxy the dataset calls: DataLoader(dataset, server=server)",
                    code="foreign-server",
                )
            with row(SUBMIT):
                pipeline_runs.append(self._servers[run.server].submit(batch.inputs(run, self._pool.arena)))
