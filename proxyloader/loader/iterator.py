"""LoaderIterator: submits packed batches to DALI ahead of time, and returns finished batches in order. Main process.

NOTE [ Who waits for what ]
The work is done at each ``next()``, in the thread that iterates. Batches that are ready in the workers are taken until
``prefetch`` + 1 are in flight. Then the oldest batch is collected and returned. The others go on in DALI's threads
while the model trains. ``next()`` waits for a worker only if nothing is in flight, or while the oldest batch cannot be
finished yet. It waits for DALI only for the oldest batch. So the sampler and torch's generators are used where a stock
loader uses them, and an error stays with its batch. Submitting a batch that is not urgent is left to a thread: see
NOTE [ Beside the model ] in ``loader/submitter.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..data.lazy_image import opened_late
from ..transforms.plan import Plan
from ..workers.loader_state import LoaderState
from ..workers.messages import BatchMessage, PackedBatch
from ..workers.pool import WorkerPool
from .assembly import NOTHING, BatchAssembler
from .submitter import InFlightBatch, RunSubmitter

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.run_queue import RunQueue


log = logging.getLogger(__name__)

POLLS = 20
"""How often workers are polled while DALI decodes a batch."""

ENOUGH = 2
"""Number of batches in flight from which the next one is not urgent."""

LONG_STEP_S = 2 * sys.getswitchinterval()
"""Duration of a step of the loop in which another thread surely gets the interpreter lock, in seconds."""

OF_TORCHS_ITERATOR = ("_workers", "_pin_memory_thread")
"""Attributes of torch's iterator that it has with workers, and with a thread that pins memory."""


class LoaderIterator:
    """The iterator of a DataLoader.

    Args:
        batches: torch's iterator over the workers of the pool.
        loader_state: the position in the epoch at which it starts. It is updated by the iterator.
        prefetch: maximum number of decoded batches that wait.
        serve: returns the run queue of a plan that arrived with a batch.
    """

    _process = 0
    """ID of the process that made it; 0 if its construction failed."""

    _is_interpreter_ending = staticmethod(sys.is_finalizing)
    """A class attribute, as the names of modules are gone when the interpreter ends."""

    def __init__(
        self,
        batches: Iterator[BatchMessage],
        pool: WorkerPool,
        servers: dict[str, RunQueue],
        loader_state: LoaderState,
        assembler: BatchAssembler,
        prefetch: int,
        serve: Callable[[Plan], RunQueue],
    ) -> None:
        self._in_flight: deque[InFlightBatch] = deque()
        self._batches: Iterator[BatchMessage] | None = batches
        self._pool, self._servers, self._loader_state = pool, servers, loader_state
        self._submitter, self._assembler, self._serve = RunSubmitter(pool, servers), assembler, serve
        # Without workers, decoding ahead gains nothing and would draw random numbers too early. With a deterministic
        # server, no run is started ahead, as a loop that is left early must not change what later runs draw.
        runs_ahead = pool.workers.num_workers and servers and not any(each.deterministic for each in servers.values())
        self._ahead = prefetch if runs_ahead else 0
        # Scripts read these attributes of torch's iterators to check that the workers end.
        vars(self).update({name: getattr(batches, name) for name in OF_TORCHS_ITERATOR if hasattr(batches, name)})
        # An IterableDataset has no sampler that could skip batches, so the batches before the position are discarded.
        # If the dataset or its iterators have restored their states, they start at the position.
        self._to_throw_away = loader_state.batches if pool.requests is None and not loader_state.worker_states else 0
        self._nothing_yet = not loader_state.batches
        self._handed_out_s = time.monotonic()
        self._cut_short = False  # a worker was lost: after its error there are no more batches
        self._was_interrupted = False
        self._turn = threading.RLock()  # threads that share the iterator take turns
        self._process = os.getpid()
        pool.user = weakref.ref(self)

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._pool.workers._index_sampler)  # as torch's iterators; TypeError for an IterableDataset

    def __del__(self) -> None:
        if not self._is_interpreter_ending():
            self.close()

    def close(self) -> None:
        """Cancel the batches in flight and release the workers. ``__del__`` calls this."""
        if self._process == os.getpid():  # a forked child has copies, with locks that may never be released
            while self._in_flight:
                in_flight = self._in_flight.popleft()
                self._submitter.forget(in_flight)
                self._give_back_slot(in_flight)
            self._submitter.close()
            if self._pool.requests is not None and self._pool.user is not None and self._pool.user() in (self, None):
                self._pool.requests.undo_draws_ahead()
        self._batches = None

    def __next__(self) -> Any:
        if self._process != os.getpid():
            raise RuntimeError("this iterator belongs to the process that made it; a forked child makes one of its own")
        with self._turn:
            if self._was_interrupted:
                raise RuntimeError(
                    "this iterator was interrupted (KeyboardInterrupt, SystemExit) in the middle of a batch, which may "
                    "be lost; begin a new one: iter(loader)"
                )
            try:
                batch = self._next()
                for in_flight in self._in_flight:
                    self._submitter.start_soon(in_flight)
                self._handed_out_s = time.monotonic()
            except (KeyboardInterrupt, SystemExit):  # it may have come in any line, also in torch's queues
                self._was_interrupted = self._pool.broken = True
                raise
            return batch

    def _next(self) -> Any:
        step_s, batch = time.monotonic() - self._handed_out_s, NOTHING
        while batch is NOTHING:
            while self._should_feed():
                self._prefetch_one(is_urgent=len(self._in_flight) < ENOUGH or step_s < LONG_STEP_S)
                self._wait_while_dali_is_busy()
            if not self._in_flight:
                if not self._cut_short:
                    self._end()
                raise StopIteration
            in_flight = self._in_flight.popleft()
            try:
                self._submitter.start(in_flight)
                self._note_progress(in_flight)
                if self._nothing_yet and in_flight.error is None:
                    self._assembler.warn_of_idle(in_flight.batch)
                batch = self._assembler.assemble(in_flight)
            finally:
                self._give_back_slot(in_flight)
        self._nothing_yet = False
        return batch

    def _note_progress(self, in_flight: InFlightBatch) -> None:
        if self._pool.requests is None:
            self._loader_state.batches += 1
        elif in_flight.batch is not None and in_flight.batch.request is not None:
            self._pool.requests.handed_out(in_flight.batch.request)
        if in_flight.batch is not None and in_flight.batch.worker_state is not None:
            self._loader_state.worker_states[in_flight.batch.worker] = in_flight.batch.worker_state
            self._loader_state.next_worker = (in_flight.batch.worker + 1) % self._pool.workers.num_workers

    def _end(self) -> None:
        self._loader_state.finished = True
        had_nothing, self._nothing_yet = self._nothing_yet, False
        self._assembler.end_epoch(has_given=not had_nothing)

    def _should_feed(self) -> bool:
        if self._batches is None:
            return False
        if self._pool.user is None or self._pool.user() is not self:
            raise RuntimeError(
                "a newer iterator of this DataLoader has taken its persistent workers; finish one before the next "
                "begins, or use persistent_workers=False"
            )
        return not self._in_flight or (self._has_room() and self._has_ready_batch())

    def _has_room(self) -> bool:
        return len(self._in_flight) <= self._ahead and self._in_flight[-1].error is None

    def _has_ready_batch(self) -> bool:
        requests = self._pool.requests
        return requests is None or requests.has_ready_batch(self._pool.in_order)

    def _wait_while_dali_is_busy(self) -> None:
        """Wait for the next ready batch of the workers, as long as DALI is surely busy with the oldest one.

        While ``next()`` waits for DALI, it takes no batches, so later ones would be submitted late.
        """
        if self._batches is None or not self._has_room():
            return
        until_s = max((pipeline_run.busy_until_s for pipeline_run in self._in_flight[0].pipeline_runs), default=0.0)
        pause_s = (until_s - time.monotonic()) / POLLS
        while time.monotonic() < until_s - pause_s and not self._has_ready_batch():
            time.sleep(pause_s)

    def _prefetch_one(self, is_urgent: bool) -> None:
        """Take the next batch from the workers. Start its runs now if it is urgent."""
        assert self._batches is not None
        in_flight, requests = InFlightBatch(), self._pool.requests
        is_late_here = not self._pool.workers.num_workers and self._pool.is_late
        try:
            with opened_late() if is_late_here else contextlib.nullcontext():
                while self._to_throw_away:
                    self._to_throw_away -= 1
                    next(self._batches)
                self._pool.fetcher.look_again()
                message = next(self._batches)
        except StopIteration:
            self._batches = None
            return
        except Exception as error:
            self._pool.broken |= getattr(self._batches, "failed", False)
            in_flight.error = error
            if getattr(self._batches, "lost", False):
                self._cut_short, self._batches = True, None
        else:
            request = requests.answered(message.number) if requests is not None else None
            in_flight.batch = PackedBatch(request)  # its slot is given back even if the next lines fail
            try:
                in_flight.batch = batch = message.open(request, self._pool.arena)
                if batch.failure is not None:
                    in_flight.error = batch.failure.exception()
                for plan in batch.plans:  # plans of transforms that no attribute of the dataset holds
                    self._servers[plan.key] = self._serve(plan)
                    self._pool.plans[plan.key] = plan
                in_flight.is_to_start = in_flight.error is None
            except Exception as error:
                in_flight.error = error
            if is_urgent:
                for each in (*self._in_flight, in_flight):
                    self._submitter.start(each)
        self._in_flight.append(in_flight)

    def _give_back_slot(self, in_flight: InFlightBatch) -> None:
        if self._pool.arena is not None and in_flight.batch is not None and in_flight.batch.request is not None:
            self._pool.arena.give_back(in_flight.batch.request.slot, in_flight)
