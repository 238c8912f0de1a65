"""The verb ``bench``, from its options to its exit status."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torchvision import models
from torchvision.datasets import ImageFolder

from ..._cores import usable_cores
from ..._validation import check_int, check_num_threads
from ..files import check_can_be_written
from . import photographs, report, tables
from .cases import BY_DEFAULT, CASES, OURS, Ranges, case_of, cases_for, parts_of, peers_for
from .config import AUGMENTATIONS, BenchConfig
from .datasets import DATASETS
from .runner import INTERRUPTED, Outcome, Tell, run, run_first_epochs
from .sweep import Sweep, sweep
from .system_info import in_words, machine, warnings_for

FIRST_EPOCHS = 3

COUNTS = (4, 8, 16)
"""Numbers of workers or threads to try, up to the number of cores; all, half and a quarter of the cores are added."""


def list_cases() -> int:
    """Print the names and descriptions of the cases. Return the exit status."""
    console = Console()
    for name, case in CASES.items():
        first_line = (case.loops.__doc__ or "").splitlines()[0]
        console.print(f"[bold]{name}[/bold]{' (GPU only)' if case.needs_gpu else ''}: {first_line}", highlight=False)
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure the cases, print the results, and write the record.

    Returns:
        The exit status: 1 if our case or all cases failed, or ours is worse than in the record to compare with; 130
        after Ctrl-C; else 0.
    """
    earlier = report.last_of(args.check) if args.check else None
    check(args)
    setting = setting_of(args)
    ranges = ranges_of(args, setting)
    names = _chosen(peers_for(setting) if args.first_epochs else cases_for(setting), args.only)
    more = {"benchmark": "first_epochs", "epochs": FIRST_EPOCHS, "page_cache": "warm"} if args.first_epochs else {}
    if earlier is not None:
        report.check_settings(earlier, report.record_of(setting, ranges, {}, {}, "", **more))
        report.check_cases(earlier, names)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check_can_be_written(args.out)
    console = Console()
    console.print(in_words(machine()), highlight=False)
    for warning in warnings_for(setting):
        console.print(f"[bold yellow]! {warning}")
    if not args.data:
        photographs.make(setting.size, setting.images)
    begin = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"{time.monotonic() - begin:6.0f} s  {line}", highlight=False, markup=False, soft_wrap=True)

    try:
        measure = measure_first_epochs if args.first_epochs else measure_rounds
        outcomes, sweeps = measure(args, setting, ranges, names, tell)
    except KeyboardInterrupt:
        console.print("Nothing had been measured yet, so nothing is written.")
        raise
    record = report.record_of(setting, ranges, outcomes, sweeps, shlex.join(["proxyloader", *sys.argv[1:]]), **more)
    _write(record, args, console)
    worse = report.worse_than(earlier, record) if earlier else []
    for sentence in worse:
        console.print(f"[bold red]{sentence}")
    if earlier and not worse:
        console.print(f"Nothing is worse than in {args.check}.")
    if any(outcome.failure == INTERRUPTED for outcome in outcomes.values()):
        return 130  # as in shells
    failed = [name for name, case in record["cases"].items() if "failure" in case]
    return 1 if worse or OURS in failed or len(failed) == len(record["cases"]) else 0


def _chosen(names: list[str], only: list[str] | None) -> list[str]:
    """Return the names that ``only`` selects. A name that is none for this machine and these options is an error."""
    unknown = [name for name in only or () if name not in names]
    if unknown:
        others = [name for name in unknown if name in CASES]
        why = "" if not others else " (needs a GPU)" if CASES[others[0]].needs_gpu else " (depends on --model)"
        raise ValueError(
            f"there is no case {', '.join(map(repr, unknown))} here{why}; there is {', '.join(map(repr, names))}"
        )
    return [name for name in names if not only or name in only or parts_of(name)[0] in only]


def _write(record: dict[str, Any], args: argparse.Namespace, console: Console) -> None:
    """Write the record to its file, as tables to a page and the terminal, and as a picture."""
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    args.out.with_suffix(".md").write_text(tables.as_markdown(record))
    console.print(*tables.as_tables(record), sep="\n")
    for name, reason in record["left_out"].items():
        console.print(f"{name} was left out: {reason}")
    written = [args.out, args.out.with_suffix(".md")]
    if not args.first_epochs:
        try:
            tables.plot(record, args.out.with_suffix(".png"))
            written.append(args.out.with_suffix(".png"))
        except ImportError:
            console.print("There is no picture, as matplotlib is not installed.")
    console.print("Written:", *written, highlight=False, markup=False, soft_wrap=True)


Measured = tuple[dict[str, Outcome], dict[str, Sweep]]


def measure_rounds(
    args: argparse.Namespace, setting: BenchConfig, ranges: Ranges, names: list[str], tell: Tell
) -> Measured:
    """Measure the tuned cases, and then those by default. The JPEG engines have no room for all of them at once."""
    tuned = [name for name in names if not name.endswith(BY_DEFAULT)]
    sweeps = sweep(setting, tuned, ranges, tell)
    settings = {name: replace(setting, tuning=sweeps[name].best) for name in tuned}
    outcomes = run(settings, args.rounds, args.seconds, tell)
    if not any(outcome.failure == INTERRUPTED for outcome in outcomes.values()):
        settings = _by_default(setting, ranges, [name for name in names if name.endswith(BY_DEFAULT)])
        try:
            outcomes |= run(settings, args.rounds, args.seconds, tell)
        except KeyboardInterrupt:  # before their first round
            outcomes |= {name: Outcome(each, failure=INTERRUPTED) for name, each in settings.items()}
    return outcomes, sweeps


def measure_first_epochs(
    args: argparse.Namespace, setting: BenchConfig, ranges: Ranges, names: list[str], tell: Tell
) -> Measured:
    """Measure the first epochs of each case, with the default of each argument that has one."""
    settings = _by_default(replace(setting, passes=1, persistent_workers=False), ranges, names)
    for path, _ in ImageFolder(setting.root).samples:
        Path(path).read_bytes()  # so that the files are in the page cache for all cases
    with tempfile.TemporaryDirectory(prefix="proxyloader-bench-") as folder:
        outcomes = run_first_epochs(settings, args.rounds, FIRST_EPOCHS, lambda: tempfile.mkdtemp(dir=folder), tell)
    return outcomes, {}


def _by_default(setting: BenchConfig, ranges: Ranges, names: list[str]) -> dict[str, BenchConfig]:
    return {name: replace(setting, by_default=True, tuning=ranges.most(case_of(name))) for name in names}


def check(args: argparse.Namespace) -> None:
    """Raise ValueError or OSError if an option is invalid, or ``--out`` has other content."""
    for name, least in {"images": 1, "passes": 1, "batch_size": 1, "rounds": 1}.items():
        if getattr(args, name) is not None:
            check_int("--" + name.replace("_", "-"), getattr(args, name), least)
    for workers in args.workers or ():
        check_int("--workers", workers, 0)
    for threads in args.threads or ():
        check_num_threads(threads, name="--threads")
    if not 0 <= args.seconds < math.inf:
        raise ValueError(f"--seconds is a number of seconds, 0 or more; got {args.seconds}")
    for load in args.hw_decoder_load:
        if not 0 <= load <= 1:
            raise ValueError(f"--hw-decoder-load is a share from 0 to 1; got {load}")
    if args.first_epochs and args.check:
        raise ValueError("--check compares whole measurements, not first epochs: leave out one")
    if args.model not in ("none", *models.list_models(module=models)):
        raise ValueError(f"--model is none, or a classifier of torchvision such as resnet50; got {args.model!r}")
    for name in args.augment:
        if name not in AUGMENTATIONS:
            raise ValueError(f"there is no augmentation {name} here; there is {', '.join(AUGMENTATIONS)}")
    for name in args.datasets:
        if name not in DATASETS:
            raise ValueError(f"there is no dataset {name} here; there is {', '.join(DATASETS)}")
    if args.data and (args.images or args.size != "imagenet"):
        raise ValueError("--images and --size say what to make, and --data gives a folder that has them: leave out one")
    if args.out.suffix in (".md", ".png"):
        raise ValueError(f"--out {args.out} is where records go, as JSON lines; a table and a picture go beside it")
    if args.data and Path(args.data).resolve() in args.out.resolve().parents:
        raise ValueError(f"--out {args.out} is in the folder of the images, and a picture goes beside it")
    if args.out.is_file() and args.out.stat().st_size:
        report.last_of(args.out)


def setting_of(args: argparse.Namespace) -> BenchConfig:
    """Return the settings of the comparison, with the defaults of this machine."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("device cuda, and torch sees no GPU; leave --device out")
    kind = photographs.SIZES[args.size]
    by_default, batch_size = (8192 if on_gpu else 1024) // kind.fewer, args.batch_size or kind.batch_size
    images = len(ImageFolder(str(args.data))) if args.data else args.images or by_default
    root = args.data or photographs.root_of(args.size, images)  # which are made later
    if images < batch_size:
        found = f"{root} has {images} images" if args.data else f"--images is {images}"
        raise ValueError(f"{found}, and --batch-size {batch_size}: not one batch. Give a smaller --batch-size")
    return BenchConfig(
        root=str(root),
        size="" if args.data else args.size,
        images=images,
        passes=1 if args.first_epochs else args.passes or (6 if on_gpu else 1),
        batch_size=batch_size,
        device=device,
        dtype=args.dtype,
        channels_last=args.channels_last,
        augmentations=tuple(args.augment),
        datasets=tuple(args.datasets),
        model=args.model,
    )


def ranges_of(args: argparse.Namespace, setting: BenchConfig) -> Ranges:
    """Return the values to try, with the defaults of this machine."""
    cores = usable_cores()
    counts = {max(1, cores // 4), max(1, cores // 2), cores, *(n for n in COUNTS if n <= cores)}
    threads = args.threads or (counts if setting.on_gpu else counts | {cores + 1})
    given = args.workers or counts, threads, args.hw_decoder_load
    return Ranges(*(tuple(sorted(set(values))) for values in given))
