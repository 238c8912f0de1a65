"""BenchConfig: the settings of a comparison."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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


def transform_with(augmentation: str = "", crop_px: int = CROP_PX) -> transforms.Compose:
    """Return the torchvision transform, with an augmentation after the flip."""
    random = [transforms.RandomResizedCrop(crop_px), transforms.RandomHorizontalFlip()]
    random += [AUGMENTATIONS[augmentation]] if augmentation else []
    return transforms.Compose([*random, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


@dataclass(frozen=True)
class Tuning:
    """The settings that are tuned for each loader: DALI's threads are those of the CPU, and ``hw_decoder_load`` is the
    share of the JPEGs, 0 to 1, for the GPU's engines. None: the loader has no such setting, or uses its default."""

    workers: int | None = None
    threads: int | None = None
    hw_decoder_load: float | None = None

    def in_words(self) -> str:
        counts = [(self.workers, "workers"), (self.threads, "threads")]
        words = [f"{count} {name if count != 1 else name[:-1]}" for count, name in counts if count is not None]
        if self.hw_decoder_load is not None:
            words.append(f"{self.hw_decoder_load:.0%} to engines")
        return ", ".join(words) or "-"


@dataclass(frozen=True)
class BenchConfig:
    """The settings of a comparison, which are the same for all cases except for the tuning.

    Attributes:
        root: root of an ImageFolder with ``images`` images.
        size: of the photographs, a key of ``SIZES`` in ``photographs.py``; "" if they are the user's.
        passes: number of passes over the images in a loop, so that the start of a loop weighs as little as in an epoch
            of a large data set.
        device: "cuda" or "cpu".
        by_default: whether arguments with a default are left out, except for those of the data and its format.
        augmentations: augmentations of torch's loader and ours, each of which is a case.
        datasets: other datasets than ImageFolder for both of them, each of which is a case.
        model: torchvision's name of the model that is trained on the batches; "none" to only load them.
    """

    root: str
    images: int
    passes: int
    batch_size: int
    device: str
    tuning: Tuning = Tuning()
    by_default: bool = False
    persistent_workers: bool = True
    dtype: str = "float32"
    channels_last: bool = False
    augmentations: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    model: str = "none"
    size: str = "imagenet"

    @property
    def batches(self) -> int:
        """Number of batches in a loop."""
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

    def in_record(self) -> dict[str, Any]:
        left_out = ("root", "tuning", "by_default", "persistent_workers")  # which differ between cases or machines
        return {name: value for name, value in asdict(self).items() if name not in left_out}
