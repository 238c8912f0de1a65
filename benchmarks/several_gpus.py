"""Do several GPUs of one host load as many times what one loads?

    python benchmarks/several_gpus.py                         # all GPUs
    python benchmarks/several_gpus.py --ranks 2               # on one GPU, too, which they share
    python benchmarks/several_gpus.py --device cpu --ranks 2

Starts a process for each GPU with torchrun; each has a loader with a DistributedSampler, as a training script has, and
DALI's own reader with 4, 8 and 16 threads, which shows what the host allows. First come the epochs of files that nobody
has checked yet: when the first batch arrives, and the speed of each process, as their shares change from epoch to
epoch. Then, in turn, the first process loops over its share alone, and all of them do at once: medians of the rounds,
and of the CPU time per image of a process and its workers.
Appends one JSON line to benchmarks/results/several_gpus.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from _common import append_record, cpu_s, make_parser, make_photographs
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIClassificationIterator
from torch.utils.data import ConcatDataset, DistributedSampler
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from proxyloader import DataLoader, pipelines
from proxyloader.tools.bench.config import make_transform

Rounds = dict[str, list[tuple[float, float]]]
"""Images per second and milliseconds of CPU time per image, ``alone`` and ``together``, in each round."""


def arguments() -> argparse.Namespace:
    parser = make_parser("several_gpus", __doc__)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--passes", type=int, default=12, help="over the images in a loop, by all processes together")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8, help="of each loader")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="processes (default: the GPUs)")
    return parser.parse_args()


def start(args: argparse.Namespace) -> int:
    """Make the images, and run this script once for each GPU."""
    if args.ranks < 2:
        print(f"this is about several GPUs, and there is {args.ranks}; --device cpu --ranks 2 tries it without")
        return 1
    make_photographs(args.images)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={args.ranks}",
        *sys.argv,
    ]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def first_epochs(args: argparse.Namespace) -> tuple[list[float], list[list[float]]]:
    """Return the seconds to the first batch of each process, and its images per second behind that in three epochs."""
    folder = ImageFolder(str(make_photographs(args.images)), make_transform())
    sampler = DistributedSampler(folder)
    workers = dict(num_workers=args.workers, persistent_workers=args.workers > 0)
    device = None if args.device == "cuda" else "cpu"
    dist.barrier()
    begin_s = time.perf_counter()
    loader = DataLoader(folder, args.batch_size, sampler=sampler, device=device, **workers)
    first_s: list[float] = []
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        dist.barrier()
        batches = iter(loader)
        next(batches)
        if not epoch:
            first_s = gathered(args, round(time.perf_counter() - begin_s, 2))
        images, seconds, _ = loop(batches)
        epochs.append(gathered(args, round(images / seconds, 1)))
    return first_s, epochs


def gathered(args: argparse.Namespace, value: float) -> list[float]:
    """Return the values of all processes."""
    values = [0.0] * args.ranks
    dist.all_gather_object(values, value)
    return values


def proxyloader_of(args: argparse.Namespace) -> Iterable[Any]:
    """A loader as a training script has it; a loop over it is one over this process's share."""
    folder = ImageFolder(str(make_photographs(args.images)), make_transform())
    images: ConcatDataset[Any] = ConcatDataset(args.passes * [folder])
    return DataLoader(
        images,
        args.batch_size,
        sampler=DistributedSampler(images),
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        device=None if args.device == "cuda" else "cpu",
    )


class IteratorLoops:
    """The same with DALI's own reader and iterator, which passes over the images one time after the other.

    Attributes:
        ahead: batches that may lie ready when a loop begins.
    """

    ahead = 3

    def __init__(self, num_threads: int, args: argparse.Namespace) -> None:
        self.passes = args.passes
        pipeline = pipelines.training(
            file_root=make_photographs(args.images),
            pad_last_batch=True,
            num_shards=args.ranks,
            shard_id=dist.get_rank(),
            batch_size=args.batch_size,
            num_threads=num_threads,
            device_id=torch.cuda.current_device() if args.device == "cuda" else None,
        )
        policy = LastBatchPolicy.PARTIAL
        self.batches = DALIClassificationIterator(
            pipeline, reader_name="Reader", last_batch_policy=policy, auto_reset=True
        )

    def __iter__(self) -> Iterator[Any]:
        for (batch,) in itertools.chain.from_iterable(itertools.repeat(self.batches, self.passes)):
            yield batch["data"], batch["label"]


LOADERS: dict[str, Callable[[argparse.Namespace], Iterable[Any]]] = {
    "proxyloader": proxyloader_of,
    **{f"iterator, {threads} threads": functools.partial(IteratorLoops, threads) for threads in (4, 8, 16)},
}


def loop(loader: Iterable[Any]) -> tuple[int, float, float]:
    """Return the number of images, and the seconds of time and of CPU time, behind what DALI's reader read before."""
    batches, images = iter(loader), 0
    for _ in range(getattr(loader, "ahead", 0)):
        next(batches)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin_s, begin_cpu_s = time.perf_counter(), cpu_s()
    for _images, labels in batches:
        images += len(labels)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return images, time.perf_counter() - begin_s, cpu_s() - begin_cpu_s


def rank(args: argparse.Namespace) -> None:
    """In each of the processes."""
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    first_s, epochs = first_epochs(args)
    loaders = {name: loader_of(args) for name, loader_of in LOADERS.items()}
    for loader in loaders.values():
        loop(loader)
    rounds: dict[str, Rounds] = {name: {"alone": [], "together": []} for name in LOADERS}
    for _ in tqdm(range(args.rounds), desc="rounds", disable=None if first else True):
        for name, loader in loaders.items():
            dist.barrier()
            if first:
                images, seconds, used_s = loop(loader)
                rounds[name]["alone"].append((images / seconds, 1e3 * used_s / images))
            dist.barrier()
            images, seconds, used_s = loop(loader)
            slowest = torch.tensor(seconds)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            rounds[name]["together"].append((args.ranks * images / float(slowest), 1e3 * used_s / images))
    if first:
        report(args, first_s, epochs, rounds)
    dist.destroy_process_group()


def report(
    args: argparse.Namespace, first_s: list[float], epochs: list[list[float]], rounds: dict[str, Rounds]
) -> None:
    speeds_of = "; ".join(", ".join(f"{speed:,.0f}" for speed in speeds) for speeds in epochs)
    print(f"first batch of each process after {', '.join(map(str, first_s))} s")
    print(f"images/s of each process in the epochs 1; 2; 3: {speeds_of}")
    found: dict[str, Any] = {}
    for name, loops in rounds.items():
        (one, one_ms), (all_of_them, ms) = (
            [statistics.median(values) for values in zip(*loops[kind])] for kind in ("alone", "together")
        )
        print(
            f"{name}: one alone {one:,.0f} images/s and {one_ms:.2f} ms of CPU an image, {args.ranks} at once "
            f"{all_of_them:,.0f} and {ms:.2f} ms: {all_of_them / one:.2f} times"
        )
        found[name] = {
            "alone_images_per_s_and_cpu_ms": [[round(speed, 1), round(used, 3)] for speed, used in loops["alone"]],
            "together_images_per_s_and_cpu_ms": [
                [round(speed, 1), round(used, 3)] for speed, used in loops["together"]
            ],
            "times": round(all_of_them / one, 3),
        }
    settings = ("images", "passes", "batch_size", "workers", "device", "ranks")
    append_record(args, *settings, first_batch_s=first_s, first_epochs=epochs, loaders=found)


def main() -> int:
    args = arguments()
    if "LOCAL_RANK" not in os.environ:
        return start(args)
    rank(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
