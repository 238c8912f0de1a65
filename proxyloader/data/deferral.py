"""Deferral: whether images that a dataset opens stay undecoded here, and when that is given up.

NOTE [ When deferral stops ]
An undecoded image costs a worker some time, which pays where DALI decodes it. A dataset without JPEGs, or one whose
code uses the pixels of each image, has nothing for DALI. So each worker counts samples, not seconds: after ``MAX_UNUSED_SAMPLES``
samples in a row without an image for DALI it removes its hooks (``hooks.py``), and the dataset runs as in torch's own
worker. A change of the dataset's transform starts this anew. Without workers this holds for the thread that fetches.

The next epoch begins where the last one ended. If no undecoded image was handed out at all, its batches are those of
torch's own loader (``WorkerPool.of_torch``; persistent workers get indices and return torch's batches), unless an
argument of ours, such as ``seed``, asks for more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

MAX_UNUSED_SAMPLES = 64
"""Number of samples in a row without an image for DALI after which deferring is given up."""


class Deferral:
    """Deferred decoding for the dataset of one loader, in one process.

    Attributes:
        on_gpu: whether images arrive on a GPU. On a CPU DALI does only those transforms at which it is faster.
        is_active: False once it was given up.
        has_seen_images: whether any undecoded image was handed out.
    """

    def __init__(self, on_gpu: bool, is_active: bool = True, has_seen_images: bool = False) -> None:
        self.on_gpu, self.is_active, self.has_seen_images = on_gpu, is_active, has_seen_images
        self._in_vain = 0

    def note(self, samples: int, for_dali: bool, decoded: bool) -> None:
        """Count a batch: whether it has images for DALI, and whether some were decoded by the dataset's code."""
        self.has_seen_images |= for_dali or decoded
        self._in_vain = 0 if for_dali else self._in_vain + samples
        self.is_active &= self._in_vain < MAX_UNUSED_SAMPLES

    def look_again(self) -> None:
        """Defer again, as the transform has changed."""
        self.is_active, self._in_vain = True, 0


_of_process: Deferral | None = None  # of a worker, which belongs to one loader
_of_thread = threading.local()  # of a thread that fetches a batch without workers


def current() -> Deferral | None:
    """Return the deferral that holds for this thread, also if it was given up; None if there is none."""
    return getattr(_of_thread, "deferral", None) or _of_process


def defer_in_process(deferral: Deferral) -> None:
    """Let a deferral hold in all threads of this process from now on. Worker."""
    global _of_process
    _of_process = deferral


@contextlib.contextmanager
def deferring(deferral: Deferral) -> Iterator[None]:
    """Let a deferral hold in this thread. Main process."""
    before, _of_thread.deferral = getattr(_of_thread, "deferral", None), deferral
    try:
        yield
    finally:
        _of_thread.deferral = before
