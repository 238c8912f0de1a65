"""Setup and collation in torch's worker processes."""

import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from ..data import hooks
from ..data.bad_samples import UnreadableSample
from ..data.batch_memory import batch_memory
from ..data.deferral import Deferral, defer_in_process
from ..errors import ImageError
from ..transforms.random_numbers import in_thread
from .arena import Arena
from .fetch import Fetcher
from .loader_state import StatefulStream, WorkerStates, load_state, save_state
from .messages import PackedBatch, WorkerError
from .packing import Packer
from .request_sampler import BatchRequest

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


class PackedDataset(Dataset[Any]):
    """Dataset of torch's workers for a map-style dataset: takes requests and returns packed batches."""

    def __init__(self, fetcher: Fetcher, packer: Packer, arena: Arena | None, states: WorkerStates) -> None:
        self.fetcher, self._packer, self._arena, self._states = fetcher, packer, arena, states
        # Sizes of the last batch. A dataset may read many files that are never sent, which must not fill the slot.
        self._batch_bytes = self._sent_bytes = 0

    def begin(self, worker_id: int) -> None:
        """Restore the dataset's state in this worker before the first batch."""
        load_state(self.fetcher.dataset, self._states.get(worker_id, {}))

    def state(self) -> dict[str, Any]:
        return save_state(self.fetcher.dataset)

    def __getitems__(self, request: BatchRequest) -> Any:
        arena: Any = self._arena if request.slot is not None else None
        info = self.fetcher.worker_info()
        deferral = self._packer.deferral
        if deferral is not None and not deferral.is_active:  # deferral has stopped, here or in other workers
            hooks.release(deferral)
        elif arena is not None:
            memory = arena.memory_to_write(request.slot, self._batch_bytes)
            batch_memory.begin(memory[: self._sent_bytes * 5 // 4])
        try:
            with self.fetcher.preserve_generators():
                packed = self._pack(request)
            self._batch_bytes, self._sent_bytes = packed.size_bytes, packed.bytes_read
        except Exception as error:  # sent in a batch, so that the main process releases its slot
            unreadable = (UnreadableSample.from_error(error.index, error),) if isinstance(error, ImageError) else ()
            packed = PackedBatch(request, unreadable=unreadable)
            packed.failure = error if info is None else WorkerError(error, f"in DataLoader worker process {info.id}")
        if arena is not None:
            batch_memory.end()  # the message may overwrite files that are not sent
        try:
            return packed.sent(info, self.state, self._arena)
        finally:
            del packed  # its error references this frame
            if arena is not None:
                arena.mark_ready(request.slot)

    def _pack(self, request: BatchRequest) -> PackedBatch:
        self._packer.begin_batch()
        deferral = self._packer.deferral
        if deferral is not None and deferral.on_gpu and self.fetcher.worker_info() is not None:
            leave_core()
        samples, indices, unreadable = self.fetcher(request)
        self.fetcher.seed_batch(request)
        if unreadable and not samples:
            return PackedBatch(request, indices=(), unreadable=unreadable)
        # ``__getitems__`` may return a batch, whose length is not its number of samples.
        packed = self._packer(samples if self._packer.batched else samples[0], request, len(indices))
        return dataclasses.replace(packed, indices=tuple(indices) if unreadable else None, unreadable=unreadable)


def pack_stream(fetcher: Fetcher, packer: Packer, stream: StatefulStream, samples: Any) -> PackedBatch:
    """The collate_fn of workers for an iterable-style dataset, given its first arguments."""
    if fetcher.deferral is not None and not fetcher.deferral.is_active:
        hooks.release(fetcher.deferral)
    packed = packer(samples, num_samples=len(samples) if packer.batched else 1)
    return packed.sent(fetcher.worker_info(), stream.state)


def set_up_worker(worker_init_fn: Callable[[int], None] | None, deferral: Deferral | None, worker_id: int) -> None:
    """Set up a worker, then call the user's function. Passed to torch as ``worker_init_fn``.

    Afterwards, ``get_worker_info()`` returns the user's dataset, and the worker exits with its parent.
    """
    info = get_worker_info()
    dataset = info.dataset if info is not None else None
    if isinstance(dataset, (PackedDataset, StatefulStream)):
        # User code expects get_worker_info() to return the dataset passed to the loader.
        user_dataset = dataset.dataset if isinstance(dataset, StatefulStream) else dataset.fetcher.dataset
        object.__setattr__(info, "dataset", user_dataset)
        keep_freed_memory()
    if deferral is not None:
        defer_in_process(deferral)
        if deferral.is_active:
            hooks.hold(deferral)
            in_thread.draw_from_state()
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True, name="proxyloader-watch").start()
    if worker_init_fn is not None:
        worker_init_fn(worker_id)
    if isinstance(dataset, PackedDataset):
        dataset.begin(worker_id)
    gc.freeze()  # so that the garbage collector does not repeatedly traverse all modules; forked workers have done so


def leave_core() -> None:
    """Move this thread to another core, if it may use several.

    A GPU interrupts one core about once per image that its engines decode, and a worker on this core is slower. Linux
    does not move a worker that never sleeps, and batches are returned in order, so the others would wait for it: see
    ``benchmarks/results/recording.txt``.
    """
    cores = os.sched_getaffinity(0)
    if others := cores - {ctypes.CDLL(None).sched_getcpu()}:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, cores)


def keep_freed_memory() -> None:
    """Let malloc keep a batch's memory for the next one, which saves most of the time for reading files."""
    with contextlib.suppress(AttributeError, OSError):  # mallopt exists only in glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 512 << 20)


def _exit_with_parent(parent_pid: int) -> None:
    # torch's watchdog ends the loop of a worker whose parent was killed, but the process then waits forever for a queue
    # without a reader. A worker's parent may be the fork server, so the main process is checked as well.
    main = multiprocessing.parent_process()
    while os.getppid() == parent_pid and (main is None or main.is_alive()):
        time.sleep(1.0)
    os._exit(1)
