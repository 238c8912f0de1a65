"""Deferral: whether images opened by a dataset stay undecoded, and when deferring stops.

NOTE [ When deferral stops ]
Leaving an image undecoded costs the worker some time, which pays off only if DALI decodes it. A dataset without JPEGs,
or whose code accesses the pixels of every image, leaves nothing to DALI. So after ``MAX_UNUSED_SAMPLES`` consecutive
samples without an image for DALI, a worker removes its hooks (``hooks.py``) and reads the dataset as torch's worker
does. It counts samples, not seconds. Changing the dataset's transform restarts deferral. Without workers, the same
applies to the thread that fetches batches.

The next epoch starts in the state in which the last one ended. If the dataset never returned an undecoded image,
torch's own loader produces the batches, unless the workers persist or an argument such as ``seed`` requires more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..transforms.plan import Branch, ImageState, Plan

MAX_UNUSED_SAMPLES = 64
"""Number of consecutive samples without an image for DALI after which deferring stops."""

MAX_CALLS = 256
"""Maximum number of cached obstacles. A full cache is cleared, because colors may differ in every call."""


class Deferral:
    """Deferred decoding for the dataset of one loader, in one process.

    Attributes:
        on_gpu: whether images arrive on a GPU.
        find_obstacle: returns why torchvision runs a plan; "" if DALI does.
        is_active: False once deferring has stopped.
        has_seen_images: whether the dataset has returned any undecoded image.
        can_stop: whether it stops. The inputs of a server are always packed.
    """

    def __init__(
        self,
        on_gpu: bool,
        find_obstacle: Callable[[Plan], str],
        is_active: bool = True,
        has_seen_images: bool = False,
        can_stop: bool = True,
    ) -> None:
        self.on_gpu, self.find_obstacle = on_gpu, find_obstacle
        self.is_active, self.has_seen_images, self.can_stop = is_active, has_seen_images, can_stop
        self._unused = 0
        self._call_obstacles: dict[Branch, str] = {}

    def find_call_obstacle(self, steps: Branch) -> str:
        """Return why torchvision runs the steps of a recorded call on a PIL image; "" if DALI does."""
        found = self._call_obstacles.get(steps)
        if found is None:
            if len(self._call_obstacles) >= MAX_CALLS:
                self._call_obstacles.clear()
            found = self._call_obstacles[steps] = self.find_obstacle(Plan(steps, ImageState()))
        return found

    def record(self, samples: int, uses_dali: bool, decoded: bool) -> None:
        """Record whether a batch has images for DALI, and whether the dataset's code decoded any."""
        self.has_seen_images |= uses_dali or decoded
        self._unused = 0 if uses_dali else self._unused + samples
        self.is_active &= self._unused < MAX_UNUSED_SAMPLES or not self.can_stop

    def restart(self) -> None:
        """Defer again, because the transform has changed."""
        self.is_active, self._unused = True, 0


_process_deferral: Deferral | None = None  # in a worker, which belongs to one loader
_thread_local = threading.local()  # without workers


def current() -> Deferral | None:
    """Return the deferral of this thread, even if it has stopped; None if there is none."""
    return getattr(_thread_local, "deferral", None) or _process_deferral


def defer_in_process(deferral: Deferral | None) -> None:
    """Apply a deferral permanently to all threads of this process. Worker."""
    global _process_deferral
    _process_deferral = deferral


@contextlib.contextmanager
def deferring(deferral: Deferral) -> Iterator[None]:
    """Apply a deferral to this thread. Main process."""
    previous, _thread_local.deferral = getattr(_thread_local, "deferral", None), deferral
    try:
        yield
    finally:
        _thread_local.deferral = previous
