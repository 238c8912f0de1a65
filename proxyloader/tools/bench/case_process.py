"""One case in its own process, which runs on request. There its memory and CPU time can be measured, and a case that
hangs can be killed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import torch
import torchvision

from ...errors import ProxyLoaderError
from .cases import case_of, loops_of
from .config import BenchConfig
from .gauges import GpuMemory, cpu_s, gauges, host_mb

CLASSES = 1000


@dataclass(frozen=True)
class RoundResult:
    """Figures of whole loops over some seconds. CPU time and memory are those of the process and its children.

    Attributes:
        loop_cpu_ms_per_image: CPU time without that of the children: of the process of the loop and all its threads.
        wait_ms: waits of the loop for batches: median, 99th percentile, maximum.
        pause_ms: median of the waits for the first batch of each loop, which are among those waits.
        host_mb: private memory.
        gpu_mb: GPU memory without the CUDA context. None without a GPU.
        gpu_percent: share of the time in which the GPU was busy. None if NVML does not report it.
        jpeg_percent: the same of the JPEG engines.
    """

    images_per_s: float
    cpu_ms_per_image: float
    loop_cpu_ms_per_image: float
    wait_ms: tuple[float, float, float]
    pause_ms: float
    host_mb: float
    gpu_mb: float | None = None
    gpu_percent: float | None = None
    jpeg_percent: float | None = None


@dataclass(frozen=True)
class Trial:
    """Figures of the second loop with a tuning. If the first one took too long and was cut, they are those of its part
    after the first batch."""

    images_per_s: float
    cpu_ms_per_image: float
    was_cut: bool = False


@dataclass(frozen=True)
class Epoch:
    """Figures of one of the first epochs. The first one begins with the construction of the loader."""

    first_batch_s: float
    images_per_s: float
    images_per_s_after_first_batch: float


@dataclass(frozen=True)
class Failure:
    """The reason in one line why a case failed, whether a package is missing, and whether no batch came for long."""

    reason: str
    is_missing: bool = False
    has_hung: bool = False


def serve(name: str, connection: Connection, batches_seen: Any, start_method: str) -> None:
    """Send None when all modules are imported, and then answer requests, until the process is killed or an error is
    sent as a ``Failure``.

    Args:
        name: name of the case.
        connection: connection to the main process, which requests methods of ``_Measured`` by name, with arguments.
        batches_seen: counter of batches in shared memory, by which a case that hangs is detected.
        start_method: start method of the workers, which is that of the main process.
    """
    multiprocessing.set_start_method(start_method, force=True)  # not the method that started this process
    try:
        from ...dali import api as api  # imported here, so that its time counts for no case

        connection.send(None)
        measured = _Measured(name, batches_seen)
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(measured, method)(*arguments))
    except Exception as error:
        text = str(error).replace("Current pipeline object is no longer valid.", "")  # as DALI's errors end
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if isinstance(error, ProxyLoaderError):  # DALI's begin with where it was
            lines = [f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]]
        reason = f"{type(error).__name__}: {lines[-1] if lines else ''}"
        with suppress(OSError):  # the main process has ended
            connection.send(Failure(reason, isinstance(error, ImportError)))
    finally:
        kill(psutil.Process())  # the thread of DALI's own proxy server would keep it alive


def kill(process: psutil.Process) -> None:
    """Kill a process and its children."""
    with suppress(psutil.NoSuchProcess):
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


class _Measured:
    """A case, with the methods that may be requested."""

    def __init__(self, name: str, batches_seen: Any) -> None:
        self._name = name
        self._seen = batches_seen
        self._use: Callable[[Any], None] = lambda batch: None
        self._loops: Any = None
        self._memory: GpuMemory | None = None

    def begin(self, setting: BenchConfig) -> float:
        """Run the first loop. Return the time to its first batch, with the construction of the loader but without the
        start of CUDA."""
        memory = self._prepared(setting)
        begin = time.perf_counter()
        first = self._begun(setting)
        first_batch_s = time.perf_counter() - begin
        for batch in first:
            self._use(batch)
        memory.note()
        return first_batch_s

    def measure(self, seconds: float) -> RoundResult:
        """Measure whole loops for at least ``seconds``.

        A case that prepares batches of the next loop has them ready, and more than usual, when its turn comes. So there
        is a loop before that is not counted. The measurement begins as it ends, behind the last batch of a loop.
        """
        assert self._memory is not None
        gc.collect()
        waits: list[float] = []
        pauses: list[float] = []
        images = 0
        self._memory.begin()
        for batch in self._next_loop() if case_of(self._name).runs_ahead else ():
            self._use(batch)
        _wait_for_gpu()
        with gauges() as shares:
            cpu, loop_cpu, begin = cpu_s(), time.process_time(), time.perf_counter()
            while True:
                asked, at = time.perf_counter(), len(waits)
                batches = self._next_loop()
                while (batch := next(batches, None)) is not None:
                    waits.append(time.perf_counter() - asked)
                    images += len(batch[0])
                    self._use(batch)
                    asked = time.perf_counter()
                pauses += waits[at : at + 1]
                if images and time.perf_counter() - begin >= seconds:
                    break
            _wait_for_gpu()
            wall, cpu, loop_cpu = time.perf_counter() - begin, cpu_s() - cpu, time.process_time() - loop_cpu
        self._memory.note()
        p50, p99, longest = (1e3 * float(np.quantile(waits, share)) for share in (0.5, 0.99, 1))
        return RoundResult(
            images_per_s=images / wall,
            cpu_ms_per_image=1e3 * cpu / images,
            loop_cpu_ms_per_image=1e3 * loop_cpu / images,
            wait_ms=(p50, p99, longest),
            pause_ms=1e3 * statistics.median(pauses),
            host_mb=host_mb(),
            gpu_mb=self._memory.mb,
            **shares,
        )

    def attempt(self, setting: BenchConfig, at_least_s: float, at_most_s: float) -> Trial:
        """Run loops with a tuning, and measure those behind the first, which take ``at_least_s`` or are one.

        A first loop that has not ended after ``at_most_s`` is measured instead.
        """
        self._prepared(setting)
        before = self._loops
        first = self._begun(setting)
        if before is not None:
            before.close()  # only now, as rebuilding decoders takes long after DALI's last pipeline was freed
            del before
            gc.collect()
        images, cpu, begin = 0, cpu_s(), time.perf_counter()
        for batch in first:
            self._use(batch)
            images += len(batch[0])
            if time.perf_counter() - begin > at_most_s:
                _wait_for_gpu()
                wall, cpu = time.perf_counter() - begin, cpu_s() - cpu
                return Trial(images / wall, 1e3 * cpu / images, was_cut=True)
        found = self.measure(at_least_s)
        return Trial(found.images_per_s, found.cpu_ms_per_image)

    def first_epochs(self, setting: BenchConfig, epochs: int, cache: str) -> list[Epoch]:
        """Measure the first epochs, as in a script that runs for the first time.

        Args:
            cache: an empty folder in place of the user's cache folder, so that nothing of earlier runs is used.
        """
        os.environ["XDG_CACHE_HOME"] = cache
        self._prepared(setting)
        found = []
        begin = time.perf_counter()
        self._loops = loops_of(self._name, setting)
        for _ in range(epochs):
            images = 0
            for batch in self._next_loop():
                self._use(batch)
                if not images:
                    _wait_for_gpu()
                    first_s, first_images = time.perf_counter() - begin, len(batch[0])
                images += len(batch[0])
            _wait_for_gpu()
            wall_s = time.perf_counter() - begin
            found.append(Epoch(first_s, images / wall_s, (images - first_images) / (wall_s - first_s)))
            begin = time.perf_counter()
        return found

    def _prepared(self, setting: BenchConfig) -> GpuMemory:
        """Start CUDA and build the model, at the first call. Return the gauge of GPU memory."""
        if self._memory is None:
            if setting.by_default and not case_of(self._name).is_own:
                # Importing this package sets it, and users of other loaders do not import it.
                os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
            self._memory = GpuMemory(setting)
            if setting.model != "none":
                self._use = _training(setting)
        return self._memory

    def _begun(self, setting: BenchConfig) -> Iterator[Any]:
        """Build the loader, and return its first loop without the first batch."""
        self._loops = loops_of(self._name, setting)
        batches = self._next_loop()
        self._use(next(batches))
        _wait_for_gpu()
        return batches

    def _next_loop(self) -> Iterator[Any]:
        # iter() starts the workers now, and not when the first batch is requested.
        return self._counted(iter(next(self._loops)))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._seen.value += 1
            yield batch


def _training(setting: BenchConfig) -> Callable[[Any], None]:
    """Return a training step with mixed precision. It does not wait for the GPU, as its optimizer is fused."""
    model = torchvision.models.get_model(setting.model, num_classes=CLASSES)
    model = model.to(setting.device, memory_format=setting.memory_format).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=setting.on_gpu)
    for weight in model.parameters():  # if the first step overflows, it is not initialized (torch 2.14)
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
