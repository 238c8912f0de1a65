"""Arena: shared memory for batches, divided into slots. Owned by the main process, written by workers.

NOTE [ Slot ownership ]
The main process owns the arena. Its sampler assigns a free slot to each request, which is sent to a worker through
torch's index queue. The worker writes the bytes of the batch to the slot, marks the slot as ready, and returns a
message with their position. The main process feeds views of the slot to DALI. Only one process writes at a time, so
there is no lock. If no slot is free, the bytes are sent through torch's shared memory instead, which is slower.

The main process releases a slot after returning its batch, when the loop is left, or if its request will not be
answered. The slot is free once DALI and the GPU have read it. ``acquire`` checks this, and waits if no slot is free.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE

SLOT_STRIDE_BYTES = 1 << 40
"""Distance between two slots in the file. Only written pages use memory, and only mapped pages use address space, so a
slot can grow to any size."""

FAULT_AROUND_BYTES = 1 << 16
"""Bytes that Linux maps on the first read from a file in memory. On a first write, it maps a single page."""

Memory = NDArray[np.uint8]


class Arena:
    """Shared memory in slots, one for each batch in progress. Workers receive it as a file descriptor.

    The memory is an anonymous file created with ``memfd_create``, so the size of ``/dev/shm`` does not matter.
    Initially ``slot_bytes`` of a slot are mapped. OSError: the file cannot be created, for example if too many files
    are open.
    """

    _fd = -1

    def __init__(self, slots: int, slot_bytes: int, sent: Any = None) -> None:  # ``sent``: see ``__reduce__``
        self._fd = os.memfd_create("proxyloader") if sent is None else sent.detach()
        os.ftruncate(self._fd, (1 + slots) * SLOT_STRIDE_BYTES)
        self.slots, self.slot_bytes = slots, slot_bytes
        self._free = deque(range(slots))
        self._releasing: deque[tuple[int, Sequence[Any]]] = deque()  # slots that these runs may still read
        self._ready = _map_file(self._fd, 0, slots)
        self._mapped: dict[int, Memory] = {}
        self._read_bytes: dict[int, int] = {}  # bytes of a slot that this process has mapped by reading

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # NOTE [ Shutdown order ]
        if self._fd >= 0 and not is_finalizing():
            os.close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only called while spawn or forkserver starts a worker. DupFd passes the descriptor on.
        from multiprocessing.reduction import DupFd  # not on Windows

        return Arena, (self.slots, self.slot_bytes, DupFd(self._fd))

    def acquire(self) -> int | None:
        """Return a free slot, or None if there is none. Main process."""
        self._reclaim()
        if not self._free and self._releasing:
            # The training loop is ahead of the GPU. Wait, so that queued work does not pile up.
            for pipeline_run in self._releasing[0][1]:
                pipeline_run.wait_until_read()
            self._reclaim()
        if not self._free:
            return None
        slot = self._free.popleft()
        self._ready[slot] = 0
        return slot

    def release(self, slot: int | None, readers: Sequence[Any] = ()) -> None:
        """Free a slot as soon as all ``PipelineRun``s in ``readers`` have read it. Main process."""
        if slot is not None and all(pipeline_run.inputs_released() for pipeline_run in readers):
            self._free.append(slot)
        elif slot is not None:
            self._releasing.append((slot, readers))

    def _reclaim(self) -> None:
        for _ in range(len(self._releasing)):
            self.release(*self._releasing.popleft())

    def memory(self, slot: int, size_bytes: int) -> Memory:
        """Return the beginning of a slot, at least ``size_bytes`` long, (bytes,) uint8. Its contents are preserved."""
        mapped = self._mapped.get(slot)
        if mapped is None or len(mapped) < size_bytes:
            # Map 1.5 times as much, so that a slot that grows in small steps is not remapped in each of them.
            length = max(self.slot_bytes, size_bytes if mapped is None else size_bytes * 3 // 2)
            mapped = self._mapped[slot] = _map_file(self._fd, (1 + slot) * SLOT_STRIDE_BYTES, length)
            self._read_bytes[slot] = 0
        return mapped

    def memory_to_write(self, slot: int, size_bytes: int) -> Memory:
        """Return ``memory``, with all pages mapped that another process wrote. Writing would map them one by one."""
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
    """Map part of a file, (bytes,) uint8, in whole pages. It is unmapped when nothing references it.

    This calls libc's ``mmap``, as Python's duplicates the descriptor for each mapping, and descriptors are limited.
    """
    length = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset_bytes)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map a slot of {length} bytes: {os.strerror(error)}")
    buffer = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(buffer, libc.munmap, address, length).atexit = False
    return np.ctypeslib.as_array(buffer)
