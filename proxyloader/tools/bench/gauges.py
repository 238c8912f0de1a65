"""CPU time, memory and GPU load of a case. Runs in a child process."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch

from .config import BenchConfig

SAMPLED_EVERY_S = 0.05


def cpu_s() -> float:
    """Return the CPU time of this process and its children, in seconds."""
    return sum(_of_each(lambda process: sum(process.cpu_times()[:2])))


def host_mb() -> float:
    """Return the private memory of this process and its children, in MB."""
    return sum(_of_each(lambda process: process.memory_full_info().uss)) / 2**20


def _of_each(ask: Callable[[psutil.Process], float]) -> list[float]:
    process, found = psutil.Process(), []
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # a worker of a dropped loader may end meanwhile
            found.append(ask(each))
    return found


class GpuMemory:
    """Memory that a case takes on a GPU. Other processes may hold memory, but must not take any meanwhile.

    Attributes:
        mb: the memory in MB. None without a GPU.
    """

    def __init__(self, setting: BenchConfig) -> None:
        self.mb: float | None = None
        if setting.on_gpu:
            torch.ones(1, device="cuda")  # creates the context, which is not counted
            self.mb = 0.0
        self.begin()

    def begin(self) -> None:
        self._before = self._used()

    def note(self) -> None:
        """Add the memory that was taken since ``begin``."""
        if self.mb is not None:
            self.mb += self._used() - self._before
            self._before = self._used()

    def _used(self) -> float:
        if self.mb is None:
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20


@contextmanager
def gauges() -> Iterator[Callable[[], dict[str, float | None]]]:
    """Sample the load of the GPU and its JPEG engines, as far as NVML reports it."""
    samples: tuple[list[float], list[float]] = [], []
    done = threading.Event()
    thread = threading.Thread(target=_sample, args=(samples, done), daemon=True)
    thread.start()
    try:
        yield lambda: {"gpu_percent": _mean(samples[0]), "jpeg_percent": _mean(samples[1])}
    finally:
        done.set()
        thread.join(10)


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _sample(samples: tuple[list[float], list[float]], done: threading.Event) -> None:
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    except Exception:  # not installed, no driver, no GPU: nothing is reported
        return
    asks: tuple[Callable[[], Any], ...] = (
        lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        lambda: pynvml.nvmlDeviceGetJpgUtilization(gpu)[0],
    )
    while not done.wait(SAMPLED_EVERY_S):
        for values, ask in zip(samples, asks):
            with suppress(pynvml.NVMLError):
                values.append(float(ask()))
