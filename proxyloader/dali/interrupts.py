"""Keep DALI's threads and the main thread off the core that handles the interrupts of a GPU. Main process.

The JPEG engines interrupt a core 5,000 times a second or more, and always the same one. DALI's executor spins while it
waits for them, so the scheduler does not move it away from that core, on which it decodes half as many images: 13,205
instead of 25,852 images/s on a virtual machine with an H200 (``benchmarks/results/interrupts.txt``). A busy main thread
stays there as well.
"""

import contextlib
import os
import time
from pathlib import Path

INTERVAL_S = 2.0
BUSY_PER_S = 1000  # interrupts per second from which a core is avoided

_checked_s = 0.0
_counts: dict[int, int] = {}  # interrupts of NVIDIA GPUs by core, at ``_checked_s``
_busy: set[int] = set()
_cores: dict[int, set[int]] = {}  # that each thread of DALI could use at first, as interrupts may move to other cores


def avoid_busy_cores() -> None:
    """Move this thread and DALI's threads off cores with many interrupts, if the system reports them.

    Call this before each run. It counts interrupts every ``INTERVAL_S``.
    """
    global _checked_s, _counts, _busy
    elapsed_s = time.monotonic() - _checked_s
    if elapsed_s > INTERVAL_S:
        before, _counts, _checked_s = _counts, _count_interrupts(), time.monotonic()
        _busy = {core for core, count in _counts.items() if count - before.get(core, count) > BUSY_PER_S * elapsed_s}
        if _busy:
            _move_dali_threads()
    cores = os.sched_getaffinity(0) if _busy else set()
    if cores & _busy and cores - _busy:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, cores - _busy)
            os.sched_setaffinity(0, cores)  # it was moved at once, and may later use all cores again


def _move_dali_threads() -> None:
    global _cores
    known, _cores = _cores, {}  # forget threads that have ended, as their numbers are used again
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            if (thread / "comm").read_text().startswith("[DALI]"):
                number = int(thread.name)
                cores = _cores[number] = known.get(number) or os.sched_getaffinity(number)
                os.sched_setaffinity(number, cores - _busy or cores)


def _count_interrupts() -> dict[int, int]:
    """Return how many interrupts of NVIDIA GPUs each core has handled; nothing if the system does not report it."""
    counts: dict[int, int] = {}
    with contextlib.suppress(OSError):
        header, *rows = Path("/proc/interrupts").read_text().splitlines() or [""]
        cores = [int(name.removeprefix("CPU")) for name in header.split()]
        for row in rows:
            if row.endswith("nvidia"):
                for core, count in zip(cores, row.split()[1:]):
                    counts[core] = counts.get(core, 0) + int(count)
    return counts
