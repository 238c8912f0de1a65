"""One case in a process of its own, which runs when it is told to: its memory and CPU time are its own there, and where
it hangs it can be ended."""

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
    """Answer ``Ready``, then what is asked for, for ever; or a ``Failure``.

    Args:
        name: of the case.
        connection: to the process that asks: for a method of ``_Measured`` by its name, with its arguments.
        batches_seen: a number in shared memory that is raised with each batch, so that a case that hangs is known.
        start_method: of the workers, as that process would start its own.
    """
    multiprocessing.set_start_method(start_method, force=True)  # or it would be the one that started this process
    try:
        from ...dali import api as api  # so that no case pays for it

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
        with suppress(OSError):  # nobody asks any more
            connection.send(Failure(reason, isinstance(error, ImportError)))
    finally:
        # The upstream server's thread would keep the process for ever.
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(0)


class _Measured:
    """A case, and what may be asked of it."""

    def __init__(self, name: str, batches_seen: Any) -> None:
        self._name = name
        self._seen = batches_seen
        self._loops: Any = None
        self._memory: GpuMemory | None = None

    def begin(self, setting: BenchConfig) -> Start:
        """Make the loader, and go through its first loop."""
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
        """Whole loops, until the seconds are over."""
        assert self._memory is not None
        gc.collect()
        return _round(self._caught_up(), self._next_loop, seconds, self._use, self._memory)

    def attempt(self, setting: BenchConfig, at_most_s: float) -> Trial:
        """Two loops with a tuning, of which the second counts."""
        memory = self._prepared(setting)
        loops = loops_of(self._name, setting)
        before, self._loops = self._loops, loops
        first = self._next_loop()
        self._use(next(first))
        _wait_for_gpu()
        if before is not None:
            before.close()  # now: with its last pipeline DALI gives up its decoders, which take long to come back
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
        """What a script sees that is started for the first time.

        Args:
            setting: of it.
            epochs: how many.
            cache: an empty folder, so that nothing is known of earlier runs.
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
        """CUDA, and the model."""
        if self._memory is None:
            if setting.by_default and not case_of(self._name).is_own:
                # Importing this package has set it, which users of other loaders do not do.
                os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
            self._memory = GpuMemory(setting)
            self._use = _training(setting) if setting.model != "none" else _nothing
        return self._memory

    def _next_loop(self) -> Iterator[Any]:
        # Workers are started, or started again, now, not when the first batch is asked for.
        return self._counted(iter(next(self._loops)))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._seen.value += 1
            yield batch

    def _caught_up(self) -> Iterator[Any] | None:
        """The rest of a loop whose first batches were ready: what was done while nobody asked is not to be counted."""
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
    """Measure what is left of a loop that was begun, if there is one, and whole ones until the seconds are over."""
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
    """The batches are only taken."""


def _training(setting: BenchConfig) -> Callable[[Any], None]:
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
