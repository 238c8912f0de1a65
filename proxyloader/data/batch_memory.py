"""The memory that a batch is sent in, into which files are read at once. Worker.

NOTE [ Reading into the slot ]
A worker sends the files of a batch in a slot of shared memory. A file that the dataset opens in the thread that fetches
the batch is read into the slot, which saves a copy. The slot is written again for a later batch, so what still refers
to an image when its batch is sent, such as a cache of the dataset's, must not refer to the slot. ``end`` gives each
image that is referred to bytes of its own. An ``EncodedImage`` alone refers to the slot, and ``data`` is a copy.

A process that is forked meanwhile shares the slot. So before a fork all images get bytes of their own, and the child
reads files elsewhere.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # it reads files into the memory
    from .encoded_image import EncodedImage

ALIGNMENT_BYTES = 64


def aligned(offset_bytes: int) -> int:
    """Return the next offset where an array may begin."""
    return -(-offset_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class BatchMemory:
    """The memory of the batch that is fetched, for the thread that fetches it. A worker fetches one batch at a time.

    Attributes:
        used_bytes: how much of it files take.
    """

    def __init__(self) -> None:
        self.used_bytes, self._address, self._thread = 0, 0, 0
        self._free: memoryview | None = None  # None: files are read elsewhere
        self._images: list[Any] = []  # those that refer to the memory

    def begin(self, memory: NDArray[np.uint8]) -> None:
        """Read files into ``memory``, (bytes,) uint8, from now on."""
        self.used_bytes, self._address, self._free = 0, get_address(memory), memory.data
        self._thread = threading.get_ident()

    def place(self, size_bytes: int) -> memoryview | None:
        """Return a place for a file, or None if there is none, as in other threads."""
        start = aligned(self.used_bytes)
        if self._free is None or self._thread != threading.get_ident() or start + size_bytes > len(self._free):
            return None
        self.used_bytes = start + size_bytes
        return self._free[start : self.used_bytes]

    def holds(self, image: EncodedImage) -> None:
        """Note that an image refers to the memory."""
        self._images.append(image)

    def stop(self) -> None:
        """Read files elsewhere from now on, as the rest of the batch is written behind them."""
        self._free = None

    def find_offset(self, array: NDArray[Any]) -> int | None:
        """Return where a file lies in the memory, in bytes; None for another array."""
        offset = get_address(array) - self._address if self.used_bytes else -1
        return offset if 0 <= offset < self.used_bytes else None

    def end(self) -> None:
        """Give each image that is still referred to bytes of its own, as the memory is about to be sent."""
        self.stop()
        images = [*self._images]
        *references, of_none = [sys.getrefcount(each) for each in [*images, object()]]
        for image, count in zip(images, references):
            if count > of_none + 2:  # two lists refer to it, too
                image.detach_data()
        self._images.clear()
        self.used_bytes = 0

    def before_fork(self) -> None:
        """Give all images bytes of their own."""
        while self._images:
            self._images.pop().detach_data()


def get_address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


batch_memory = BatchMemory()  # of the process, as ``Image.open`` in a dataset knows no loader
os.register_at_fork(before=batch_memory.before_fork, after_in_child=batch_memory.stop)
