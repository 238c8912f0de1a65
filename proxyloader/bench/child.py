"""One case in a process of its own, which runs when it is told to: its memory and CPU time are its own there, and where
it hangs it can be ended."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import torch
import torchvision

from ..errors import ProxyLoaderError
from .cases import RUNS_UNDER_WAY, case_of, loops_of
from .setting import Setting

SAMPLED_EVERY_S = 0.05
CLASSES = 1000


@dataclass(frozen=True)
class Start:
    """The first loop.

    Attributes:
        first_batch_s: from the making of the loader to its first batch; the libraries were imported before.
    """

    first_batch_s: float


@dataclass(frozen=True)
class Round:
    """What was measured in whole loops of some seconds.

    Attributes:
        images_per_s: that went through the loop.
        cpu_ms_per_image: of this process and all its children.
        wait_ms: of the loop for its batches: the median, the 99th percentile, and the longest.
        pause_ms: before a loop's first batch, which is one of those waits: the median of the loops.
        host_mb: that this process and its children have to themselves.
        gpu_mb: that the case has taken, without the CUDA context. None without a GPU.
        gpu_percent: of the time, that the GPU was at work. None where NVML does not tell.
        jpeg_percent: the same of its JPEG engines.
    """

    images_per_s: float
    cpu_ms_per_image: float
    wait_ms: tuple[float, float, float]
    pause_ms: float
    host_mb: float
    gpu_mb: float | None = None
    gpu_percent: float | None = None
    jpeg_percent: float | None = None


@dataclass(frozen=True)
class Failure:
    """
    Attributes:
        reason: in one line.
        is_missing: something is not installed.
    """

    reason: str
    is_missing: bool = False


def serve(name: str, setting: Setting, connection: Connection, start_method: str) -> None:
    """Answer with a Start, then with a Round for each number of seconds that comes, for ever; or a Failure.

    Args:
        name: of the case.
        setting: of it.
        connection: to the process that asks.
        start_method: of the workers, as that process would start its own.
    """
    multiprocessing.set_start_method(start_method, force=True)  # or it would be the one that started this process
    try:
        _serve(name, setting, connection)
    except Exception as error:
        text = str(error).replace("Current pipeline object is no longer valid.", "")  # as DALI's errors end
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if isinstance(error, ProxyLoaderError):  # DALI's begin with where it was
            lines = [f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]]
        reason = f"{type(error).__name__}: {lines[-1] if lines else ''}"
        with suppress(OSError):  # nobody asks any more
            connection.send(Failure(reason, isinstance(error, ImportError)))
    finally:
        # The upstream server's thread would keep the process for ever.
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(0)


def _serve(name: str, setting: Setting, connection: Connection) -> None:
    from .. import _dali as _dali  # so that no case pays for it

    memory = _GpuMemory(setting)
    use = _training(setting) if setting.model != "none" else _nothing
    begin = time.perf_counter()
    loops = loops_of(name, setting)
    first = iter(next(loops))
    use(next(first))
    _wait_for_gpu()
    start = Start(time.perf_counter() - begin)
    for batch in first:
        use(batch)
    memory.note()
    connection.send(start)
    while True:
        seconds = connection.recv()
        gc.collect()
        batches = iter(next(loops))
        if case_of(name).runs_ahead:
            # What it did while it had to wait is not to be counted.
            for batch in itertools.islice(batches, RUNS_UNDER_WAY + 1):
                use(batch)
            _wait_for_gpu()
        connection.send(_round(batches, loops, seconds, use, memory))


def _round(batches: Iterator[Any], loops: Any, seconds: float, use: Callable[[Any], None], memory: _GpuMemory) -> Round:
    """Measure the rest of this loop, and more of them until the seconds are over."""
    waits: list[float] = []
    pauses: list[float] = []
    images = 0
    memory.begin()
    with _gauges() as shares:
        cpu, begin = _cpu_s(), time.perf_counter()
        while True:
            asked, at = time.perf_counter(), len(waits)
            while (batch := next(batches, None)) is not None:
                waits.append(time.perf_counter() - asked)
                images += len(batch[0])
                use(batch)
                asked = time.perf_counter()
            pauses += waits[at : at + 1]
            if time.perf_counter() - begin >= seconds:
                break
            batches = iter(next(loops))
        _wait_for_gpu()
        wall, cpu = time.perf_counter() - begin, _cpu_s() - cpu
    memory.note()
    p50, p99, longest = (1e3 * float(np.quantile(waits, share)) for share in (0.5, 0.99, 1))
    return Round(
        images_per_s=images / wall,
        cpu_ms_per_image=1e3 * cpu / images,
        wait_ms=(p50, p99, longest),
        pause_ms=1e3 * statistics.median(pauses),
        host_mb=_host_mb(),
        gpu_mb=memory.mb,
        **shares(),
    )


def _nothing(batch: Any) -> None:
    """The batches are only taken."""


def _training(setting: Setting) -> Callable[[Any], None]:
    """A step of training, as with mixed precision. It does not wait for the GPU, since its optimizer is fused."""
    model = torchvision.models.get_model(setting.model, num_classes=CLASSES)
    model = model.to(setting.device, memory_format=setting.memory_format).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=setting.on_gpu)
    for weight in model.parameters():  # or a first step that overflows would leave it as the memory was (torch 2.14)
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    half = torch.bfloat16 if setting.torch_dtype == torch.bfloat16 or not setting.on_gpu else torch.float16
    scaler = torch.amp.GradScaler(setting.device, enabled=half == torch.float16)

    def step(batch: Any) -> None:
        images, labels = batch
        with torch.autocast(setting.device, half):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return step


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _tree() -> list[psutil.Process]:
    process = psutil.Process()
    return [process, *process.children(recursive=True)]


def _cpu_s() -> float:
    times = [process.cpu_times() for process in _tree()]
    return float(sum(each.user + each.system for each in times))


def _host_mb() -> float:
    return float(sum(process.memory_full_info().uss for process in _tree())) / 2**20


class _GpuMemory:
    """What a case takes of a GPU that others hold memory of, too, but take none meanwhile.

    Attributes:
        mb: None without a GPU.
    """

    def __init__(self, setting: Setting) -> None:
        self.mb: float | None = None
        if setting.on_gpu:
            torch.ones(1, device="cuda")  # with the context, which is not counted
            self.mb = 0.0
        self.begin()

    def begin(self) -> None:
        self._before = self._used()

    def note(self) -> None:
        """Add what was taken since ``begin``."""
        if self.mb is not None:
            self.mb += self._used() - self._before
            self._before = self._used()

    def _used(self) -> float:
        if self.mb is None:
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20


@contextmanager
def _gauges() -> Iterator[Callable[[], dict[str, float | None]]]:
    """Sample how much of the time the GPU and its JPEG engines work, as far as NVML tells."""
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
    except Exception:  # not installed, no driver, no GPU: then nothing is told
        return
    asks: tuple[Callable[[], Any], ...] = (
        lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        lambda: pynvml.nvmlDeviceGetJpgUtilization(gpu)[0],
    )
    while not done.wait(SAMPLED_EVERY_S):
        for values, ask in zip(samples, asks):
            with suppress(pynvml.NVMLError):
                values.append(float(ask()))
