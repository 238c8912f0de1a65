"""What is compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def transform_with(augmentation: str = "") -> transforms.Compose:
    """torchvision's, with an augmentation behind the flip."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(CROP_PX),
            transforms.RandomHorizontalFlip(),
            *([AUGMENTATIONS[augmentation]] if augmentation else []),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


@dataclass(frozen=True)
class Setting:
    """The same for all cases of a run.

    Attributes:
        root: of an ImageFolder.
        images: in it.
        passes: over them in a loop, so that its start weighs as little as in an epoch of a large data set.
        batch_size: images.
        workers: of each loader that has some.
        stock_workers: of the stock loader, which needs more.
        threads: of DALI on the CPU.
        device: "cuda" or "cpu".
        hw_decoder_load: share of the JPEGs for the GPU's engines.
        dtype: of the images, by torch's name for it.
        channels_last: of the batches.
        augmentations: of torch's loader and ours, each in a case of its own.
        model: torchvision's name of what is trained on the batches; "none": they are only taken.
    """

    root: str
    images: int
    passes: int
    batch_size: int
    workers: int
    stock_workers: int
    threads: int
    device: str
    hw_decoder_load: float = 1.0
    dtype: str = "float32"
    channels_last: bool = False
    augmentations: tuple[str, ...] = ()
    model: str = "none"

    @property
    def batches(self) -> int:
        """In a loop."""
        return -(-self.images * self.passes // self.batch_size)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format
