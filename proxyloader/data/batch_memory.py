"""Read files directly into the memory in which their batch is sent. Worker.

NOTE [ Reading into the slot ]
A worker sends the files of a batch in a slot of shared memory, into which the thread that fetches the batch reads them
directly. A later batch reuses the slot, so when the batch is sent, ``end`` copies the data of every image that is still
referenced, for example by the dataset's cache. Only ``EncodedImage`` refers to the slot; its ``data`` is a copy.

A forked process shares the slot. So all images get their own copies before a fork, and the child reads files elsewhere.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # avoids a circular import
    from .encoded_image import EncodedImage

ALIGNMENT_BYTES = 64


def aligned(offset_bytes: int) -> int:
    """Return the next offset at which an array may start."""
    return -(-offset_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class BatchMemory:
    """Memory of the current batch, for the thread that fetches it. ``used_bytes``: number of bytes of its files."""

    def __init__(self) -> None:
        self.used_bytes, self._address, self._thread = 0, 0, 0
        self._free: memoryview | None = None  # None: files are read elsewhere
        self.images: list[EncodedImage] = []  # that refer to the memory

    def begin(self, memory: NDArray[np.uint8]) -> None:
        """Read files into ``memory``, (bytes,) uint8, from now on."""
        self.used_bytes, self._address, self._free = 0, get_address(memory), memory.data
        self._thread = threading.get_ident()

    def allocate(self, size_bytes: int) -> memoryview | None:
        """Return memory for a file; None if too little is left, or in other threads."""
        start = aligned(self.used_bytes)
        if self._free is None or self._thread != threading.get_ident() or start + size_bytes > len(self._free):
            return None
        self.used_bytes = start + size_bytes
        return self._free[start : self.used_bytes]

    def stop(self) -> None:
        """Read files elsewhere from now on, because the rest of the batch is written after the files."""
        self._free = None

    def find_offset(self, array: NDArray[Any]) -> int | None:
        """Return the offset of a file in the memory, in bytes; None for other arrays."""
        offset = get_address(array) - self._address if self.used_bytes else -1
        return offset if 0 <= offset < self.used_bytes else None

    def end(self) -> None:
        """Copy the data of every image that is still referenced, because the memory is about to be sent."""
        self.stop()
        images = [*self.images]
        *references, baseline = [sys.getrefcount(each) for each in [*images, object()]]
        for image, count in zip(images, references):
            if count > baseline + 2:  # two lists also refer to it
                image.detach_data()
        self.images.clear()
        self.used_bytes = 0

    def before_fork(self) -> None:
        while self.images:
            self.images.pop().detach_data()


def get_address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


batch_memory = BatchMemory()  # process-wide, because ``Image.open`` has no reference to a loader
os.register_at_fork(before=batch_memory.before_fork, after_in_child=batch_memory.stop)
