"""Load of the GPU and its JPEG engines, as NVML reports it."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

SAMPLED_EVERY_S = 0.05


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
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    except Exception:  # no such module, driver or GPU: nothing is reported
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
