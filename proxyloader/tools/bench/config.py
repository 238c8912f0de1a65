"""BenchConfig: the settings of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torchvision import transforms

CROP_PX = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

AUGMENTATIONS: dict[str, Any] = {
    "ColorJitter": transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "RandAugment": transforms.RandAugment(),
    "TrivialAugmentWide": transforms.TrivialAugmentWide(),
    "AutoAugment": transforms.AutoAugment(),
    "AugMix": transforms.AugMix(),
}


def transform_with(augmentation: str = "", crop_px: int = CROP_PX) -> transforms.Compose:
    """Return the torchvision transform, with an augmentation after the flip."""
    random = [transforms.RandomResizedCrop(crop_px), transforms.RandomHorizontalFlip()]
    random += [AUGMENTATIONS[augmentation]] if augmentation else []
    return transforms.Compose([*random, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


SIZES: dict[str, dict[str, Any]] = {
    "thumbnails": {"size": (96, 96)},
    "imagenet": {"size": (500, 375)},
    "web": {"size": (500, 375), "progressive": 0.2},
    "camera": {"size": (3000, 2000)},
}
"""Photographs that are made: arguments of ``make_dataset``."""


class Tuning(NamedTuple):
    """The settings that are tuned for each loader. None: the loader has no such setting, or uses its default."""

    workers: int | None = None
    threads: int | None = None
    hw_decoder_load: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if value is not None) or "-"


@dataclass(frozen=True)
class BenchConfig:
    """The settings of a comparison. Cases differ in the tuning only.

    Attributes:
        root: root of an ImageFolder with ``images`` images.
        size: of the photographs, a key of ``SIZES``; "" if they are the user's.
        passes: number of passes over the images in a loop, so that its start weighs as little as in a long epoch.
        device: "cuda" or "cpu".
        by_default: whether arguments with a default are left out, except for those of the data and its format.
        added: augmentations and datasets, each of which is another case of torch's loader and of ours.
        model: torchvision's name of the model that is trained on the batches; "none" to only load them.
    """

    root: str
    images: int
    passes: int
    batch_size: int
    device: str
    tuning: Tuning = Tuning()  # noqa: RUF009  it is a tuple
    by_default: bool = False
    persistent_workers: bool = True
    dtype: str = "float32"
    channels_last: bool = False
    added: tuple[str, ...] = ()
    model: str = "none"
    size: str = "imagenet"

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def batches(self) -> int:
        """Number of batches in a loop."""
        return -(-self.images * self.passes // self.batch_size)

    @property
    def format(self) -> dict[str, Any]:
        """The dtype and the memory format of the images."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return {"dtype": getattr(torch, self.dtype), "memory_format": layout}
