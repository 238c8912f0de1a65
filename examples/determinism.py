"""What decides the batches, and what does not: a table of runs, each with a fingerprint of all its batches.

With seed=, proxyloader.DataLoader makes the order of the pictures and their random crops a function of the seed, the
epoch and the picture's index, and of nothing else. So a run can be done again, with more workers too, and a training
that was stopped in mid-epoch goes on with the batches that were left.

Launch it:

    python examples/determinism.py                # makes photographs in data/example_photos
    python examples/determinism.py my_pictures    # a folder with one folder of images for each class

Look at the fingerprints: runs that have the same one gave the same batches, bit for bit. The first five runs are to be
the same, the last three are not; where it is otherwise, the script says so and ends with an error.
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
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder of pictures; the default is made")
    option("--size", type=int, default=64, help="side of the square crops, in pixels")
    option("--batch-size", type=int, default=16, help="pictures in a batch; the folder must hold two batches")
    option("--seed", type=int, default=0, help="of the first run")
    args = parser.parse_args()
    for name, least in {"size": 1, "batch_size": 1, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} is {least} or more; got {getattr(args, name)}")
    return args


def fingerprint(batches: Iterable[list[torch.Tensor]]) -> str:
    """Eight characters that depend on every bit of every batch."""
    digest = hashlib.sha256()
    for images, labels in batches:
        digest.update(images.cpu().numpy().tobytes())
        digest.update(labels.numpy().tobytes())
    return digest.hexdigest()[:8]


class Runs:
    """The runs of the table. Each method gives the fingerprint of one epoch."""

    def __init__(self, root: Path, args: argparse.Namespace) -> None:
        steps = [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        try:
            self.folder = ImageFolder(str(root), transforms.Compose(steps))
        except FileNotFoundError as error:
            sys.exit(f"{root} is to hold a folder of pictures for each class, and none empty: {error}")
        self.batch_size, self.seed = args.batch_size, args.seed

    def loader(self, seed: int | None, workers: int) -> DataLoader[Any]:
        # The JPEG engines of a GPU and its other decoder round in different ways, and by default the loader measures
        # which of them is faster. Bits are to be compared here, so the choice is made beforehand.
        more: dict[str, Any] = {"num_workers": workers, "seed": seed, "hw_decoder_load": 1.0}
        return DataLoader(self.folder, self.batch_size, shuffle=True, **more)

    def whole(self, workers: int, another: int = 0) -> str:
        return fingerprint(self.loader(self.seed + another, workers))

    def second_epoch(self) -> str:
        loader = self.loader(self.seed, workers=1)
        for _ in loader:
            pass
        return fingerprint(loader)

    def resumed(self, workers: int) -> str:
        """Stop after the first batch; let a new loader, which may be in another process, go on."""
        stopped = self.loader(self.seed, workers=1)
        first = list(islice(stopped, 1))
        checkpoint = stopped.state_dict()
        going_on = self.loader(self.seed, workers)
        going_on.load_state_dict(checkpoint)
        return fingerprint(chain(first, going_on))

    def without_seed(self, workers: int) -> str:
        torch.manual_seed(self.seed)
        return fingerprint(self.loader(None, workers))


def main() -> None:
    args = parse_args()
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    if not root.is_dir():
        sys.exit(f"{root}: no such folder. Without a folder, the script makes one in {PHOTOS}")
    runs, seed = Runs(root, args), args.seed
    if len(runs.folder) < 2 * args.batch_size:
        sys.exit(f"{root}: {len(runs.folder)} pictures are less than two batches. Lower --batch-size")
    seeded: list[tuple[str, Callable[[], str], bool]] = [
        (f"seed={seed}, no workers", lambda: runs.whole(workers=0), True),
        (f"seed={seed}, no workers, once more", lambda: runs.whole(workers=0), True),
        (f"seed={seed}, 1 worker", lambda: runs.whole(workers=1), True),
        (f"seed={seed}, 2 workers", lambda: runs.whole(workers=2), True),
        (f"seed={seed}, stopped after a batch, resumed with 2 workers", lambda: runs.resumed(workers=2), True),
        (f"seed={seed}, the next epoch", runs.second_epoch, False),
        (f"seed={seed + 1}", lambda: runs.whole(workers=1, another=1), False),
        (f"no seed=, torch.manual_seed({seed}), 1 worker", lambda: runs.without_seed(workers=1), False),
    ]
    print(f"{'run':<56} batches   same as the first")
    first, wrong = "", []
    for title, run, same in tqdm(seeded, leave=False, disable=None):
        found = run()
        first = first or found
        tqdm.write(f"{title:<56} {found}  {'yes' if found == first else 'no'}")
        if (found == first) != same:
            wrong.append(title)
    if wrong:
        sys.exit(f"not as it should be: {'; '.join(wrong)}. Please report it")
    print("Seed, epoch and pictures decide the batches; the number of workers does not, nor does a stop in between")


if __name__ == "__main__":
    main()
