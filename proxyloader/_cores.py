"""Number of cores available to this process."""

import os


def usable_cores() -> int:
    """Return the number of cores that this process may use; of all cores if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_process() -> int:
    """Return the share of the usable cores of this process, at least 1. Processes of torchrun share them equally."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, usable_cores() // max(1, int(processes))) if processes.isdecimal() else usable_cores()
