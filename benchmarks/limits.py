"""What limits the speed of a pipeline: the workers, the main thread, the kernels, or DALI's decoder?

    python benchmarks/limits.py --pipelines AugMix hflip
    python benchmarks/limits.py --pipelines "SimCLR, two views" --worker-niceness 5
    python benchmarks/limits.py --pipelines hflip --workers 4 --profile

The pipelines are those of versions.py, and those of `proxyloader bench --task`. For each, a loader loops over endless
epochs, in turns: as a training loop does, which moves everything to the device; without moving anything; and without
launching any kernel, which leaves the contents of the images undefined. Reports medians of the turns: images per
second, and per image the CPU time of the workers, and of the process of the training loop with DALI's threads; and how
long its main thread computes, as a fraction of the time. On a GPU, also reports the time of its kernels and copies per
batch. Appends a JSON line for each pipeline to benchmarks/results/limits.jsonl.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from _common import append_record, make_parser, make_photographs
from _pipelines import PIPELINES
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only
from torchvision.datasets.folder import pil_loader
from tqdm import tqdm
from versions import Endless

from proxyloader import DataLoader
from proxyloader.kernels.launcher import Launcher
from proxyloader.make_dataset import FORMAT, make_dataset
from proxyloader.tools.bench import tasks

SETTLE_S = 0.5  # time before a turn, in which what was prefetched is used up
COLUMNS = ("images_per_s", "worker_cpu_ms", "main_cpu_ms", "main_thread_busy")
Turn = dict[str, float]


def arguments() -> argparse.Namespace:
    parser = make_parser("limits", __doc__)
    parser.add_argument("--pipelines", nargs="+", required=True, choices=(*PIPELINES, *tasks.PIPELINES), metavar="NAME")
    parser.add_argument("--images", type=int, default=8192, help="photographs; of bench's tasks, an eighth of them")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--threads", type=int, help="of DALI (default: the loader's)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a turn")
    parser.add_argument(
        "--worker-niceness", type=int, default=0, metavar="N", help="lower their priority, as `nice -n N`"
    )
    parser.add_argument("--profile", action="store_true", help="print where Python spends the time of the main thread")
    return parser.parse_args()


def make_loader(name: str, args: argparse.Namespace) -> tuple[Any, int]:
    """Return a loader, and the images of a sample."""
    if name in PIPELINES:
        make, more = PIPELINES[name]
        dataset, frames = make(str(make_photographs(args.images))), 1
        more = {"batch_size": 256, **more}
    else:
        images = args.images // 8
        path = Path(tempfile.gettempdir()) / f"coco-v{FORMAT}-{images}"
        kind, frames = (tasks.Clips, 16) if name == "clips" else (tasks.Photographs, 1)
        dataset = kind(str(make_dataset(path, images=images, size=(640, 480))), name, pil_loader, tasks.PIPELINES[name])
        collate = None if name in ("segmentation", "clips") else tasks.collate_lists
        more = {"batch_size": 8 if name == "clips" else 16, "collate_fn": collate, "targets_on_device": True}

    def set_niceness(worker: int) -> None:
        os.nice(args.worker_niceness)

    more |= {"worker_init_fn": set_niceness} if args.worker_niceness else {}
    more |= {"num_threads": args.threads} if args.threads else {}
    workers = {"num_workers": args.workers, "multiprocessing_context": "fork" if args.workers else None}
    return DataLoader(dataset, sampler=Endless(dataset), device=args.device, **workers, **more), frames


def move(batch: Any, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def take_turn(batches: Iterator[Any], images: int, args: argparse.Namespace, moves: bool = False) -> Turn:
    """Loop for some seconds. ``images``: in a batch."""

    def run(seconds: float) -> int:
        end_s, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < end_s:
            batch = next(batches)
            count += images
            if moves:
                move(batch, args.device)
        if args.device == "cuda":
            torch.cuda.synchronize()
        return count

    run(SETTLE_S)
    main, workers = [psutil.Process()], psutil.Process().children(recursive=True)
    before, thread_s, begin_s = (cpu_s(workers), cpu_s(main)), time.thread_time(), time.perf_counter()
    count = run(args.seconds)
    elapsed_s = time.perf_counter() - begin_s
    return {
        "images_per_s": count / elapsed_s,
        "worker_cpu_ms": 1e3 * (cpu_s(workers) - before[0]) / count,
        "main_cpu_ms": 1e3 * (cpu_s(main) - before[1]) / count,
        "main_thread_busy": (time.thread_time() - thread_s) / elapsed_s,
    }


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (each.cpu_times() for each in processes))


def run_without_launches(run: Any) -> Any:
    def skip(self: Any, schedule: Any, *more: Any) -> Any:
        object.__setattr__(schedule, "launches", ())
        return run(self, schedule, *more)

    return skip


def gpu_times(batches: Iterator[Any], count: int = 50) -> dict[str, float]:
    """Return the microseconds per batch of each kernel and copy, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(count):
            next(batches)
        torch.cuda.synchronize()
    found = {each.key.partition("<")[0]: each.self_device_time_total / count for each in profiled.key_averages()}
    return {name: round(time_us, 1) for name, time_us in sorted(found.items(), key=lambda one: -one[1]) if time_us > 1}


def measure(name: str, args: argparse.Namespace) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    loader, frames = make_loader(name, args)
    batches, images = iter(loader), frames * loader.batch_size
    for _ in range(3 * loader.num_workers + 3):
        next(batches)
    turns: dict[str, list[Turn]] = {"moved": [], "not moved": [], "no kernels": []}
    for _ in tqdm(range(args.rounds), name, unit="round", leave=False, disable=None):
        turns["moved"].append(take_turn(batches, images, args, moves=True))
        turns["not moved"].append(take_turn(batches, images, args))
        if args.device == "cuda":
            with patch.object(Launcher, "run", run_without_launches(Launcher.run)):
                turns["no kernels"].append(take_turn(batches, images, args))
    if args.profile:
        with cProfile.Profile() as profiled:
            take_turn(batches, images, args, moves=True)
        pstats.Stats(profiled).sort_stats("tottime").print_stats(25)
    on_gpu = gpu_times(batches) if args.device == "cuda" else {}
    return {kind: each for kind, each in turns.items() if each}, on_gpu


def main() -> None:
    args = arguments()
    table = Table("pipeline", "loop", "images/s", "CPU ms, workers", "CPU ms, main process", "main thread busy")
    for name in args.pipelines:
        turns, on_gpu = measure(name, args)
        medians = {
            kind: {column: round(statistics.median(each[column] for each in found), 3) for column in COLUMNS}
            for kind, found in turns.items()
        }
        settings = ("images", "workers", "threads", "seconds", "worker_niceness", "device")
        append_record(args, *settings, pipeline=name, medians=medians, rounds=turns, gpu_us_per_batch=on_gpu)
        for kind, figures in medians.items():
            speed, *others = figures.values()
            table.add_row(name, kind, f"{speed:,.0f}", *(f"{value:.3f}" for value in others))
        if on_gpu:
            longest = ", ".join(f"{kernel} {time_us:,.0f}" for kernel, time_us in itertools.islice(on_gpu.items(), 5))
            table.add_row("", f"µs of the GPU per batch: {sum(on_gpu.values()):,.0f}; {longest}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
