"""The verb ``bench``, from its options to its exit status."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from torchvision import models
from torchvision.datasets import ImageFolder

from ..arguments import at_least, check_num_threads
from ..make_dataset import make_dataset, usable_cores
from . import report
from .cases import CASES, WITH, cases_for
from .machine import in_words, machine, warnings_for
from .rounds import INTERRUPTED, run
from .setting import AUGMENTATIONS, Setting


def list_cases() -> int:
    """Print the names of the cases, and what they are."""
    console = Console()
    for name, case in CASES.items():
        first_line = (case.loops.__doc__ or "").splitlines()[0]
        console.print(f"[bold]{name}[/bold]{' (GPU only)' if case.needs_gpu else ''}: {first_line}", highlight=False)
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure, print and write; returns 1 where ours or all cases failed, or ours is worse than in the
    record to compare with.

    Raises:
        ValueError: there is no such case or GPU, or no record to compare with.
    """
    earlier = report.last_of(args.check) if args.check else None
    check(args)
    for name in args.augment:
        if name not in AUGMENTATIONS:
            raise ValueError(f"there is no augmentation {name} here; there is {', '.join(AUGMENTATIONS)}")
    setting = setting_of(args)
    names = cases_for(setting)
    unknown = [name for name in args.only or () if name not in names]
    if unknown:
        others = [name for name in unknown if name in CASES]
        why = "" if not others else " (needs a GPU)" if CASES[others[0]].needs_gpu else " (depends on --model)"
        raise ValueError(
            f"there is no case {', '.join(map(repr, unknown))} here{why}; there is {', '.join(map(repr, names))}"
        )
    if args.only:
        names = [name for name in names if name in args.only or name.split(WITH)[0] in args.only]
    if earlier is not None:
        report.check_settings(earlier, report.record_of(setting, {}, ""))
        report.check_cases(earlier, names)
    make_room_for(args.out)
    console = Console()
    console.print(in_words(machine()), highlight=False)
    for warning in warnings_for(setting):
        console.print(f"[bold yellow]! {warning}")
    if not args.data:
        make_dataset(setting.root, images=setting.images)
    try:
        outcomes = run(setting, names, args.rounds, args.seconds)
    except KeyboardInterrupt:
        console.print("Nothing had been measured yet, so nothing is written.")
        raise
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
    if earlier and not worse:
        console.print(f"Nothing is worse than in {args.check}.")
    if any(outcome.failure == INTERRUPTED for outcome in outcomes.values()):
        return 130  # as shells have it
    failed = [name for name, case in record["cases"].items() if "failure" in case]
    all_failed = len(failed) == len(record["cases"])
    return 1 if worse or all_failed or report.OURS in failed else 0


def check(args: argparse.Namespace) -> None:
    """Refuse what would be found out in the middle of the measurement.

    Raises:
        ValueError: an option is wrong.
        OSError: the results of before cannot be read.
    """
    least = {"images": 1, "passes": 1, "batch_size": 1, "workers": 0, "stock_workers": 0, "rounds": 1}
    for name, value in least.items():
        if getattr(args, name) is not None:
            at_least("--" + name.replace("_", "-"), getattr(args, name), value)
    if args.threads is not None:
        check_num_threads(args.threads, name="--threads")
    if not 0 <= args.seconds < math.inf:
        raise ValueError(f"--seconds is a number of seconds, 0 or more; got {args.seconds}")
    if not 0 <= args.hw_decoder_load <= 1:
        raise ValueError(f"--hw-decoder-load is a share from 0 to 1; got {args.hw_decoder_load}")
    if args.model not in ("none", *models.list_models(module=models)):
        raise ValueError(f"--model is none, or a classifier of torchvision such as resnet50; got {args.model!r}")
    if args.data and args.images:
        raise ValueError("--images says how many to make, and --data gives a folder that has them: leave out one")
    if args.out.suffix in (".md", ".png"):
        raise ValueError(f"--out {args.out} is where records go, as JSON lines; a table and a picture go beside it")
    if args.data and Path(args.data).resolve() in args.out.resolve().parents:
        raise ValueError(f"--out {args.out} is in the folder of the images, and a picture goes beside it")
    if args.out.is_file() and args.out.stat().st_size:
        report.last_of(args.out)


def make_room_for(out: Path) -> None:
    """The folder of the results, in which they can be written.

    Raises:
        OSError: they cannot.
    """
    was_there = out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.open("a").close()
    if not was_there:
        out.unlink()


def setting_of(args: argparse.Namespace) -> Setting:
    """What is compared, with what was left open filled in for this machine."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda, and torch sees no GPU; leave --device out")
    on_gpu, cores = device == "cuda", usable_cores()
    images = len(ImageFolder(str(args.data))) if args.data else args.images or (8192 if on_gpu else 1024)
    root = args.data or Path(tempfile.gettempdir()) / f"photos-{images}"  # which are made later
    if images < args.batch_size:
        found = f"{root} has {images} images" if args.data else f"--images is {images}"
        raise ValueError(f"{found}, and --batch-size {args.batch_size}: not one batch. Give a smaller --batch-size")
    return Setting(
        root=str(root),
        images=images,
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
