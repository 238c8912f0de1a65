"""Workers: torch's loader, with faster detection of lost workers and faster shutdown. Main process."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..lifetime import END_S, at_exit, before_exit

LOOK_FOR_DEAD_WORKERS_S = 1.0
GRACE_S = 0.2


class Workers(TorchDataLoader[Any]):
    first_worker = 0
    """Number of the worker that receives the first request when workers start."""

    def _get_iterator(self) -> Any:
        return WorkersIterator(self) if self.num_workers else super()._get_iterator()


class WorkersIterator(_MultiProcessingDataLoaderIter):
    failed = False  # whether a worker was lost or timed out: the remaining ones cannot begin another epoch
    lost = False  # whether a worker was lost with its batches, some of which may still be expected
    _look_at_s = 0.0  # when the workers are looked at next, in seconds of ``time.monotonic``
    _send_idx = _rcvd_idx = 0  # torch sets them after it has started the workers, which may fail

    def __init__(self, loader: Workers) -> None:
        self._process = os.getpid()
        self._first_worker = loader.first_worker
        super().__init__(loader)
        _iterators.add(self)

    def _try_put_index(self) -> None:
        for _ in range(self._first_worker):
            next(self._worker_queue_idx_cycle)
        self._first_worker = 0
        super()._try_put_index()

    def _get_data(self) -> Any:
        in_use = list(self._workers_status)  # torch may mark a lost worker as unused before it raises
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except Exception:
            self.failed = True
            self.lost = bool(self._dead(in_use))
            raise

    def _try_get_data(self, timeout: float = LOOK_FOR_DEAD_WORKERS_S) -> Any:
        # Outside the main thread only this poll detects a lost worker. torch polls every five seconds or at the user's
        # timeout, and detects nothing while another worker returns batches.
        deadline_s = time.monotonic() + timeout
        found = False, None
        while not found[0] and time.monotonic() < deadline_s:
            wait_s = min(LOOK_FOR_DEAD_WORKERS_S, max(0.01, deadline_s - time.monotonic()))
            found = super()._try_get_data(wait_s)  # type: ignore[no-untyped-call]
            if found[0] and time.monotonic() < self._look_at_s:  # a check takes as long as receiving a batch
                return found
            self._look_at_s = time.monotonic() + LOOK_FOR_DEAD_WORKERS_S
            dead = self._dead(self._workers_status)
            if dead:
                pids = ", ".join(str(worker.pid) for worker in dead)
                with before_exit():  # at exit, workers end as well, which a daemon thread must not report
                    raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly")
        return found

    def _dead(self, in_use: list[bool]) -> list[Any]:
        return [worker for worker, used in zip(self._workers, in_use) if used and not worker.is_alive()]

    def _shutdown_workers(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # module globals may be gone
            return
        if self._process != os.getpid():
            self._shutdown = True  # a forked copy of the iterator: the workers belong to the parent
            return
        if not self._shutdown:
            queue: Any
            for queue in self._index_queues:
                # An interrupt inside `put` may leave the lock of the queue held, and torch calls `put` once more.
                queue._notempty.acquire(timeout=GRACE_S)
                queue._notempty.release()
            # torch waits up to five seconds for each busy worker, whose batches are no longer needed. Workers that have
            # answered all requests may take that time to exit.
            if not 0 < self._rcvd_idx == self._send_idx:
                deadline_s = time.monotonic() + GRACE_S
                self._workers: Any = [_Impatient(worker, deadline_s) for worker in self._workers]
        super()._shutdown_workers()

    def end_workers(self) -> None:
        """End running workers at exit. multiprocessing would wait forever for a worker that hangs."""
        # The signal kills a spawned worker that is still starting, which torch would report as a lost worker.
        if self._worker_pids_set:
            with contextlib.suppress(ValueError):  # removed by another thread
                signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
        for worker in self._workers:
            worker._popen.terminate()
        until_s = time.monotonic() + END_S
        for worker in self._workers:
            _Impatient(worker, until_s).join()
            if worker.is_alive():
                worker.kill()


class _Impatient:
    """A worker process whose ``join`` returns by a deadline. ``terminate`` kills the process if it does not end."""

    def __init__(self, process: Any, deadline_s: float) -> None:
        self._process, self._deadline_s = process, deadline_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def join(self, timeout: float | None = None) -> None:
        self._process.join(max(0.0, self._deadline_s - time.monotonic()))

    def terminate(self) -> None:
        self._process.terminate()
        self._process.join(GRACE_S / 4)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(GRACE_S)
        self._deadline_s = time.monotonic() + GRACE_S


_iterators: weakref.WeakSet[WorkersIterator] = weakref.WeakSet()


@at_exit
def _end_workers() -> None:
    for iterator in list(_iterators):
        if iterator._process == os.getpid():
            iterator.end_workers()
