"""Arena: shared memory for batches, divided into slots. Owned by the main process, written by workers.

NOTE [ Slot ownership ]
The main process owns the arena. Its sampler assigns a free slot to each request, which is sent to a worker through
torch's index queue. The worker writes the bytes of the batch to the slot, marks the slot as ready, and returns a
message with their position. The main process feeds views of the slot to DALI. Only one process writes at a time, so
there is no lock. If no slot is free, the bytes are sent through torch's shared memory instead, which is slower.

The main process releases a slot after returning its batch, when the loop is left, or if its request will not be
answered. The slot is free once DALI and the GPU have read it. ``acquire`` checks this, and waits if no slot is free.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLOT_BYTES = 1 << 35
"""Size of a slot. The memory is sparse: only pages that were written exist, so a slot is larger than any batch."""

FAULT_AROUND_BYTES = 1 << 16
"""Bytes that Linux maps on the first read from a file in memory. On a first write, it maps a single page."""

Memory = NDArray[np.uint8]


class Arena:
    """Shared memory in slots, one for each batch in progress. Workers receive it as a file descriptor.

    The memory is an anonymous file created with ``memfd_create``, so the size of ``/dev/shm`` does not matter. OSError:
    it cannot be created or mapped, for example because of a limit on open files or on address space.
    """

    def __init__(self, slots: int, slot_bytes: int = SLOT_BYTES, sent: Any = None) -> None:
        # ``sent``: see ``__reduce__``
        self._fd = os.memfd_create("proxyloader") if sent is None else sent.detach()
        weakref.finalize(self, os.close, self._fd).atexit = False  # NOTE [ Shutdown order ]
        os.ftruncate(self._fd, (1 + slots) * slot_bytes)
        self.slots, self._slot_bytes = slots, slot_bytes
        mapped = mmap.mmap(self._fd, (1 + slots) * slot_bytes)
        self._slots: list[Memory] = list(np.frombuffer(mapped, np.uint8).reshape(1 + slots, slot_bytes))
        self._ready = self._slots[slots]  # of each slot, whether its batch is complete
        self._free = deque(range(slots))
        self._releasing: deque[tuple[int, Sequence[Any]]] = deque()  # slots that these runs may still read
        self._read_bytes = [0] * slots  # bytes of each slot that this process has mapped by reading

    def __reduce__(self) -> tuple[Any, ...]:
        # Only called while spawn or forkserver starts a worker. DupFd passes the descriptor on.
        return Arena, (self.slots, self._slot_bytes, DupFd(self._fd))

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

    def memory(self, slot: int) -> Memory:
        """Return the memory of a slot, (slot_bytes,) uint8."""
        return self._slots[slot]

    def memory_to_write(self, slot: int, size_bytes: int) -> Memory:
        """Return ``memory``, with all pages mapped that another process wrote. Writing would map them one by one."""
        memory = self.memory(slot)
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
