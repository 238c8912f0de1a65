"""Check that a detector trains as with torch's loader, that targets are equal, and that memory stays flat.

    python benchmarks/detection.py                                    # on a GPU if there is one
    python benchmarks/detection.py --device cpu --images 16 --batch-size 2 --workers 1 --steps 4 --soak 64

Trains torchvision's Faster R-CNN with MobileNet on photographs with labelled polygons, flipped and resized to several
sizes, once with torch's loader and once with this one, with the same seed. torch's loader does it twice, because some
operations on a GPU are not deterministic.

Then compares an epoch of each of three pipelines with torch's: targets must be equal, and images close. Finally loads
as many images as --soak says, and records the memory in use. Appends one JSON line to
benchmarks/results/detection.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import append_record, make_parser
from torch.utils.data import DataLoader as StockLoader
from torchvision.datasets.folder import pil_loader
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from tqdm import tqdm

from proxyloader import DataLoader
from proxyloader.make_dataset import FORMAT, make_dataset
from proxyloader.tools.bench import tasks

SOAK_PIPELINES = ("multiscale", "lsj-masks", "hflip")
CLOSE_LEVELS = 3.0
"""Upper bound on the mean difference of an image, in levels of 255. A different crop exceeds 15."""


def arguments() -> argparse.Namespace:
    parser = make_parser("detection", __doc__)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50, help="number of training steps")
    parser.add_argument("--soak", type=int, default=200_000, metavar="IMAGES")
    return parser.parse_args()


def make_loader(kind: Any, root: str, pipeline: str, args: argparse.Namespace) -> Any:
    dataset = tasks.Photographs(root, pipeline, pil_loader, tasks.PIPELINES[pipeline])
    own = {"device": args.device, "masks_on_device": True} if kind is DataLoader else {}
    collate = tasks.collate_lists
    workers = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    return kind(dataset, args.batch_size, shuffle=True, collate_fn=collate, **workers, **own)


def move_all(targets: Any, device: str) -> list[Any]:
    return [{name: _move(value, device) for name, value in target.items()} for target in targets]


def _move(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def train(loader: Any, args: argparse.Namespace) -> list[float]:
    """Return the loss of each step."""
    torch.manual_seed(0)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=91).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), args.steps)
    for images, targets in tqdm(batches, "training", args.steps, leave=False):
        loss = sum(model([each.to(args.device) for each in images], move_all(targets, args.device)).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def difference(losses: list[float], others: list[float]) -> tuple[float, float]:
    """Return the median and the largest relative difference of a step."""
    differences = [abs(one - other) / one for one, other in zip(losses, others, strict=True)]
    return statistics.median(differences), max(differences)


def compare(root: str, pipeline: str, args: argparse.Namespace) -> dict[str, float]:
    """Compare an epoch with torch's. Return the largest mean difference of an image, and the GPU memory in use."""
    torch.cuda.empty_cache()  # of the training; nothing without a GPU
    levels, before = 0.0, memory_in_use()["gpu"]
    epochs = []
    for kind in (StockLoader, DataLoader):
        torch.manual_seed(2)
        epochs.append(iter(make_loader(kind, root, pipeline, args)))
    for (expected, their_targets), (images, our_targets) in zip(*epochs, strict=True):
        for theirs, mine in zip(their_targets, move_all(our_targets, "cpu"), strict=True):
            assert theirs.keys() == mine.keys()
            for name, value in theirs.items():
                equal = torch.equal(value, mine[name]) if isinstance(value, torch.Tensor) else value == mine[name]
                assert equal, f"{pipeline}: {name} of image {theirs['image_id']} differs"
        for one, other in zip(expected, images, strict=True):
            levels = max(levels, 255 * (one - other.cpu()).abs().mean().item())
    assert levels < CLOSE_LEVELS, f"{pipeline}: an image differs by {levels:.1f} levels on average"
    return {"levels": levels, "gpu_mb": memory_in_use()["gpu"] - before}  # while the loader exists


def memory_in_use() -> dict[str, int]:
    """Return the memory in MB that this process uses, and the whole GPU, and what torch has reserved and allocated.

    torch's allocator keeps what has been freed, and images of many sizes leave gaps in it. The rest belongs to DALI.
    """
    gc.collect()
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    used = {"host": psutil.Process().memory_full_info().uss, "gpu": total - free}
    used |= {"reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
    return {name: size >> 20 for name, size in used.items()}


def soak(root: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Load many images with a loader for each pipeline. Return the memory in use while they load."""
    memory: list[dict[str, Any]] = []
    epochs = -(-args.soak // (args.images * len(SOAK_PIPELINES)))
    every = max(1, epochs // 10)
    with tqdm(total=epochs * args.images * len(SOAK_PIPELINES), desc="soak", leave=False) as progress:
        for pipeline in SOAK_PIPELINES:
            loader = make_loader(DataLoader, root, pipeline, args)
            for epoch in range(1, epochs + 1):
                progress.update(sum(len(images) for images, _ in loader))
                if epoch % every == 0:
                    memory.append(memory_in_use() | {"pipeline": pipeline, "epoch": epoch})
            del loader
    return memory


def main() -> None:
    args = arguments()
    path = Path(tempfile.gettempdir()) / f"coco-v{FORMAT}-{args.images}"
    root = str(make_dataset(path, images=args.images, size=(640, 480)))
    runs = [train(make_loader(kind, root, "multiscale", args), args) for kind in (StockLoader, StockLoader, DataLoader)]
    stock, again, ours = runs
    print("relative difference of a step's loss from that with torch's loader, median and largest:")
    print(f"proxyloader {difference(stock, ours)}, torch's loader again {difference(stock, again)}")
    compared = {pipeline: compare(root, pipeline, args) for pipeline in SOAK_PIPELINES}
    print(f"targets are equal; largest mean difference of an image in levels, and MB of a loader: {compared}")
    memory = soak(root, args)
    print(f"memory in MB: {memory}")
    settings = ("images", "batch_size", "workers", "steps", "soak", "device")
    append_record(
        args, *settings, losses={"stock": stock, "again": again, "ours": ours}, compared=compared, held=memory
    )


if __name__ == "__main__":
    main()
