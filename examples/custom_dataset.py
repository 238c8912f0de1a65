"""A custom dataset of the images and labels listed in a CSV file, loaded by proxyloader.DataLoader.

The class contains no code for proxyloader: it opens files with Pillow and calls its transform. With proxyloader's
loader, DALI decodes the files of a batch together, yet the batches match those of the stock loader. The script loads
the same images with both loaders under the same seed and compares the batches.

Usage:

    python examples/custom_dataset.py                 # creates photos and their CSV file in data/example_photos
    python examples/custom_dataset.py my_table.csv    # a file with a header and the columns file,label

Labels, file names, and the random crops and flips must be equal in every batch. Pixels differ by rounding: by less than
one of 255 levels on average. Different crops would differ by tens of levels.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader, Dataset
from torchvision import transforms
from tqdm import tqdm

from proxyloader import DataLoader
from proxyloader.make_dataset import make_dataset

PHOTOS = Path("data/example_photos")
MAX_MEAN_LEVELS = 1.0  # of 255; rounding differences are smaller


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("table", type=Path, nargs="?", default=PHOTOS / "table.csv", help="CSV file next to its images")
    option("--batches", type=int, default=4, help="number of batches to compare")
    option("--batch-size", type=int, default=16, help="images per batch")
    option("--workers", type=int, default=2, help="worker processes per loader")
    option("--size", type=int, default=96, help="height and width of the crops, in pixels")
    option("--seed", type=int, default=0, help="seed of the order, crops and flips")
    args = parser.parse_args()
    for name, least in {"batches": 1, "batch_size": 1, "workers": 0, "size": 1, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


class CsvImages(Dataset[dict[str, Any]]):
    """The rows of a CSV file, each as {"image", "label", "file"}.

    Args:
        table: CSV file with the columns ``file``, relative to its folder, and ``label``, any string.
        transform: function of a PIL image.
    """

    def __init__(self, table: Path, transform: Callable[[Any], Any]) -> None:
        with table.open(newline="") as file:
            rows = csv.DictReader(file)
            if not {"file", "label"} <= set(rows.fieldnames or ()):
                sys.exit(f"{table}: the header must contain the columns file,label, got {rows.fieldnames}")
            self.rows = [(row["file"], row["label"]) for row in rows]
        if not self.rows:
            sys.exit(f"{table}: no rows after the header")
        # Checked here, because a worker would raise a traceback in the middle of an epoch.
        bad = [file for file, label in self.rows if not label or not (table.parent / (file or "")).is_file()]
        if bad:
            sys.exit(f"{table}: {len(bad)} rows have no label, or no file in {table.parent}, such as {bad[0]!r}")
        self.folder, self.transform = table.parent, transform
        self.labels = sorted({label for _, label in self.rows})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, label = self.rows[index]
        image = Image.open(self.folder / file).convert("RGB")
        return {"image": self.transform(image), "label": self.labels.index(label), "file": file}


def make_table(table: Path) -> None:
    """Create photos and a CSV file that lists them."""
    make_dataset(table.parent, images=64)
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "label"])
        for path in sorted(table.parent.glob("*/*.jpg")):
            rows.writerow([path.relative_to(table.parent), path.parent.name])


def load(loader_class: type, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the first batches: images (N, 3, size, size) float32 in [0, 1], labels (N,) int64, and file names."""
    steps = [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    dataset = CsvImages(args.table, transforms.Compose(steps))
    torch.manual_seed(args.seed)
    loader = loader_class(dataset, args.batch_size, shuffle=True, num_workers=args.workers)
    title = f"{loader_class.__module__.split('.')[0]}.DataLoader"
    batches = min(args.batches, len(loader))
    return list(tqdm(islice(loader, batches), title, batches, leave=False, disable=None))


def main() -> None:
    args = parse_args()
    if args.table == PHOTOS / "table.csv":
        make_table(args.table)
    if not args.table.is_file():
        sys.exit(f"{args.table}: no such file. Omit it to create one in {PHOTOS}")
    stock_batches, batches = load(StockLoader, args), load(DataLoader, args)
    print(f"{args.table}: {len(batches)} batches of torch.utils.data.DataLoader and of proxyloader.DataLoader")
    print("batch  labels  files   pixel difference, of 255 levels")
    wrong = []
    for number, (expected, batch) in enumerate(zip(stock_batches, batches), 1):
        labels, files = torch.equal(batch["label"], expected["label"]), batch["file"] == expected["file"]
        levels = (batch["image"].cpu() - expected["image"]).abs() * 255
        words = ["equal" if each else "DIFFER" for each in (labels, files)]
        print(f"{number:>5}  {words[0]:<6}  {words[1]:<6}  mean {levels.mean():.2f}, max {levels.max():.0f}")
        if not (labels and files and levels.mean() < MAX_MEAN_LEVELS):
            wrong.append(number)
    if wrong:
        sys.exit(f"batches {wrong} differ from the stock loader's. This is a bug, please report it")
    print(f"The batches match, on {batches[0]['image'].device}; pixels differ only by rounding")


if __name__ == "__main__":
    main()
