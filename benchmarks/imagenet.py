"""How fast does the ImageNet example train with images from each of its backends?

    python benchmarks/imagenet.py                              # on a GPU, 8,192 photographs
    python benchmarks/imagenet.py --archs resnet50 --rounds 5
    python benchmarks/imagenet.py --device cpu --images 64 --archs resnet18 --batch-size 16 --size 32 --workers 1

Runs examples/imagenet/train.py as a user would, once for each model and backend in each round, and takes the figures
from its log. The first epoch of a run is left out: in it cuDNN is loaded, DALI's decoder is set, and each JPEG is
looked into for the first time. Appends one JSON line for each model to benchmarks/results/imagenet.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import append_record, make_parser
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from proxyloader.make_dataset import make_dataset

SCRIPT = Path(__file__).parent.parent / "examples" / "imagenet" / "train.py"
BACKENDS = ("pytorch", "proxy", "dali", "synthetic")
VAL_IMAGES = 64

Figures = dict[str, list[float]]
"""``images_per_s`` and ``waited`` of the epochs that count."""


def arguments() -> argparse.Namespace:
    parser = make_parser("imagenet", __doc__)
    parser.add_argument("--archs", nargs="+", default=["resnet18", "resnet50"], metavar="NAME", help="of torchvision")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="side of the square that the model sees, in pixels")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4, help="of each run; the first is left out")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.epochs < 2 or args.rounds < 1 or args.images < args.batch_size:
        parser.error(f"at least 2 epochs, 1 round and {args.batch_size} images, which are one batch")
    return args


def trained(args: argparse.Namespace, data: Path, arch: str, backend: str) -> Figures:
    """One run of the example."""
    with tempfile.TemporaryDirectory() as out:
        options = ["--arch", arch, "--data-backend", backend, "--out", out, "--epochs", str(args.epochs)]
        for name in ("batch_size", "size", "workers"):
            options += ["--" + name.replace("_", "-"), str(getattr(args, name))]
        if args.device == "cuda":
            options += ["--amp", "float16", "--channels-last"]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(data), *options],
            env={**os.environ, **hidden},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{backend} failed with {arch}:\n{done.stderr}")
        epochs = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()][1:]
    return {name: [round(epoch[name], 4) for epoch in epochs] for name in ("images_per_s", "waited")}


def medians(rounds: list[Figures]) -> dict[str, Any]:
    """Of a round its median epoch counts, and of the rounds their median."""
    speeds, waited = ([statistics.median(each[name]) for each in rounds] for name in ("images_per_s", "waited"))
    return {
        "images_per_s": statistics.median(speeds),
        "images_per_s_rounds": [round(speed, 4) for speed in speeds],
        "waited": round(statistics.median(waited), 4),
    }


def as_table(record: dict[str, Any]) -> Table:
    table = Table(title=f"{record['arch']} on {record['machine']['gpu'] or 'the CPU'}, {record['workers']} workers")
    for column in ("backend", "images/s", "lowest - highest", "times pytorch", "waited"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for backend, figures in record["backends"].items():
        rounds = figures["images_per_s_rounds"]
        times = figures["images_per_s"] / record["backends"]["pytorch"]["images_per_s"]
        spread = f"{min(rounds):,.0f} - {max(rounds):,.0f}"
        table.add_row(backend, f"{figures['images_per_s']:,.0f}", spread, f"{times:.2f}", f"{figures['waited']:.0%}")
    return table


def main() -> None:
    args = arguments()
    data = Path(tempfile.gettempdir()) / f"imagenet-{args.images}"
    make_dataset(data / "train", images=args.images)
    make_dataset(data / "val", images=VAL_IMAGES, seed=1)
    for arch in args.archs:
        rounds: dict[str, list[Figures]] = {backend: [] for backend in BACKENDS}
        with tqdm(total=args.rounds * len(BACKENDS), desc=arch, unit="run", disable=None) as bar:
            for _ in range(args.rounds):
                for backend in BACKENDS:
                    bar.set_postfix_str(backend)
                    rounds[backend].append(trained(args, data, arch, backend))
                    bar.update()
        backends = {backend: medians(figures) for backend, figures in rounds.items()}
        settings = ("images", "batch_size", "size", "workers", "epochs", "device")
        record = append_record(args, *settings, arch=arch, backends=backends)
        Console().print(as_table(record))


if __name__ == "__main__":
    main()
