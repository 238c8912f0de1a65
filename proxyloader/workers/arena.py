"""Arena: shared memory for batches, lent to workers slot by slot. Owned by the main process, written by workers.

NOTE [ The way of a slot ]
The main process owns the arena. Its sampler lends a free slot with every request; the request travels to a worker on
torch's index queue; the worker writes the batch's bytes into the slot, marks it ready, and sends back a PackedBatch
that says where they lie. The main process feeds DALI views of the slot, and when DALI has finished with the batch the
slot is free again. One side writes at a time, so there is no lock. Where no slot is free, the bytes travel in torch's
shared memory instead: slower, never wrong.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE

SLOT_STRIDE_BYTES = 1 << 40
"""From one slot to the next in the file. A file has memory only where it was written, and a process addresses only what
it maps, so a slot may grow to whatever a batch needs."""

Memory = NDArray[np.uint8]


class Reader(Protocol):
    """Whoever reads a slot: the runs of its batch."""

    def inputs_released(self) -> bool:
        """The slot may be written to."""

    def wait_until_read(self) -> None:
        """Wait for the GPU, if that is all there is to wait for."""


class Arena:
    """Memory in slots, one for each batch on its way; shared with the workers by a file descriptor.

    It is an anonymous file (``memfd_create``), so the size of ``/dev/shm`` does not matter.

    Args:
        slots: how many.
        slot_bytes: how much of a slot is mapped at first.

    Raises:
        OSError: the system gives no such file (too many open files).
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        fd = os.memfd_create("proxyloader")
        os.ftruncate(fd, (1 + slots) * SLOT_STRIDE_BYTES)
        self._map(fd, slots, slot_bytes)
        self._free = deque(range(slots))
        self._read_by: deque[tuple[int, Reader]] = deque()

    def _map(self, fd: int, slots: int, slot_bytes: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        self.slots, self.slot_bytes = slots, slot_bytes
        self._ready = _map_file(fd, 0, slots)
        self._mapped: dict[int, Memory] = {}

    def __repr__(self) -> str:
        return f"Arena({self.slots} slots of {self.slot_bytes} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        # Only while a worker process is being started (spawn, forkserver): DupFd hands the descriptor over.
        from multiprocessing.reduction import DupFd  # not on Windows

        return _attach_arena, (DupFd(self._fd), self.slots, self.slot_bytes)

    def lend(self) -> int | None:
        """Take a free slot; None where there is none. Main process."""
        self._take_back()
        if not self._free and self._read_by:
            # The training loop runs ahead of the GPU; here it waits for it, instead of piling up work.
            self._read_by[0][1].wait_until_read()
            self._take_back()
        if not self._free:
            return None
        slot = self._free.popleft()
        self._ready[slot] = 0
        return slot

    def give_back(self, slot: int | None, reader: Reader | None = None) -> None:
        """Make a slot free again, as soon as ``reader`` has finished with it. Main process."""
        if slot is not None and (reader is None or reader.inputs_released()):
            self._free.append(slot)
        elif slot is not None and reader is not None:
            self._read_by.append((slot, reader))

    def _take_back(self) -> None:
        for _ in range(len(self._read_by)):
            self.give_back(*self._read_by.popleft())

    def memory(self, slot: int, size_bytes: int) -> Memory:
        """The beginning of a slot, ``size_bytes`` of it or more, (bytes,) uint8. What was written before is there."""
        mapped = self._mapped.get(slot)
        if mapped is None or len(mapped) < size_bytes:
            # Half as much again, so that a slot that grows step by step is not mapped at each of them.
            length = max(self.slot_bytes, size_bytes if mapped is None else size_bytes * 3 // 2)
            mapped = self._mapped[slot] = _map_file(self._fd, (1 + slot) * SLOT_STRIDE_BYTES, length)
        return mapped

    def mark_ready(self, slot: int, ready: bool = True) -> None:
        """Say that the slot's batch is on its way. Worker."""
        self._ready[slot] = ready

    def is_ready(self, slot: int) -> bool:
        """Whether the slot's batch is on its way: asking torch for it now will not wait long. Main process."""
        return bool(self._ready[slot])


def _map_file(fd: int, offset_bytes: int, size_bytes: int) -> Memory:
    """Part of a file as memory, (bytes,) uint8, in whole pages; given back when nobody refers to it.

    By libc's ``mmap``: Python's keeps a copy of the descriptor for each mapping, and descriptors can be few.
    """
    length = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset_bytes)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"a slot of {length} bytes cannot be mapped: {os.strerror(error)}")
    mapped = (ctypes.c_uint8 * length).from_address(address)
    weakref.finalize(mapped, libc.munmap, address, length).atexit = False
    return np.ctypeslib.as_array(mapped)


def _attach_arena(fd: Any, slots: int, slot_bytes: int) -> Arena:
    arena = Arena.__new__(Arena)
    arena._map(fd.detach(), slots, slot_bytes)
    return arena
