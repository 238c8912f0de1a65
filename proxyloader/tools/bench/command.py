"""``proxyloader bench``: options, output and exit status, and the record of the results."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
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
from .cases import ADDED_SEPARATOR, CASES, DEFAULTS_SUFFIX, OURS, case_names, default_names, find_case
from .config import SIZES, BenchConfig, Tuning, machine
from .runner import Outcome, Ranges, run, run_first_epochs, tune

FIRST_EPOCHS = 3
COUNTS = (4, 8, 16)  # of workers or threads to try, in addition to all, half and a quarter of the cores
MIN_BATCHES = 4  # per loop
METHOD = 3  # version of the measurement; benchmarks/README.md describes the differences
UNRECORDED = ("root", "tuning", "use_defaults", "persistent_workers")  # omitted settings

Record = dict[str, Any]


def bench(**options: Any) -> int:
    """Run the cases, print the results and append the record, or list the cases. Return the exit status."""
    args, console = argparse.Namespace(**options), Console(highlight=False)
    if args.list:
        for name, case in CASES.items():
            console.print(f"[bold]{name}[/bold]: {(case.loops.__doc__ or '').splitlines()[0]}")
        return 0
    config = make_config(args)
    ranges = make_ranges(args, config)
    names = _select(case_names(config), args.only)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check_can_be_written(args.out)
    console.print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    for warning in find_problems(config):
        console.print(f"[bold yellow]! {warning}")
    if not args.data:
        make_dataset(config.root, images=config.images, **SIZES[config.size])
    begin = time.monotonic()

    def log(line: str) -> None:
        console.print(f"{time.monotonic() - begin:6.0f} s  {line}", markup=False, soft_wrap=True)

    def default_config(name: str, **changed: Any) -> BenchConfig:
        workers = ranges["workers"][-1] if "workers" in find_case(name).tuned else None
        return replace(config, use_defaults=True, tuning=Tuning(workers), **changed)

    if args.first_epochs:
        for path, _ in ImageFolder(config.root).samples:
            Path(path).read_bytes()  # into the page cache
        settings = {name: default_config(name, persistent_workers=False) for name in names}
        outcomes = run_first_epochs(settings, args.rounds, FIRST_EPOCHS, log)
    else:
        tuned = {name: tune(config, name, ranges, log) for name in names}
        settings = {name: replace(config, tuning=tuning) for name, (tuning, _) in tuned.items()}
        outcomes = run(settings, args.rounds, args.seconds, log)
        for name, (_, trials) in tuned.items():
            outcomes[name] |= {"trials": trials} if trials else {}
        # The defaults run later, as the JPEG engines lack the memory for all cases at once.
        settings = {name: default_config(name) for name in default_names(names)}
        outcomes |= run(settings, args.rounds, args.seconds, log)
    record = make_record(config, ranges, outcomes, shlex.join(["proxyloader", *sys.argv[1:]]))
    if args.first_epochs:
        record |= {"benchmark": "first_epochs", "epochs": FIRST_EPOCHS, "page_cache": "warm"}
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    console.print(make_table(record))
    if not args.first_epochs:
        plot(record, args.out.with_suffix(".png"))
    failed = [name for name, outcome in outcomes.items() if "failure" in outcome]
    return 1 if OURS in failed or len(failed) == len(outcomes) else 0


def _select(names: list[str], only: list[str] | None) -> list[str]:
    """Return the cases in ``only``, and those that add an augmentation or dataset to them."""
    if unknown := [name for name in only or () if name not in names]:
        raise ValueError(f"no case {unknown[0]!r} with these options, only {', '.join(map(repr, names))}")
    return [name for name in names if not only or name in only or name.split(ADDED_SEPARATOR)[0] in only]


def make_config(args: argparse.Namespace) -> BenchConfig:
    """Return the settings, with the defaults for this machine. Raise ValueError if options contradict each other."""
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
        size="" if args.data else args.size,
        images=images,
        passes=1 if args.first_epochs else args.passes or (6 if on_gpu else 1),
        batch_size=batch_size,
        device=device,
        dtype=args.dtype,
        channels_last=args.channels_last,
        added=(*args.augment, *args.datasets),
        model=args.model,
    )


def make_ranges(args: argparse.Namespace, config: BenchConfig) -> Ranges:
    """Return the values to try, with the defaults for this machine."""
    cores = usable_cores()
    counts = {max(1, cores // 4), max(1, cores // 2), cores, *(n for n in COUNTS if n <= cores)}
    threads = counts if config.on_gpu else counts | {cores + 1}
    ranges = {"workers": args.workers or counts, "threads": args.threads or threads}
    return {name: sorted(set(values)) for name, values in (ranges | {"hw_decoder_load": args.hw_decoder_load}).items()}


def find_problems(config: BenchConfig) -> list[str]:
    """Return a sentence for each reason why the measurements are unreliable."""
    cores, load, problems = usable_cores(), os.getloadavg()[0], []
    if load > 0.5 * cores:
        problems.append(f"Other processes are running (load {load:.1f} on {cores} cores).")
    batches = math.ceil(config.images * config.passes / config.batch_size)
    if batches < MIN_BATCHES:
        problems.append(
            f"A loop has {batches} batches. DALI prepares some of them before the loop starts, so short loops "
            "overstate its speed. Use more --passes or --images, or a smaller --batch-size."
        )
    return problems


# --- the record ---


def make_record(config: BenchConfig, ranges: Ranges, outcomes: Mapping[str, Outcome], command: str) -> Record:
    """Return a record, a line of a results file."""
    return {
        "date": datetime.date.today().isoformat(),
        "benchmark": "bench",
        "method": METHOD,
        "command": command,
        "machine": machine(),
        **{name: value for name, value in asdict(config).items() if name not in UNRECORDED},
        **ranges,
        "cases": {name: _summary(outcome) for name, outcome in outcomes.items()},
    }


def _summary(outcome: Outcome) -> dict[str, Any]:
    summary = {**outcome, "tuning": outcome["tuning"]._asdict()}
    if rounds := summary.pop("rounds", None):
        summary |= _medians(rounds)
    if "epochs" in summary:
        summary["epochs"] = [_medians(rounds) for rounds in zip(*summary["epochs"])]
    return summary


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the median of each metric, the maximum of ``wait_ms_max``, and the speeds of all rounds."""
    summary: dict[str, Any] = {"images_per_s_rounds": [round(figures["images_per_s"], 1) for figures in rounds]}
    for name in rounds[0]:
        reduce = max if name == "wait_ms_max" else statistics.median
        summary[name] = round(reduce(figures[name] for figures in rounds), 3)
    return summary


def relative_speed(record: Record, name: str) -> float | None:
    """Return our speed relative to another case, both tuned or both with defaults."""
    ours = OURS + DEFAULTS_SUFFIX if name.endswith(DEFAULTS_SUFFIX) else OURS
    speeds = [record["cases"].get(case, {}).get("images_per_s") for case in (ours, name)]
    return speeds[0] / speeds[1] if all(speeds) and name != ours else None


COLUMNS = {
    "images/s": "images_per_s:,.0f",
    "first batch, s": "first_batch_s:.1f",
    "CPU ms/image": "cpu_ms_per_image:.2f",
}
"""Key and format of each column. For first epochs, a cell lists the values of all epochs."""


def make_table(record: Record) -> Table:
    title = f"{_title(record)}: {record['images']:,} images, batch {record['batch_size']}, model {record['model']}"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("case", min_width=max(len(word) for name in record["cases"] for word in name.split()))
    for column in (*COLUMNS, "lowest - highest", "proxyloader is", "setting"):
        table.add_column(column, justify="right", overflow="fold")
    for name, case in record["cases"].items():
        cells = []
        for key, spec in (column.split(":") for column in COLUMNS.values()):
            cells.append(", ".join(format(run[key], spec) for run in case.get("epochs", [case]) if key in run))
        speeds, ratio = case.get("images_per_s_rounds"), relative_speed(record, name)
        cells.append(f"{min(speeds):,.0f} - {max(speeds):,.0f}" if speeds else "")
        cells.append(f"{ratio:.2f} times" if ratio else "")
        table.add_row(name, *cells, case.get("failure") or str(Tuning(**case["tuning"])))
    return table


def plot(record: Record, path: Path) -> None:
    """Plot a bar for each case, with error bars from the slowest to the fastest round."""
    cases = {name: case for name, case in record["cases"].items() if "images_per_s" in case}
    speeds = [case["images_per_s"] for case in cases.values()]
    rounds = [case["images_per_s_rounds"] for case in cases.values()]
    spread = [[abs(speed - limit(values)) for speed, values in zip(speeds, rounds)] for limit in (min, max)]
    figure = Figure(figsize=(8, 0.5 * len(cases) + 1.5), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:green" if name.startswith(OURS) else "tab:blue" for name in cases]
    axes.barh(list(cases), speeds, xerr=spread, color=colors, capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="images per second", title=_title(record))
    figure.savefig(path, dpi=120)


def _title(record: Record) -> str:
    return f"{record['machine']['gpu'] or 'CPU'}, {record['machine']['cores']} cores"
