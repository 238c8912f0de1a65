"""``diagnose``: measure what bounds a training, and what proxyloader gains there. Needs psutil.

NOTE [ Phases of a diagnosis ]
What a loop does between two batches is its step. An iterator in place of the loader measures both in four phases:

1. Both: batches are handed out as they come, after some that are not counted.
2. The step alone: the last batch is handed out again and again. The first steps, beside prefetching, are not counted.
3. The loader alone: batches are drawn and dropped, after those that were prefetched.
4. The other kind of loader alone, and this one with other numbers of workers.

Then the loop ends. The GPU is synchronized at both ends of a phase, not at each step.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import os
import random
import runpy
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pynvml
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import IterableDataset

from ..._cores import usable_cores
from ...data.dataset import get_length
from ...data.sharded_sampler import World
from ...loader.dataloader import DataLoader
from ..bench.config import machine
from ..files import check_can_be_written
from .verdict import Diagnosis, Figures, Kind, Phase, diagnosed, plot

SHARES = {"warm up": 0.1, "both": 0.25, "step": 0.15, "loader": 0.15, "other": 0.15, "workers": 0.2}
"""Shares of the time."""

LEAST_STEPS, MOST_STEPS = 3, 1000
"""Number of steps in a phase, however long or short they are."""

ARGUMENTS = "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator"
ARGUMENTS += " prefetch_factor persistent_workers pin_memory_device in_order"
"""Arguments of torch's loader that do not select samples."""


def diagnose(loader: Any, step: Callable[[Any], Any], *, seconds: float = 60.0) -> Diagnosis:
    """Measure what bounds a training, and what proxyloader gains there.

    ``step`` does with a batch what the training loop does. It is called with some hundred batches, so it trains the
    model. Requires Linux and ``pip install 'proxyloader[bench]'``.

    Args:
        loader: a ``torch.utils.data.DataLoader`` or a ``proxyloader.DataLoader``.
        step: function of a batch.
        seconds: approximate duration.

    Raises:
        TypeError: ``loader`` is not a DataLoader.
        ValueError: ``seconds`` is not positive, the loader yields no batches, or there are several processes.
    """
    with diagnosis(loader, seconds=seconds) as loop:
        for batch in loop:
            step(batch)
    return loop.result


class diagnosis(AbstractContextManager["diagnosis"]):
    """Measure a training loop of your own, as ``diagnose`` does.

    ::

        with proxyloader.diagnosis(loader) as batches:
            for images, labels in batches:
                ...  # the step
        print(batches.result)

    The loop ends by itself when everything is measured, possibly after several epochs. ``batches.result`` raises
    RuntimeError if it was left early.
    """

    def __init__(self, loader: Any, *, seconds: float = 60.0) -> None:
        if not isinstance(loader, StockLoader):
            kinds = "torch.utils.data.DataLoader or a proxyloader.DataLoader"
            raise TypeError(f"loader must be a {kinds}, got {type(loader).__name__}")
        if not seconds > 0:
            raise ValueError(f"seconds must be > 0, got {seconds:g}")
        if (processes := World.current().num_shards) > 1:
            raise ValueError(f"diagnose requires a single process, got {processes}: start the script without torchrun")
        self._loader, self._seconds = loader, seconds
        self._result: Diagnosis | None = None
        self._batches = self._measured()

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    @property
    def result(self) -> Diagnosis:
        if self._result is None:
            raise RuntimeError(f"no result: the loop was left early. It ends by itself after about {self._seconds:g} s")
        return self._result

    def _measured(self) -> Generator[Any, None, None]:
        loader, seconds = self._loader, {name: share * self._seconds for name, share in SHARES.items()}
        ahead, phases = _prefetched(loader), list[Phase]()
        with closing(_endless(loader)) as batches:
            for _ in _steps(seconds["warm up"], most=1 + ahead + LEAST_STEPS):
                yield next(batches)
            for batch in _measure(batches, seconds["both"], phases):
                yield batch
            ahead_s = min(seconds["step"] / 3, ahead * phases[0].step_s)
            for _ in _steps(ahead_s, least=0, most=sys.maxsize):
                yield batch
            yield from _measure(repeat(batch), seconds["step"] - ahead_s, phases)
            alone = _drawn(batches, ahead, seconds["loader"])
        kinds: tuple[Kind, Kind] = ("proxyloader", "stock")
        kind, other = kinds if isinstance(loader, DataLoader) else kinds[::-1]
        loaders, unmeasured = {kind: alone}, dict[str, str]()
        with _noted(other, unmeasured):
            loaders[other] = _alone(_other_kind(loader), seconds["other"])
        figures = Figures(
            watched=kind,
            both=phases[0],
            step=phases[1],
            alone=loaders,
            batch_size=_images_in(batch) or loader.batch_size or 1,
            num_workers=loader.num_workers,
            cores=usable_cores(),
            waiting=_waiting(loader.dataset, unmeasured),
            speedups=_speedups(loader, alone.step_s, seconds["workers"], unmeasured),
            unmeasured=unmeasured,
        )
        self._result = diagnosed(figures)


@contextmanager
def _noted(name: str, unmeasured: dict[str, str]) -> Iterator[None]:
    """Note the error of a measurement without which there is a verdict. The report says what is missing, and why."""
    try:
        yield
    except Exception as error:
        unmeasured[name] = f"{type(error).__name__}: {error}".splitlines()[0]


def _steps(seconds: float, least: int = LEAST_STEPS, most: int = MOST_STEPS) -> Iterator[int]:
    """Count steps from 1, for this time, but at least and at most these numbers of them."""
    end_s = time.perf_counter() + seconds
    for number in range(1, most + 1):
        if number > least and time.perf_counter() >= end_s:
            return
        yield number


def _measure(batches: Iterator[Any], seconds: float, phases: list[Phase]) -> Iterator[Any]:
    """Yield batches for this time, and append what a step between two of them took."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    load: AbstractContextManager[dict[str, float]] = _gpu_load() if on_gpu else nullcontext({})
    with load as gpu_load:
        if on_gpu:
            torch.cuda.synchronize()
        before, begin_s = _usage(), time.perf_counter()
        for steps in _steps(seconds):  # noqa: B007
            yield next(batches)
        if on_gpu:
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - begin_s
        cpu_s, thread_s, workers_s, read, from_disk = (max(0.0, each) for each in (_usage() - before).tolist())
    shares = (thread_s / wall_s, workers_s / wall_s, from_disk / max(read, 1.0))
    phases.append(Phase(wall_s / steps, cpu_s / steps, *shares, **gpu_load))


def _usage() -> NDArray[np.float64]:
    """Return the resources used so far: CPU time of all processes, time in which this thread computed or waited for a
    core, the same of all workers, bytes that all processes read, and those that came from a disk."""
    this, used = psutil.Process(), np.array([0, _busy_s(), 0, 0, 0])
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # a worker may end meanwhile; it counts as an ended child then
            times, read = process.cpu_times(), process.io_counters()
            workers_s = ended_s = times.children_user + times.children_system  # of children that were waited for
            if process != this:
                delays_s = map(_delay_s, Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
                workers_s += times.user + times.system + sum(delays_s)
            used += (times.user + times.system + ended_s, 0, workers_s, read.read_chars, read.read_bytes)
    return used


def _busy_s() -> float:
    """Return how long this thread has computed or waited for a core."""
    return time.thread_time() + _delay_s(Path("/proc/thread-self/schedstat"))


def _delay_s(schedstat: Path) -> float:
    with suppress(OSError):  # the thread has ended, or Linux was built without these statistics
        return int(schedstat.read_text().split()[1]) / 1e9
    return 0.0


@contextmanager
def _gpu_load() -> Iterator[dict[str, float]]:
    """Sample the utilization of the GPU and of its JPEG engines in a thread. At the end, the dictionary gets the means
    of what NVML knows: a GPU may have no JPEG engines, and some systems have no NVML."""
    uuid, done = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid, threading.Event()
    means, samples = dict[str, float](), {"gpu_percent": list[float](), "jpeg_percent": list[float]()}

    def sample() -> None:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            while not done.wait(0.05):
                samples["gpu_percent"].append(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
                with suppress(pynvml.NVMLError, AttributeError):  # AttributeError: an older nvidia-ml-py
                    samples["jpeg_percent"].append(pynvml.nvmlDeviceGetJpgUtilization(gpu)[0])

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield means
    finally:
        done.set()
        thread.join(10)
    means |= {name: float(np.mean(values)) for name, values in samples.items() if values}


def _waiting(dataset: Any, unmeasured: dict[str, str]) -> float | None:
    """Return the share of the time that reading some samples waits in this thread, or None if it cannot be measured."""
    if (length := get_length(dataset)) is None or isinstance(dataset, IterableDataset):
        return None
    with _noted("the share of reading a sample that is waiting", unmeasured):
        begin_s, busy_s = time.perf_counter(), _busy_s()
        for index in random.Random(0).sample(range(length), min(8, length)):
            dataset[index]
        return 1 - (_busy_s() - busy_s) / (time.perf_counter() - begin_s)
    return None


def _endless(loader: Any) -> Generator[Any, None, None]:
    """Yield the batches of a loader, epoch after epoch."""
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ValueError("the loader yields no batches: its dataset is smaller than a batch, or empty")


def _prefetched(loader: Any) -> int:
    return int(loader.num_workers) * (loader.prefetch_factor or 0) + getattr(loader, "prefetch", 0)


def _images_in(batch: Any) -> int:
    """Return the length of the first tensor with the shape of images, (N, C, H, W), or 0."""
    return next((len(each) for each in tree_leaves(batch) if getattr(each, "ndim", 0) == 4), 0)


def _other_kind(loader: Any) -> Any:
    """Return a loader of the other kind over the same samples, with the same arguments."""
    arguments = {name: getattr(loader, name) for name in ARGUMENTS.split()}
    if loader.batch_size is None and loader.batch_sampler is not None:
        arguments["batch_sampler"] = loader.batch_sampler
    else:
        arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            arguments["sampler"] = loader.sampler
    return (StockLoader if isinstance(loader, DataLoader) else DataLoader)(loader.dataset, **arguments)


def _alone(loader: Any, seconds: float) -> Phase:
    with closing(_endless(loader)) as batches:
        return _drawn(batches, _prefetched(loader), seconds)


def _drawn(batches: Iterator[Any], ahead: int, seconds: float) -> Phase:
    """Measure a loader alone for this time, after the batches that were prefetched, or a third of it."""
    end_s, phases = time.perf_counter() + seconds, list[Phase]()
    for _ in _steps(seconds / 3, least=1, most=ahead + 1):
        next(batches)
    for _ in _measure(batches, end_s - time.perf_counter(), phases):
        pass
    return phases[0]


def _speedups(loader: Any, step_s: float, seconds: float, unmeasured: dict[str, str]) -> dict[int, float]:
    """Return how much faster than ``step_s`` the loader alone is with other numbers of workers."""
    workers, cores, speedups = loader.num_workers, usable_cores(), dict[int, float]()
    counts = sorted({count for count in (workers // 2, 2 * workers, cores) if 0 < count <= cores} - {workers})
    for count in counts:
        with _noted(f"num_workers={count}", unmeasured):
            speedups[count] = step_s / _alone(_with_workers(loader, count), seconds / len(counts)).step_s
    return speedups


def _with_workers(loader: Any, count: int) -> Any:
    copied = copy.copy(loader)
    factor = (loader.prefetch_factor or 2) if count else None
    vars(copied).update(_iterator=None, num_workers=count, prefetch_factor=factor)  # unlike setattr
    return copy.copy(copied)  # which sizes its pipelines by these arguments


class _Ended(BaseException):
    """Ends a script whose loop has been measured. ``except Exception`` does not catch it."""


@contextmanager
def _watched(seconds: float) -> Iterator[list[Diagnosis]]:
    """Diagnose the loop over the largest loader of a script, and then end the script. Loops over smaller loaders go on,
    and so does a loop that is left early, such as ``next(iter(loader))``: the next one is diagnosed then."""
    found, measured = list[Diagnosis](), list[Any]()

    def loop(loader: Any) -> Iterator[Any]:
        name = type(loader.dataset).__name__
        print(f"proxyloader: measuring the loop over {name} for about {seconds:g} s", file=sys.stderr)
        measured.append(loader)
        try:
            with diagnosis(loader, seconds=seconds) as batches:
                yield from batches
                found.append(batches.result)
        finally:
            measured.clear()
        raise _Ended

    def patched(kind: Any) -> Any:
        begin = kind.__iter__

        def iterate(loader: Any) -> Iterator[Any]:
            is_other = measured or found or _size(loader) < max(map(_size, loaders), default=0)
            return begin(loader) if is_other else loop(loader)

        return patch.object(kind, "__iter__", iterate)

    loaders, init = weakref.WeakSet[Any](), StockLoader.__init__

    def noted(loader: Any, *arguments: Any, **options: Any) -> None:
        init(loader, *arguments, **options)
        loaders.add(loader)

    with patched(StockLoader), patched(DataLoader), patch.object(StockLoader, "__init__", noted):
        yield found


def _size(loader: Any) -> float:
    """Return the number of samples; -1 for the torch loader inside one of ours."""
    if type(loader).__module__.startswith("proxyloader.workers"):
        return -1.0
    length = get_length(loader.dataset)
    return np.inf if length is None else length


def diagnose_script(
    script: Path, arguments: Sequence[str], seconds: int, json_file: Path | None, plot_file: Path | None
) -> int:
    """Run a script, as ``python script arguments`` does, until the loop over its largest loader is diagnosed. Print the
    report, and write it to files. If the script exits or raises an error, so does this, with exit status 1."""
    script.open().close()
    if plot_file is not None:
        importlib.import_module("matplotlib")
    for file in filter(None, (json_file, plot_file)):
        check_can_be_written(file)
    path = os.path.abspath(script)
    with (
        patch.object(sys, "argv", [str(script), *arguments]),
        patch.object(sys, "path", [str(script.parent), *sys.path]),
        _watched(seconds) as found,
    ):
        try:
            runpy.run_path(path, run_name="__main__")
        except _Ended:
            pass
        except Exception as error:
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename != path:
                frames = frames.tb_next
            traceback.print_exception(type(error), error, frames)
            raise SystemExit(1) from None
    gc.collect()  # frames of the script, and with them its workers
    if not found:
        raise ValueError(
            f"{script} ended, or left the loop over its largest DataLoader, before that was measured. In a loop of "
            "your own, use proxyloader.diagnosis(loader)"
        )
    (result,) = found
    Console().print("", result, sep="\n", highlight=False)
    if json_file is not None:
        told = {"script": " ".join([script.name, *arguments]), "machine": machine(), **result.as_dict()}
        json_file.write_text(json.dumps(told, indent=1) + "\n")
    if plot_file is not None:
        plot(result, plot_file)
    return 0
