"""Feed: takes packed batches from the workers and gives them to DALI, ahead of the training loop. Main process.

NOTE [ No feeder thread ]
The work is done at each ``next()``, in the thread that iterates. Batches that are ready in the workers are taken until
``prefetch`` + 1 are in flight. Then the oldest batch is collected and returned. The others go on in DALI's threads
while the model trains. ``next()`` waits for a worker only if nothing is in flight, or while the oldest batch cannot be
finished yet. It waits for DALI only for the oldest batch. So the sampler and torch's generators are used where a stock
loader uses them, and an error stays with its batch.

NOTE [ The submitter thread ]
Submitting a large batch to DALI takes a considerable part of ``next()``. Many training loops wait for the GPU in each
step, for example in a GradScaler, and ask for the next batch when the GPU is idle. The time of ``next()`` is lost then.
So a batch that is not urgent, because others are in flight and the steps of the loop are long, is submitted by a
thread. The thread starts when ``next()`` has returned. It gets the interpreter lock when the training thread waits for
the GPU, or has queued work for it. It uses neither the sampler nor torch's iterator nor a random generator. It
unpickles nothing, as that may import modules. If the loop asks for the batch, it waits for the thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..data.deferral import deferring
from ..errors import InputError
from ..transforms.plan import Plan
from ..workers.loader_state import LoaderState
from ..workers.messages import BatchMessage, PackedBatch
from ..workers.pool import WorkerPool
from ..workers.request_sampler import BatchRequest
from .stats import SUBMIT, WAIT, row

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.run_queue import PipelineRun, RunQueue

POLLS = 20
"""How often workers are polled while DALI decodes a batch."""

ENOUGH = 2
"""Number of batches in flight from which the next one is not urgent."""

LONG_STEP_S = 2 * sys.getswitchinterval()
"""Duration of a step of the loop in which another thread surely gets the interpreter lock, in seconds."""


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
            assert in_flight.batch is not None
            for run in in_flight.batch.runs:
                if run.server not in self._servers:
                    raise InputError(
                        "a sample was made by the proxy of another server than the loader's; "
                        "give the loader the server whose proxy the dataset calls: DataLoader(dataset, server=server)",
                        code="foreign-server",
                    )
                with row(SUBMIT):
                    inputs = in_flight.batch.inputs(run, self._pool.arena)
                    in_flight.pipeline_runs.append(self._servers[run.server].submit(inputs))
        except Exception as error:
            in_flight.error = error
        in_flight.is_to_start = False
        if in_flight.is_forgotten:  # meanwhile
            for pipeline_run in in_flight.pipeline_runs:
                pipeline_run.cancel()


class Feed:
    """The batches of an epoch between the workers and the training loop.

    Args:
        batches: torch's iterator over the workers of the pool.
        servers: run queues by the keys of their plans. Those of plans that arrive with a batch are added.
        serve: returns the run queue of a plan.
        loader_state: the position in the epoch at which it starts.
        prefetch: maximum number of decoded batches that wait.

    Attributes:
        process: ID of the process that made it; 0 if its construction failed.
        for_workers_s: time in which ``next`` waited for the workers, in seconds, since the loop set it to 0.
        worker_processes: the worker processes of torch's iterator.
        is_cut_short: whether a worker was lost: after its error there are no more batches.
    """

    process = 0

    def __init__(
        self,
        batches: Iterator[BatchMessage],
        pool: WorkerPool,
        servers: dict[str, RunQueue],
        serve: Callable[[Plan], RunQueue],
        loader_state: LoaderState,
        prefetch: int,
    ) -> None:
        self._in_flight: deque[InFlightBatch] = deque()
        self._batches: Iterator[BatchMessage] | None = batches
        self.pool, self.servers, self._serve = pool, servers, serve
        self._submitter = RunSubmitter(pool, servers)
        # Without workers, decoding ahead gains nothing and would draw random numbers too early. With a deterministic
        # server, no run is started ahead, as a loop that is left early must not change what later runs draw.
        runs_ahead = pool.workers.num_workers and servers and not any(each.deterministic for each in servers.values())
        self._ahead = prefetch if runs_ahead else 0
        # An IterableDataset has no sampler that could skip batches, so the batches before the position are discarded.
        # If the dataset or its iterators have restored their states, they start at the position.
        self._to_throw_away = loader_state.batches if pool.requests is None and not loader_state.worker_states else 0
        self.for_workers_s, self.is_cut_short = 0.0, False
        self.worker_processes: Sequence[Any] = getattr(batches, "_workers", ())
        self.process = os.getpid()
        pool.user = weakref.ref(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # names of modules may be gone
        if not is_finalizing():
            self.close()

    def close(self) -> None:
        """Cancel the batches in flight and release the workers. ``__del__`` calls this."""
        if self.process == os.getpid():  # a forked child has copies, with locks that may never be released
            while self._in_flight:
                in_flight = self._in_flight.popleft()
                self._submitter.forget(in_flight)
                self.give_back_slot(in_flight)
            self._submitter.close()
            if self.pool.requests is not None and self.pool.user is not None and self.pool.user() in (self, None):
                self.pool.requests.undo_draws_ahead()
        self._batches = None

    @property
    def batches_ahead(self) -> int:
        """Number of batches that wait for the loop, decoded or with DALI."""
        return len(self._in_flight)

    def next(self, loop_s: float) -> InFlightBatch | None:
        """Take batches from the workers, and return the oldest one in flight; None if the epoch has ended.

        ``loop_s`` is the time that the training loop took for its last step, in seconds.
        """
        while self._batches is not None and (not self._in_flight or (self._has_room() and self._has_ready_batch())):
            self._take_from_workers(is_urgent=len(self._in_flight) < ENOUGH or loop_s < LONG_STEP_S)
            self._wait_while_dali_is_busy()
        return self._in_flight.popleft() if self._in_flight else None

    def start(self, in_flight: InFlightBatch) -> None:
        """Start the runs of a batch now, or wait until they have started."""
        self._submitter.start(in_flight)

    def start_soon(self) -> None:
        """Let a thread start the runs that have not started yet, beside the model."""
        for each in self._in_flight:
            self._submitter.start_soon(each)

    def give_back_slot(self, in_flight: InFlightBatch) -> None:
        if self.pool.arena is not None and in_flight.batch is not None and in_flight.batch.request is not None:
            self.pool.arena.give_back(in_flight.batch.request.slot, in_flight)

    def _has_room(self) -> bool:
        return len(self._in_flight) <= self._ahead and (not self._in_flight or self._in_flight[-1].error is None)

    def _has_ready_batch(self) -> bool:
        requests = self.pool.requests
        return requests is None or requests.has_ready_batch(self.pool.workers.in_order)

    def _wait_while_dali_is_busy(self) -> None:
        """Wait for the next ready batch of the workers, as long as DALI is surely busy with the oldest one.

        While ``next()`` waits for DALI, it takes no batches, so later ones would be submitted late.
        """
        if self._batches is None or not self._has_room():
            return
        until_s = max((pipeline_run.busy_until_s for pipeline_run in self._in_flight[0].pipeline_runs), default=0.0)
        pause_s = (until_s - time.monotonic()) / POLLS
        with row(WAIT):
            while time.monotonic() < until_s - pause_s and not self._has_ready_batch():
                time.sleep(pause_s)

    def _take_from_workers(self, is_urgent: bool) -> None:
        """Take the next batch from the workers. Start its runs now if it is urgent."""
        assert self._batches is not None
        in_flight, requests = InFlightBatch(), self.pool.requests
        deferral = self.pool.deferral
        try:
            with deferring(deferral) if deferral is not None else contextlib.nullcontext():
                while self._to_throw_away:
                    self._to_throw_away -= 1
                    next(self._batches)
                self.pool.fetcher.look_again()
                asked_s = time.monotonic()
                message: Any = next(self._batches)
                self.for_workers_s += time.monotonic() - asked_s
        except StopIteration:
            self._batches = None
            return
        except Exception as error:
            self.pool.broken |= getattr(self._batches, "failed", False)
            in_flight.error = error
            if getattr(self._batches, "lost", False):
                self.is_cut_short, self._batches = True, None
        else:
            is_torchs = not isinstance(message, BatchMessage)
            request = requests.answered(None if is_torchs else message.number) if requests is not None else None
            in_flight.batch = PackedBatch(request)  # its slot is given back even if the next lines fail
            try:
                in_flight.batch = batch = (
                    self._of_torch(message, request) if is_torchs else message.open(request, self.pool.arena)
                )
                if batch.failure is not None:
                    in_flight.error = batch.failure.exception()
                # Plans of transforms that no attribute of the dataset holds arrive with a batch.
                self.pool.plans.update({plan.key: plan for plan in batch.plans})
                for run in batch.runs:
                    plan = self.pool.plans.get(run.server)
                    if plan is not None and plan.key not in self.servers:
                        self.servers[plan.key] = self._serve(plan)
                in_flight.is_to_start = in_flight.error is None
            except Exception as error:
                in_flight.error = error
            if is_urgent:
                for each in (*self._in_flight, in_flight):
                    self._submitter.start(each)
        self._in_flight.append(in_flight)

    def _of_torch(self, content: Any, request: BatchRequest | None) -> PackedBatch:
        """Return a batch that a worker has sent as torch's would."""
        size = len(request.each()) if request is not None else size_of(content, self.pool.workers.batch_size or 1)
        return PackedBatch(request, content=content, num_samples=size, gave_up=True)


def size_of(batch: Any, batch_size: int) -> int:
    """Return the number of samples in a batch of a stream: that of its first tensor, or else ``batch_size``."""
    while isinstance(batch, (tuple, list, dict)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch) if isinstance(batch, torch.Tensor) and batch.ndim else batch_size
