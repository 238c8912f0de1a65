"""The verb ``bench``, from its options to its exit status."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from torchvision.datasets import ImageFolder

from ..make_dataset import make_dataset, usable_cores
from . import report
from .cases import AUGMENTATIONS, CASES, WITH, cases_for
from .machine import warnings_for
from .rounds import run
from .setting import Setting


def list_cases() -> int:
    """Print the names of the cases, and what they are."""
    console = Console()
    for name, case in CASES.items():
        first_line = (case.loops.__doc__ or "").splitlines()[0]
        console.print(f"[bold]{name}[/bold]{' (GPU only)' if case.needs_gpu else ''}: {first_line}", highlight=False)
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure, print and write; returns 1 where ours failed, or is worse than in the record to compare with.

    Raises:
        ValueError: there is no such case or GPU, or no record to compare with.
    """
    earlier = report.last_of(args.check) if args.check else None
    for name in args.augment:
        if name not in AUGMENTATIONS:
            raise ValueError(f"there is no augmentation {name} here; there is {', '.join(AUGMENTATIONS)}")
    setting = setting_of(args)
    names = cases_for(setting)
    unknown = [name for name in args.only or () if name not in names]
    if unknown:
        raise ValueError(f"there is no case {', '.join(unknown)} here; there is {', '.join(names)}")
    if args.only:
        names = [name for name in names if name in args.only or name.split(WITH)[0] in args.only]
    console = Console()
    for warning in warnings_for(setting):
        console.print(f"[bold yellow]! {warning}")
    outcomes = run(setting, names, args.rounds, args.seconds)
    record = report.record_of(setting, outcomes, shlex.join(["proxyloader", *sys.argv[1:]]))
    report.append(record, args.out)
    args.out.with_suffix(".md").write_text(report.as_markdown(record))
    console.print(*report.as_tables(record), sep="\n")
    for name, reason in record["left_out"].items():
        console.print(f"{name} was left out: {reason}")
    try:
        report.plot(record, args.out.with_suffix(".png"))
    except ImportError:
        console.print("There is no picture, as matplotlib is not installed.")
    worse = report.worse_than(earlier, record) if earlier else []
    for sentence in worse:
        console.print(f"[bold red]{sentence}")
    return 1 if worse or record["cases"].get(report.OURS, {}).get("failure") else 0


def setting_of(args: argparse.Namespace) -> Setting:
    """What is compared, with what was left open filled in for this machine; makes the images if there are none."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda, and torch sees no GPU; leave --device out")
    on_gpu, cores = device == "cuda", usable_cores()
    images = args.images or (8192 if on_gpu else 1024)
    root = args.data or make_dataset(Path(tempfile.gettempdir()) / f"photos-{images}", images=images)
    return Setting(
        root=str(root),
        images=len(ImageFolder(str(root))),
        passes=args.passes or (6 if on_gpu else 1),
        batch_size=args.batch_size,
        workers=min(8, cores) if args.workers is None else args.workers,
        stock_workers=min(16, cores) if args.stock_workers is None else args.stock_workers,
        threads=args.threads or (4 if on_gpu else cores + 1),
        device=device,
        hw_decoder_load=args.hw_decoder_load,
        dtype=args.dtype,
        channels_last=args.channels_last,
        augmentations=tuple(args.augment),
        model=args.model,
    )
