"""Settings of a benchmark, its files, and the machine that it runs on."""

import importlib.metadata
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from torchvision import transforms

from ... import __version__
from ..._cores import usable_cores
from ...make_dataset import FORMAT
from . import AUGMENTATIONS, FRAMES

CROP_PX = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_transform(augmentation: str = "") -> transforms.Compose:
    """Return the transform of the benchmark, with an optional augmentation after the flip."""
    random = [transforms.RandomResizedCrop(CROP_PX), transforms.RandomHorizontalFlip()]
    random += [getattr(transforms, augmentation)(*AUGMENTATIONS[augmentation])] if augmentation else []
    return transforms.Compose([*random, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


class Tuning(NamedTuple):
    """Settings that are tuned for each case. None: the case lacks the setting, or uses its default."""

    workers: int | None = None
    threads: int | None = None
    hw_decoder_load: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if value is not None) or "-"


@dataclass(frozen=True)
class BenchConfig:
    """Settings of a case. In a benchmark, cases differ only in the last five."""

    root: str  # of an ImageFolder
    images: int
    passes: int  # over the images per loop, to amortize its startup as in a long epoch
    batch_size: int
    device: str  # "cuda" or "cpu"
    dtype: str = "float32"
    channels_last: bool = False
    model: str = "none"  # torchvision model to train on the batches; "none" to only load them
    task: str = "classification"  # a key of ``TASKS``
    case: str = "torch"  # what loads the images, a key of ``CASES``
    added: str = ""  # augmentation or dataset of the case, or "", or its pipeline for other tasks than classification
    tuning: Tuning = Tuning()  # noqa: RUF009  it is a tuple
    use_defaults: bool = False  # whether to omit arguments that have a default, except those of the data and its format
    persistent_workers: bool = True  # False to measure first epochs, always with defaults

    @property
    def name(self) -> str:
        suffix = ", by default" if self.use_defaults and self.persistent_workers else ""
        return self.case + (f" + {self.added}" if self.added else "") + suffix

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def samples(self) -> int:
        """Number of samples in a pass, at most."""
        return self.images // FRAMES if self.task == "clips" else self.images

    @property
    def format(self) -> dict[str, Any]:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return {"dtype": getattr(torch, self.dtype), "memory_format": layout}


def writable_cache_folder() -> Path:
    """Return ``proxyloader`` in ``XDG_CACHE_HOME`` or ``~/.cache``, or a new temporary folder if it is not writable."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxyloader"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return Path(tempfile.mkdtemp(prefix="proxyloader-"))
    return folder


def photograph_folder(command: str, images: int) -> Path:
    """Return the cache folder for the synthetic photographs of a command, in the current format."""
    return writable_cache_folder() / f"{command}-v{FORMAT}-{images}"


def check_can_be_written(file: Path) -> None:
    """Raise OSError if a file cannot be written, before starting the work. Does not change an existing file."""
    existed = file.exists()
    file.open("a").close()
    if not existed:
        file.unlink()


def machine() -> dict[str, Any]:
    """Return the hardware and the installed versions; None for missing ones."""
    installed = {dist.name: dist.version for dist in importlib.metadata.distributions()}
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda_queues": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "cores": usable_cores(),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "dali": installed.get("nvidia-dali-cuda120") or installed.get("nvidia-dali-cuda130"),
        "proxyloader": __version__,
        **{name: installed[name] for name in ("spdl", "dataloader-rs", "kornia") if name in installed},
    }
