"""One case in its own process, which runs on request. There its memory and CPU time can be measured, and a case that
hangs can be killed."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import torch
import torchvision

from ...errors import ProxyLoaderError
from .cases import case_of, loops_of
from .config import BenchConfig
from .dali_cases import RUNS_UNDER_WAY
from .figures import Epoch, Failure, Ready, RoundResult, Start, Trial
from .gauges import GpuMemory, cpu_s, gauges, host_mb

CLASSES = 1000


def serve(name: str, connection: Connection, batches_seen: Any, start_method: str) -> None:
    """Send ``Ready``, and then answer requests until the process is killed. After an error send a ``Failure`` and end.

    Args:
        name: name of the case.
        connection: connection to the main process, which requests methods of ``_Measured`` by name, with arguments.
        batches_seen: counter of batches in shared memory, by which a case that hangs is detected.
        start_method: start method of the workers, which is that of the main process.
    """
    multiprocessing.set_start_method(start_method, force=True)  # not the method that started this process
    try:
        from ...dali import api as api  # imported here, so that its time counts for no case

        connection.send(Ready())
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
        # The thread of DALI's own proxy server would keep the process alive.
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(0)


class _Measured:
    """A case, with the methods that may be requested."""

    def __init__(self, name: str, batches_seen: Any) -> None:
        self._name = name
        self._seen = batches_seen
        self._loops: Any = None
        self._memory: GpuMemory | None = None

    def begin(self, setting: BenchConfig) -> Start:
        """Build the loader, and run its first loop."""
        memory = self._prepared(setting)
        begin = time.perf_counter()
        self._loops = loops_of(self._name, setting)
        first = self._next_loop()
        self._use(next(first))
        _wait_for_gpu()
        start = Start(time.perf_counter() - begin)
        for batch in first:
            self._use(batch)
        memory.note()
        return start

    def measure(self, seconds: float) -> RoundResult:
        """Measure whole loops for at least ``seconds``."""
        assert self._memory is not None
        gc.collect()
        return _round(self._caught_up(), self._next_loop, seconds, self._use, self._memory)

    def attempt(self, setting: BenchConfig, at_most_s: float) -> Trial:
        """Run two loops with a tuning, and measure the second one."""
        memory = self._prepared(setting)
        loops = loops_of(self._name, setting)
        before, self._loops = self._loops, loops
        first = self._next_loop()
        self._use(next(first))
        _wait_for_gpu()
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
        found = _round(self._caught_up(), self._next_loop, 0.0, self._use, memory)
        return Trial(found.images_per_s, found.cpu_ms_per_image)

    def first_epochs(self, setting: BenchConfig, epochs: int, cache: str) -> list[Epoch]:
        """Measure the first epochs, as in a script that runs for the first time.

        Args:
            setting: setting of the case.
            epochs: number of epochs.
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
            self._use = _training(setting) if setting.model != "none" else _nothing
        return self._memory

    def _next_loop(self) -> Iterator[Any]:
        # iter() starts the workers now, and not when the first batch is requested.
        return self._counted(iter(next(self._loops)))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._seen.value += 1
            yield batch

    def _caught_up(self) -> Iterator[Any] | None:
        """Return a loop without its first batches, which were prepared before and must not be counted, or None."""
        if not case_of(self._name).runs_ahead:
            return None
        batches = self._next_loop()
        for batch in itertools.islice(batches, RUNS_UNDER_WAY + 1):
            self._use(batch)
        _wait_for_gpu()
        return batches


def _round(
    batches: Iterator[Any] | None,
    next_loop: Callable[[], Iterator[Any]],
    seconds: float,
    use: Callable[[Any], None],
    memory: GpuMemory,
) -> RoundResult:
    """Measure the rest of a loop, if one was begun, and whole loops for at least ``seconds``."""
    waits: list[float] = []
    pauses: list[float] = []
    images = 0
    memory.begin()
    with gauges() as shares:
        cpu, begin = cpu_s(), time.perf_counter()
        while True:
            asked, at = time.perf_counter(), len(waits)
            batches = next_loop() if batches is None else batches
            while (batch := next(batches, None)) is not None:
                waits.append(time.perf_counter() - asked)
                images += len(batch[0])
                use(batch)
                asked = time.perf_counter()
            pauses += waits[at : at + 1]
            if images and time.perf_counter() - begin >= seconds:
                break
            batches = None
        _wait_for_gpu()
        wall, cpu = time.perf_counter() - begin, cpu_s() - cpu
    memory.note()
    p50, p99, longest = (1e3 * float(np.quantile(waits, share)) for share in (0.5, 0.99, 1))
    return RoundResult(
        images_per_s=images / wall,
        cpu_ms_per_image=1e3 * cpu / images,
        wait_ms=(p50, p99, longest),
        pause_ms=1e3 * statistics.median(pauses),
        host_mb=host_mb(),
        gpu_mb=memory.mb,
        **shares(),
    )


def _nothing(batch: Any) -> None:
    """Take a batch without using it."""


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
