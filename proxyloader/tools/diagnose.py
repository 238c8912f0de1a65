"""``diagnose``: measure what limits a training loop, and the speedup with proxyloader. Requires psutil.

NOTE [ Phases of a diagnosis ]
The code that a loop runs for a batch is its step. An iterator replaces the loader and measures four phases:

1. Both: yield batches as they arrive.
2. The step alone: yield the last batch repeatedly.
3. The loader alone: fetch and discard batches.
4. The other kind of loader alone, and the same loader with other numbers of workers.

The first third of each phase is a warm-up. The GPU is synchronized only at the start and the end of a measurement.
"""

import dataclasses
import gc
import importlib
import inspect
import os
import random
import runpy
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partialmethod
from itertools import count, islice, repeat, takewhile
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pynvml
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader as StockLoader, IterableDataset

from .._cores import usable_cores
from ..data.dataset import get_length
from ..data.sharded_sampler import World
from ..loader.dataloader import DataLoader
from .processes import cpu_seconds

Kind = Literal["stock", "proxyloader"]
Bound = Literal["input", "disk", "model", "loop", "cores"]

MIN_SPEEDUP = 1.05  # minimum speedup to recommend proxyloader or another number of workers
LONGER = 1.15  # ratio above which one time counts as longer than another
DISTURBED = 1.3  # ratio of a measured time to its estimate above which the estimates are not reliable
MIN_STEPS = 3  # of a phase, regardless of its duration
BUSY = 0.7  # utilization above which a GPU, a thread or all cores count as busy


@dataclass(frozen=True)
class Phase:
    """Means over the steps of a phase."""

    step_s: float  #: duration of a step
    cpu_s: float  #: CPU time of a step, in all processes
    thread: float  #: fraction of the time that the thread of the loop was running or waiting for a core
    workers: float  #: number of cores that the child processes used
    gpu_percent: float | None = None  #: utilization of the GPU, without its JPEG engines; None if unknown

    @property
    def cores(self) -> float:
        return self.cpu_s / self.step_s


@dataclass(frozen=True)
class Figures:
    """The measurements."""

    watched: Kind  #: kind of the loader of the training loop
    both: Phase  #: the unmodified loop
    step: Phase  #: the step alone, with the same batch in each step
    alone: dict[Kind, Phase]  #: each kind of loader alone, unless it failed
    batch_size: int  #: images per batch
    num_workers: int
    cores: int
    waiting: float | None  #: fraction of the time to read a sample not spent on the CPU; None if unknown
    speedups: dict[int, float]  #: speedup of the loader alone, by number of workers
    unmeasured: dict[str, str] = field(default_factory=dict)  #: errors of failed measurements, by name

    def step_s(self, kind: Kind) -> float:
        """Estimate the duration of a step with a loader: the longest of the step alone, the loader alone, and the CPU
        time of both on all cores. Without workers, step and loader take turns."""
        times = (self.step.step_s, self.alone[kind].step_s)
        shared_s = (self.step.cpu_s + self.alone[kind].cpu_s) / self.cores
        return max(max(times) if self.num_workers else sum(times), shared_s)

    def speed(self, step_s: float) -> str:
        return format_number(self.batch_size / step_s)


@dataclass(frozen=True)
class Diagnosis:
    """What limits a training loop, and the speedup with proxyloader. ``str()`` returns the report.

    ``bound`` is "input" if the loader keeps the CPU or GPU busy, "disk" if it waits for reads, "model" if the step
    keeps the GPU busy or sleeps, "loop" if the step keeps its thread busy, and "cores" if step and loader compete for
    cores.
    """

    bound: Bound
    verdict: str  #: the conclusion, in one or two sentences
    reasons: tuple[str, ...]  #: measurements that support it, and failed measurements
    suggestions: tuple[str, ...]  #: numbers of workers with which the loader alone is at least 5% faster
    figures: Figures

    def as_dict(self) -> dict[str, Any]:
        """Return all fields for JSON, with the estimates."""
        estimated = {kind: self.figures.step_s(kind) for kind in self.figures.alone}
        return {**dataclasses.asdict(self), "estimated_step_s": estimated}

    def __str__(self) -> str:
        figures = self.figures
        phases = {"loop as it is": figures.both, "step alone": figures.step}
        phases |= {f"{kind} alone": phase for kind, phase in figures.alone.items()}
        rows = [("", "ms/step", "images/s", "cores", "GPU")]
        for name, phase in phases.items():
            gpu = "-" if phase.gpu_percent is None else f"{phase.gpu_percent:.0f}%"
            rows.append((name, ms(phase.step_s), figures.speed(phase.step_s), f"{phase.cores:.1f}", gpu))
        steps_s = {kind: figures.step_s(kind) for kind in figures.alone}
        rows += [(f"with {kind}, estimated", ms(each), figures.speed(each), "", "") for kind, each in steps_s.items()]
        table = ("{:<27}  {:<7}  {:<8}  {:<5}  {}".format(*row).rstrip() for row in rows)
        return "\n".join([self.verdict, "", *table, "", *(f"- {each}" for each in (*self.reasons, *self.suggestions))])


def diagnose(loader: Any, step: Callable[[Any], Any], *, seconds: float = 60.0) -> Diagnosis:
    """Measure what limits a training loop, and the speedup with proxyloader.

    Requires Linux and ``pip install -e '.[bench]'``.

    Args:
        loader: a ``torch.utils.data.DataLoader`` or a ``proxyloader.DataLoader``.
        step: what the loop does with a batch. It runs a few hundred times, so it trains the model.
        seconds: approximate duration.

    Raises:
        ValueError: ``seconds`` is not positive, the loader yields no batches, or there are several processes.
    """
    with diagnosis(loader, seconds=seconds) as loop:
        for batch in loop:
            step(batch)
    return loop.result


class diagnosis(AbstractContextManager["diagnosis"]):
    """Measure your own training loop, like ``diagnose``.

    ::

        with proxyloader.diagnosis(loader) as batches:
            for images, labels in batches:
                ...  # the step
        print(batches.result)

    The loop ends by itself when everything is measured, possibly after several epochs. ``batches.result`` raises
    RuntimeError if you leave the loop earlier.
    """

    def __init__(self, loader: Any, *, seconds: float = 60.0) -> None:
        if not isinstance(loader, StockLoader):
            raise TypeError(f"loader must be a torch.utils.data.DataLoader or subclass, got {type(loader).__name__}")
        if not seconds > 0:
            raise ValueError(f"seconds must be > 0, got {seconds:g}")
        if (processes := World.current().num_shards) > 1:
            raise ValueError(f"diagnose requires a single process, got {processes}: start the script without torchrun")
        self._loader, self._seconds = loader, seconds
        self._result: Diagnosis | None = None
        self._batches = self._measure()

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    @property
    def result(self) -> Diagnosis:
        if self._result is None:
            raise RuntimeError(f"no result: the loop was left early. It ends by itself after about {self._seconds:g} s")
        return self._result

    def _measure(self) -> Generator[Any, None, None]:
        loader, seconds, phases, unmeasured = self._loader, self._seconds, list[Phase](), dict[str, str]()
        for batch in _measure(_cycle(loader), 0.35 * seconds, phases):
            yield batch
        yield from _measure(repeat(batch), 0.15 * seconds, phases)
        classes: dict[Kind, Any] = {"proxyloader": DataLoader, "stock": StockLoader}
        kind, other = classes if isinstance(loader, DataLoader) else reversed(classes)
        alone, speedups, waiting = {kind: _measure_alone(loader, 0.15 * seconds)}, dict[int, float](), None
        with _record_failure(other, unmeasured):
            alone[other] = _measure_alone(_rebuild(loader, classes[other]), 0.15 * seconds)
        workers, cores = loader.num_workers, usable_cores()
        counts = sorted({n for n in (workers // 2, 2 * workers, cores) if 0 < n <= cores} - {workers})
        for n in counts:
            with _record_failure(f"num_workers={n}", unmeasured):
                variant = _rebuild(loader, classes[kind], num_workers=n)
                speedups[n] = alone[kind].step_s / _measure_alone(variant, 0.2 * seconds / len(counts)).step_s
        with _record_failure("time spent waiting for samples to be read", unmeasured):
            waiting = _measure_waiting(loader.dataset)
        sizes = [len(leaf) for leaf in tree_leaves(batch) if getattr(leaf, "ndim", 0)]
        batch_size = loader.batch_size or (*sizes, 1)[0]
        both, step = phases
        figures = Figures(kind, both, step, alone, batch_size, workers, cores, waiting, speedups, unmeasured)
        self._result = interpret(figures)


@contextmanager
def _record_failure(name: str, unmeasured: dict[str, str]) -> Iterator[None]:
    """Record the error of a measurement that the verdict does not depend on, for the report."""
    try:
        yield
    except Exception as error:
        unmeasured[name] = f"{type(error).__name__}: {error}".splitlines()[0]


def _steps(seconds: float) -> Iterator[int]:
    """Count steps from 1 until the time is over, at least to ``MIN_STEPS``."""
    end_s = time.perf_counter() + seconds
    return takewhile(lambda number: number <= MIN_STEPS or time.perf_counter() < end_s, count(1))


def _measure(batches: Iterator[Any], seconds: float, phases: list[Phase]) -> Iterator[Any]:
    """Yield batches for this time, and append the mean resource usage of a step to ``phases``."""
    for _ in _steps(seconds / 3):
        yield next(batches)
    done, on_gpu = threading.Event(), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(1) as executor:
        try:
            gpu_percent = executor.submit(_sample_gpu, done, torch.cuda.current_device()) if on_gpu else None
            before = _usage(on_gpu)
            for steps in _steps(2 * seconds / 3):  # noqa: B007
                yield next(batches)
            wall_s, cpu_s, own_cpu_s, busy_s = (_usage(on_gpu) - before).tolist()
        finally:
            done.set()
    shares = (busy_s / wall_s, max(0.0, cpu_s - own_cpu_s) / wall_s, gpu_percent.result() if gpu_percent else None)
    phases.append(Phase(wall_s / steps, cpu_s / steps, *shares))


def _usage(on_gpu: bool) -> NDArray[np.float64]:
    """Finish the work of the GPU. Return the time, the CPU times of all processes and of this one, and ``_busy_s``."""
    if on_gpu:
        torch.cuda.synchronize()
    return np.array([time.perf_counter(), cpu_seconds(), time.process_time(), _busy_s()])


def _busy_s() -> float:
    """Return how long this thread has been running or waiting for a core."""
    delay_ns = 0
    with suppress(OSError):  # the kernel lacks these statistics
        delay_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.thread_time() + delay_ns / 1e9


def _sample_gpu(done: threading.Event, device: int) -> float | None:
    """Return the mean utilization of a GPU until ``done`` is set; None if unknown."""
    samples = list[int]()
    with suppress(pynvml.NVMLError, RuntimeError):
        while not done.wait(0.05):
            samples.append(torch.cuda.utilization(device))
    return float(np.mean(samples)) if samples else None


def _measure_waiting(dataset: Any) -> float:
    """Return the fraction of the time that this thread waits while reading some samples."""
    start_s, busy_s = time.perf_counter(), _busy_s()
    is_stream, choose = isinstance(dataset, IterableDataset), random.Random(0).choices
    samples = islice(dataset, 8) if is_stream else map(dataset.__getitem__, choose(range(len(dataset)), k=8))
    deque(samples, maxlen=0)
    return 1 - (_busy_s() - busy_s) / (time.perf_counter() - start_s)


def _measure_alone(loader: Any, seconds: float) -> Phase:
    phases = list[Phase]()
    deque(_measure(_cycle(loader), seconds, phases), maxlen=0)
    return phases[0]


def _cycle(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader over many epochs."""
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ValueError("the loader yields no batches: its dataset is smaller than a batch, or empty")


def _rebuild(loader: Any, cls: Any, **changes: Any) -> Any:
    """Build a loader of a class over the same samples, with the same arguments except for ``changes``."""
    sampling = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    names = [name for name in inspect.signature(cls).parameters if hasattr(loader, name) and name not in sampling]
    arguments = {name: getattr(loader, name) for name in names}
    if loader.batch_size is None and loader.batch_sampler is not None:
        arguments["batch_sampler"] = loader.batch_sampler
    else:
        arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            arguments["sampler"] = loader.sampler
    return cls(loader.dataset, **{**arguments, **changes})


def interpret(figures: Figures) -> Diagnosis:
    """Derive the diagnosis from the measurements."""
    bound, step, loader = find_bound(figures), figures.step, figures.alone[figures.watched]
    both, alone, load = (ms(phase.step_s) for phase in (figures.both, step, loader))
    verdict = f"{bound.capitalize()}-bound: a step takes {both} ms, or {alone} ms without loading. "
    verdict += f"Loading alone takes {load} ms."
    reasons = []
    if figures.num_workers:
        reasons.append(f"Alone, the workers are {min(100.0, 100 * loader.workers / figures.num_workers):.0f}% busy")
    if figures.waiting is not None:
        percent = max(0.0, 100 * figures.waiting)
        reasons.append(f"Reading a sample spends {percent:.0f}% of its time waiting, for example for a disk")
    base: Kind = "stock" if "stock" in figures.alone else figures.watched
    share = step.step_s / figures.step_s(base)
    cost = f"With {'torch' if base == 'stock' else base}, loading takes {100 * (1 - share):.0f}% of a step"
    gain = f"An infinitely fast loader would give {1 / share:.2f}x"
    gain = gain if share > 1e-3 else "The speedup has no limit, because the loop does nothing with a batch"
    reasons.append(f"{cost}. {gain}")
    if (ratio := figures.both.step_s / figures.step_s(figures.watched)) > DISTURBED:
        reasons.append(f"The loop takes {ratio:.2f} times as long as estimated. Repeat this on an idle machine")
    if len(figures.alone) == 2:
        stock_s, ours_s = figures.step_s("stock"), figures.step_s("proxyloader")
        gain = f"{figures.speed(ours_s)} instead of {figures.speed(stock_s)} images/s, {stock_s / ours_s:.2f}x"
        verdict += f" proxyloader is {'' if stock_s > MIN_SPEEDUP * ours_s else 'not '}worth it: {gain}"
    reasons += [f"Not measured: {name} ({reason})" for name, reason in figures.unmeasured.items()]
    speedups = sorted(figures.speedups.items(), key=lambda item: -item[1])
    suggestions = (f"num_workers={n}: the loader alone is {x:.2f}x as fast" for n, x in speedups if x >= MIN_SPEEDUP)
    return Diagnosis(bound, verdict, tuple(reasons), tuple(suggestions), figures)


def find_bound(figures: Figures) -> Bound:
    """Return what takes longest alone, or "cores" if step and loader compete for them."""
    step, loader = figures.step, figures.alone[figures.watched]
    longest_s = LONGER * max(step.step_s, loader.step_s)
    if min((step.cpu_s + loader.cpu_s) / figures.cores, figures.both.step_s) > longest_s:
        return "cores"
    if step.step_s >= loader.step_s:
        computes = step.thread > BUSY and step.cores < LONGER * step.thread and (step.gpu_percent or 0) < 50
        return "loop" if computes else "model"
    is_busy = (
        (loader.gpu_percent or 0) > 100 * BUSY
        or loader.cores > BUSY * figures.cores
        or loader.workers > 0.5 * figures.num_workers > 0
        or loader.thread > (BUSY if figures.num_workers else 0.5)
    )
    return "input" if is_busy or (figures.waiting or 0) < 0.5 else "disk"


def ms(seconds: float) -> str:
    return format_number(1e3 * seconds)


def format_number(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


@contextmanager
def _intercept_loops(seconds: float) -> Iterator[list[Diagnosis]]:
    """Diagnose the loop over the largest loader of a script, then raise SystemExit in the script. Loops over smaller
    loaders run as usual. After a loop that is left early, such as ``next(iter(loader))``, diagnose the next one."""
    results, measuring = list[Diagnosis](), threading.Lock()

    def measure(loader: Any) -> Iterator[Any]:
        name = type(loader.dataset).__name__
        print(f"proxyloader: measuring the loop over {name} for about {seconds:g} s", file=sys.stderr)
        with measuring, diagnosis(loader, seconds=seconds) as batches:
            yield from batches
            results.append(batches.result)
        raise SystemExit

    def iterate(loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        loaders = (obj for obj in gc.get_objects() if issubclass(type(obj), StockLoader))
        is_other = measuring.locked() or results or _num_samples(loader) < max(map(_num_samples, loaders))
        return original(loader) if is_other else measure(loader)

    with (
        patch.object(StockLoader, "__iter__", partialmethod(iterate, StockLoader.__iter__)),
        patch.object(DataLoader, "__iter__", partialmethod(iterate, DataLoader.__iter__)),
    ):
        yield results


def _num_samples(loader: Any) -> float:
    """Return the number of samples; -1 for the torch loader inside one of ours."""
    is_internal = type(loader).__module__.startswith("proxyloader.workers")
    length = -1 if is_internal else get_length(getattr(loader, "dataset", ()))
    return np.inf if length is None else length


def diagnose_script(script: Path, arguments: Sequence[str], seconds: int) -> None:
    """Run a script, like ``python script arguments``, until the loop over its largest loader is diagnosed. Print the
    report. If the script raises an error, print it and exit with status 1."""
    script.open().close()
    importlib.import_module("psutil")  # before the script runs
    path = [str(script.parent), *sys.path]
    with patch.multiple(sys, argv=[str(script), *arguments], path=path), _intercept_loops(seconds) as results:
        try:
            runpy.run_path(os.path.abspath(script), run_name="__main__")
        except SystemExit:
            if not results:  # the script's own
                raise
        except Exception as error:  # also one that a command reports in a line
            traceback.print_exception(error)
            raise SystemExit(1) from None
    gc.collect()  # frees the frames of the script, and with them its workers
    if not results:
        raise ValueError(
            f"{script} created no DataLoader, or stopped looping over its largest one before it was measured. In a "
            "loop of your own, use proxyloader.diagnosis(loader)"
        )
    print("", *results, sep="\n")
