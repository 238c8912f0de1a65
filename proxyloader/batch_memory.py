"""The memory of one batch in a worker: the slot that was lent for it; where there is none, memory of its own.

NOTE [ Read where it stays ]
A file that is opened for a batch is read straight into the batch's slot, so that its bytes are moved once: from the
system's cache to where DALI will find them. Later the slot is another batch's. So once a batch is packed and its
samples are dropped, nothing in the worker may refer to the slot. Where something does, as the images that a dataset
keeps, it gets what the slot holds for its own, at the same address (``Arena.leave_to_holders``), and from then on this
worker reads every file into memory of its own: such a dataset will do it again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from .arena import Arena, Memory
from .parcel import aligned


@dataclass(frozen=True)
class _Part:
    """A slot as it was mapped at one time; it is mapped anew when it has to grow.

    Attributes:
        mapped: the arena's.
        seen: what all that refers to files in it is made from, and keeps alive.
        start: its address.
    """

    mapped: Memory
    seen: weakref.ref[NDArray[np.uint8]]
    start: int


class BatchMemory:
    """Takes a batch's arrays and files, one after the other.

    Args:
        arena: of the loader; None: the bytes are kept here, see ``blob``.
        slot: that was lent for the batch.

    Attributes:
        size_bytes: of all that was put there.
    """

    receives_files: ClassVar[bool] = True
    """In this process."""

    _receiver: ClassVar[tuple[int, int, BatchMemory] | None] = None
    """The one that files are read into, with the process and the thread that may do it."""

    def __init__(self, arena: Arena | None = None, slot: int | None = None) -> None:
        self._arena = arena if slot is not None else None
        self._slot = -1 if slot is None else slot
        self._memory: Memory = np.empty(0, np.uint8)
        self._parts: list[_Part] = []
        self._files: memoryview | None = None  # the last part, for reading
        self._arrays: list[tuple[int, NDArray[Any]]] = []  # that have no slot to go to
        self.size_bytes = 0

    def add(self, array: NDArray[Any], align: bool = True) -> int:
        """Write an array, unless it lies there already; returns its offset in bytes."""
        if self._parts and (start := self._place_of(array)) is not None:
            return start
        if align:
            self.size_bytes = aligned(self.size_bytes)
        start, end = self.size_bytes, self.size_bytes + array.nbytes
        self.size_bytes = end
        if self._arena is None:
            self._arrays.append((start, array))
            return start
        if end > len(self._memory):
            self._memory = self._arena.memory(self._slot, end)
        self._memory[start:end] = array.reshape(-1).view(np.uint8)
        return start

    def blob(self) -> torch.Tensor | None:
        """All that was written, as one tensor, where there was no slot."""
        if not self._arrays:
            return None
        blob = torch.empty(self.size_bytes, dtype=torch.uint8)
        memory = blob.numpy()
        for start, array in self._arrays:
            memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        return blob

    # --- files ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open_for_files(self) -> Iterator[None]:
        """While the batch's samples are fetched: what this thread reads goes there."""
        if self._arena is not None and BatchMemory.receives_files:
            BatchMemory._receiver = os.getpid(), threading.get_ident(), self
        try:
            yield
        finally:
            BatchMemory._receiver = None

    @classmethod
    def receiver(cls) -> BatchMemory | None:
        """That of the batch whose samples are being fetched; None in other threads, and in a process forked off."""
        if cls._receiver is None or cls._receiver[:2] != (os.getpid(), threading.get_ident()):
            return None
        return cls._receiver[2]

    def read(self, descriptor: int, size_bytes: int) -> memoryview | None:
        """Read a file of that size, from its start. None where it has another one, or it is empty.

        Returns:
            Its bytes, to be looked at; they stay as they are while anybody refers to them.
        """
        assert self._arena is not None
        start = aligned(self.size_bytes)
        wanted = start + size_bytes + 1  # so that a short answer is all there is
        if self._files is None or wanted > len(self._files):
            self._memory = self._arena.memory(self._slot, wanted)
            seen: Any = np.frombuffer(self._memory, np.uint8)
            self._parts.append(_Part(self._memory, weakref.ref(seen), self._memory.ctypes.data))
            self._files = memoryview(seen)
        if not size_bytes or os.preadv(descriptor, [self._files[start:wanted]], 0) != size_bytes:
            return None
        self.size_bytes = start + size_bytes
        return self._files[start : self.size_bytes].toreadonly()

    def take_back(self, file: memoryview) -> None:
        """The file that was read last is not needed there."""
        self.size_bytes -= len(file)

    def _place_of(self, array: NDArray[Any]) -> int | None:
        address = array.__array_interface__["data"][0]
        for part in self._parts:
            if part.start <= address < part.start + len(part.mapped) and array.flags.c_contiguous:
                return int(address - part.start)
        return None

    def close(self) -> None:
        """The batch is packed, and its samples were dropped: leave what somebody refers to nevertheless to them."""
        self._files = None
        for part in self._parts:
            if part.seen() is not None:
                assert self._arena is not None
                self._arena.leave_to_holders(self._slot, part.mapped, self.size_bytes)
                BatchMemory.receives_files = False
        self._parts.clear()
