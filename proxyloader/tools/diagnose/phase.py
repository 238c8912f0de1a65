"""A phase of the measurement: some steps of a loop, and what they took of the machine. Needs psutil."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from .gauges import gauges

LEAST_STEPS, MOST_STEPS = 3, 1000
"""Numbers of steps in a phase: however long they take, and however short they are."""


@dataclass(frozen=True)
class Phase:
    """Figures of some steps, from one synchronisation with the GPU to the next.

    Attributes:
        wall_s: time of all steps, in seconds.
        waits_s: how long each step waited in ``next()``, in seconds.
        thread_cpu_s: CPU time of the thread of the loop, in seconds.
        thread_delay_s: how long that thread wanted to compute and had no core, in seconds; 0 if Linux does not tell.
        main_cpu_s: CPU time of all threads of the process, in seconds.
        workers_cpu_s: CPU time of its child processes, in seconds.
        workers_delay_s: how long they wanted to compute and had no core, in seconds.
        bytes_read: what all of them read, from files, pipes and the page cache.
        bytes_from_disk: the part of it that came from a disk.
        iowait_cores: number of cores of the machine that were idle because a process waited for a disk, in the mean.
        gpu_percent: share of the time in which the GPU was busy; None if NVML does not tell, or there is no GPU.
        jpeg_percent: the same of its JPEG engines.
    """

    wall_s: float
    waits_s: tuple[float, ...]
    thread_cpu_s: float
    thread_delay_s: float
    main_cpu_s: float
    workers_cpu_s: float
    workers_delay_s: float
    bytes_read: float
    bytes_from_disk: float
    iowait_cores: float
    gpu_percent: float | None = None
    jpeg_percent: float | None = None

    @property
    def steps(self) -> int:
        return len(self.waits_s)

    @property
    def step_s(self) -> float:
        """Time of a step in the mean, in seconds."""
        return self.wall_s / self.steps

    @property
    def thread_share(self) -> float:
        """Share of the time in which the thread of the loop computed, or wanted to."""
        return (self.thread_cpu_s + self.thread_delay_s) / self.wall_s

    @property
    def workers_busy(self) -> float:
        """Number of child processes that computed, or wanted to, in the mean."""
        return (self.workers_cpu_s + self.workers_delay_s) / self.wall_s

    @property
    def cpu_s(self) -> float:
        """CPU time of a step in all processes, in the mean, in seconds."""
        return (self.main_cpu_s + self.workers_cpu_s) / self.steps

    @property
    def cores_used(self) -> float:
        """Number of cores that all processes used, in the mean."""
        return (self.main_cpu_s + self.workers_cpu_s) / self.wall_s

    @property
    def bytes_per_step(self) -> float:
        return self.bytes_read / self.steps

    @property
    def wait_s(self) -> float:
        """Wait of a step in the mean, in seconds."""
        return sum(self.waits_s) / self.steps

    def wait_quantile_s(self, share: float) -> float:
        return float(np.quantile(self.waits_s, share))


class Recording:
    """The steps of a phase that goes on."""

    phase: Phase
    """Set when the phase has ended."""

    def __init__(self, seconds: float) -> None:
        self._waits_s: list[float] = []
        synchronize()
        self._before, self._begin_s = _used(), time.perf_counter()
        self._end_s = self._begin_s + seconds

    def goes_on(self) -> bool:
        steps = len(self._waits_s)
        return steps < LEAST_STEPS or (steps < MOST_STEPS and time.perf_counter() < self._end_s)

    def drawn(self, draw: Callable[[], Any]) -> Any:
        """Return the next batch, and note how long that took."""
        asked_s = time.perf_counter()
        batch = draw()
        self._waits_s.append(time.perf_counter() - asked_s)
        return batch

    def ended(self) -> dict[str, Any]:
        synchronize()
        wall_s = time.perf_counter() - self._begin_s
        used: dict[str, Any] = {name: amount - self._before[name] for name, amount in _used().items()}
        used["iowait_cores"] /= wall_s
        used["workers_delay_s"] = max(0.0, used["workers_delay_s"])  # that of children that have ended is forgotten
        return {"wall_s": wall_s, "waits_s": tuple(self._waits_s), **used}


@contextmanager
def recorded(seconds: float) -> Iterator[Recording]:
    """Record the steps that are made meanwhile, for at most this time. ``phase`` has their figures at the end."""
    # Where no GPU is in use, asking for its load would start CUDA.
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    load: AbstractContextManager[dict[str, float]] = gauges() if is_on_gpu else nullcontext({})
    with load as shares:
        recording = Recording(seconds)
        yield recording
        found: dict[str, Any] = recording.ended()
    recording.phase = Phase(**found | shares)


def synchronize() -> None:
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def thread_delay_s() -> float:
    """Return how long this thread has wanted to compute and had no core, in seconds; 0 if the kernel does not tell."""
    return _delay_s(Path("/proc/thread-self/schedstat"))


def _delay_s(schedstat: Path) -> float:
    try:
        return int(schedstat.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _used() -> dict[str, float]:
    """Return what this process and its children have used until now: fields of ``Phase`` by their names.

    Of a child that has ended and was waited for, Linux counts the CPU time in the ``children_*`` times of its parent,
    and what it has read in what its parent has.
    """
    this = psutil.Process()
    times = this.cpu_times()
    used = {
        "thread_cpu_s": time.thread_time(),
        "thread_delay_s": thread_delay_s(),
        "main_cpu_s": times.user + times.system,
        "workers_cpu_s": times.children_user + times.children_system,
        "workers_delay_s": 0.0,
        "bytes_read": 0.0,
        "bytes_from_disk": 0.0,
        "iowait_cores": getattr(psutil.cpu_times(), "iowait", 0.0),
    }
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # a worker may end meanwhile
            if process is not this:
                used["workers_cpu_s"] += sum(process.cpu_times()[:4])
                used["workers_delay_s"] += sum(map(_delay_s, Path(f"/proc/{process.pid}/task").glob("*/schedstat")))
            read = process.io_counters()
            used["bytes_read"] += read.read_chars
            used["bytes_from_disk"] += read.read_bytes
    return used
