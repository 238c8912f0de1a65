"""Deferral: whether images opened by a dataset stay undecoded here, and when deferring stops.

NOTE [ When deferral stops ]
Leaving an image undecoded costs the worker some time, which pays off only if DALI decodes it. A dataset without JPEGs,
or whose code accesses the pixels of every image, leaves nothing to DALI. So after ``MAX_UNUSED_SAMPLES`` consecutive
samples without an image for DALI, a worker removes its hooks (``hooks.py``) and reads the dataset as torch's worker
does. It counts samples, not seconds. Changing the dataset's transform starts over. Without workers, the same applies to
the thread that fetches batches.

The next epoch starts in the state in which the last one ended. If no undecoded image was returned at all, torch's own
loader produces the batches (``WorkerPool.of_torch``; persistent workers receive indices and return torch's batches),
unless an argument such as ``seed`` requires more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

MAX_UNUSED_SAMPLES = 64
"""Number of consecutive samples without an image for DALI after which deferring stops."""


class Deferral:
    """Deferred decoding for the dataset of one loader, in one process.

    Attributes:
        on_gpu: whether images arrive on a GPU. On a CPU, DALI runs only the transforms at which it is faster.
        is_active: False once deferring has stopped.
        has_seen_images: whether the dataset has returned any undecoded image.
    """

    def __init__(self, on_gpu: bool, is_active: bool = True, has_seen_images: bool = False) -> None:
        self.on_gpu, self.is_active, self.has_seen_images = on_gpu, is_active, has_seen_images
        self._unused = 0

    def note(self, samples: int, for_dali: bool, decoded: bool) -> None:
        """Count a batch: whether it has images for DALI, and whether the dataset's code decoded any."""
        self.has_seen_images |= for_dali or decoded
        self._unused = 0 if for_dali else self._unused + samples
        self.is_active &= self._unused < MAX_UNUSED_SAMPLES

    def restart(self) -> None:
        """Defer again, because the transform has changed."""
        self.is_active, self._unused = True, 0


_process_deferral: Deferral | None = None  # of a worker, which belongs to one loader
_in_thread = threading.local()  # of a thread that fetches batches without workers


def current() -> Deferral | None:
    """Return the deferral of this thread, even if it has stopped; None if there is none."""
    return getattr(_in_thread, "deferral", None) or _process_deferral


def defer_in_process(deferral: Deferral) -> None:
    """Apply a deferral to all threads of this process, permanently. Worker."""
    global _process_deferral
    _process_deferral = deferral


@contextlib.contextmanager
def deferring(deferral: Deferral) -> Iterator[None]:
    """Apply a deferral to this thread. Main process."""
    before, _in_thread.deferral = getattr(_in_thread, "deferral", None), deferral
    try:
        yield
    finally:
        _in_thread.deferral = before
