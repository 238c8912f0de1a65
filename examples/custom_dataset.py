"""A dataset class of your own, loaded by proxyloader.DataLoader: pictures and labels from a CSV file.

No line of the class is for proxyloader. It opens a file with Pillow and gives the image to its transform. With
proxyloader's loader the file is not decoded there, but by DALI with its batch, and the batches stay the stock loader's:
the script loads the same pictures with both under one seed and compares them.

Launch it:

    python examples/custom_dataset.py                # makes photographs, and a CSV file of them, in data/example_photos
    python examples/custom_dataset.py my_table.csv   # a file with a header and the columns file,label

Look at the table that it prints. Labels and file names are to be equal in every batch; so are crops and flips, which
are random. Pixels differ by rounding: by less than one level of 255 in the mean. Where crops were others, it would be
tens of levels.
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
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset
from torchvision import transforms
from tqdm import tqdm

from proxyloader import DataLoader
from proxyloader.make_dataset import make_dataset

PHOTOS = Path("data/example_photos")
CLOSE = 1.0  # of 255 levels, in the mean: what rounding comes to


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("table", type=Path, nargs="?", default=PHOTOS / "table.csv", help="CSV file; files are relative to it")
    option("--batches", type=int, default=4, help="how many are compared")
    option("--batch-size", type=int, default=16, help="pictures in a batch")
    option("--workers", type=int, default=2, help="processes that fetch pictures, of each loader")
    option("--size", type=int, default=96, help="side of the square crops, in pixels")
    option("--seed", type=int, default=0, help="decides the order of the pictures and their crops")
    args = parser.parse_args()
    for name, least in {"batches": 1, "batch_size": 1, "workers": 0, "size": 1, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} is {least} or more; got {getattr(args, name)}")
    return args


class PicturesOfTable(Dataset[dict[str, Any]]):
    """The rows of a CSV file, each as {"image", "label", "file"}.

    Args:
        table: has the columns ``file`` (relative to the table's folder) and ``label`` (any word).
        transform: is called with a PIL image.
    """

    def __init__(self, table: Path, transform: Callable[[Any], Any]) -> None:
        with table.open(newline="") as file:
            rows = csv.DictReader(file)
            if not {"file", "label"} <= set(rows.fieldnames or ()):
                sys.exit(f"{table}: the first line names the columns file,label; it has {rows.fieldnames or 'nothing'}")
            self.rows = [(row["file"], row["label"]) for row in rows]
        if not self.rows:
            sys.exit(f"{table}: no rows below the first line. Each is a file and its label")
        # Said here it is one sentence; by a worker that opens the file, it would be a traceback in mid-epoch.
        wrong = [file for file, label in self.rows if not label or not (table.parent / (file or "")).is_file()]
        if wrong:
            sys.exit(f"{table}: rows without a label, or a file in {table.parent}: {len(wrong)}, such as {wrong[0]!r}")
        self.folder, self.transform = table.parent, transform
        self.labels = sorted({label for _, label in self.rows})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, label = self.rows[index]
        image = Image.open(self.folder / file).convert("RGB")
        return {"image": self.transform(image), "label": self.labels.index(label), "file": file}


def make_table(table: Path) -> None:
    """Write photographs, and a table of them beside."""
    make_dataset(table.parent, images=64)
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "label"])
        for path in sorted(table.parent.glob("*/*.jpg")):
            rows.writerow([path.relative_to(table.parent), path.parent.name])


def load(kind: type, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The first batches of a loader: images (N, 3, size, size) float32 in 0..1, labels (N,) int64, N file names."""
    steps = [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    dataset = PicturesOfTable(args.table, transforms.Compose(steps))
    torch.manual_seed(args.seed)
    loader = kind(dataset, args.batch_size, shuffle=True, num_workers=args.workers)
    title = f"{kind.__module__.split('.')[0]}.DataLoader"
    batches = min(args.batches, len(loader))
    return list(tqdm(islice(loader, batches), title, batches, leave=False, disable=None))


def main() -> None:
    args = parse_args()
    if args.table == PHOTOS / "table.csv":
        make_table(args.table)
    if not args.table.is_file():
        sys.exit(f"{args.table}: no such file. Without a file, the script makes one in {PHOTOS}")
    theirs, ours = load(StockLoader, args), load(DataLoader, args)
    print(f"{args.table}: {len(ours)} batches of torch.utils.data.DataLoader and of proxyloader.DataLoader")
    print("batch  labels  files  pixels differ, of 255 levels")
    wrong = []
    for number, (their, our) in enumerate(zip(theirs, ours), 1):
        labels, files = torch.equal(our["label"], their["label"]), our["file"] == their["file"]
        levels = (our["image"].cpu() - their["image"]).abs() * 255
        words = ["equal" if same else "OTHER" for same in (labels, files)]
        print(f"{number:>5}  {words[0]:<6}  {words[1]:<5}  {levels.mean():.2f} in the mean, {levels.max():.0f} at most")
        if not (labels and files and levels.mean() < CLOSE):
            wrong.append(number)
    if wrong:
        sys.exit(f"batches {wrong} are not the stock loader's. That should not be: please report it")
    print(f"The same batches, on {ours[0]['image'].device}; pixels differ by rounding")


if __name__ == "__main__":
    main()
