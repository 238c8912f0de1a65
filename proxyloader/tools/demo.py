"""``proxyloader demo``: a comparison of this loader and torch's on this machine.

Both loaders load the same images under the same seed. Their batches are compared, their speeds are measured, and the
same batch of both is drawn on a contact sheet. Then a small network is trained for a few steps.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.text import Text
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import DataLoader as StockLoader
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

from .._cores import usable_cores
from ..loader.dataloader import DataLoader
from ..make_dataset import make_dataset
from .bench.config import CROP_PX, MEAN, STD, transform_with
from .contact_sheet import contact_sheet
from .files import check_can_be_written, photographs_of, writable_cache_folder
from .processes import ProgressBar

SEED = 0
TIMED_EPOCHS = 3
COMPARED_IMAGES = 512
PROMISED_MEAN, PROMISED_PERCENTILE = 0.5, 2.0
"""Bounds of the difference of a batch from the stock loader's, in levels of 255: mean and 99.9th percentile."""
SHEET_COLUMNS = 8

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images (N, 3, H, W) and labels (N,)."""


@dataclass(frozen=True)
class Setup:
    """The settings of both loaders, and the number of images of the ImageFolder ``root`` that they load."""

    root: Path
    images: int
    batch_size: int
    workers: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def loader_arguments(self) -> dict[str, Any]:
        return {"shuffle": True, "num_workers": self.workers, "persistent_workers": self.workers > 0}


@dataclass(frozen=True)
class Comparison:
    """Differences between the batches of two loaders, in levels of 255. Each number is that of the worst batch."""

    images: int
    labels_equal: bool
    mean: float
    percentile: float
    largest: float

    @property
    def is_as_promised(self) -> bool:
        return self.labels_equal and self.mean <= PROMISED_MEAN and self.percentile <= PROMISED_PERCENTILE


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Let torch use one thread, as in its workers. On busy cores, several threads of a small operation mostly wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_torch_thread()
def demo(
    *,
    data: Path | None = None,
    images: int = 768,
    batch_size: int | None = None,
    workers: int | None = None,
    device: str | None = None,
    steps: int = 30,
    out: Path | None = None,
) -> bool:
    """Compare both loaders, measure their speeds, train a network, and print the results. ``proxyloader demo --help``
    explains the arguments and their defaults.

    Returns:
        Whether the differences between the batches are within the promised bounds.
    """
    _check_counts(images=(images, 1), batch_size=(batch_size, 1), workers=(workers, 0), steps=(steps, 0))
    chosen = _device(device)
    sheet = out or writable_cache_folder() / "demo.png"
    if not sheet.absolute().parent.is_dir():
        raise FileNotFoundError(f"{sheet}: its folder does not exist")
    check_can_be_written(sheet)
    root = data or make_dataset(photographs_of("demo", images), images=images)
    setup = Setup(
        root=root,
        images=min(images, len(ImageFolder(str(root)))),
        batch_size=batch_size or (256 if chosen.type == "cuda" else 64),
        workers=min(usable_cores(), 16) if workers is None else workers,
        device=chosen,
    )
    _print("Decoded on", _decoder(setup))
    _print("Images", f"{setup.images:,} of {setup.root}")
    _print("Transform", f"RandomResizedCrop({CROP_PX}), RandomHorizontalFlip, ToTensor, Normalize")
    counts = f"batch_size={setup.batch_size}, num_workers={setup.workers}"
    kept = ", persistent_workers=True" if setup.workers else ""
    _print("Both loaders", f"{counts}{kept}, shuffle=True, the same seed")
    as_promised, theirs, ours = _measure(setup)
    contact_sheet(theirs, ours).save(sheet, "PNG")
    _print("Contact sheet", str(sheet))
    if steps:
        _train(setup, steps)
    _print("Next", "write `from proxyloader import DataLoader` in your own script; README.md says more")
    return as_promised


def _check_counts(**counts: tuple[int | None, int]) -> None:
    """Raise ValueError if a number, given as (value, minimum), is below its minimum. None is allowed."""
    for name, (value, least) in counts.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: must be {least} or more")


def _device(asked: str | None) -> torch.device:
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={asked}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _dataset(setup: Setup, crop_px: int = CROP_PX) -> Any:
    """Return the dataset, or a random subset of it if fewer images are to be used."""
    folder = ImageFolder(str(setup.root), transform_with(crop_px=crop_px))
    order = torch.randperm(len(folder), generator=torch.Generator().manual_seed(SEED))
    return Subset(folder, order[: setup.images].tolist())


def _measure(setup: Setup) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Compare both loaders, measure their speeds, and print that.

    Returns:
        Whether the batches are as promised, and the first images of torch's loader and ours for ``contact_sheet``.
    """
    # With many workers, one pass over few images would end before all workers are busy.
    dataset: Any = ConcatDataset([_dataset(setup)] * min(max(setup.workers // 2, 1), 8))
    arguments = {"batch_size": setup.batch_size, "pin_memory": setup.on_gpu, **setup.loader_arguments()}
    with _bar("both loaders", 2 * (1 + TIMED_EPOCHS) * len(dataset), "image") as bar:
        stock = _Runner(StockLoader(dataset, **arguments), setup.device, bar)
        ours = _Runner(DataLoader(dataset, device=setup.device, **arguments), setup.device, bar)
        comparison, their_images, our_images = _compare(stock, ours)
        speeds = [(stock.images_per_s(seed), ours.images_per_s(seed)) for seed in range(TIMED_EPOCHS)]
    _print_speeds(*zip(*speeds))
    _print_comparison(comparison)
    return comparison.is_as_promised, their_images, our_images


@dataclass(frozen=True)
class _Runner:
    """Iterates over whole epochs of a loader, with the batches on the device."""

    loader: Any
    device: torch.device
    bar: ProgressBar

    def epoch(self, seed: int) -> Iterator[Batch]:
        torch.manual_seed(seed)
        for images, labels in self.loader:
            self.bar.update(len(labels))
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def images_per_s(self, seed: int) -> float:
        start = time.perf_counter()
        images = sum(len(labels) for _, labels in self.epoch(seed))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return images / (time.perf_counter() - start)


def _compare(stock: _Runner, ours: _Runner) -> tuple[Comparison, torch.Tensor, torch.Tensor]:
    """Run both loaders' first epoch, which also warms them up. Return the differences between the batches, and the
    first images of both loaders in levels of 255."""
    kept: list[Batch] = []
    try:
        for images, labels in stock.epoch(SEED):
            if sum(len(labels) for _, labels in kept) < COMPARED_IMAGES:
                # The images of the stock loader have 8 bits, so this conversion is exact.
                kept.append((_levels(images).round().to(torch.uint8), labels))
    except (OSError, Image.DecompressionBombError):
        for _ in ours.epoch(SEED):  # the error of this loader names the file
            pass
        raise
    compared = []
    for number, (images, labels) in enumerate(ours.epoch(SEED)):
        if number == 0:
            our_images = _levels(images[:SHEET_COLUMNS])
        if number < len(kept):
            compared.append(_difference((_levels(images), labels), kept[number]))
    worst = (max(getattr(each, name) for each in compared) for name in ("mean", "percentile", "largest"))
    images_compared = sum(each.images for each in compared)
    comparison = Comparison(images_compared, all(each.labels_equal for each in compared), *worst)
    return comparison, kept[0][0][:SHEET_COLUMNS], our_images


def _levels(images: torch.Tensor) -> torch.Tensor:
    """Undo ToTensor and Normalize. Return (N, 3, H, W) float32 in 0..255."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, STD))
    return (images * std + mean) * 255


def _difference(ours: Batch, theirs: Batch) -> Comparison:
    levels = (ours[0] - theirs[0]).abs().flatten()
    return Comparison(
        images=len(ours[0]),
        labels_equal=torch.equal(ours[1], theirs[1]),
        mean=levels.mean().item(),
        percentile=levels.kthvalue(max(1, int(0.999 * len(levels)))).values.item(),
        largest=levels.max().item(),
    )


def _train(setup: Setup, steps: int) -> list[float]:
    """Train a ResNet-18, and print and return its losses. Without a GPU the crops are small, so that it takes only
    seconds."""
    crop_px, batch_size = (CROP_PX, setup.batch_size) if setup.on_gpu else (64, min(setup.batch_size, 32))
    torch.manual_seed(SEED)
    loader: DataLoader[Any] = DataLoader(
        _dataset(setup, crop_px), batch_size, device=setup.device, **setup.loader_arguments()
    )
    model = resnet18(num_classes=len(ImageFolder(str(setup.root)).classes)).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    with _bar("training", steps, "step") as bar:
        for images, labels in islice(chain.from_iterable(repeat(loader)), steps):
            images, labels = images.to(setup.device), labels.to(setup.device)
            with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.on_gpu):
                loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            optimizer.step()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.2f}", refresh=False)
            bar.update()
    few = min(5, (steps + 1) // 2)
    first, last = statistics.mean(losses[:few]), statistics.mean(losses[-few:])
    loss_fell = f"loss {first:.2f} in the first {few}, {last:.2f} in the last {few}"
    _print("Training", f"ResNet-18, {steps} steps of {batch_size} images of {crop_px} px: {loss_fell}")
    return losses


def _bar(title: str, total: int, unit: str) -> ProgressBar:
    return ProgressBar(total=total, desc=title, unit=unit, leave=False, disable=None)


def _print(title: str, text: str, style: str = "") -> None:
    Console(highlight=False, soft_wrap=True).print(Text.assemble((f"{title:<15}", "bold"), (text, style)))


def _decoder(setup: Setup) -> str:
    cpu = f"CPU ({usable_cores()} cores)"
    if not all(importlib.util.find_spec(name) for name in ("nvidia", "nvidia.dali")):
        return (
            f"{cpu}, by Pillow: NVIDIA DALI is not installed, so that proxyloader.DataLoader is torch's own loader here"
        )
    if setup.on_gpu:
        return torch.cuda.get_device_name(setup.device)
    return f"{cpu}; on a GPU it would be decoded there"


def _print_speeds(stock: Sequence[float], ours: Sequence[float]) -> None:
    ratio = statistics.median(ours) / statistics.median(stock)
    _print("Speed", f"{_speed(stock)} torch.utils.data.DataLoader")
    _print("", f"{_speed(ours)} proxyloader.DataLoader, {ratio:.1f} times as fast")
    _print("", f"medians of {TIMED_EPOCHS} epochs (slowest to fastest), in turns, after one to warm up", "dim")


def _speed(images_per_s: Sequence[float]) -> str:
    spread = f"({min(images_per_s):,.0f} to {max(images_per_s):,.0f})"
    return f"{statistics.median(images_per_s):>6,.0f} images/s {spread:<18}"


def _print_comparison(comparison: Comparison) -> None:
    equal = "all equal" if comparison.labels_equal else "NOT EQUAL"
    _print("Labels", f"{equal}; {comparison.images:,} images compared")
    levels = f"{comparison.mean:.2f} in the mean, {comparison.percentile:.1f} at the 99.9th percentile"
    _print("Pixels", f"differ by {levels}, {comparison.largest:.0f} at most, of 255 levels (worst batch)")
    if not comparison.is_as_promised:
        promise = f"equal labels, and at most {PROMISED_MEAN} in the mean and {PROMISED_PERCENTILE} at the percentile"
        _print("FAILED", f"promised are {promise}. Please report this, with all of the above", "bold red")
