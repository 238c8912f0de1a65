"""``proxyloader bench``: options, output and exit status, and the record of the results."""

import argparse
import datetime
import json
import math
import os
import re
import shlex
import sys
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torchvision.datasets import ImageFolder

from ..._cores import usable_cores
from ...make_dataset import make_dataset
from . import SIZES, TASKS
from .cases import CASES, CLASSIFICATION_CASES, FEW, FEW_WORKERS, OURS, TASK_CASES
from .config import BenchConfig, Tuning, check_can_be_written, machine, photograph_folder
from .runner import Outcome, Ranges, compare_targets, run, run_first_epochs, tune

FIRST_EPOCHS = 3
COUNTS = (4, 8, 16)  # of workers or threads to try, in addition to all, half and a quarter of the cores
MIN_BATCHES = 4  # per loop
METHOD = 3  # version of the measurement; benchmarks/README.md describes the differences
RECORDED = ("task", "images", "passes", "batch_size", "device", "dtype", "channels_last", "model")  # settings

Record = dict[str, Any]


def bench(**options: Any) -> int:
    """Run the cases, print the results and append the record, or list the cases. Return the exit status."""
    args = argparse.Namespace(**options)
    # Off a terminal, rich would cut the table at 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 240)
    if args.list:
        for name, case in CASES.items():
            console.print(f"[bold]{name}[/bold]: {case.description}")
        for task in [task for task, pipelines in TASKS.items() if pipelines]:
            console.print(f"--task {task}: {', '.join(TASKS[task])}, each with {', '.join(TASK_CASES)}")
        return 0
    base = make_config(args)
    configs, ranges = make_cases(args, base), make_ranges(args, base)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check_can_be_written(args.out)
    console.print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    if (batches := math.ceil(base.samples * base.passes / base.batch_size)) < MIN_BATCHES:
        console.print(
            f"[bold yellow]! A loop has only {batches} batch{'es' * (batches > 1)}. DALI prepares some before the "
            "loop starts, so short loops overstate its speed. Use more --passes or --images, or a smaller --batch-size."
        )
    if not args.data:
        make_dataset(base.root, images=base.images, **SIZES[args.size])
    names = [config.name for config in configs]
    obstacles = {config.name: reason for config in configs if (reason := CASES[config.case].obstacle(config))}
    configs = [config for config in configs if config.name not in obstacles]

    def by_default(config: BenchConfig, **changed: Any) -> BenchConfig:
        workers = ranges["workers"][-1] if "workers" in CASES[config.case].tuned else None
        return replace(config, use_defaults=True, tuning=Tuning(workers), **changed)

    if args.first_epochs:
        for path, _ in ImageFolder(base.root).samples:
            Path(path).read_bytes()  # into the page cache
        configs = [by_default(config, persistent_workers=False) for config in configs]
        outcomes = run_first_epochs(configs, args.rounds, FIRST_EPOCHS)
    elif args.task != "classification":
        outcomes = run_task(args, configs, ranges)
    else:
        tuned = {config: tune(config, ranges) for config in configs}
        outcomes = run([replace(config, tuning=best) for config, (best, _) in tuned.items()], args.rounds, args.seconds)
        for config, (_, trials) in tuned.items():
            outcomes[config.name] |= {"trials": trials} if trials else {}
        # The defaults run later, as the JPEG engines lack the memory for all cases at once.
        with_defaults = [by_default(config) for config in configs if "threads" in CASES[config.case].tuned]
        outcomes |= run(with_defaults, args.rounds, args.seconds)
    outcomes |= {name: {"tuning": Tuning()._asdict(), "failure": reason} for name, reason in obstacles.items()}
    outcomes = {name: outcomes[name] for name in dict.fromkeys([*names, *outcomes])}
    record = make_record(args, base, ranges, outcomes)
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    console.print(make_table(record))
    if not args.first_epochs:
        plot(record, args.out.with_suffix(".png"))
    failed = {name.split(" + ")[0] for name, outcome in outcomes.items() if "failure" in outcome}
    all_failed = all("failure" in outcome for outcome in outcomes.values())
    differ = any(outcome.get("targets_differ") for outcome in outcomes.values())
    return 1 if all_failed or differ or not failed.isdisjoint((OURS, FEW)) else 0


def run_task(args: argparse.Namespace, configs: list[BenchConfig], ranges: Ranges) -> dict[str, Outcome]:
    """Tune, compare and measure the cases of each pipeline. All of them at once would exceed the memory."""
    outcomes: dict[str, Outcome] = {}
    for pipeline in dict.fromkeys(config.added for config in configs):
        tuned = list[BenchConfig]()
        for config in (config for config in configs if config.added == pipeline):
            best, trials = tune(config, ranges)
            first = max(trials, key=lambda trial: trial.get("images_per_s", 0.0))
            # Loops of about the same duration. With prefetching, half of a trial's loop, of one pass, is its start.
            seconds = args.seconds * (2 if CASES[config.case].prefetches else 1)
            passes = args.passes or max(1, round(seconds * first.get("images_per_s", 0.0) / config.images))
            tuned.append(replace(config, tuning=best, passes=passes))
            outcomes[config.name] = {"passes": passes, "trials": trials}
            outcomes[config.name]["first_epoch_images_per_s"] = first.get("first_loop_images_per_s", 0.0)
            outcomes[config.name] |= compare_targets(tuned[-1]) if config.case in (OURS, FEW) else {}
        for name, outcome in run(tuned, args.rounds, args.seconds).items():
            outcomes[name] = outcome | outcomes[name]
    return outcomes


def make_config(args: argparse.Namespace) -> BenchConfig:
    """Return the settings of all cases, with the defaults for this machine. ValueError: options contradict."""
    if args.data and (args.images or args.size):
        raise ValueError("--images and --size cannot be used with --data")
    if args.out.suffix != ".jsonl":
        raise ValueError(f"--out must be a .jsonl file, got {args.out}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu, is_large, classifies = device == "cuda", args.size == "camera", args.task == "classification"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda requires a GPU, and torch sees none")
    others = [args.model != "none", args.dtype != "float32", args.channels_last, args.augment, args.datasets]
    if not classifies and any(others):
        raise ValueError("--model, --dtype, --channels-last, --augment and --datasets require --task classification")
    args.size = args.size or ("imagenet" if classifies else "coco")
    batch_size = args.batch_size or {"classification": 64 if is_large else 256, "clips": 8}.get(args.task, 16)
    share = {"camera": 8, "coco": 1 if args.task == "clips" else 4}.get(args.size, 1)
    images = args.images or (8192 if on_gpu else 1024) // share
    images = len(ImageFolder(str(args.data))) if args.data else images
    if images < batch_size:
        of = "" if args.batch_size else " (the default)"
        raise ValueError(f"--batch-size {batch_size}{of} is larger than the number of images, {images}")
    return BenchConfig(
        root=str(args.data or photograph_folder(f"bench-{args.size}", images)),
        images=images,
        passes=1 if args.first_epochs else args.passes or (6 if on_gpu and classifies else 1),
        batch_size=batch_size,
        device=device,
        dtype=args.dtype,
        channels_last=args.channels_last,
        model=args.model,
        task=args.task,
    )


def make_cases(args: argparse.Namespace, base: BenchConfig) -> list[BenchConfig]:
    """Return the cases in ``args.only``, and those that add an augmentation, dataset or pipeline to them."""
    pairs = [(case, "") for case in CLASSIFICATION_CASES if case != "synthetic" or args.model != "none"]
    pairs += [(case, name) for name in (*args.augment, *args.datasets) for case in ("torch", OURS)]
    if base.task != "classification":
        has_few = max(make_ranges(args, base)["workers"]) > FEW_WORKERS and not args.first_epochs
        pairs = [(case, name) for name in TASKS[base.task] for case in TASK_CASES if case != FEW or has_few]
    configs = [replace(base, case=case, added=name) for case, name in pairs]
    names = [name for name in dict.fromkeys([*(config.name for config in configs), *chain(*pairs)]) if name]
    if unknown := [name for name in args.only or () if name not in names]:
        raise ValueError(f"no case {unknown[0]!r} with these options, only {', '.join(map(repr, names))}")
    only = {*(args.only or names)}
    return [config for config in configs if not only.isdisjoint((config.name, config.case, config.added))]


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
    "first epoch, images/s": "first_epoch_images_per_s:,.0f",
    "CPU ms/image": "cpu_ms_per_image:.2f",
    "GPU MB": "gpu_mb_max:,.0f",
    "differing targets": "targets_differ:,",
    "image difference": "image_difference_max:.4f",
}
"""Key and format of each column. For first epochs, a cell lists the values of all epochs."""


def make_table(record: Record) -> Table:
    title = f"{_title(record)}: {record['images']:,} images, batch {record['batch_size']}, model {record['model']}"
    table, cases = Table(title=title, box=SIMPLE_HEAD), record["cases"]
    table.add_column("case", min_width=max(len(word) for name in cases for word in name.split()))
    runs = {name: case.get("epochs", [case]) for name, case in cases.items()}
    keys = {key for epochs in runs.values() for run in epochs for key in run}
    titles = [title for title, column in COLUMNS.items() if column.split(":")[0] in keys]
    columns = [COLUMNS[title].split(":") for title in titles]
    for column in (*titles, "lowest - highest", "times torch", "proxyloader is", "setting"):
        table.add_column(column, justify="right", overflow="fold")
    for name, case in cases.items():
        cells = [", ".join(format(run[key], spec) for run in runs[name] if key in run) for key, spec in columns]
        speeds, prefix = case.get("images_per_s_rounds"), re.split(r", | \+ ", name)[0]
        suffix = name.removeprefix(prefix)
        cells.append(f"{min(speeds):,.0f} - {max(speeds):,.0f}" if speeds else "")
        speed, stock, ours = (cases.get(each + suffix, {}).get("images_per_s") for each in (prefix, "torch", OURS))
        cells.append(f"{speed / stock:.2f}" if speed and stock else "")
        cells.append(f"{ours / speed:.2f} times" if speed and ours and speed != ours else "")
        table.add_row(name, *cells, case.get("failure") or str(Tuning(**case["tuning"])))
    return table


def plot(record: Record, path: Path) -> None:
    """Plot a bar for each case, with error bars from the slowest to the fastest round."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("matplotlib is not installed, so there is no plot")
        return
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
