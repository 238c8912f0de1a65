"""Memory for batches on their way, lent to workers slot by slot. Owned by the main process, written by workers.

NOTE [ The way of a slot ]
The main process owns the arena. Its sampler lends a free slot with every request; the request travels to a worker on
torch's index queue; the worker writes the batch's bytes into the slot, marks it ready, and sends back a PackedBatch
that says where they lie. The main process feeds DALI views of the slot, and when DALI has finished with the batch the
slot is free again. One side writes at a time, so there is no lock. Where no slot is free, or a batch is larger than
one, the bytes travel in torch's shared memory instead: slower, never wrong.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE

Memory = NDArray[np.uint8]


class Reader(Protocol):
    """Whoever reads a slot: the runs of its batch."""

    def was_read(self) -> bool:
        """The slot may be written to."""

    def wait_until_read(self) -> None:
        """Wait for the GPU, if that is all there is to wait for."""


class Arena:
    """Memory in slots, one for each batch on its way; shared with the workers by a file descriptor.

    It is an anonymous file (``memfd_create``), so the size of ``/dev/shm`` does not matter. Pages cost memory from the
    first write on: a slot may be generous.

    Args:
        slots: how many.
        slot_bytes: size of each, rounded up to whole pages.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create("proxyloader")
        os.ftruncate(fd, PAGE_BYTES + slots * slot_bytes)
        self._map(fd, slots, slot_bytes)
        self._free = deque(range(slots))
        self._read_by: deque[tuple[int, Reader]] = deque()

    def _map(self, fd: int, slots: int, slot_bytes: int) -> None:
        self._fd: int | None = fd
        self.slots, self.slot_bytes = slots, slot_bytes
        self.wanted_bytes = slot_bytes  # what the largest batch so far would have needed
        memory = np.frombuffer(mmap.mmap(fd, PAGE_BYTES + slots * slot_bytes), np.uint8)
        self._ready, self._memory = memory[:slots], memory[PAGE_BYTES:]

    def __repr__(self) -> str:
        return f"Arena({self.slots} slots of {self.slot_bytes} bytes)"

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        fd, self._fd = getattr(self, "_fd", None), None
        if fd is not None:
            os.close(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only while a worker process is being started (spawn, forkserver): DupFd hands the descriptor over.
        assert self._fd is not None
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
        if slot is not None and (reader is None or reader.was_read()):
            self._free.append(slot)
        elif slot is not None and reader is not None:
            self._read_by.append((slot, reader))

    def _take_back(self) -> None:
        for _ in range(len(self._read_by)):
            self.give_back(*self._read_by.popleft())

    def memory(self, slot: int) -> Memory:
        """The bytes of a slot, (slot_bytes,) uint8."""
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def mark_ready(self, slot: int) -> None:
        """Say that the slot's batch is on its way. Worker."""
        self._ready[slot] = 1

    def is_ready(self, slot: int) -> bool:
        """Whether the slot's batch is on its way: asking torch for it now will not wait long. Main process."""
        return bool(self._ready[slot])


def _attach_arena(fd: Any, slots: int, slot_bytes: int) -> Arena:
    arena = Arena.__new__(Arena)
    arena._map(fd.detach(), slots, slot_bytes)
    arena._close()  # the mapping is enough for a worker
    return arena


@dataclass(frozen=True)
class Request:
    """What a sampler yields to a worker, and what comes back with the batch.

    Attributes:
        number: counts a loader's requests.
        indices: of the batch's samples; or one index where batching is off.
        slot: that the worker may write to; None: there was none.
    """

    number: int
    indices: Any
    slot: int | None


class RequestSampler:
    """A batch sampler over another one, or over a sampler where batching is off, that lends a slot with each batch.

    torch advances it in the thread that iterates over the loader, as it does with a stock loader's.
    """

    def __init__(self, sampler: Iterable[Any], arena: Arena | None) -> None:
        self._sampler, self._arena = sampler, arena
        self._unanswered: dict[int, Request] = {}
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Request]:
        # torch begins an epoch when the workers have let go of the one before.
        if self._arena is not None:
            for request in self._unanswered.values():
                self._arena.give_back(request.slot)
        self._unanswered.clear()
        for indices in self._sampler:
            slot = self._arena.lend() if self._arena is not None else None
            request = Request(next(self._numbers), indices, slot)
            self._unanswered[request.number] = request
            yield request

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def answered(self, request: Request) -> None:
        """Note that the batch has come back; the slot now belongs to whoever has the batch."""
        del self._unanswered[request.number]

    def has_ready_batch(self, in_order: bool) -> bool:
        """Whether torch will give the next batch without waiting for a worker (as far as their slots tell)."""
        requests = itertools.islice(self._unanswered.values(), 1 if in_order else None)
        return any(r.slot is None or self._arena is None or self._arena.is_ready(r.slot) for r in requests)
