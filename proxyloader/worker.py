"""What runs in torch's worker processes beside the user's dataset."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset, get_worker_info

from .arena import Arena, Request
from .errors import ImageError
from .packing import Failure, PackedBatch, Packer

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


class PackedDataset(Dataset[PackedBatch]):
    """What torch's workers see in the place of the user's map-style dataset: takes requests, gives packed batches."""

    def __init__(self, dataset: Any, packer: Packer, arena: Arena | None, batched: bool) -> None:
        self.dataset, self._packer, self._arena, self._batched = dataset, packer, arena, batched

    def __getitems__(self, request: Request) -> PackedBatch:
        try:
            return self._packer(self._fetch(request.indices), request)
        except Exception:
            info = get_worker_info()
            if info is None:
                raise
            # As a value, so that the slot comes back with it.
            return PackedBatch(request, failure=Failure.caught(f"in DataLoader worker process {info.id}"))
        finally:
            if self._arena is not None and request.slot is not None:
                self._arena.mark_ready(request.slot)

    def _fetch(self, indices: Any) -> Any:
        if not self._batched:
            return self._sample(indices)
        if getattr(self.dataset, "__getitems__", None) and not isinstance(self.dataset, Subset):
            return self.dataset.__getitems__(indices)
        return [self._sample(index) for index in indices]

    def _sample(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except ImageError as error:
            raise ImageError(f"dataset[{index}]: {error}") from error.__cause__


def set_up_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """torch's ``worker_init_fn`` for every worker: shows the user's dataset, and ends the worker with its parent."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, PackedDataset):
        # A user's code asks get_worker_info() for the dataset it gave to the loader.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    keep_freed_memory()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True, name="proxyloader-watch").start()
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def keep_freed_memory() -> None:
    """Let malloc keep a batch's memory for the next batch, which saves most of the time that reading files takes."""
    with contextlib.suppress(AttributeError, OSError):  # glibc's alone
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 512 << 20)


def _end_with_parent(parent_pid: int) -> None:
    # torch's own watchdog ends the loop of a worker whose parent was killed, but the process then waits for a queue
    # that nobody reads, and stays for ever. A worker of a forkserver has that for a parent: ask for the trainer, too.
    trainer = multiprocessing.parent_process()
    while os.getppid() == parent_pid and (trainer is None or trainer.is_alive()):
        time.sleep(1.0)
    os._exit(1)
