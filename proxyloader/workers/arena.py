"""Arena: shared memory for batches, lent to workers slot by slot. Owned by the main process, written by workers.

NOTE [ Slot ownership ]
The main process owns the arena. Its sampler assigns a free slot to each request. The request is sent to a worker on
torch's index queue. The worker writes the bytes of the batch into the slot, marks the slot as ready, and returns a
message that says where they are. The main process feeds DALI views of the slot. Only one process writes at a time, so
there is no lock. If no slot is free, the bytes are sent in torch's shared memory instead, which is slower.

A slot is given back when its batch was handed out, when its loop is left, and when its request will not be answered any
more. It is free at once if DALI and the GPU have read it. Otherwise ``lend`` asks for that again, and waits if it needs
the slot.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE

SLOT_STRIDE_BYTES = 1 << 40
"""Distance between two slots in the file. Only pages that were written use memory, and only mapped pages use address
space, so a slot can grow to any size that a batch needs."""

FAULT_AROUND_BYTES = 1 << 16
"""How much Linux maps, of a file that is in memory, where a process first reads of it. Where it first writes, it maps a
page alone."""

Memory = NDArray[np.uint8]


class Reader(Protocol):
    """A reader of a slot: the runs of its batch."""

    def inputs_released(self) -> bool:
        """Return whether the slot may be written again."""

    def wait_until_read(self) -> None:
        """Wait until the GPU has read the slot, unless something other than the GPU must finish first."""


class Arena:
    """Shared memory in slots, one for each batch in progress. Workers receive it as a file descriptor.

    The memory is an anonymous file created with ``memfd_create``, so the size of ``/dev/shm`` does not matter. At first
    ``slot_bytes`` of a slot are mapped. OSError: the system cannot create such a file, as too many files are open.
    """

    _fd = -1

    def __init__(self, slots: int, slot_bytes: int) -> None:
        fd = os.memfd_create("proxyloader")
        os.ftruncate(fd, (1 + slots) * SLOT_STRIDE_BYTES)
        self._map(fd, slots, slot_bytes)
        self._free = deque(range(slots))
        self._read_by: deque[tuple[int, Reader]] = deque()

    def _map(self, fd: int, slots: int, slot_bytes: int) -> None:
        self._fd = fd
        self.slots, self.slot_bytes = slots, slot_bytes
        self._ready = _map_file(fd, 0, slots)
        self._mapped: dict[int, Memory] = {}
        self._read_bytes: dict[int, int] = {}  # of a slot, by this process, which writes to it

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # NOTE [ Shutdown order ]
        if self._fd >= 0 and not is_finalizing():
            os.close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only while a worker process is being started by spawn or forkserver. DupFd passes the descriptor on.
        from multiprocessing.reduction import DupFd  # not on Windows

        return _attach_arena, (DupFd(self._fd), self.slots, self.slot_bytes)

    def lend(self) -> int | None:
        """Take a free slot, or return None if there is none. Main process."""
        self._take_back()
        if not self._free and self._read_by:
            # The training loop is ahead of the GPU. Wait for the GPU here, so that queued work does not accumulate.
            self._read_by[0][1].wait_until_read()
            self._take_back()
        if not self._free:
            return None
        slot = self._free.popleft()
        self._ready[slot] = 0
        return slot

    def give_back(self, slot: int | None, reader: Reader | None = None) -> None:
        """Make a slot free again once ``reader`` has finished with it. Main process."""
        if slot is not None and (reader is None or reader.inputs_released()):
            self._free.append(slot)
        elif slot is not None and reader is not None:
            self._read_by.append((slot, reader))

    def _take_back(self) -> None:
        for _ in range(len(self._read_by)):
            self.give_back(*self._read_by.popleft())

    def memory(self, slot: int, size_bytes: int) -> Memory:
        """Return the beginning of a slot, at least ``size_bytes`` long, (bytes,) uint8. Earlier contents are kept."""
        mapped = self._mapped.get(slot)
        if mapped is None or len(mapped) < size_bytes:
            # Map half as much again, so that a slot that grows in small steps is not mapped at each of them.
            length = max(self.slot_bytes, size_bytes if mapped is None else size_bytes * 3 // 2)
            mapped = self._mapped[slot] = _map_file(self._fd, (1 + slot) * SLOT_STRIDE_BYTES, length)
            self._read_bytes[slot] = 0
        return mapped

    def memory_to_write(self, slot: int, size_bytes: int) -> Memory:
        """Return ``memory``, with the pages mapped that another process wrote. Writing would map them one by one."""
        memory = self.memory(slot, size_bytes)
        if size_bytes > self._read_bytes[slot]:
            memory[self._read_bytes[slot] : size_bytes : FAULT_AROUND_BYTES].max()
            self._read_bytes[slot] = size_bytes
        return memory

    def mark_ready(self, slot: int, ready: bool = True) -> None:
        """Mark whether the batch of a slot is complete and about to be sent. Worker."""
        self._ready[slot] = ready

    def is_ready(self, slot: int) -> bool:
        """Return whether the batch of a slot is complete, so that torch can return it soon. Main process."""
        return bool(self._ready[slot])


def _map_file(fd: int, offset_bytes: int, size_bytes: int) -> Memory:
    """Map part of a file, (bytes,) uint8, in whole pages. It is unmapped when nothing refers to it.

    This calls ``mmap`` of libc, because Python's ``mmap`` duplicates the descriptor for each mapping, and the number of
    descriptors is limited.
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
    return np.asarray(_Mapping(address, length, libc.munmap))


class _Mapping:
    """Mapped memory, which arrays over it keep alive. It is unmapped with them, but not when the interpreter ends."""

    def __init__(self, address: int, length: int, unmap: Callable[[int, int], object]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (length,), "typestr": "|u1", "version": 3}
        self._place, self._unmap = (address, length), unmap

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._unmap(*self._place)


def _attach_arena(fd: Any, slots: int, slot_bytes: int) -> Arena:
    arena = Arena.__new__(Arena)
    arena._map(fd.detach(), slots, slot_bytes)
    return arena
