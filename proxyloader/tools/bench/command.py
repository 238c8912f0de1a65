"""``proxyloader bench``: options, output and exit status, and the record of the results."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torchvision.datasets import ImageFolder

from ..._cores import usable_cores
from ...make_dataset import make_dataset
from ..files import check_can_be_written, photograph_folder
from . import SIZES
from .cases import CASES, OURS
from .config import BenchConfig, Tuning, machine
from .runner import Outcome, Ranges, run, run_first_epochs, tune

FIRST_EPOCHS = 3
COUNTS = (4, 8, 16)  # of workers or threads to try, in addition to all, half and a quarter of the cores
MIN_BATCHES = 4  # per loop
METHOD = 3  # version of the measurement; benchmarks/README.md describes the differences
RECORDED = ("images", "passes", "batch_size", "device", "dtype", "channels_last", "model")  # settings

Record = dict[str, Any]


def bench(**options: Any) -> int:
    """Run the cases, print the results and append the record, or list the cases. Return the exit status."""
    args = argparse.Namespace(**options)
    # Off a terminal, rich would cut the table at 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 240)
    if args.list:
        for name, case in CASES.items():
            console.print(f"[bold]{name}[/bold]: {case.description}")
        return 0
    base = make_config(args)
    configs, ranges = make_cases(args, base), make_ranges(args, base)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check_can_be_written(args.out)
    console.print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    if (batches := math.ceil(base.images * base.passes / base.batch_size)) < MIN_BATCHES:
        console.print(
            f"[bold yellow]! A loop has {batches} batches. DALI prepares some of them before the loop starts, so short "
            "loops overstate its speed. Use more --passes or --images, or a smaller --batch-size."
        )
    if not args.data:
        make_dataset(base.root, images=base.images, **SIZES[args.size])

    def by_default(config: BenchConfig, **changed: Any) -> BenchConfig:
        workers = ranges["workers"][-1] if "workers" in CASES[config.case].tuned else None
        return replace(config, use_defaults=True, tuning=Tuning(workers), **changed)

    if args.first_epochs:
        for path, _ in ImageFolder(base.root).samples:
            Path(path).read_bytes()  # into the page cache
        configs = [by_default(config, persistent_workers=False) for config in configs]
        outcomes = run_first_epochs(configs, args.rounds, FIRST_EPOCHS)
    else:
        tuned = {config: tune(config, ranges) for config in configs}
        outcomes = run([replace(config, tuning=best) for config, (best, _) in tuned.items()], args.rounds, args.seconds)
        for config, (_, trials) in tuned.items():
            outcomes[config.name] |= {"trials": trials} if trials else {}
        # The defaults run later, as the JPEG engines lack the memory for all cases at once.
        with_defaults = [by_default(config) for config in configs if "threads" in CASES[config.case].tuned]
        outcomes |= run(with_defaults, args.rounds, args.seconds)
    record = make_record(args, base, ranges, outcomes)
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    console.print(make_table(record))
    if not args.first_epochs:
        plot(record, args.out.with_suffix(".png"))
    failed = [name for name, outcome in outcomes.items() if "failure" in outcome]
    return 1 if OURS in failed or len(failed) == len(outcomes) else 0


def make_config(args: argparse.Namespace) -> BenchConfig:
    """Return the settings of all cases, with the defaults for this machine. ValueError: options contradict."""
    if args.data and (args.images or args.size != "imagenet"):
        raise ValueError("--images and --size cannot be used with --data")
    if args.out.suffix != ".jsonl":
        raise ValueError(f"--out must be a .jsonl file, got {args.out}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu, is_large = device == "cuda", args.size == "camera"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda requires a GPU, and torch sees none")
    batch_size = args.batch_size or (64 if is_large else 256)
    images = args.images or (8192 if on_gpu else 1024) // (8 if is_large else 1)
    images = len(ImageFolder(str(args.data))) if args.data else images
    if images < batch_size:
        raise ValueError(f"--batch-size {batch_size} is larger than the number of images, {images}")
    return BenchConfig(
        root=str(args.data or photograph_folder(f"bench-{args.size}", images)),
        images=images,
        passes=1 if args.first_epochs else args.passes or (6 if on_gpu else 1),
        batch_size=batch_size,
        device=device,
        dtype=args.dtype,
        channels_last=args.channels_last,
        model=args.model,
    )


def make_cases(args: argparse.Namespace, base: BenchConfig) -> list[BenchConfig]:
    """Return the cases in ``args.only``, and those that add an augmentation or dataset to them."""
    configs = [replace(base, case=case) for case in CASES if case != "synthetic" or args.model != "none"]
    added = (*args.augment, *args.datasets)
    configs += [replace(base, case=case, added=name) for name in added for case in ("torch", OURS)]
    names, only = [config.name for config in configs], args.only or list(CASES)
    if unknown := [name for name in args.only or () if name not in names]:
        raise ValueError(f"no case {unknown[0]!r} with these options, only {', '.join(map(repr, names))}")
    return [config for config in configs if config.name in only or config.case in only]


def make_ranges(args: argparse.Namespace, base: BenchConfig) -> Ranges:
    """Return the values to try, with the defaults for this machine."""
    cores = usable_cores()
    counts = {max(1, cores // 4), max(1, cores // 2), cores, *(n for n in COUNTS if n <= cores)}
    threads = counts if base.on_gpu else counts | {cores + 1}
    ranges = {"workers": args.workers or counts, "threads": args.threads or threads}
    return {name: sorted(set(values)) for name, values in (ranges | {"hw_decoder_load": args.hw_decoder_load}).items()}


def make_record(args: argparse.Namespace, base: BenchConfig, ranges: Ranges, outcomes: dict[str, Outcome]) -> Record:
    """Return a record, a line of a results file."""
    first = {"benchmark": "first_epochs", "epochs": FIRST_EPOCHS, "page_cache": "warm"} if args.first_epochs else {}
    return {
        "date": datetime.date.today().isoformat(),
        "benchmark": "bench",
        "method": METHOD,
        "command": shlex.join(["proxyloader", *sys.argv[1:]]),
        "machine": machine(),
        **{name: value for name, value in asdict(base).items() if name in RECORDED},
        "added": [*args.augment, *args.datasets],
        "size": "" if args.data else args.size,
        **ranges,
        "cases": outcomes,
        **first,
    }


COLUMNS = {
    "images/s": "images_per_s:,.0f",
    "first batch, s": "first_batch_s:.1f",
    "CPU ms/image": "cpu_ms_per_image:.2f",
}
"""Key and format of each column. For first epochs, a cell lists the values of all epochs."""


def make_table(record: Record) -> Table:
    title = f"{_title(record)}: {record['images']:,} images, batch {record['batch_size']}, model {record['model']}"
    table, cases = Table(title=title, box=SIMPLE_HEAD), record["cases"]
    table.add_column("case", min_width=max(len(word) for name in cases for word in name.split()))
    for column in (*COLUMNS, "lowest - highest", "proxyloader is", "setting"):
        table.add_column(column, justify="right", overflow="fold")
    for name, case in cases.items():
        cells = []
        for key, spec in (column.split(":") for column in COLUMNS.values()):
            cells.append(", ".join(format(run[key], spec) for run in case.get("epochs", [case]) if key in run))
        speeds, ours = case.get("images_per_s_rounds"), OURS + ", by default" * name.endswith(", by default")
        cells.append(f"{min(speeds):,.0f} - {max(speeds):,.0f}" if speeds else "")
        speed, our_speed = (cases.get(each, {}).get("images_per_s") for each in (name, ours))
        cells.append(f"{our_speed / speed:.2f} times" if speed and our_speed and name != ours else "")
        table.add_row(name, *cells, case.get("failure") or str(Tuning(**case["tuning"])))
    return table


def plot(record: Record, path: Path) -> None:
    """Plot a bar for each case, with error bars from the slowest to the fastest round."""
    figure = Figure(figsize=(8, 0.5 * len(record["cases"]) + 1.5), layout="constrained")
    axes = figure.subplots()
    for name, case in record["cases"].items():
        speed, speeds = case.get("images_per_s", 0.0), case.get("images_per_s_rounds", [0.0])
        spread = [[abs(speed - limit(speeds))] for limit in (min, max)]
        axes.barh(name, speed, xerr=spread, color="tab:green" if name.startswith(OURS) else "tab:blue", capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="images per second", title=_title(record))
    figure.savefig(path, dpi=120)


def _title(record: Record) -> str:
    return f"{record['machine']['gpu'] or 'CPU'}, {record['machine']['cores']} cores"
