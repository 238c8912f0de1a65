"""What does ``loader.stats()`` cost?

    python benchmarks/overhead.py
    python benchmarks/overhead.py --device cpu --images 1024 --workers 2

The loop does nothing with its batches, so a step is as short as it can be. Images/s of whole epochs, in rounds in which
the cases take turns: counted for ``loader.stats()`` as always, and not counted. Then the time that counting takes in a
step, in microseconds. Appends one JSON line to benchmarks/results/overhead.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from proxyloader import DataLoader
from proxyloader._cores import usable_cores
from proxyloader.loader.stats import StatsRecorder
from proxyloader.make_dataset import make_dataset
from proxyloader.tools.bench.config import transform_with
from proxyloader.tools.bench.system_info import machine

COUNTED, NOT_COUNTED = "counted", "not counted"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overhead.jsonl")
    return parser.parse_args()


def loader_of(root: Path, options: argparse.Namespace) -> DataLoader[Any]:
    return DataLoader(
        ImageFolder(str(root), transform_with()),
        options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        device=options.device,
    )


def epoch_s(loader: DataLoader[Any]) -> float:
    """Return the time of an epoch behind one that is not counted, as batches of that may have been read before."""
    for _ in loader:
        pass
    start_s = time.perf_counter()
    for _ in loader:
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


@contextlib.contextmanager
def timed_counting() -> Iterator[list[float]]:
    """Give the seconds that each call of ``StatsRecorder.add`` takes."""
    spent_s, add = [], StatsRecorder.add

    def timed(self: StatsRecorder, *arguments: Any) -> None:
        start_s = time.perf_counter()
        add(self, *arguments)
        spent_s.append(time.perf_counter() - start_s)

    with mock.patch.object(StatsRecorder, "add", timed):
        yield spent_s


def measure(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    loader, cases = loader_of(root, options), [COUNTED, NOT_COUNTED]
    spent_s: dict[str, list[float]] = {name: [] for name in cases}
    progress = tqdm(total=(options.rounds + 1) * len(cases), desc="epochs", disable=None)
    for number in range(options.rounds + 1):
        for name in cases if number % 2 else reversed(cases):
            counts = mock.patch.object(StatsRecorder, "add", lambda self, batch, step: None)
            with counts if name == NOT_COUNTED else contextlib.nullcontext():
                seconds = epoch_s(loader)
            if number:  # the first one starts workers and pipelines
                spent_s[name].append(seconds)
            progress.update()
    progress.close()
    with timed_counting() as of_steps_s:
        step_s = epoch_s(loader) / len(loader)
    rates = {name: [round(options.images / seconds) for seconds in each] for name, each in spent_s.items()}
    medians = {name: statistics.median(each) for name, each in rates.items()}
    counting_s = statistics.median(of_steps_s)
    return {
        "images_per_s": medians,
        "of_rounds": rates,
        "ratio": {name: round(median / medians[NOT_COUNTED], 3) for name, median in medians.items()},
        "counting_us_per_step": round(1e6 * counting_s, 1),
        "step_ms": round(1e3 * step_s, 2),
        "counting_share_of_step": round(counting_s / step_s, 5),
    }


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        root = make_dataset(Path(folder) / "set", images=options.images)
        record = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            **{name: getattr(options, name) for name in ("device", "images", "batch_size", "workers")},
            **measure(root, options),
        }
    print(json.dumps(record, indent=2))
    with options.out.open("a") as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
