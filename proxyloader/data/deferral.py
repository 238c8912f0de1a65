"""Deferral: whether images opened by a dataset stay undecoded, and when deferring stops.

NOTE [ When deferral stops ]
Leaving an image undecoded pays off only if DALI decodes it. So after ``MAX_UNUSED_SAMPLES`` consecutive samples without
an image for DALI, a worker, or the thread that fetches batches, removes its hooks and reads the dataset as torch does.

The next epoch starts in the state in which the last one ended, unless the dataset's transform has changed. If the
dataset never returned an undecoded image, torch's own loader produces the batches, unless the workers persist or an
argument such as ``seed`` requires proxyloader's workers.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..transforms.chain import Chain
from ..transforms.plan import ImageState, Plan

MAX_UNUSED_SAMPLES = 64


@dataclasses.dataclass(eq=False)
class Deferral:
    """Deferred decoding for the dataset of one loader, in one process."""

    on_gpu: bool
    find_obstacle: Callable[[Plan], str]  # returns why torchvision runs a plan; "" if kernels or DALI do
    is_active: bool = True  # False once deferring has stopped
    has_seen_images: bool = False  # whether the dataset has returned any undecoded image
    can_stop: bool = True  # False with a ``server``, whose inputs are always packed
    _unused: int = dataclasses.field(default=0, init=False)  # consecutive samples without an image for DALI

    def record(self, samples: int, uses_dali: bool, decoded: bool) -> None:
        """Record whether a batch has images for DALI, and whether the dataset's code decoded any."""
        self.has_seen_images |= uses_dali or decoded
        self._unused = 0 if uses_dali else self._unused + samples
        self.is_active &= self._unused < MAX_UNUSED_SAMPLES or not self.can_stop


@functools.lru_cache(maxsize=1024)  # limited, because colors may differ in every call
def find_call_obstacle(find_obstacle: Callable[[Plan], str], chain: Chain) -> str:
    """Return why torchvision runs the recorded call with which a chain ends; "" if kernels do."""
    # The kernels of a call on a PIL image do not depend on the steps before it.
    is_on_pil = chain.num_recorded == len(chain.steps)
    return find_obstacle(Plan(chain.last.steps, ImageState()) if is_on_pil else chain.partial_plan)


_process_deferral: Deferral | None = None  # in a worker, which belongs to one loader


class _Thread(threading.local):
    deferral: Deferral | None = None  # without workers
    is_materializing = False


_thread = _Thread()


def current() -> Deferral | None:
    """Return the deferral of this thread, even if it has stopped; None if there is none."""
    return _thread.deferral or _process_deferral


def active() -> Deferral | None:
    """Return the deferral by which images stay undecoded in this thread at this time, if any."""
    deferral = _thread.deferral or _process_deferral
    return None if deferral is None or not deferral.is_active or _thread.is_materializing else deferral


def defer_in_process(deferral: Deferral | None) -> None:
    """Apply a deferral permanently to all threads of this process, a worker."""
    global _process_deferral
    _process_deferral = deferral


@contextlib.contextmanager
def _setting(name: str, value: Any) -> Iterator[None]:
    previous = getattr(_thread, name)
    setattr(_thread, name, value)
    try:
        yield
    finally:
        setattr(_thread, name, previous)


deferring = functools.partial(_setting, "deferral")

materializing = functools.partial(_setting, "is_materializing", True)
"""Do not record calls made by this thread, because they compute the pixels of an image."""


def is_materializing() -> bool:
    return _thread.is_materializing
