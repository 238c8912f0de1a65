"""Do the batches equal those of torch's loader, and is all given back, through hours of changing loaders?

    python benchmarks/soak.py --minutes 60                    # on a GPU if there is one
    python benchmarks/soak.py --minutes 5 --device cpu
    python benchmarks/soak.py --seed 7 --only-loader 123      # the one that failed, again

Each loader draws its settings from the seed: transform, order, batch size, workers and how they start. It and torch's
loader with the same settings go over the same images under the same ``torch.manual_seed``: labels must be equal, and
pixels within a few levels. Some loops are left early, end with an error in their body, or lose a worker. The first
batch that differs, and 120 s without a batch, end the run with a status that is not 0.

Prints memory, threads, open files and processes each minute, between two loaders, and appends one JSON line to
benchmarks/results/soak.jsonl.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import append_record, make_parser
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import proxyloader
from proxyloader.make_dataset import make_dataset

HANG_S = 120
MOST_LEVELS = 6.0
"""Mean difference of an image to torch's, in levels of 255. Another crop of the same image is above 15."""

SIZE_PX = 64
TRANSFORMS: dict[str, list[Any]] = {
    "resize": [transforms.Resize((SIZE_PX, SIZE_PX))],
    "center": [transforms.Resize(72), transforms.CenterCrop(SIZE_PX)],
    "crop": [transforms.RandomResizedCrop(SIZE_PX), transforms.RandomHorizontalFlip()],
    "pad": [transforms.Resize((SIZE_PX, SIZE_PX)), transforms.RandomCrop(SIZE_PX, padding=8)],
}
FAULTS = ["none", "none", "none", "break", "error", "kill"]


def arguments() -> argparse.Namespace:
    parser = make_parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-loader", type=int, metavar="N", help="the loader of this number, and no other")
    return parser.parse_args()


def drawn(rng: random.Random, transform: str) -> dict[str, Any]:
    """Return the arguments of a loader."""
    start = rng.choices(["fork", "forkserver", "spawn"], [8, 1, 1])[0]
    workers = rng.choice([0, 1, 2, 3]) if start == "fork" else 1
    of_workers = {
        "multiprocessing_context": start,
        # With random transforms an epoch would depend on how far the workers had come in the one before.
        "persistent_workers": rng.random() < 0.5 and transform in ("resize", "center"),
        "prefetch_factor": rng.randint(1, 4),
    }
    return {
        "batch_size": rng.choice([1, 3, 8, 16, 32]),
        "shuffle": rng.random() < 0.5,
        "drop_last": rng.random() < 0.3,
        "num_workers": workers,
        **(of_workers if workers else {}),
    }


def check_equal(batch: Any, expected: Any) -> None:
    images, labels = (part.cpu() for part in batch)
    if labels.tolist() != expected[1].tolist():
        raise AssertionError(f"the labels are {labels.tolist()}, and torch's {expected[1].tolist()}")
    levels = 255 * (images - expected[0]).abs().mean((1, 2, 3))
    if levels.max() > MOST_LEVELS:
        raise AssertionError(f"images differ from torch's by {[round(level, 1) for level in levels.tolist()]} levels")


class BodyError(Exception):
    """An error in the body of a loop."""


def epoch(loader: Any, stock: Any, seed: int, fault: str, at: int) -> int:
    """Compare an epoch of both loaders, with a fault at a batch of ours. Return the number of batches."""
    torch.manual_seed(seed)
    expected = list(stock)
    torch.manual_seed(seed)
    number = 0
    for number, batch in enumerate(loader, 1):
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        check_equal(batch, expected[number - 1])
        if number == at and fault == "break":
            return number
        if number == at and fault == "error":
            raise BodyError
        if number == at and fault == "kill" and loader.num_workers:
            os.kill(workers()[0].pid, signal.SIGKILL)
    if number != len(expected):
        raise AssertionError(f"{number} batches, and torch's loader has {len(expected)}")
    return number


def workers() -> list[Any]:
    """Return the workers, which are the children that multiprocessing knows, without its servers."""
    return multiprocessing.active_children()


def run_loader(root: str, number: int, args: argparse.Namespace, seen: Counter[str]) -> None:
    """Run two or three epochs of a loader, which is a function of the seed and its number."""
    rng = random.Random(f"{args.seed} {number}")
    name = rng.choice(list(TRANSFORMS))
    how = drawn(rng, name)
    dataset = ImageFolder(root, transforms.Compose([*TRANSFORMS[name], transforms.ToTensor()]))
    kept = rng.sample(range(len(dataset)), rng.randint(2, len(dataset) // 4))
    dataset.samples = [dataset.samples[k] for k in kept]
    loader: Any = proxyloader.DataLoader(dataset, device=args.device, **how)
    stock: Any = StockLoader(dataset, **how)
    for turn in range(rng.randint(2, 3)):
        fault, at, seed = rng.choice(FAULTS), rng.randint(1, 4), rng.randrange(1000)
        what = f"loader {number} ({name}, {len(dataset)} images, {how}), epoch {turn}, {fault} at batch {at}"
        try:
            seen["batches"] += epoch(loader, stock, seed, fault, at)
        except BodyError:
            pass
        except RuntimeError as error:
            if fault != "kill" or "worker" not in str(error):
                raise RuntimeError(f"{what}: {error}; again: --seed {args.seed} --only-loader {number}") from error
        except Exception as error:
            raise RuntimeError(f"{what}: {error}; again: --seed {args.seed} --only-loader {number}") from error
        seen[fault] += 1
        if fault == "kill":  # torch's loader still has its workers, and so draws other numbers
            break
    seen["loaders"] += 1


def held() -> dict[str, float]:
    """Return what this process holds, now that no loader is alive."""
    gc.collect()
    process = psutil.Process()
    gpu = {}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        gpu = {"gpu_mb": round((total - free) / 2**20)}
    return {
        "host_mb": round(process.memory_full_info().uss / 2**20),
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "processes": len(process.children(recursive=True)),
        **gpu,
    }


def main() -> int:
    args = arguments()
    seen: Counter[str] = Counter()
    minutes: list[dict[str, float]] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = str(make_dataset(Path(folder) / "images", images=args.images, size=(160, 120), progress=False))
        number = args.only_loader or 0
        while time.monotonic() - begin < 60 * args.minutes or not seen["loaders"]:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            run_loader(root, number, args, seen)
            number += args.only_loader is None
            if time.monotonic() - begin >= 60 * len(minutes):
                minutes.append(held())
                print(f"minute {len(minutes) - 1}: {seen['loaders']} loaders, {minutes[-1]}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    minutes.append(held())
    append_record(args, "minutes", "images", "seed", "device", seen=dict(seen), held=minutes)
    print(f"{seen['loaders']} loaders, {seen['batches']} batches equal torch's; at the end {minutes[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
