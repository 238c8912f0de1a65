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
from .system_info import nvml

SAMPLED_EVERY_S = 0.05


def cpu_s() -> float:
    """Return the CPU time of this process and its children, in seconds."""
    return sum(_of_each(lambda process: sum(process.cpu_times()[:2])))


def host_mb() -> float:
    """Return the private memory of this process and its children, in MB."""
    return sum(_of_each(lambda process: process.memory_full_info().uss)) / 2**20


def _of_each(ask: Callable[[psutil.Process], float]) -> Iterator[float]:
    process = psutil.Process()
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # a worker of a dropped loader may end meanwhile
            yield ask(each)


class GpuMemory:
    """GPU memory that a case takes, ``mb``. None without a GPU. Other processes must not take any meanwhile."""

    def __init__(self, setting: BenchConfig) -> None:
        self.mb = 0.0 if setting.on_gpu else None
        if setting.on_gpu:
            torch.ones(1, device="cuda")  # creates the context, which is not counted
        self.begin()

    def begin(self) -> None:
        self._free = 0 if self.mb is None else torch.cuda.mem_get_info()[0]

    def note(self) -> None:
        """Add the memory that was taken since ``begin``."""
        if self.mb is not None:
            before = self._free
            self.begin()
            self.mb += (before - self._free) / 2**20


@contextmanager
def gauges() -> Iterator[dict[str, float]]:
    """Sample the load of the GPU and its JPEG engines. The dictionary gets the means at the end, as far as NVML reports
    them."""
    means: dict[str, float] = {}
    done = threading.Event()
    thread = threading.Thread(target=_sample, args=(means, done), daemon=True)
    thread.start()
    try:
        yield means
    finally:
        done.set()
        thread.join(10)


def _sample(means: dict[str, float], done: threading.Event) -> None:
    try:
        pynvml, gpu = nvml()
    except Exception:  # nothing is reported
        return
    asks: dict[str, Callable[[], Any]] = {
        "gpu_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "jpeg_percent": lambda: pynvml.nvmlDeviceGetJpgUtilization(gpu)[0],
    }
    samples: dict[str, list[float]] = {name: [] for name in asks}
    while not done.wait(SAMPLED_EVERY_S):
        for name, ask in asks.items():
            with suppress(pynvml.NVMLError):
                samples[name].append(float(ask()))
    means.update({name: statistics.fmean(values) for name, values in samples.items() if values})
