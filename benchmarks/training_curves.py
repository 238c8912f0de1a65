"""Does a network learn the same from proxyloader's batches? Its curves, among those of several stock runs.

    python benchmarks/training_curves.py                 # on a GPU where there is one
    python benchmarks/training_curves.py --device cpu    # a small network, fewer pictures
    python benchmarks/training_curves.py --plot          # draw the last record again; trains nothing

The pictures are painted: a disc, a triangle, a star or a bar in red, green or blue upon what looks like a photograph.
Each of the twelve is a class, so a network needs the shape and the colour. It is trained from the same weights, with
the same ``torch.manual_seed`` for the loader, several times with torch's DataLoader and once with proxyloader's, behind
RandomResizedCrop, flip, ColorJitter and RandAugment.

What differs between two stock runs is rounding: of half of the initial weights, drawn for each run, the next float32 is
taken, 1e-7 of the value away, which is what a sum in another order makes. On a GPU, cuDNN is free to sum in any order
(``torch.backends.cudnn.deterministic`` is False), which comes to it. Training makes much of such differences. The run
with proxyloader has them, too, and in addition its own: pixels that are a part of a level of 255 off. On a CPU, where
torchvision runs ColorJitter and RandAugment in the workers of either loader, these two are left out.

The measure: a curve is the training loss, as means over a quarter of an epoch, or the accuracy in validation after each
epoch. Two curves are as far apart as they are at their farthest point. Claimed is, for either curve: proxyloader's is
no farther from the mean of the stock runs than the two stock runs are that are farthest from each other. The table and
the record also say how far each stock run is from the mean of the other stock runs. It takes some hundreds of steps
until rounding has grown to its full size; in a shorter training stock runs hardly differ, and the claim does not hold.

Appends one JSON line to benchmarks/results/training_curves.jsonl, and draws training_curves.png beside it (with
matplotlib, where it is installed).
"""

from __future__ import annotations

import colorsys
import hashlib
import itertools
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from _common import append_record, make_parser
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

import proxyloader
from proxyloader._cores import usable_cores
from proxyloader.make_dataset import photograph
from proxyloader.tools.bench.config import MEAN, STD

PARTS_OF_AN_EPOCH = 4
"""Of each, the mean of the training loss is a point."""

SEED = 5
"""Of the weights, and of the loader."""

OURS = "proxyloader"
CURVES = {"loss": "training loss", "accuracy": "accuracy in validation"}


def corners(number: int) -> Any:
    """Those of a regular polygon, as complex numbers."""
    return np.exp(2j * np.pi * np.arange(number) / number)


SHAPES = {
    "disc": 0.8 * corners(40),
    "triangle": corners(3),
    "star": corners(10) * np.tile([1, 0.4], 5),
    "bar": np.array([1 + 0.3j, -1 + 0.3j, -1 - 0.3j, 1 - 0.3j]),
}
HUES = {"red": 0.0, "green": 1 / 3, "blue": 2 / 3}
CLASSES = list(itertools.product(SHAPES, HUES))


@dataclass(frozen=True)
class Scale:
    """How large everything is; the defaults of a device.

    Attributes:
        crop_px: side of what the network sees. The pictures are 2 x 1.5 times as large.
        images: to train with; a quarter of that to validate.
    """

    model: str
    crop_px: int
    images: int
    epochs: int
    runs: int
    batch_size: int

    def network(self) -> nn.Module:
        if self.model == "ResNet-18":
            return torchvision.models.resnet18(num_classes=len(CLASSES))
        blocks, channels = [], 3
        for width in (16, 32, 64, 128):
            for stride in (2, 1):
                convolution = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
                blocks.append(nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU()))
                channels = width
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, len(CLASSES)))


SCALES = {
    "cuda": Scale("ResNet-18", crop_px=128, images=8192, epochs=12, runs=4, batch_size=128),
    "cpu": Scale("8 convolutions", crop_px=128, images=768, epochs=12, runs=4, batch_size=32),
}


def picture(number: int, crop_px: int) -> Image.Image:
    """A coloured shape upon a background that says nothing of the class."""
    rng = np.random.default_rng((SEED, number))
    shape, color = CLASSES[number % len(CLASSES)]
    size = width, height = 2 * crop_px, 3 * crop_px // 2
    background = photograph(number, size=size, label=int(rng.integers(100)), classes=100)
    center = complex(rng.uniform(0.35, 0.65) * width, rng.uniform(0.4, 0.6) * height)
    turned = rng.uniform(0.25, 0.4) * height * np.exp(2j * np.pi * rng.random())
    outline = 4 * (SHAPES[shape] * turned + center)
    mask = Image.new("L", (4 * width, 4 * height))
    ImageDraw.Draw(mask).polygon([(point.real, point.imag) for point in outline], fill=215)
    hue = (HUES[color] + rng.normal(0, 0.02)) % 1
    paint = 255 * np.array(colorsys.hsv_to_rgb(hue, rng.uniform(0.45, 0.9), rng.uniform(0.4, 0.9)))
    rough = paint + rng.normal(0, 14, (height, width, 1))
    surface = Image.fromarray(np.clip(rough, 0, 255).astype(np.uint8))
    return Image.composite(surface, background, mask.resize(size, Image.Resampling.BOX))


def write(root: Path, crop_px: int, number: int) -> None:
    folder = root / "_".join(CLASSES[number % len(CLASSES)])
    folder.mkdir(parents=True, exist_ok=True)
    picture(number, crop_px).save(folder / f"{number:06d}.jpg", quality=90)


def make_pictures(root: Path, scale: Scale) -> None:
    """root/train and root/val, a folder for each class in them."""
    parts = {"train": range(scale.images), "val": range(scale.images, scale.images + max(scale.images // 4, 12))}
    with ProcessPoolExecutor(usable_cores(), get_context("spawn")) as pool:
        for part, numbers in parts.items():
            made = pool.map(partial(write, root / part, scale.crop_px), numbers, chunksize=32)
            for _ in tqdm(made, part, len(numbers), unit="image", disable=None):
                pass


def transforms_for(crop_px: int, device: str) -> dict[str, Any]:
    ending = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    train = [transforms.RandomResizedCrop(crop_px, scale=(0.4, 1)), transforms.RandomHorizontalFlip()]
    if device == "cuda":
        train += [transforms.ColorJitter(0.2, 0.2, 0.2, 0.02), transforms.RandAugment()]
    val = [transforms.Resize(crop_px * 8 // 7), transforms.CenterCrop(crop_px)]
    return {"train": transforms.Compose([*train, *ending]), "val": transforms.Compose([*val, *ending])}


def loaders(name: str, root: Path, scale: Scale, device: str) -> list[Any]:
    """One to train with and one to validate with, both of the kind that the run is named after."""
    made = []
    for part, transform in transforms_for(scale.crop_px, device).items():
        how: dict[str, Any] = dict(
            batch_size=scale.batch_size,
            shuffle=part == "train",
            drop_last=part == "train",
            num_workers=min(16, usable_cores()),
            persistent_workers=True,
        )
        dataset = ImageFolder(str(root / part), transform)
        if name == OURS:
            made.append(proxyloader.DataLoader(dataset, **how, device=device))
        else:
            made.append(DataLoader(dataset, **how, pin_memory=device == "cuda"))
    return made


def rounded_otherwise(network: nn.Module, run: int) -> nn.Module:
    """Half of the weights, others for each run, become the next larger float32."""
    generator = torch.Generator().manual_seed(run)
    with torch.no_grad():
        for weight in network.parameters():
            drawn = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.where(drawn, torch.nextafter(weight, torch.tensor(torch.inf)), weight))
    return network


def train(name: str, run: int, root: Path, scale: Scale, device: str, bar: Any) -> dict[str, Any]:
    """The curves of one run, the time it took, and a digest of its labels in their order."""
    torch.manual_seed(SEED)
    network = rounded_otherwise(scale.network(), run).to(device)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = scale.images // scale.batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=scale.epochs * steps)
    torch.manual_seed(SEED)
    train_loader, val_loader = loaders(name, root, scale, device)
    losses, accuracies, order, start = [], [], hashlib.sha1(usedforsecurity=False), time.perf_counter()
    for _ in range(scale.epochs):
        network.train()
        for images, labels in train_loader:
            order.update(labels.cpu().numpy().tobytes())
            scores = network(images.to(device, non_blocking=True))
            loss = nn.functional.cross_entropy(scores, labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        accuracies.append(accuracy(network, val_loader, device))
        bar.set_postfix_str(f"{name} {run}: accuracy {accuracies[-1]:.2f}", refresh=False)
        bar.update()
    points = np.array_split(torch.stack(losses).cpu().numpy(), scale.epochs * min(PARTS_OF_AN_EPOCH, steps))
    return {
        "loss": [round(float(part.mean()), 4) for part in points],
        "accuracy": [round(value, 4) for value in accuracies],
        "seconds": round(time.perf_counter() - start, 1),
        "labels_sha1": order.hexdigest(),
    }


@torch.no_grad()
def accuracy(network: nn.Module, batches: Any, device: str) -> float:
    network.eval()
    right = [(network(images.to(device)).argmax(1) == labels.to(device)).float() for images, labels in batches]
    return float(torch.cat(right).mean())


def distance(a: Any, b: Any) -> float:
    """Of two curves: at the point where they are farthest apart."""
    return round(float(np.abs(np.subtract(a, b)).max()), 4)


def distances(runs: dict[str, Any], curve: str) -> dict[str, Any]:
    """What is claimed of a curve, in numbers."""
    stock = {name: run[curve] for name, run in runs.items() if name != OURS}
    others = {name: [value for other, value in stock.items() if other != name] for name in stock}
    allowed = max(distance(a, b) for a, b in itertools.combinations(stock.values(), 2))
    found = distance(runs[OURS][curve], np.mean(list(stock.values()), 0))
    return {
        "ours_to_mean_of_stock": found,
        "most_between_two_stock": allowed,
        "each_stock_to_mean_of_others": {name: distance(stock[name], np.mean(others[name], 0)) for name in stock},
        "holds": found <= allowed,
    }


def as_table(record: dict[str, Any]) -> Table:
    where, scale = record["machine"]["gpu"] or "CPU", record["scale"]
    table = Table(title=f"{scale['model']}, {scale['epochs']} epochs of {scale['images']} images, {where}")
    for column in ("run", "last loss", "last accuracy", "loss: from the stock mean", "accuracy: from it", "s"):
        table.add_column(column)
    for name, run in record["runs"].items():
        far = []
        for found in record["distances"].values():
            own = found["ours_to_mean_of_stock"] if name == OURS else found["each_stock_to_mean_of_others"][name]
            far.append(f"{own:.3f}")
        table.add_row(name, f"{run['loss'][-1]:.3f}", f"{run['accuracy'][-1]:.3f}", *far, f"{run['seconds']:.0f}")
    allowed = [f"{found['most_between_two_stock']:.3f}" for found in record["distances"].values()]
    table.add_section()
    table.add_row("most between two stock runs", "", "", *allowed, "")
    holds = ["yes" if found["holds"] else "no" for found in record["distances"].values()]
    table.add_row("proxyloader is among them", "", "", *holds, "")
    return table


def plot(record: dict[str, Any], path: Path) -> None:
    """Both curves of all runs, side by side."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("matplotlib is not installed, so there is no plot; with it, --plot draws the record", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, (curve, title) in zip(axes, CURVES.items()):
        for name, run in record["runs"].items():
            points = record["scale"]["epochs"] * np.arange(1, len(run[curve]) + 1) / len(run[curve])
            style: Any = {"color": "C1", "lw": 1.8, "zorder": 3} if name == OURS else {"color": "0.55", "lw": 1}
            stock_label = "torch.utils.data.DataLoader" if name == "stock 1" else None
            axis.plot(points, run[curve], label="proxyloader.DataLoader" if name == OURS else stock_label, **style)
        axis.set(title=title, xlabel="epoch")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    where = record["machine"]["gpu"] or f"{record['machine']['cores']} CPU cores"
    figure.suptitle(f"{record['scale']['model']}, same seed, {where}", fontsize="medium")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = make_parser("training_curves", __doc__)
    for name, meaning in (("images", "to train with"), ("epochs", "of each run"), ("runs", "with the stock loader")):
        of_each = ", ".join(f"{getattr(scale, name)} ({device})" for device, scale in SCALES.items())
        parser.add_argument(f"--{name}", type=int, help=f"{meaning} (default: {of_each})")
    parser.add_argument("--plot", action="store_true", help="draw the last record of --out, and do nothing else")
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(args.out.read_text().splitlines()[-1]), args.out.with_suffix(".png"))
        return
    given = {name: getattr(args, name) for name in ("images", "epochs", "runs") if getattr(args, name) is not None}
    scale = Scale(**{**vars(SCALES[args.device]), **given})
    if scale.runs < 2 or scale.images < scale.batch_size or scale.epochs < 1:
        parser.error(f"at least 2 runs, 1 epoch and {scale.batch_size} images, which are one batch")
    torch.backends.cudnn.benchmark = True
    if args.device == "cpu":
        torch.set_num_threads(1)  # the network is tiny, and the cores are the loaders'
    names = [*(f"stock {number}" for number in range(1, scale.runs + 1)), OURS]
    with tempfile.TemporaryDirectory() as folder:
        make_pictures(Path(folder), scale)
        with tqdm(total=len(names) * scale.epochs, unit="epoch", disable=None) as bar:
            runs = {
                name: train(name, run, Path(folder), scale, args.device, bar) for run, name in enumerate(names, start=1)
            }
    assert len({run["labels_sha1"] for run in runs.values()}) == 1, "the loaders gave other labels, or another order"
    record = append_record(
        args,
        "device",
        scale=vars(scale),
        seed=SEED,
        transform=str(transforms_for(scale.crop_px, args.device)["train"]),
        distances={curve: distances(runs, curve) for curve in CURVES},
        runs=runs,
    )
    plot(record, args.out.with_suffix(".png"))
    Console().print(as_table(record))


if __name__ == "__main__":
    main()
