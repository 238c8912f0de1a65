"""Is this version as fast as an earlier one, and does it take as much of the cores?

    git worktree add ../before COMMIT && python benchmarks/versions.py --before ../before
    ... --device cpu --images 1024 --workers 2

Whole epochs of an ImageFolder that do nothing with their batches, with persistent workers. The versions take turns, in
a new process each. Of each epoch: images/s, milliseconds of CPU time an image, of all processes, and the longest wait
for a batch behind the first. Of all epochs: seconds, from the making of the loader on. The medians of the epochs leave
out the first four, in which pipelines start, scans are looked at, and engines may be tried. Appends one JSON line to
benchmarks/results/versions.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import append_record, make_parser
from torchvision import transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
WARM_UP, EPOCHS = 4, 8
OF_EPOCHS = ("images_per_s", "cpu_ms_per_image", "longest_wait_ms")


def arguments() -> argparse.Namespace:
    parser = make_parser("versions", __doc__)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="a checkout of the earlier version")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--root", help=argparse.SUPPRESS)  # of a process that measures
    return parser.parse_args()


def cpu_s() -> float:
    """Return the CPU time of this process and its workers, which all live."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (each.cpu_times() for each in processes))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the version that this process imports, for each number of workers."""
    import proxyloader

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    found: dict[str, Any] = {"from": str(Path(proxyloader.__file__).parents[1])}
    for workers in options.workers:
        made_s = time.perf_counter()
        loader = proxyloader.DataLoader(
            ImageFolder(options.root, transform),
            options.batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
            device=options.device,
        )
        figures: dict[str, list[float]] = {name: [] for name in OF_EPOCHS}
        for _ in range(EPOCHS):
            start_s, start_cpu_s, images, came_s = time.perf_counter(), cpu_s(), 0, []
            for batch in loader:
                images += len(batch[0])
                came_s.append(time.perf_counter())
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            waits_s = [after - before for before, after in itertools.pairwise(came_s)]
            figures["images_per_s"].append(round(images / (time.perf_counter() - start_s)))
            figures["cpu_ms_per_image"].append(round(1e3 * (cpu_s() - start_cpu_s) / images, 3))
            figures["longest_wait_ms"].append(round(1e3 * max(waits_s, default=0.0)))
        found[str(workers)] = {**figures, "all_s": round(time.perf_counter() - made_s, 2)}
        del loader
    return found


def in_process(checkout: Path, root: str, options: argparse.Namespace) -> dict[str, Any]:
    settings = ["--device", options.device, "--batch-size", str(options.batch_size), "--before", str(options.before)]
    command = [sys.executable, __file__, "--root", root, *settings, "--workers", *map(str, options.workers)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=HERE)
    found: dict[str, Any] = json.loads(done.stdout)
    if Path(found.pop("from")) != checkout.resolve():
        raise RuntimeError(f"another version than that of {checkout} was imported")
    return found


def medians_of(rounds: list[dict[str, Any]]) -> dict[str, float]:
    medians = {
        name: statistics.median(value for each in rounds for value in each[name][WARM_UP:]) for name in OF_EPOCHS
    }
    return {**medians, "all_s": statistics.median(each["all_s"] for each in rounds)}


def main() -> None:
    options = arguments()
    if options.root:
        print(json.dumps(measure(options)))
        return
    from proxyloader.make_dataset import make_dataset

    checkouts = {"before": options.before.resolve(), "now": HERE.parent}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        root = str(make_dataset(Path(folder) / "set", images=options.images))
        for _ in tqdm(range(options.rounds), unit="round", disable=None):
            for name, checkout in checkouts.items():
                rounds[name].append(in_process(checkout, root, options))
                tqdm.write(f"{name}: {json.dumps(rounds[name][-1])}", file=sys.stderr)  # if it is stopped early
    medians = {
        name: {str(workers): medians_of([each[str(workers)] for each in found]) for workers in options.workers}
        for name, found in rounds.items()
    }
    settings = ("device", "images", "batch_size")
    append_record(options, *settings, epochs_left_out=WARM_UP, medians=medians, rounds=rounds)
    print(json.dumps(medians, indent=2))


if __name__ == "__main__":
    main()
