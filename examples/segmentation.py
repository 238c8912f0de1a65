"""Train a small semantic segmentation network on photographs and label maps, loaded by proxyloader.DataLoader.

Except for one import, the code is as for torch's loader: a dataset that opens a JPEG and a PNG with Pillow, and
transforms v2 that change both together. The workers transform the label maps, but leave the photos encoded, and record
what is done to them. The loader then decodes and transforms all photos of a batch, on a GPU if there is one. Label maps
arrive on the CPU, as with torch.

Usage:

    python examples/segmentation.py          # creates photos of triangles, squares, stars and discs
    python examples/segmentation.py my_data  # my_data/train/ and my_data/val/, with pairs of NAME.jpg and NAME.png

The values of a label map are classes, where 0 is the background and 255 is ignored. The script prints the loss of each
epoch, and then for each class its intersection over union on the validation photos (IoU): the pixels that are predicted
as the class and belong to it, divided by those of either. The photos that it creates are easy: with the default
options, the mean over classes (mIoU) reaches at least 0.75, in about half a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import colorsys
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from tqdm import tqdm

from proxyloader import DataLoader
from proxyloader.make_dataset import photograph

PHOTOS = Path("data/example_masks")
IMAGES = {"train": 320, "val": 80}
SHAPES = {"triangle": (3, 1.0), "square": (4, 1.0), "star": (10, 0.45), "disc": (30, 1.0)}
"""Number of corners of each class, and the distance of every second one from the center, relative to the others."""

IGNORED = 255
CHANNELS = (3, 16, 32, 64, 96)
NORMALIZE = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and std of ImageNet
BAR = {"unit": " batches", "leave": False, "disable": None}  # None: no bar unless the output is a terminal


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder with train/ and val/, of photos and label maps")
    option("--classes", type=int, default=len(SHAPES) + 1, help="number of classes, including the background")
    option("--epochs", type=int, default=5, help="number of epochs, over which the learning rate decays to 0")
    option("--batch-size", type=int, default=8, help="images per step")
    option("--workers", type=int, default=2, help="worker processes; 0: load in the main process")
    option("--lr", type=float, default=0.004, help="peak learning rate")
    option("--size", type=int, default=96, help="height and width of the training crops, in pixels")
    option("--seed", type=int, default=0, help="seed of the initial weights, the order and the augmentation")
    args = parser.parse_args()
    least_values = {"classes": 1, "epochs": 1, "batch_size": 1, "workers": 0, "lr": 0, "size": 1, "seed": 0}
    for name, least in least_values.items():
        if not least <= getattr(args, name) < math.inf:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


def draw_color(rng: np.random.Generator, label: int) -> tuple[int, ...]:
    hue = (label + rng.normal(0, 0.1)) / len(SHAPES)
    red, green, blue = colorsys.hsv_to_rgb(hue, rng.uniform(0.6, 1.0), rng.uniform(0.6, 1.0))
    return int(255 * red), int(255 * green), int(255 * blue)


def make_photos(folder: Path, images: int, seed: int) -> None:
    """Create photos of one to four shapes, and their label maps, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in tqdm(range(images), f"creating {folder}", leave=False, disable=None):
        rng = np.random.default_rng((seed, number))
        if (folder / f"{number:04}.png").exists():
            continue
        photo = photograph(number, size=(160, 120) if rng.random() < 0.6 else (130, 150), seed=seed)
        labels = Image.new("L", photo.size)
        for _ in range(rng.integers(1, 5)):
            label = int(rng.integers(len(SHAPES)))
            corners, indent = list(SHAPES.values())[label]
            angles = rng.uniform(0, 2 * math.pi) + np.arange(corners) * 2 * math.pi / corners
            distances = rng.uniform(15, 35) * np.where(np.arange(corners) % 2, indent, 1)
            outline = rng.random(2) * photo.size + distances[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
            points = [(x, y) for x, y in outline.tolist()]
            ImageDraw.Draw(photo).polygon(points, draw_color(rng, label))
            ImageDraw.Draw(labels).polygon(points, label + 1)
        photo.save(folder / f"{number:04}.jpg", quality=93)
        labels.save(folder / f"{number:04}.png")


class PhotosAndLabels(Dataset[tuple[Any, Any]]):
    """Pairs of NAME.jpg and NAME.png in a folder.

    Args:
        folder: the folder.
        transforms: function of a PIL image and a mask, (1, H, W) uint8.
    """

    def __init__(self, folder: Path, transforms: Callable[[Any, Any], Any]) -> None:
        self.paths, self.transforms = sorted(folder.glob("*.jpg")), transforms
        if not self.paths:
            sys.exit(f"{folder}: no files NAME.jpg. Without a folder, the script creates photos in {PHOTOS}")
        if missing := [path.name for path in self.paths if not path.with_suffix(".png").is_file()]:
            sys.exit(f"{folder}: {len(missing)} photos have no label map NAME.png, such as {missing[0]}")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path = self.paths[index]
        labels = tv_tensors.Mask(Image.open(path.with_suffix(".png")))
        return self.transforms(Image.open(path).convert("RGB"), labels)


def load_data(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Return the loaders of training and validation batches: (N, 3, H, W) float32 images, (N, 1, H, W) int64 labels."""
    crop = v2.RandomCrop(args.size, pad_if_needed=True, fill={tv_tensors.Mask: IGNORED, "others": 0})
    augment = [v2.RandomHorizontalFlip(), crop]
    dtypes = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    to_tensor = [v2.ToImage(), v2.ToDtype(dtypes, scale=True), NORMALIZE, v2.ToPureTensor()]
    datasets = []
    for part, steps in (("train", [*augment, *to_tensor]), ("val", to_tensor)):
        folder = args.data / part
        if args.data == PHOTOS:
            make_photos(folder, IMAGES[part], seed=part == "val")
        datasets.append(PhotosAndLabels(folder, v2.Compose(steps)))
    train_set, val_set = datasets
    if len(train_set) < args.batch_size:
        sys.exit(f"{args.data / 'train'}: {len(train_set)} images are fewer than one batch. Lower --batch-size")
    workers: dict[str, Any] = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **workers)
    return train_loader, DataLoader(val_set, batch_size=1, **workers)  # photos of different sizes


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Network(nn.Module):
    """A small U-Net: (N, 3, H, W) images to (N, classes, H, W) logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        pairs = list(pairwise(CHANNELS))
        self.down = nn.ModuleList(block(*pair, stride=2) for pair in pairs)
        self.up = nn.ModuleList(block(below + beside, beside) for beside, below in pairs[:0:-1])
        self.classify = nn.Conv2d(CHANNELS[1], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        outputs = [images]
        for down in self.down:
            outputs.append(down(outputs[-1]))
        output = outputs.pop()
        for up in self.up:
            beside = outputs.pop()
            output = up(torch.cat([F.interpolate(output, beside.shape[2:]), beside], 1))
        return F.interpolate(self.classify(output), images.shape[2:], mode="bilinear")


def train(model: nn.Module, loader: DataLoader, optimizer: Any, scheduler: Any, device: Any, title: str) -> float:
    """Train for one epoch. Return the mean loss."""
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in tqdm(loader, title, **BAR):
        loss = F.cross_entropy(model(images.to(device)), labels.squeeze(1).to(device), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
    return total.item() / len(loader)


@torch.inference_mode()
def evaluate(model: nn.Module, loader: DataLoader, classes: int, device: torch.device) -> list[float]:
    """Return the IoU of each class."""
    model.eval()
    counts = torch.zeros(classes, classes, device=device)  # pixels by class and prediction
    for images, labels in tqdm(loader, "validation", **BAR):
        labels, predicted = labels.to(device), model(images.to(device)).argmax(1, keepdim=True)
        counts += (classes * labels + predicted)[labels != IGNORED].bincount(minlength=classes**2).reshape(counts.shape)
    both = counts.diagonal()
    return (both / (counts.sum(0) + counts.sum(1) - both)).tolist()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, val_loader = load_data(args)
    model = Network(args.classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * len(train_loader))
    print(f"training on {len(train_loader.dataset)} images on {device}", flush=True)
    for epoch in range(1, args.epochs + 1):
        title = f"epoch {epoch}/{args.epochs}"
        loss = train(model, train_loader, optimizer, scheduler, device, title)
        print(f"{title}: loss {loss:.3f}", flush=True)
    ious = evaluate(model, val_loader, args.classes, device)
    print(f"IoU of each class {' '.join(f'{iou:.2f}' for iou in ious)}")
    print(f"mIoU {sum(ious) / len(ious):.3f} on {len(val_loader.dataset)} validation images")


if __name__ == "__main__":
    main()
