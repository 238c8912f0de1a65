"""How fast is each kind of pipeline with torch's loader, an earlier version of this one, and this version?

    git worktree add ../before COMMIT && python benchmarks/versions.py --before ../before
    ... --pipelines ImageFolder "direct functional calls" --rounds 5
    ... --pipelines RandAugment --loaders now ImageFolder
    ... --device cpu --images 1024 --workers 2

For each pipeline, every loader starts in a new process, one after another, with persistent workers. Then they take
turns while the others wait. Reports seconds from creating the loader to the first batch; photographs per second of the
first epoch, measured from the creation of the loader, or over its first seconds; and medians of the turns: photographs
per second, CPU time per photograph of all processes, and the longest wait for a batch. The epochs of the turns are of
endless length, so their start and end do not count. Batches are moved to the device, and not used. Appends a JSON line
for each pipeline to benchmarks/results/versions.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _common import append_record, cpu_s, make_parser, make_photographs
from _pipelines import PIPELINES
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader as StockLoader, RandomSampler, SequentialSampler
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
SETTLE_S = 0.5  # time that a loader runs in its turn before it is measured: it uses up what it prefetched


def arguments() -> argparse.Namespace:
    parser = make_parser("versions", __doc__)
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of an earlier version")
    parser.add_argument("--pipelines", nargs="+", default=[*PIPELINES], choices=PIPELINES, metavar="NAME")
    parser.add_argument(
        "--loaders",
        nargs="+",
        choices=("torch", "before", "now", *PIPELINES),
        metavar="NAME",
        help="torch, before, now, or another pipeline, which runs with this version (default: the first three)",
    )
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a turn, and of the first epoch at most")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # the loader, in its process
    return parser.parse_args()


class Endless(RandomSampler):
    """Repeats shuffled epochs indefinitely."""

    def __iter__(self) -> Any:
        return itertools.chain.from_iterable(super(Endless, self).__iter__() for _ in itertools.count())


class Switch(SequentialSampler):
    """Delegates to ``current``, so that persistent workers can start on another order."""

    current: Any = None

    def __iter__(self) -> Any:
        return iter(self.current)


def measure(options: argparse.Namespace) -> None:
    """Measure a pipeline with the version that this process imports: its start, then a turn for each line of stdin."""
    import proxyloader

    checkout = Path(proxyloader.__file__).parents[1]
    if options.measure == "before" and checkout != options.before.resolve():
        raise RuntimeError(f"{checkout} was imported instead of {options.before}")
    ((make, more),) = [PIPELINES[name] for name in options.pipelines]
    dataset, on_gpu = make(str(make_photographs(options.images))), options.device == "cuda"
    torch.ones(1, device=options.device)
    created_s, sampler = time.perf_counter(), Switch(dataset)
    arguments: dict[str, Any] = {"batch_size": options.batch_size, "sampler": sampler, "num_workers": options.workers}
    arguments |= {"persistent_workers": True, "drop_last": True, **more}
    if options.measure == "torch":
        loader: Any = StockLoader(dataset, **arguments, pin_memory=on_gpu)
    else:
        loader = proxyloader.DataLoader(dataset, **arguments, device=options.device)

    def move(batch: Any) -> Any:
        return tree_map(lambda leaf: leaf.to(options.device, non_blocking=True) if hasattr(leaf, "to") else leaf, batch)

    def now_s() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    sampler.current, size = RandomSampler(dataset), loader.batch_size
    first_batch_s = 0.0
    for batches, batch in enumerate(loader, 1):  # noqa: B007
        move(batch)
        first_batch_s = first_batch_s or now_s() - created_s
        if time.perf_counter() - created_s - first_batch_s > options.seconds:
            break
    start = {"first_batch_s": first_batch_s, "first_epoch_per_s": batches * size / (now_s() - created_s)}
    print(json.dumps(start), flush=True)
    for _ in loader if batches < len(loader) else ():  # nothing after whole epochs, which leave the workers idle
        break
    sampler.current = Endless(dataset)
    batches_of_turns = iter(loader)
    for _ in sys.stdin:
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < SETTLE_S:
            move(next(batches_of_turns))
        start_s, start_cpu_s, count, longest_s = now_s(), cpu_s(), 0, 0.0
        arrival_s = start_s
        while arrival_s - start_s < options.seconds:
            move(next(batches_of_turns))
            before_s, arrival_s, count = arrival_s, time.perf_counter(), count + size
            longest_s = max(longest_s, arrival_s - before_s)
        turn = {"per_s": count / (now_s() - start_s), "cpu_ms": 1e3 * (cpu_s() - start_cpu_s) / count}
        print(json.dumps(turn | {"longest_wait_ms": 1e3 * longest_s}), flush=True)


def start(loader: str, pipeline: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start to measure in a new process. ``loader`` may be a pipeline, which replaces ``pipeline``."""
    if loader in PIPELINES:
        loader, pipeline = "now", loader
    names = ("device", "images", "batch_size", "workers", "seconds")
    settings = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    checkout = options.before.resolve() if loader == "before" else HERE.parent
    settings += ["--before", str(checkout)] if loader == "before" else []
    command = [sys.executable, __file__, "--measure", loader, "--pipelines", pipeline, *settings]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=HERE)


def compare(pipeline: str, loaders: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the start and the turns of each loader. Those that fail, whose errors have been printed, are left out."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        processes = {}
        for loader in loaders:
            process = stack.enter_context(start(loader, pipeline, options))
            assert process.stdout is not None
            if line := process.stdout.readline():
                processes[loader], found[loader] = process, {"start": json.loads(line), "turns": []}
        for number in tqdm(range(options.rounds), pipeline, unit="round", leave=False, disable=None):
            for loader, process in [*processes.items()][:: -1 if number % 2 else 1]:
                assert process.stdin is not None and process.stdout is not None
                print(file=process.stdin, flush=True)
                found[loader]["turns"].append(json.loads(process.stdout.readline()))
    return found


def main() -> None:
    options = arguments()
    if options.measure:
        measure(options)
        return
    make_photographs(options.images)
    loaders = options.loaders or ["torch", *(["before"] if options.before else []), "now"]
    medians: dict[str, Any] = {}
    for pipeline in options.pipelines:
        rounds = compare(pipeline, loaders, options)
        medians[pipeline] = {
            loader: {name: round(value, 3) for name, value in one["start"].items()}
            | {name: round(statistics.median(turn[name] for turn in one["turns"]), 3) for name in one["turns"][0]}
            for loader, one in rounds.items()
        }
        settings = ("device", "images", "batch_size", "workers", "seconds")
        append_record(options, *settings, pipeline=pipeline, medians=medians[pipeline], rounds=rounds)
    table = Table(
        "pipeline", "loader", "first batch, s", "first epoch, images/s", "images/s", "CPU ms", "longest wait, ms"
    )
    for pipeline, found in medians.items():
        for loader, (first_s, *others) in ((loader, values.values()) for loader, values in found.items()):
            cells = (f"{value:,.{digits}f}" for value, digits in zip(others, (0, 0, 3, 0)))
            table.add_row(pipeline, loader, f"{first_s:.2f}", *cells)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()
