"""Tune each case, then measure the cases in interleaved rounds. Each case has its own process.

Tuning first tries all combinations of DALI threads and JPEG engine loads with the median number of workers, then the
other numbers of workers with the best combination.
"""

import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import psutil
import torch
import torchvision

from ..processes import block_sigint, cpu_seconds
from .cases import CASES, FEW, FEW_WORKERS, OURS, Loops
from .config import BenchConfig, Tuning

TIMEOUT_S = 1800  # of a request to a process
TRIAL_BATCHES_PER_WORKER = 4  # in a loop of a trial, for the largest number of workers
MIN_TRIAL_S = 1.5
TRIAL_FIGURES = ("first_loop_images_per_s", "images_per_s", "failure")

Ranges = dict[str, list[Any]]  # values to try for each field of ``Tuning``, in ascending order

Figures = dict[str, float]
Outcome = dict[str, Any]
"""``tuning`` of a case; medians of its rounds and ``first_batch_s``, or of its ``epochs``; ``failure`` if it failed."""

_start_s = time.monotonic()


def log(line: str) -> None:
    print(f"{time.monotonic() - _start_s:6.0f} s  {line}", flush=True)


def tune(config: BenchConfig, ranges: Ranges) -> tuple[Tuning, list[dict[str, Any]]]:
    """Return the fastest tuning of a case, and the results of all trials."""
    known = {*CASES[config.case].tuned} - (set() if config.on_gpu else {"hw_decoder_load"})
    workers, threads, loads = (values if key in known else [None] for key, values in ranges.items())
    workers = [FEW_WORKERS] if config.case == FEW else workers
    batches = TRIAL_BATCHES_PER_WORKER * max(1, *ranges["workers"])
    config = replace(config, passes=min(config.passes, -(-batches * config.batch_size // config.samples)))
    tunings = [Tuning(workers[len(workers) // 2], *pair) for pair in product(threads, loads)]
    if len(tunings) == len(workers) == 1 and config.task == "classification":
        return tunings[0], []

    trials: dict[Tuning, dict[str, Any]] = {}
    while untried := [tuning for tuning in tunings if tuning not in trials]:
        for tuning in untried:
            log(f"trial of {config.name} ({tuning})")
            (outcome,) = run([replace(config, tuning=tuning)], 1, MIN_TRIAL_S).values()
            trials[tuning] = {key: outcome[key] for key in TRIAL_FIGURES if key in outcome}
        best = max(trials, key=lambda tuning: trials[tuning].get("images_per_s", 0.0))
        tunings = [best._replace(workers=count) for count in workers]
    return best, [tuning._asdict() | figures for tuning, figures in trials.items()]


def run(configs: list[BenchConfig], rounds: int, seconds: float) -> dict[str, Outcome]:
    """Measure whole loops of each case, for at least ``seconds`` per round. Return the outcomes by name."""
    outcomes: dict[str, Outcome] = {config.name: {"tuning": config.tuning._asdict()} for config in configs}
    results: dict[str, list[Figures]] = {name: [] for name in outcomes}
    with start_processes(outcomes) as processes:
        for config, (name, outcome) in zip(configs, outcomes.items()):
            with catch_failure(name, outcome):
                first = processes[name].ask(begin, config)
                outcome["first_batch_s"] = round(first["first_batch_s"], 3)
                outcome["first_loop_images_per_s"] = round(first["images_per_s"], 1)
                log(f"{name} ({config.tuning}): first batch after {outcome['first_batch_s']:.1f} s")
        for number, (name, outcome) in product(range(1, rounds + 1), outcomes.items()):
            if "failure" not in outcome:
                with catch_failure(name, outcome):
                    results[name].append(processes[name].ask(measure, seconds))
                    log(f"round {number} of {name}: {results[name][-1]['images_per_s']:,.0f} images/s")
    return {name: outcome | medians(results[name]) for name, outcome in outcomes.items()}


def run_first_epochs(configs: list[BenchConfig], rounds: int, epochs: int) -> dict[str, Outcome]:
    """Measure the first epochs of each case, in a new process per round."""
    outcomes: dict[str, Outcome] = {config.name: {"tuning": config.tuning._asdict()} for config in configs}
    results: dict[str, list[list[Figures]]] = {name: [] for name in outcomes}
    for config, (name, outcome) in rounds * [*zip(configs, outcomes.items())]:
        if "failure" not in outcome:
            with start_processes([name]) as processes, catch_failure(name, outcome):
                process = processes[name]
                results[name].append([process.ask(begin, config), *(process.ask(loop) for _ in range(1, epochs))])
                speeds = ", ".join(f"{figures['images_per_s']:,.0f}" for figures in results[name][-1])
                log(f"{name}: {speeds} images/s in epochs 1 to {epochs}")
    return {name: outcome | {"epochs": [*map(medians, zip(*results[name]))]} for name, outcome in outcomes.items()}


def medians(rounds: Sequence[Figures]) -> dict[str, Any]:
    """Return the median of each metric, the maximum of those that end with "_max", and the speeds of all rounds."""
    summary: dict[str, Any] = {}
    for name in rounds[0] if rounds else ():
        values = [figures[name] for figures in rounds]
        summary[name] = round(max(values) if name.endswith("_max") else statistics.median(values), 3)
        if name == "images_per_s":
            summary["images_per_s_rounds"] = [round(value, 1) for value in values]
    return summary


def compare_targets(config: BenchConfig) -> dict[str, Any]:
    """Return the figures of ``compare``, from a new process, or a ``failure``."""
    outcome: dict[str, Any] = {}
    with start_processes([config.name]) as processes, catch_failure(config.name, outcome):
        outcome = processes[config.name].ask(compare, config)
        log(f"{config.name}: {outcome['targets_differ']} of {outcome['targets']:,} targets differ from torch's")
    return outcome


class CaseError(Exception):
    """A case failed. The message is one line."""


@contextmanager
def catch_failure(name: str, outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except CaseError as error:
        outcome["failure"] = str(error)
        log(f"{name} failed: {error}")


class CaseProcess:
    """The process of a case."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        with block_sigint():  # SIGINT stays blocked in the new process, which this one kills
            self.is_ready = self._pool.submit(_prepare, multiprocessing.get_start_method())

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the process, which a CaseError ends."""
        try:
            return self._pool.submit(function, *arguments).result(TIMEOUT_S)
        except Exception as error:
            self.end()
            # DALI's errors start with their location and end with this sentence.
            text = str(error).replace("Current pipeline object is no longer valid.", "").strip()
            reason = text.splitlines()[-1].strip() if text else f"no answer in {TIMEOUT_S} s"
            raise CaseError(f"{type(error).__name__}: {reason}") from error

    def end(self) -> None:
        """Kill the process and its children."""
        for process in list((self._pool._processes or {}).values()):
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                parent.suspend()  # so that it cannot start another process
                for member in [*parent.children(recursive=True), parent]:
                    member.kill()
        self._pool.shutdown()


@contextmanager
def start_processes(keys: Iterable[Any]) -> Iterator[dict[Any, CaseProcess]]:
    """Start a process for each key, and wait until all have imported their modules. Kill them at the end."""
    processes = {}
    with ExitStack() as stack:
        for key in keys:
            processes[key] = CaseProcess()
            stack.callback(processes[key].end)
        for process in processes.values():
            process.is_ready.result(TIMEOUT_S)
        yield processes


# --- in the process of a case -----------------------------------------------------------------------------------------

_config: BenchConfig
_loops: Loops = iter(())
_train_step: Callable[[Any], None] | None = None
_gpu_mb = 0.0


def _prepare(start_method: str) -> None:
    """Import torch and DALI, and let workers start as in the main process, not like this one."""
    multiprocessing.set_start_method(start_method, force=True)


def begin(config: BenchConfig) -> Figures:
    """Build the loader, and measure its first loop, including the time to build it. See ``loop``."""
    global _config, _loops, _train_step, _gpu_mb
    if config.use_defaults and config.case != OURS:
        # This package sets it on import. Users of other loaders do not import it.
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    torch.ones(1, device=config.device)  # starts CUDA
    free_mb = _free_gpu_mb(config)
    _train_step = None if config.model == "none" else _make_train_step(config)
    started, _config, _loops = time.perf_counter(), config, CASES[config.case].loops(config)
    figures = loop(started)
    _gpu_mb = free_mb - _free_gpu_mb(config)
    return figures


def loop(started: float | None = None) -> Figures:
    started = started or time.perf_counter()
    batches = iter(next(_loops))  # starts the workers
    images = first_images = _consume(next(batches))
    _wait_for_gpu()
    first = time.perf_counter()
    images += sum(map(_consume, batches))
    _wait_for_gpu()
    end = time.perf_counter()
    return {
        "first_batch_s": first - started,
        "images_per_s": images / (end - started),
        "images_per_s_after_first_batch": (images - first_images) / (end - first),
    }


def compare(config: BenchConfig) -> dict[str, Any]:
    """Load an epoch with this loader and with torch's, from the same seed, and compare each sample.

    ``targets_differ`` counts samples whose target, or the size of whose image, differs. ``image_difference_max`` is the
    largest mean absolute difference of an image, in units of its values.
    """
    # Without workers, the loaders would draw from the same generators.
    config = replace(config, passes=1, tuning=config.tuning._replace(workers=config.tuning.workers or 1))
    epochs = []
    for case in (config.case, "torch"):
        torch.manual_seed(0)
        batches = next(CASES[case].loops(config))
        epochs.append(itertools.chain([next(batches)], batches))
    targets = differ = 0
    difference = 0.0
    for batch, torch_batch in zip(*epochs, strict=True):
        for (image, target), (torch_image, torch_target) in zip(zip(*batch), zip(*torch_batch), strict=True):
            targets += 1
            try:
                torch.testing.assert_close((image.shape, target), (torch_image.shape, torch_target), rtol=0, atol=0)
            except AssertionError:
                differ += 1
            if image.shape == torch_image.shape:
                difference = max(difference, float((image - torch_image).abs().mean()))
    return {"targets": targets, "targets_differ": differ, "image_difference_max": round(difference, 5)}


def measure(seconds: float) -> Figures:
    """Measure whole loops for at least ``seconds``. If batches may be prefetched already, first run another loop."""
    global _gpu_mb
    waits, pauses, images, free_mb = list[float](), list[float](), 0, _free_gpu_mb(_config)
    if CASES[_config.case].prefetches:
        loop()
    _wait_for_gpu()
    cpu, loop_cpu, started = cpu_seconds(), time.process_time(), time.perf_counter()
    while not images or time.perf_counter() - started < seconds:
        wait_start, first = time.perf_counter(), len(waits)
        batches = iter(next(_loops))
        while (batch := next(batches, None)) is not None:
            waits.append(1e3 * (time.perf_counter() - wait_start))
            images += _consume(batch)
            wait_start = time.perf_counter()
        pauses.append(waits[first])
    _wait_for_gpu()
    wall, cpu, loop_cpu = time.perf_counter() - started, cpu_seconds() - cpu, time.process_time() - loop_cpu
    _gpu_mb += free_mb - _free_gpu_mb(_config)  # of this process alone, as only one runs at a time
    return {
        "images_per_s": images / wall,
        "cpu_ms_per_image": 1e3 * cpu / images,
        "loop_cpu_ms_per_image": 1e3 * loop_cpu / images,  # excluding workers
        "wait_ms_p50": float(np.quantile(waits, 0.5)),
        "wait_ms_p99": float(np.quantile(waits, 0.99)),
        "wait_ms_max": max(waits),
        "pause_ms": statistics.median(pauses),
        **({"gpu_mb_max": _gpu_mb} if _config.on_gpu else {}),
    }


def _consume(batch: Any) -> int:
    if _train_step is not None:
        _train_step(batch)
    images = batch[0]
    return images.shape[:-3].numel() if isinstance(images, torch.Tensor) else len(images)


def _make_train_step(config: BenchConfig) -> Callable[[Any], None]:
    """Return a training step with mixed precision. Its fused optimizer does not synchronize the GPU."""
    model = torchvision.models.get_model(config.model, num_classes=1000)
    model = model.to(config.device, memory_format=config.format["memory_format"]).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=config.on_gpu)
    for weight in model.parameters():  # torch 2.14 does not initialize it if the first step overflows
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    half = torch.bfloat16 if config.dtype == "bfloat16" or not config.on_gpu else torch.float16
    scaler = torch.amp.GradScaler(config.device, enabled=half == torch.float16)

    def step(batch: Any) -> None:
        images, labels = batch
        with torch.autocast(config.device, half):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return step


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free_gpu_mb(config: BenchConfig) -> float:
    return torch.cuda.mem_get_info()[0] / 1e6 if config.on_gpu else 0.0
