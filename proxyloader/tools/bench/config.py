"""BenchConfig: what is compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
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
class Tuning:
    """What is chosen for each loader by itself. None: it has no such setting, or is left at its own default.

    Attributes:
        workers: processes that read, and for torch decode.
        threads: of DALI on the CPU.
        hw_decoder_load: share of the JPEGs for the GPU's engines.
    """

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
    """The same for all cases of a run, but for the tuning.

    Attributes:
        root: of an ImageFolder.
        images: in it.
        passes: over them in a loop, so that its start weighs as little as in an epoch of a large data set.
        batch_size: images.
        device: "cuda" or "cpu".
        tuning: of the case.
        by_default: the arguments that a loader has a default for are left out, but those that decide what it loads and
            in which format.
        persistent_workers: of the loaders that have workers.
        dtype: of the images, by torch's name for it.
        channels_last: of the batches.
        augmentations: of torch's loader and ours, each in a case of its own.
        model: torchvision's name of what is trained on the batches; "none": they are only taken.
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
    model: str = "none"

    def tuned(self, **changed: Any) -> BenchConfig:
        """With another tuning, of those of its values that are given."""
        return replace(self, tuning=replace(self.tuning, **changed))

    @property
    def workers(self) -> int:
        return self.tuning.workers or 0

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

    def in_record(self) -> dict[str, Any]:
        """What a record says of all cases."""
        left_out = ("root", "tuning", "by_default", "persistent_workers")
        return {name: value for name, value in asdict(self).items() if name not in left_out}
