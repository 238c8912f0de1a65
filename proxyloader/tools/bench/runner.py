"""Tune each case, then measure all cases in interleaved rounds. Each case has its own process.

First, all combinations of DALI threads and engine shares are tried with the median number of workers; then the other
numbers of workers with the best combination.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import psutil
import torch
import torchvision

from ..processes import cpu_seconds, ctrl_c_held_back
from .cases import CASES, OURS, Loops, find_case, make_loops
from .config import BenchConfig, Tuning

TIMEOUT_S = 1800  # of a request to a process
TRIAL_BATCHES_PER_WORKER = 4  # in a loop of a trial, for the largest number of workers
MIN_TRIAL_S, MAX_TRIAL_S = 1.5, 5.0  # a first loop that takes longer is interrupted, and the speed until then counts

Ranges = dict[str, list[Any]]
"""Values to try for each field of ``Tuning``, in ascending order."""

Figures = dict[str, float]
Tell = Callable[[str], None]
Outcome = dict[str, Any]
"""``tuning`` of a case; ``first_batch_s`` and ``rounds``, or ``epochs`` of each round; ``failure`` if it failed."""


def tune(setting: BenchConfig, name: str, ranges: Ranges, tell: Tell) -> tuple[Tuning, list[dict[str, Any]]]:
    """Return the fastest tuning of a case, and the results of all trials."""
    known = {*find_case(name).tuned} - (set() if setting.on_gpu else {"hw_decoder_load"})
    workers, threads, loads = (values if key in known else [None] for key, values in ranges.items())
    batches = TRIAL_BATCHES_PER_WORKER * max(1, *ranges["workers"])
    setting = replace(setting, passes=min(setting.passes, -(-batches * setting.batch_size // setting.images)))
    tunings = [Tuning(workers[len(workers) // 2], *pair) for pair in product(threads, loads)]
    if len(tunings) == len(workers) == 1:
        return tunings[0], []

    trials: dict[Tuning, dict[str, Any]] = {}
    while untried := [tuning for tuning in tunings if tuning not in trials]:
        trials |= try_each(name, [replace(setting, tuning=each) for each in untried], tell)
        best = max(trials, key=lambda tuning: trials[tuning].get("images_per_s", 0.0))
        tunings = [best._replace(workers=count) for count in workers]
    return best, [tuning._asdict() | figures for tuning, figures in trials.items()]


def try_each(name: str, settings: Sequence[BenchConfig], tell: Tell) -> dict[Tuning, dict[str, Any]]:
    """Measure a case with each setting. Return the speed or the failure of each."""
    trials: dict[Tuning, dict[str, Any]] = {setting.tuning: {} for setting in settings}
    with start_processes(trials) as processes:
        for setting in settings:
            process, trial = processes[setting.tuning], trials[setting.tuning]
            with catch_failure(f"trial of {name} ({setting.tuning})", trial, tell):
                found: Figures = process.ask(begin, name, setting, MAX_TRIAL_S)
                was_cut, speed = "was_cut" in found, found["images_per_s_after_first_batch"]
                speed = speed if was_cut else process.ask(measure, MIN_TRIAL_S)["images_per_s"]
                tell(f"trial of {name} ({setting.tuning}): {speed:,.0f} images/s")
                trial |= {"images_per_s": round(speed, 1), "was_cut": was_cut}
            process.end()  # frees its memory of the JPEG engines
    return trials


def run(settings: Mapping[str, BenchConfig], rounds: int, seconds: float, tell: Tell) -> dict[str, Outcome]:
    """Measure whole loops of each case, for at least ``seconds`` per round. Return the outcomes by name."""
    outcomes: dict[str, Outcome] = {name: {"tuning": each.tuning, "rounds": []} for name, each in settings.items()}
    with start_processes(settings) as processes:
        for name, outcome in outcomes.items():
            with catch_failure(name, outcome, tell):
                outcome["first_batch_s"] = processes[name].ask(begin, name, settings[name])["first_batch_s"]
                tell(f"{name} ({outcome['tuning']}): first batch after {outcome['first_batch_s']:.1f} s")
        for number, (name, outcome) in product(range(1, rounds + 1), outcomes.items()):
            if "failure" not in outcome:
                with catch_failure(name, outcome, tell):
                    outcome["rounds"].append(processes[name].ask(measure, seconds))
                    tell(f"round {number} of {name}: {outcome['rounds'][-1]['images_per_s']:,.0f} images/s")
    return outcomes


def run_first_epochs(settings: Mapping[str, BenchConfig], rounds: int, epochs: int, tell: Tell) -> dict[str, Outcome]:
    """Measure the first epochs of each case, in a new process per round."""
    outcomes: dict[str, Outcome] = {name: {"tuning": each.tuning, "epochs": []} for name, each in settings.items()}
    for name, outcome in rounds * [*outcomes.items()]:
        if "failure" not in outcome:
            with start_processes([name]) as processes, catch_failure(name, outcome, tell):
                process = processes[name]
                found = [process.ask(begin, name, settings[name]), *(process.ask(loop) for _ in range(1, epochs))]
                outcome["epochs"].append(found)
                speeds = ", ".join(f"{each['images_per_s']:,.0f}" for each in found)
                tell(f"{name}: {speeds} images/s in epochs 1 to {epochs}")
    return outcomes


class CaseError(Exception):
    """Why a case failed, in one line."""


@contextmanager
def catch_failure(name: str, outcome: Outcome, tell: Tell) -> Iterator[None]:
    """Store and report a CaseError."""
    try:
        yield
    except CaseError as error:
        outcome["failure"] = str(error)
        tell(f"{name} failed: {error}")


class CaseProcess:
    """The process of a case."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        with ctrl_c_held_back():  # Ctrl-C stays blocked in the new process, which this one kills
            self.is_ready = self._pool.submit(_set_start_method, multiprocessing.get_start_method())

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the process. A CaseError ends the process."""
        try:
            return self._pool.submit(function, *arguments).result(TIMEOUT_S)
        except Exception as error:
            self.end()
            # Errors of DALI start with their location, and end with this sentence.
            text = str(error).replace("Current pipeline object is no longer valid.", "").strip()
            reason = text.splitlines()[-1].strip() if text else f"no answer in {TIMEOUT_S} s"
            raise CaseError(f"{type(error).__name__}: {reason}") from error

    def end(self) -> None:
        """Kill the process and its children."""
        for process in list((self._pool._processes or {}).values()):
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                parent.suspend()  # so that it cannot start another process in the meantime
                for each in [*parent.children(recursive=True), parent]:
                    each.kill()
        self._pool.shutdown()


@contextmanager
def start_processes(keys: Iterable[Any]) -> Iterator[dict[Any, CaseProcess]]:
    """Start a process for each key and wait until it has imported all modules. Kill them at the end."""
    processes = {}
    with ExitStack() as stack:
        for key in keys:
            processes[key] = CaseProcess()
            stack.callback(processes[key].end)
        for each in processes.values():
            each.is_ready.result(TIMEOUT_S)
        yield processes


_name = ""
_loops: Loops = iter(())
_use: Callable[[Any], None] | None = None


def _set_start_method(start_method: str) -> None:
    """Start workers as in the main process. Calling this imports this module, with torch and DALI."""
    multiprocessing.set_start_method(start_method, force=True)


def begin(name: str, setting: BenchConfig, limit_s: float = math.inf) -> Figures:
    """Build the loader, and measure its first loop including this time. See ``loop``."""
    global _name, _loops, _use
    if setting.by_default and find_case(name) is not CASES[OURS]:
        # Set by importing this package, which users of other loaders do not.
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    torch.ones(1, device=setting.device)  # starts CUDA
    _use = None if setting.model == "none" else _training(setting)
    started, _name, _loops = time.perf_counter(), name, make_loops(name, setting)
    return loop(limit_s, started)


def loop(limit_s: float = math.inf, started: float | None = None) -> Figures:
    """Measure one loop. It is interrupted ``limit_s`` after its first batch."""
    started = started or time.perf_counter()
    batches = iter(next(_loops))  # starts the workers
    images = first_images = _used(next(batches))
    _wait_for_gpu()
    first, was_cut = time.perf_counter(), False
    while not was_cut and (batch := next(batches, None)) is not None:
        images += _used(batch)
        was_cut = time.perf_counter() - first > limit_s
    _wait_for_gpu()
    end = time.perf_counter()
    return {
        "first_batch_s": first - started,
        "images_per_s": images / (end - started),
        "images_per_s_after_first_batch": (images - first_images) / (end - first),
        **({"was_cut": True} if was_cut else {}),
    }


def measure(seconds: float) -> Figures:
    """Measure whole loops for at least ``seconds``. If batches may already be prepared, run another loop before."""
    waits, pauses, images = list[float](), list[float](), 0
    if find_case(_name).runs_ahead:
        loop()
    _wait_for_gpu()
    cpu, loop_cpu, started = cpu_seconds(), time.process_time(), time.perf_counter()
    while not images or time.perf_counter() - started < seconds:
        asked, at = time.perf_counter(), len(waits)
        batches = iter(next(_loops))
        while (batch := next(batches, None)) is not None:
            waits.append(1e3 * (time.perf_counter() - asked))
            images += _used(batch)
            asked = time.perf_counter()
        pauses.append(waits[at])
    _wait_for_gpu()
    wall, cpu, loop_cpu = time.perf_counter() - started, cpu_seconds() - cpu, time.process_time() - loop_cpu
    return {
        "images_per_s": images / wall,
        "cpu_ms_per_image": 1e3 * cpu / images,
        "loop_cpu_ms_per_image": 1e3 * loop_cpu / images,  # without the workers
        "wait_ms_p50": float(np.quantile(waits, 0.5)),
        "wait_ms_p99": float(np.quantile(waits, 0.99)),
        "wait_ms_max": max(waits),
        "pause_ms": statistics.median(pauses),
    }


def _used(batch: Any) -> int:
    if _use is not None:
        _use(batch)
    return len(batch[0])


def _training(setting: BenchConfig) -> Callable[[Any], None]:
    """Return a training step with mixed precision. It does not synchronize the GPU, as the optimizer is fused."""
    model = torchvision.models.get_model(setting.model, num_classes=1000)
    model = model.to(setting.device, memory_format=setting.format["memory_format"]).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=setting.on_gpu)
    for weight in model.parameters():  # torch 2.14 does not initialize it if the first step overflows
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    half = torch.bfloat16 if setting.dtype == "bfloat16" or not setting.on_gpu else torch.float16
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
