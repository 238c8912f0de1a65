"""Workers: torch's loader, with faster detection of dead workers and faster shutdown. Main process."""

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

from ..lifetime import EXIT_TIMEOUT_S, at_exit, before_exit

POLL_S = 1.0  # between checks for dead workers
GRACE_S = 0.2  # for workers to exit


class Workers(TorchDataLoader[Any]):
    first_worker = 0
    """Number of the worker that receives the first request."""

    def _get_iterator(self) -> Any:
        return WorkersIterator(self) if self.num_workers else super()._get_iterator()


class WorkersIterator(_MultiProcessingDataLoaderIter):
    failed = False  # whether a worker died or timed out, so that the others cannot begin another epoch
    lost = False  # whether a worker died, with batches that may still be expected
    _next_check_s = 0.0  # time of the next check for dead workers, as given by ``time.monotonic``
    _send_idx = _rcvd_idx = 0  # torch sets them after starting the workers, which may fail

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
        active = list(self._workers_status)  # torch may mark a dead worker as inactive before it raises
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except Exception:
            self.failed = True
            self.lost = bool(self._find_dead(active))
            raise

    def _try_get_data(self, timeout: float = POLL_S) -> Any:
        # Outside the main thread, only this poll detects a dead worker. torch polls every five seconds or at the user's
        # timeout, and not while another worker returns batches.
        deadline_s = time.monotonic() + timeout
        result = False, None
        while not result[0] and time.monotonic() < deadline_s:
            wait_s = min(POLL_S, max(0.01, deadline_s - time.monotonic()))
            result = super()._try_get_data(wait_s)  # type: ignore[no-untyped-call]
            if result[0] and time.monotonic() < self._next_check_s:  # a check takes as long as receiving a batch
                return result
            self._next_check_s = time.monotonic() + POLL_S
            dead = self._find_dead(self._workers_status)
            if dead:
                pids = ", ".join(str(worker.pid) for worker in dead)
                with before_exit():  # a daemon thread must not report workers that are terminated at exit
                    raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly")
        return result

    def _find_dead(self, active: list[bool]) -> list[Any]:
        return [worker for worker, is_active in zip(self._workers, active) if is_active and not worker.is_alive()]

    def _shutdown_workers(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # module globals may be gone
            return
        if self._process != os.getpid():
            self._shutdown = True  # a forked copy of the iterator: the workers belong to the parent
            return
        if not self._shutdown:
            queue: Any
            for queue in self._index_queues:
                # An interrupt inside `put` may leave the queue locked, and torch calls `put` once more.
                queue._notempty.acquire(timeout=GRACE_S)
                queue._notempty.release()
            # torch waits up to five seconds for each busy worker, whose batches are no longer needed. Only workers that
            # have answered all requests get that time to exit.
            if not 0 < self._rcvd_idx == self._send_idx:
                deadline_s = time.monotonic() + GRACE_S
                self._workers: Any = [_DeadlineProcess(worker, deadline_s) for worker in self._workers]
        super()._shutdown_workers()

    def terminate_workers(self) -> None:
        """Terminate running workers at exit. multiprocessing would wait forever for a worker that hangs."""
        # SIGTERM kills a spawned worker that is still starting, which torch would report as a dead worker.
        if self._worker_pids_set:
            with contextlib.suppress(ValueError):  # another thread has removed them
                signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
        for worker in self._workers:
            worker._popen.terminate()
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        for worker in self._workers:
            _DeadlineProcess(worker, deadline_s).join()
            if worker.is_alive():
                worker.kill()


class _DeadlineProcess:
    """A worker process whose ``join`` returns by a deadline. ``terminate`` kills the process if it does not exit."""

    def __init__(self, process: Any, deadline_s: float) -> None:
        self._process, self._deadline_s = process, deadline_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def join(self, timeout: float | None = None) -> None:
        self._process.join(max(0.0, self._deadline_s - time.monotonic()))

    def terminate(self) -> None:
        self._process.terminate()
        self._process.join(GRACE_S / 4)
        self._process.kill()
        self._process.join(GRACE_S)
        self._deadline_s = time.monotonic() + GRACE_S


_iterators: weakref.WeakSet[WorkersIterator] = weakref.WeakSet()


@at_exit
def _terminate_workers() -> None:
    for iterator in list(_iterators):
        if iterator._process == os.getpid():
            iterator.terminate_workers()
