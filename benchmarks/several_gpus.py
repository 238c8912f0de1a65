"""Do several GPUs of one host load as many times what one loads?

    python benchmarks/several_gpus.py                         # all GPUs
    python benchmarks/several_gpus.py --model resnet50        # while they train a network
    python benchmarks/several_gpus.py --ranks 2               # on one GPU, too, which they share
    python benchmarks/several_gpus.py --device cpu --ranks 2

Starts a process for each GPU with torchrun. Each has a loader with a DistributedSampler, as a training script has;
another one that loads photographs with boxes, in batches of 16; and DALI's own reader with 4, 8 and 16 threads, which
shows what the host allows. First come the epochs of files that nobody has checked yet: when the first batch arrives,
and the speed of each process, as their shares change from epoch to epoch. Then, in turn, the first process loops over
its share alone, and all of them do at once: medians of the rounds, and of the CPU time per image of a process and its
workers.

With --model, the processes train it with mixed precision, as one DistributedDataParallel or alone, also on synthetic
batches. Appends one JSON line to benchmarks/results/several_gpus.jsonl, and plots it in a .png file beside it.
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
import torchvision
from _common import append_record, cpu_s, make_parser, make_photographs
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIClassificationIterator
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from proxyloader import DataLoader, pipelines
from proxyloader.make_dataset import make_dataset
from proxyloader.tools.bench import SIZES
from proxyloader.tools.bench.config import make_transform, photograph_folder
from proxyloader.tools.bench.tasks import PIPELINES, Photographs, collate_lists

Rounds = dict[str, list[tuple[float, float]]]
"""Images per second and milliseconds of CPU time per image, ``alone`` and ``together``, in each round."""


def arguments() -> argparse.Namespace:
    parser = make_parser("several_gpus", __doc__)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument(
        "--passes",
        type=int,
        help="over the images in a loop, by all processes together (default: 12, or 6 with --model)",
    )
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8, help="of each loader")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, help="processes (default: the GPUs)")
    parser.add_argument("--model", choices=("resnet18", "resnet50"))
    args = parser.parse_args()
    if args.ranks is None and torch.cuda.device_count() < 2:
        parser.error("this is about several GPUs; --device cpu --ranks 2 tries it without")
    args.ranks = args.ranks or torch.cuda.device_count()
    args.passes = args.passes or (6 if args.model else 12)
    return args


def start(args: argparse.Namespace) -> int:
    """Make the images, and run this script once for each GPU."""
    make_photographs(args.images)
    make_dataset(photograph_folder("bench-coco", args.images // 4), images=args.images // 4, **SIZES["coco"])
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


class RepeatedSampler(DistributedSampler[Any]):
    """This process's share of several passes over a dataset, in one epoch."""

    def __init__(self, size: int, passes: int) -> None:
        super().__init__(range(passes * size))  # type: ignore[arg-type]
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return (index % self.size for index in super().__iter__())


def make_loader(dataset: Any, args: argparse.Namespace, batch_size: int, **more: Any) -> Iterable[Any]:
    """A loader as a training script has it; a loop over it is one over this process's share."""
    sampler = RepeatedSampler(len(dataset), args.passes)
    workers = dict(num_workers=args.workers, persistent_workers=args.workers > 0)
    device = None if args.device == "cuda" else "cpu"
    return DataLoader(dataset, batch_size, sampler=sampler, device=device, **workers, **more)


def proxyloader_of(args: argparse.Namespace) -> Iterable[Any]:
    folder = ImageFolder(str(make_photographs(args.images)), make_transform())
    return make_loader(folder, args, args.batch_size, targets_on_device=True)


def detection_of(args: argparse.Namespace) -> Iterable[Any]:
    root = str(photograph_folder("bench-coco", args.images // 4))
    dataset = Photographs(root, "hflip", open_image, PIPELINES["hflip"])
    return make_loader(dataset, args, 16, collate_fn=collate_lists, targets_on_device=True)


def open_image(path: str) -> Any:
    return Image.open(path).convert("RGB")


class Synthetic:
    """The same batch for each step of this process's share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.steps = args.passes * args.images // (args.ranks * args.batch_size)
        self.batch = (
            torch.rand(args.batch_size, 3, 224, 224, device=args.device),
            torch.zeros(args.batch_size, dtype=torch.int64, device=args.device),
        )

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, self.steps)


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


ITERATORS = {f"iterator, {threads} threads": functools.partial(IteratorLoops, threads) for threads in (4, 8, 16)}
LOADERS: dict[str, Callable[[argparse.Namespace], Iterable[Any]]] = {"proxyloader": proxyloader_of, **ITERATORS}


class Training:
    """Steps of a network with mixed precision, of all processes together or of this one alone."""

    def __init__(self, args: argparse.Namespace) -> None:
        network = torchvision.models.get_model(args.model, num_classes=1000).to(args.device)
        self.alone = network.to(memory_format=torch.channels_last)
        group = dist.new_group(backend="nccl" if args.device == "cuda" else "gloo")
        self.together = DistributedDataParallel(self.alone, process_group=group)
        self.optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
        self.device = args.device

    def step(self, network: Any, images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            outputs = network(images.to(memory_format=torch.channels_last))
        labels = labels.flatten().to(images.device, non_blocking=True).long()
        loss = torch.nn.functional.cross_entropy(outputs.float(), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def loop(loader: Iterable[Any], step: Callable[[Any, Any], None] | None = None) -> tuple[int, float, float]:
    """Loop over a loader, with a training step for each batch.

    Return the number of images, and the seconds of time and of CPU time, behind what DALI's reader read before."""
    batches, images = iter(loader), 0
    for _ in range(getattr(loader, "ahead", 0)):
        next(batches)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin_s, begin_cpu_s = time.perf_counter(), cpu_s()
    for batch, labels in batches:
        if step is not None:
            step(batch, labels)
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
    alone = together = None
    kinds: dict[str, Any] = LOADERS | {"proxyloader, boxes": detection_of}
    if args.model:
        training, kinds = Training(args), {"synthetic": Synthetic, **LOADERS}
        alone, together = (functools.partial(training.step, each) for each in (training.alone, training.together))
    loaders = {name: loader_of(args) for name, loader_of in kinds.items()}
    for loader in loaders.values():
        loop(loader, together)
    rounds: dict[str, Rounds] = {name: {"alone": [], "together": []} for name in loaders}
    for _ in tqdm(range(args.rounds), desc="rounds", disable=None if first else True):
        for name, loader in loaders.items():
            dist.barrier()
            if first:
                images, seconds, used_s = loop(loader, alone)
                rounds[name]["alone"].append((images / seconds, 1e3 * used_s / images))
            dist.barrier()
            images, seconds, used_s = loop(loader, together)
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
    settings = ("images", "passes", "batch_size", "workers", "device", "ranks", "model")
    append_record(args, *settings, first_batch_s=first_s, first_epochs=epochs, loaders=found)
    plot(args, found)


def plot(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Plot the median speed of each loader with one process and with all, and linear scaling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for color, (name, figures) in enumerate(found.items()):
        one, all_of_them = (
            statistics.median(speed for speed, _ in figures[f"{kind}_images_per_s_and_cpu_ms"])
            for kind in ("alone", "together")
        )
        axes.plot([1, args.ranks], [one, all_of_them], "o-", color=f"C{color}", label=name)
        axes.plot([1, args.ranks], [one, args.ranks * one], ":", color=f"C{color}", linewidth=0.8)
    axes.set(xlabel="GPUs", ylabel="images per second", xticks=[1, args.ranks], ylim=(0, None))
    axes.legend(title="dotted: linear scaling")
    figure.savefig(args.out.with_suffix(".png"), dpi=120)


def main() -> int:
    args = arguments()
    if "LOCAL_RANK" not in os.environ:
        return start(args)
    rank(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
