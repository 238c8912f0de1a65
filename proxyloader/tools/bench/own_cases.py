"""This library's ways to load the images. Runs in a child process."""

from __future__ import annotations

import itertools
from typing import Any

from PIL import Image
from torchvision.datasets.folder import default_loader

from ...loader.dataloader import DataLoader
from .config import BenchConfig
from .torch_cases import Loops, images_and_labels, loader_arguments, samples_of

CACHED_BATCHES = 8


def tuned_arguments(setting: BenchConfig) -> dict[str, Any]:
    """Return the tuned arguments, as far as they are not left at their defaults."""
    names = {"num_threads": setting.tuning.threads, "hw_decoder_load": setting.tuning.hw_decoder_load}
    return {name: value for name, value in names.items() if value is not None}


def swap(setting: BenchConfig, added: str = "", opened: Any = default_loader) -> Loops:
    """proxyloader.DataLoader: bytes read by workers, crops drawn by torchvision."""
    loader: DataLoader[Any] = DataLoader(
        samples_of(setting, added, opened),
        device=setting.device,
        dtype=setting.torch_dtype,
        memory_format=setting.memory_format,
        **loader_arguments(setting),
        **tuned_arguments(setting),
    )
    while True:
        pairs = map(images_and_labels, loader)
        yield ((images, labels.to(setting.device, non_blocking=True)) for images, labels in pairs)


def own_dataset(setting: BenchConfig) -> Loops:
    """proxyloader.DataLoader, and a dataset whose own code opens each file with Pillow."""
    return swap(setting, opened=opened_by_pillow)


def opened_by_pillow(path: str) -> Image.Image:
    return Image.open(path).convert("RGB")


def replay(setting: BenchConfig) -> Loops:
    """Batches that were loaded once, again and again: what training would gain from a loader that costs nothing."""
    cached = list(itertools.islice(next(swap(setting)), CACHED_BATCHES))
    while True:
        yield itertools.islice(itertools.cycle(cached), setting.batches)
