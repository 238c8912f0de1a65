"""``proxyloader demo``: compare this loader with torch's on this machine."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch.utils.data import ConcatDataset, DataLoader as StockLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.utils import make_grid, save_image

from .._cores import usable_cores
from ..dali.device import check_device_exists
from ..loader.dataloader import DataLoader
from ..make_dataset import make_dataset
from .bench import config
from .bench.config import CROP_PX, MEAN, STD
from .processes import ProgressBar

SEED = 0
TIMED_EPOCHS = 3
COMPARED_IMAGES = 512
MAX_MEAN, MAX_PERCENTILE = 0.5, 2.0  # documented mean and 99.9th percentile of the difference, in levels of 255
SHEET_COLUMNS = 8
GAIN = 32  # factor by which the contact sheet amplifies differences


def demo(
    data: Path | None, images: int, batch_size: int | None, workers: int | None, device: str | None, out: Path | None
) -> int:
    """Run the demo. Return the exit status: 1 if the batches differ more than documented."""
    torch_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_device_exists(torch_device)
    sheet = out or config.writable_cache_folder() / "demo.png"
    config.check_can_be_written(sheet)
    root = data or make_dataset(config.photograph_folder("demo", images), images=images)
    folder = ImageFolder(str(root), config.make_transform())
    order = torch.randperm(len(folder), generator=torch.Generator().manual_seed(SEED))
    subset = Subset(folder, order[:images].tolist())
    workers = min(usable_cores(), 16) if workers is None else workers
    batch_size = batch_size or (256 if torch_device.type == "cuda" else 64)
    options = {"shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
    cpu = f"CPU ({usable_cores()} cores); with a GPU, images are decoded on it"
    _print("Decoded on", torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else cpu)
    _print("Images", f"{len(subset):,} of {root}")
    _print("Transform", f"RandomResizedCrop({CROP_PX}), RandomHorizontalFlip, ToTensor, Normalize")
    persistent = ", persistent_workers=True" * (workers > 0)
    _print("Both loaders", f"batch_size={batch_size}, num_workers={workers}{persistent}, shuffle=True, the same seed")
    torch.set_num_threads(1)  # as in torch's workers
    is_close = _compare(subset, batch_size, torch_device, sheet, options)
    _print("Next", "use `from proxyloader import DataLoader` in your own script; see README.md")
    return int(not is_close)


def _print(title: str, text: str, style: str = "") -> None:
    Console(highlight=False, soft_wrap=True).print(Text.assemble((f"{title:<15}", "bold"), (text, style)))


def _compare(subset: Any, batch_size: int, device: torch.device, sheet: Path, options: dict[str, Any]) -> bool:
    """Compare both loaders, print their speeds and differences, and return whether these are as documented."""
    # Repeat the images, as a pass over few images would end before many workers are all busy.
    dataset: Any = ConcatDataset([subset] * min(max(options["num_workers"] // 2, 1), 8))
    arguments = {"batch_size": batch_size, "pin_memory": device.type == "cuda", **options}
    loaders: list[Any] = [StockLoader(dataset, **arguments), DataLoader(dataset, device=device, **arguments)]
    _print("Backend", loaders[1].backend)
    bar = ProgressBar(total=2 * (1 + TIMED_EPOCHS) * len(dataset), desc="both loaders", leave=False, disable=None)

    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))

    def run_epoch(loader: Any, seed: int, compared: int = 0) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], float]:
        """Return the levels and labels of the first batches, and the images per second."""
        torch.manual_seed(seed)
        first, begin_s = [], time.perf_counter()
        for number, (images, labels) in enumerate(loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            if number * batch_size < compared:
                first.append(((images * std + mean) * 255, labels))
            bar.update(len(labels))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return first, len(dataset) / (time.perf_counter() - begin_s)

    with bar:
        # First proxyloader, as its errors name the file.
        new, old = (run_epoch(loader, SEED, COMPARED_IMAGES)[0] for loader in reversed(loaders))
        labels_equal = all(torch.equal(labels, expected) for (_, labels), (_, expected) in zip(new, old))
        count, differences = sum(len(labels) for _, labels in new), []
        for (levels, _), (expected, _) in zip(new, old):
            off = (levels - expected.round_()).abs().flatten()  # exact: JPEGs have 8 bits
            high = off.kthvalue(max(1, int(0.999 * len(off)))).values
            differences.append([off.mean().item(), high.item(), off.max().item()])
        average, percentile, largest = map(max, zip(*differences))
        rows = [batches[0][0][:SHEET_COLUMNS] for batches in (old, new)]
        grid = make_grid(torch.cat([*rows, (rows[1] - rows[0]).abs() * GAIN]).round() / 255, len(rows[0]), pad_value=1)
        save_image(grid, sheet, "PNG")
        del new, old
        speeds = [[run_epoch(loader, seed)[1] for loader in loaders] for seed in range(TIMED_EPOCHS)]
    stock, ours = (sorted(each) for each in zip(*speeds))
    ratio = statistics.median(ours) / statistics.median(stock)
    names = ("torch.utils.data.DataLoader", f"proxyloader.DataLoader, {ratio:.1f} times as fast")
    for title, name, speed_rounds in zip(("Speed", ""), names, (stock, ours)):
        spread = f"({speed_rounds[0]:,.0f} to {speed_rounds[-1]:,.0f})"
        _print(title, f"{statistics.median(speed_rounds):>6,.0f} images/s {spread:<18} {name}")
    _print("", f"medians of {TIMED_EPOCHS} alternating epochs (slowest to fastest), after a warm-up epoch", "dim")
    _print("Labels", f"{'all equal' if labels_equal else 'NOT EQUAL'}; {count:,} images compared")
    worst = f"{average:.2f} on average, {percentile:.1f} at the 99.9th percentile, {largest:.0f} at most, of 255 levels"
    _print("Pixels", f"differ by {worst} (worst batch)")
    is_close = labels_equal and average <= MAX_MEAN and percentile <= MAX_PERCENTILE
    if not is_close:
        bounds = f"equal labels, and at most {MAX_MEAN} on average and {MAX_PERCENTILE} at the 99.9th percentile"
        _print("FAILED", f"expected {bounds}. Please report this with the output above", "bold red")
    _print("Contact sheet", f"{sheet}: torch's images, proxyloader's, and their differences, {GAIN} times as bright")
    return is_close
