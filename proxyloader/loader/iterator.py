"""LoaderIterator: iterates over the finished batches of an epoch. Main process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

from ..workers.loader_state import LoaderState
from ..workers.messages import PackedBatch
from ..workers.pool import WorkerPool
from .assembly import SKIPPED_BATCH, BatchAssembler
from .stats import TAKE, StatsRecorder, Step, profile_row

TORCH_ITERATOR_ATTRS = ("_workers", "_pin_memory_thread")
"""Attributes of torch's iterator by which scripts check that its workers and its thread have exited."""


class LoaderIterator(Iterator[Any]):
    """The iterator of a DataLoader. ``recorder`` counts its batches."""

    def __init__(self, recorder: StatsRecorder) -> None:
        self._recorder = recorder
        self._lock = threading.RLock()  # threads may share the iterator
        self._assembler: BatchAssembler | None = None  # None: the batches are those of torch's iterator

    def begin(self, batches: Any, pool: WorkerPool, state: LoaderState, assembler: BatchAssembler | None) -> None:
        """Begin an epoch of torch's iterator. ``assembler``: None if its batches are returned unchanged."""
        with self._lock:
            self._pool, self._loader_state, self._assembler = pool, state, assembler
            self._batches: Any = batches if assembler is None else None  # a closed feed releases the workers
            self._torch_next: Any = batches.__next__ if assembler is None else None
            kind = "MultiProcessing" if pool.workers.num_workers else "SingleProcess"
            self._profile_name = f"enumerate(DataLoader)#_{kind}DataLoaderIter.__next__"  # as in torch
            batches._profile_name = self._profile_name if assembler is None else TAKE
            vars(self).update({name: value for name, value in vars(batches).items() if name in TORCH_ITERATOR_ATTRS})
            self._has_batches = state.batches > 0
            self._recorder.begin_epoch()
            self._last_return_s = monotonic()
            self._was_interrupted = False

    def __getstate__(self) -> Any:
        raise NotImplementedError("the iterator of a DataLoader cannot be pickled")

    def __len__(self) -> int:
        return len(self._pool.workers._index_sampler)  # as in torch, with a TypeError for an IterableDataset

    def close(self, invalidate: bool = False) -> None:
        """Cancel the batches in flight. With ``invalidate``, ``next()`` raises until another epoch begins."""
        with self._lock:
            if self._assembler is not None:
                self._assembler.feed.close()
                self._was_interrupted = invalidate

    def __next__(self) -> Any:
        assembler = self._assembler
        if assembler is None:
            return self._next_torch_batch()
        if assembler.feed.process != os.getpid():
            raise RuntimeError("the iterator belongs to the parent of this forked process; create a new one here")
        with self._lock, profile_row(self._profile_name):
            if self._was_interrupted:
                raise RuntimeError(
                    "the iterator was interrupted while fetching a batch, which may be lost; make another"
                )
            try:
                return self._next(assembler)
            except (KeyboardInterrupt, SystemExit):  # raised at any line, including within torch's queues
                self._was_interrupted = self._pool.broken = True
                raise

    def _next(self, assembler: BatchAssembler) -> Any:
        feed, start_s = assembler.feed, monotonic()
        feed.worker_wait_s = 0.0
        loop_s, batch = start_s - self._last_return_s, SKIPPED_BATCH
        while batch is SKIPPED_BATCH:
            if (in_flight := feed.next()) is None:
                if not feed.truncated:
                    self._loader_state.finished = True
                    had_batches, self._has_batches = self._has_batches, True
                    self._recorder.end_epoch()
                    assembler.end_epoch(had_batches)
                raise StopIteration
            try:
                feed.request_next(in_flight)
                batch = assembler.assemble(in_flight)
            except Exception as error:
                # If a worker dies, torch's signal handler raises at any line. The state is then that before this batch.
                if in_flight.has_arrived and str(error).startswith("DataLoader worker (pid"):
                    feed.truncated = True
                    feed.close()
                else:
                    self._record_progress(in_flight)
                raise
            finally:
                feed.release(in_flight)
            if batch is SKIPPED_BATCH:
                self._record_progress(in_flight)
        self._has_batches = True
        self._last_return_s = monotonic()
        assert in_flight is not None
        wait_s = self._last_return_s - start_s
        self._recorder.add(in_flight, Step(loop_s, wait_s, feed.worker_wait_s, in_flight.num_samples))
        self._record_progress(in_flight)  # at the end, as an interrupted batch is not received
        return batch

    def _record_progress(self, batch: PackedBatch) -> None:
        state, requests = self._loader_state, self._pool.requests
        if requests is None:
            state.batches += 1
        elif batch.request is not None:
            requests.record_return(batch.request, state)
        if batch.worker_state is not None:
            state.worker_states[batch.worker] = batch.worker_state
            state.next_worker = (batch.worker + 1) % self._pool.workers.num_workers

    def _next_torch_batch(self) -> Any:
        # Hot path: for batches of a few numbers, every line adds measurable overhead.
        start_s = monotonic()
        try:
            batch = self._torch_next()
        except StopIteration:
            self._loader_state.finished = True
            raise
        except Exception:
            self._pool.broken |= getattr(self._batches, "failed", False)
            self._advance()  # past the failed batch
            raise
        size = self._advance() or self._pool.workers.batch_size or 1
        now_s = monotonic()
        wait_s = now_s - start_s
        self._recorder.add_step(Step(start_s - self._last_return_s, wait_s, wait_s, size), size)
        self._last_return_s = now_s
        return batch

    def _advance(self) -> int:
        """Advance the epoch's state by one of torch's batches. Return its number of samples; 0 if unknown."""
        state, requests = self._loader_state, self._pool.requests
        state.batches += 1
        if requests is None or not requests.sizes:
            return 0
        size = requests.sizes.popleft()
        state.samples += requests.positions(size)
        return size
