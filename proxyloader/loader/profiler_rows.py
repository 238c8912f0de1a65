"""Rows of torch's profiler: where a loader's time goes. Main process.

``torch.autograd.profiler.emit_nvtx()`` makes NVTX ranges of them.
"""

from __future__ import annotations

import contextlib

from torch.autograd import profiler

SUBMIT = "proxyloader.submit_to_dali"
WAIT = "proxyloader.wait_for_dali"

_NOTHING = contextlib.nullcontext()


def next_row(has_workers: bool) -> str:
    """Return the name of the row that torch's own loader has for its ``next()``."""
    kind = "_MultiProcessingDataLoaderIter" if has_workers else "_SingleProcessDataLoaderIter"
    return f"enumerate(DataLoader)#{kind}.__next__"


def row(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context whose time is a row of the profile. Without a profiler it costs next to nothing."""
    # ``record_function`` takes several µs also where nothing profiles.
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING
