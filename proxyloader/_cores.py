"""How many cores there are for this process."""

from __future__ import annotations

import os


def cores_of_process() -> int:
    """Return the number of cores that this process may use, at least 1. Processes of torchrun share them equally."""
    # macOS and Windows have no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cores // max(1, int(processes))) if processes.isdecimal() else cores
