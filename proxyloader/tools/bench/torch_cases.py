"""The ways of torch and torchvision to load the images. Runs in a child process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from .config import CROP_PX, MEAN, STD, BenchConfig, transform_with
from .datasets import DATASETS

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images (N, 3, H, W) and labels (N,), on the device."""

Loops = Iterator[Iterator[Any]]
"""Endless iterator of loops over batches. Each loop makes ``passes`` passes over the images."""


def images_of(setting: BenchConfig, transform: Any = None, loader: Any = default_loader) -> Any:
    """Return the images as an ImageFolder, ``passes`` times one after the other."""
    return _repeated(setting, ImageFolder(setting.root, transform, loader=loader))


def samples_of(setting: BenchConfig, added: str = "", loader: Any = default_loader) -> Any:
    """Return ``images_of`` with the transform and an augmentation, or with the transform in one of DATASETS."""
    if added in DATASETS:
        return _repeated(setting, DATASETS[added](setting.root, transform_with()))
    return images_of(setting, transform_with(added), loader)


def _repeated(setting: BenchConfig, once: Any) -> Any:
    # A Subset is asked for whole batches if the dataset in it is, which Hugging Face's are. A ConcatDataset is not.
    return once if setting.passes == 1 else Subset(once, setting.passes * [*range(len(once))])


def loader_arguments(setting: BenchConfig) -> dict[str, Any]:
    """Return the arguments that all loaders with workers have."""
    workers = setting.tuning.workers or 0
    persistent = {"persistent_workers": True} if setting.persistent_workers and workers > 0 else {}
    return {"batch_size": setting.batch_size, "shuffle": True, "num_workers": workers, **persistent}


def stock(setting: BenchConfig, added: str = "") -> Loops:
    """torch's DataLoader, with torchvision's transforms in its workers."""
    loader: Any = StockLoader(
        samples_of(setting, added),
        pin_memory=setting.on_gpu and not setting.by_default,
        **loader_arguments(setting),
    )
    while True:
        yield (on_device(setting, batch) for batch in loader)


def on_device(setting: BenchConfig, batch: Any) -> Batch:
    """Copy a batch to the device and convert it, as a training loop does."""
    images, labels = images_and_labels(batch)
    images = images.to(setting.device, setting.torch_dtype, non_blocking=True, memory_format=setting.memory_format)
    return images, labels.to(setting.device, non_blocking=True)


def images_and_labels(batch: Any) -> Batch:
    """Return the images and the labels of a batch, which is a dict of both, or a pair."""
    images, labels = batch.values() if isinstance(batch, dict) else batch
    return images, labels


def torchvision_on_a_gpu(setting: BenchConfig) -> Loops:
    """Workers read bytes; torchvision decodes them on the GPU and transforms them there, image by image."""
    transform = v2.Compose([v2.RandomResizedCrop(CROP_PX, antialias=True), v2.RandomHorizontalFlip()])
    finish = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    loader: Any = StockLoader(
        images_of(setting, loader=file_as_tensor),
        collate_fn=as_lists,
        **loader_arguments(setting),
    )

    def decoded(batch: Any) -> Batch:
        files, labels = batch
        images = decode_jpeg(files, ImageReadMode.RGB, device=setting.device)
        return on_device(setting, (finish(torch.stack([transform(image) for image in images])), torch.tensor(labels)))

    while True:
        yield map(decoded, loader)


def file_as_tensor(path: str) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))


def as_lists(samples: list[Any]) -> Any:
    files, labels = zip(*samples)
    return list(files), list(labels)


def synthetic(setting: BenchConfig) -> Loops:
    """One batch of random numbers, again and again."""
    images = torch.randn(setting.batch_size, 3, CROP_PX, CROP_PX)
    batch = on_device(setting, (images, torch.randint(1000, (setting.batch_size,))))
    while True:
        yield itertools.repeat(batch, setting.batches)
