"""LoaderOptions: the arguments that DataLoader adds to torch's; what loads the images, and why. Main process."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, TensorDataset

from .._validation import check_int
from ..dali.device import check_device, cuda_ordinal
from ..dali.output_format import OutputFormat
from ..data.bad_samples import ON_ERROR, OnError
from ..data.dataset import get_sources
from ..kernels.compiler import can_compile
from ..kernels.operations import find_obstacle
from ..kernels.pillow_check import differing_steps, is_new
from ..transforms.plan import Plan
from .stats import StatsRecorder

NO_DALI = "NVIDIA DALI is not installed"
HAS_DALI = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None

MAX_THREADS = 1024
"""Maximum number of DALI threads. DALI creates all of them at once and aborts the process if one cannot be created."""


@dataclass(frozen=True)
class LoaderOptions:
    """The arguments that ``DataLoader`` adds to torch's. Raises ValueError or TypeError for invalid ones."""

    device: str | int | torch.device | None
    dtype: torch.dtype | None
    memory_format: torch.memory_format
    server: Any
    seed: int | None
    on_error: OnError
    check_scans: bool
    translate: bool
    masks_on_device: bool
    targets_on_device: bool
    prefetch: int
    num_threads: int | Literal["auto"]
    hw_decoder_load: float | Literal["auto"]

    def __post_init__(self) -> None:
        check_int("prefetch", self.prefetch, 1)
        if self.seed is not None:
            check_int("seed", self.seed, 0)
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error must be one of {', '.join(map(repr, ON_ERROR))}, got {self.on_error!r}")
        if self.num_threads != "auto":
            check_int("num_threads", self.num_threads, 1, ", or 'auto'")
            if self.num_threads > MAX_THREADS:
                raise ValueError(f"num_threads must be at most {MAX_THREADS}, or 'auto', got {self.num_threads}")
        for name in ("check_scans", "translate", "masks_on_device", "targets_on_device"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        load = self.hw_decoder_load
        if load != "auto" and not (isinstance(load, (int, float)) and 0 <= load <= 1):
            raise ValueError(f"hw_decoder_load must be in [0, 1] or 'auto', got {load!r}")
        check_device(self.device)
        OutputFormat(self.dtype, self.memory_format)
        if self.server is not None and not hasattr(self.server, "runs"):
            raise TypeError(f"server must be a proxyloader.ProxyServer, got {type(self.server).__name__}")

    @classmethod
    def from_loader(cls, loader: Any, **changed: Any) -> LoaderOptions:
        """Create the options from a loader's attributes, with the ``changed`` ones replaced."""
        options = cls(**{name: getattr(loader, name) for name in OPTION_NAMES} | changed)
        if options.on_error == "replace" and isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                "on_error='replace' requires a map-style dataset. For an IterableDataset, 'skip' drops images that "
                "cannot be decoded; files that cannot be opened must be skipped by __iter__ itself"
            )
        return options

    @property
    def format(self) -> OutputFormat:
        return OutputFormat(self.dtype, self.memory_format)

    @property
    def on_gpu(self) -> bool:
        """Whether images are returned on a GPU."""
        return torch.cuda.is_available() if self.device is None else torch.device(self.device).type == "cuda"

    @property
    def moves_masks(self) -> bool:
        return self.masks_on_device or self.targets_on_device

    @property
    def has_kernels(self) -> bool:
        """Whether kernels transform the images. Does not initialize CUDA."""
        return self.on_gpu and can_compile()

    @property
    def kernel_output(self) -> tuple[torch.dtype | None, bool] | None:
        """The dtype of floating-point images, and whether channels are last; None without kernels."""
        return (self.dtype, self.format.channels_last) if self.has_kernels else None

    @property
    def find_obstacle(self) -> Callable[[Plan], str]:
        """Function that returns why torchvision runs a plan in the workers; "" if it does not."""
        left_out = differing_steps(cuda_ordinal(self.device) or 0) if self.has_kernels and is_new() else ()
        return functools.partial(find_obstacle, has_kernels=self.has_kernels, left_out=left_out)

    @property
    def image_device(self) -> torch.device:
        """The device of the images. Initializes CUDA, and raises ValueError if the device does not exist."""
        ordinal = cuda_ordinal(self.device)
        return torch.device("cpu") if ordinal is None else torch.device("cuda", ordinal)


OPTION_NAMES = frozenset(field.name for field in fields(LoaderOptions))
"""Names of the arguments. Each is also an attribute of the loader."""


def find_torch_reason(dataset: Any, options: LoaderOptions) -> str:
    """Return why torch alone loads a dataset, which never has images for DALI; "" if it may have some."""
    if not HAS_DALI:
        return NO_DALI
    if not options.translate:
        return "translate=False"
    if options.server is None and all(type(source) is TensorDataset for source in get_sources(dataset)):
        return "its samples are in memory, with nothing to decode"
    return ""


def describe_backend(
    reason: str, plans: Iterable[Plan], options: LoaderOptions, has_begun: bool, recorder: StatsRecorder
) -> str:
    """Describe DALI's transforms with the known plans, or the ``reason`` why torch loads the images."""
    if reason or recorder.has_fallen_back:
        return f"torch: {reason or recorder.fallback_reason}"
    first = f"; first reason: {recorder.decode_reason}" if recorder.decode_reason else ""
    device = options.device if options.device is not None else "cuda" if options.on_gpu else "cpu"
    parts = [", ".join(step.title for step in plan.steps) for plan in plans]
    if options.server is not None:
        parts.append("the pipeline of the server")
    if not parts and recorder.images[0]:
        parts.append("different transforms for each image")
    if parts:
        exceptions = f"; the dataset's code decodes some images{first}" if first else ""
        sent = "decoded images are sent as pixels" if recorder.sends_pixels else "JPEGs are sent encoded"
        return f"DALI on {device}: {'; '.join(parts)}; {sent}{exceptions}"
    if has_begun:
        return f"torch: the workers have produced all images loaded so far{first}"
    return f"DALI on {device}, if the dataset calls transforms on JPEGs"
