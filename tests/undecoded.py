"""What holds in a loader's worker, and while a loader without workers fetches a batch, for tests of one image."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from proxyloader.data import hooks
from proxyloader.data.deferral import Deferral, deferring


@contextlib.contextmanager
def opened_late(on_gpu: bool = True) -> Iterator[None]:
    """Let images stay undecoded in this thread, with all transforms for DALI, or those that are for it on a CPU."""
    deferral = Deferral(on_gpu)
    hooks.hold(deferral)
    try:
        with deferring(deferral):
            yield
    finally:
        hooks.release(deferral)
