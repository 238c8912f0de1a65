"""What determines the batches: a table of runs, with a fingerprint of all batches of each.

With seed=, the order of the images and their random crops depend only on the seed, the epoch and the index of the
image. So a run can be repeated with any number of workers, and a training run that stopped mid-epoch resumes with the
remaining batches.

Usage:

    python examples/determinism.py              # creates photos in data/example_photos
    python examples/determinism.py my_images    # a folder with one subfolder of images per class

Runs with the same fingerprint have bit-identical batches. The first five runs must have the same one, and the last
three must differ from it. Otherwise the script exits with an error.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from proxyloader import DataLoader
from proxyloader.make_dataset import make_dataset

PHOTOS = Path("data/example_photos")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder with one subfolder of images per class")
    option("--size", type=int, default=64, help="height and width of the crops, in pixels")
    option("--batch-size", type=int, default=16, help="images per batch; the folder must contain at least two batches")
    option("--seed", type=int, default=0, help="seed of the first run")
    args = parser.parse_args()
    for name, least in {"size": 1, "batch_size": 1, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


def fingerprint(batches: Iterable[list[torch.Tensor]]) -> str:
    """Return eight characters that depend on every bit of every batch."""
    digest = hashlib.sha256()
    for images, labels in batches:
        digest.update(images.cpu().numpy().tobytes())
        digest.update(labels.numpy().tobytes())
    return digest.hexdigest()[:8]


class Runs:
    """The runs of the table. Each public method returns the fingerprint of one epoch."""

    def __init__(self, root: Path, args: argparse.Namespace) -> None:
        steps = [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        try:
            self.folder = ImageFolder(str(root), transforms.Compose(steps))
        except FileNotFoundError as error:
            sys.exit(f"{root} must contain one folder of images per class, none empty: {error}")
        self.batch_size, self.seed = args.batch_size, args.seed

    def _loader(self, seed: int | None, workers: int) -> DataLoader[Any]:
        # All images use the JPEG engines of a GPU, because CUDA rounds differently.
        options: dict[str, Any] = {"num_workers": workers, "seed": seed, "hw_decoder_load": 1.0}
        return DataLoader(self.folder, self.batch_size, shuffle=True, **options)

    def first_epoch(self, workers: int, seed_offset: int = 0) -> str:
        return fingerprint(self._loader(self.seed + seed_offset, workers))

    def second_epoch(self) -> str:
        loader = self._loader(self.seed, workers=1)
        for _ in loader:
            pass
        return fingerprint(loader)

    def resumed(self, workers: int) -> str:
        """Stop after the first batch, and resume with a new loader, which may be in another process."""
        stopped = self._loader(self.seed, workers=1)
        first = list(islice(stopped, 1))
        loader = self._loader(self.seed, workers)
        loader.load_state_dict(stopped.state_dict())
        return fingerprint(chain(first, loader))

    def without_seed(self, workers: int) -> str:
        torch.manual_seed(self.seed)
        return fingerprint(self._loader(None, workers))


def main() -> None:
    args = parse_args()
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    runs, seed = Runs(root, args), args.seed
    if len(runs.folder) < 2 * args.batch_size:
        sys.exit(f"{root}: {len(runs.folder)} images are fewer than two batches. Lower --batch-size")
    table: list[tuple[str, Callable[[], str], bool]] = [
        (f"seed={seed}, no workers", lambda: runs.first_epoch(workers=0), True),
        (f"seed={seed}, no workers, repeated", lambda: runs.first_epoch(workers=0), True),
        (f"seed={seed}, 1 worker", lambda: runs.first_epoch(workers=1), True),
        (f"seed={seed}, 2 workers", lambda: runs.first_epoch(workers=2), True),
        (f"seed={seed}, stopped after a batch, resumed with 2 workers", lambda: runs.resumed(workers=2), True),
        (f"seed={seed}, the next epoch", runs.second_epoch, False),
        (f"seed={seed + 1}", lambda: runs.first_epoch(workers=1, seed_offset=1), False),
        (f"no seed=, torch.manual_seed({seed}), 1 worker", lambda: runs.without_seed(workers=1), False),
    ]
    print(f"{'run':<56} batches   equal to the first run")
    first, wrong = "", []
    for title, run, expected in tqdm(table, leave=False, disable=None):
        digest = run()
        first = first or digest
        tqdm.write(f"{title:<56} {digest}  {'yes' if digest == first else 'no'}")
        if (digest == first) != expected:
            wrong.append(title)
    if wrong:
        sys.exit(f"unexpected batches: {'; '.join(wrong)}. This is a bug, please report it")
    print("Batches depend on the seed, the epoch and the images, but not on the number of workers or on resuming")


if __name__ == "__main__":
    main()
