"""What loads the images: DALI, torchvision in the workers, or torch, and why. Main process."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST, SEMEION, USPS

from ..data.dataset import describe_dataset, get_length, get_sources
from ..data.placeholders import Proxy
from ..kernels.operations import NO_KERNELS
from ..transforms.plan import Plan
from ..workers.messages import PackedBatch
from .options import LoaderOptions

log = logging.getLogger(__name__)

NO_DALI = "NVIDIA DALI is not installed"

NO_SERVER = (
    "its .transform is the proxy of a server, but the loader has none: pass server=..., or call server.produce_data on "
    "each batch"
)

GREY_ARRAYS = (MNIST, SEMEION, USPS)
"""FashionMNIST, KMNIST, QMNIST and EMNIST are subclasses of MNIST."""

WARN_FRACTION = 0.05
"""Fraction of the first epoch's images not decoded by DALI above which a warning is logged."""


def find_torch_reason(dataset: Any, options: LoaderOptions) -> str:
    """Return why torch alone loads a dataset, which never has images for DALI; "" if it may have some."""
    if not _dali_is_installed():
        return NO_DALI
    if not options.translate:
        return "translate=False"
    if options.server is not None:
        return ""
    sources = get_sources(dataset)
    if all(type(source) is TensorDataset for source in sources):
        return "its samples are in memory, with nothing to decode"
    # With a GPU, such arrays become LazyTensors, so that results computed from them arrive on the loader's device.
    if not options.on_gpu and all(map(_has_grey_arrays, sources)):
        return "its images are grayscale arrays, which DALI does not accept"
    return ""


@functools.cache
def _dali_is_installed() -> bool:
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def _has_grey_arrays(dataset: Any) -> bool:
    """Return whether this is a torchvision dataset that creates images in mode L from arrays in memory."""
    own = getattr(type(dataset).__getitem__, "__module__", "") if isinstance(dataset, GREY_ARRAYS) else ""
    return own.startswith("torchvision.")


def uses_proxy(dataset: Any) -> bool:
    """Return whether the dataset's transform is the proxy of a server."""
    return any(isinstance(getattr(source, "transform", None), Proxy) for source in get_sources(dataset))


def describe_backend(
    reason: str, plans: Iterable[Plan], options: LoaderOptions, has_begun: bool, counts: ImageCounts
) -> str:
    """Describe DALI's transforms, or why torch loads the images.

    Args:
        reason: why torch alone loads the dataset; "" if it does not.
        plans: the plans of all transforms known so far.
        has_begun: whether an epoch has begun.
    """
    if reason or counts.has_fallen_back:
        return f"torch: {reason or counts.fallback_reason}"
    first = f", the first: {counts.decode_reason}" if counts.decode_reason else ""
    device = options.device if options.device is not None else "cuda" if options.on_gpu else "cpu"
    parts = [", ".join(type(step).__name__ for step in plan.steps) for plan in plans]
    if options.server is not None:
        parts.append("the pipeline of the server")
    if not parts and counts._dali_images:
        parts.append("different transforms for each image")
    if parts:
        exceptions = f"; the dataset's code decodes some images{first}" if first else ""
        sent = "decoded images are sent as pixels" if counts.sends_pixels else "JPEGs are sent encoded"
        return f"DALI on {device}: {'; '.join(parts)}; {sent}{exceptions}"
    if has_begun:
        return f"torch: the workers have produced all images loaded so far{first}"
    return f"DALI on {device}, if the dataset calls transforms on JPEGs"


def _has_arrays(dataset: Any) -> bool:
    """Return whether a dataset creates its images from an array in memory, like CIFAR10, and so decodes none."""
    return all(
        isinstance(data := getattr(source, "data", None), (np.ndarray, torch.Tensor))
        and len(data) == get_length(source)
        for source in get_sources(dataset)
    )


class ImageCounts:
    """Counts the images of a loader's first epoch by what decoded them, for the log."""

    def __init__(self, dataset: Any, on_gpu: bool) -> None:
        self._name, self._has_arrays, self._on_gpu = describe_dataset(dataset), _has_arrays(dataset), on_gpu
        self._dali_images = self._pillow_images = self._worker_images = 0
        self._is_logged = self.is_server_idle = False
        self.decode_reason = ""  # why the workers decoded the first deferred image, if known
        self.has_fallen_back = False  # whether the workers have: NOTE [ When deferral stops ] in ``data/deferral.py``
        self.sends_pixels = False  # whether all images so far were decoded by Pillow, or are arrays
        self.has_images = False  # whether the workers have created undecoded images

    @property
    def fallback_reason(self) -> str:
        if not self.has_images:
            return self.decode_reason or "the dataset opens no JPEGs that DALI could decode"
        return self.decode_reason or "the dataset uses the pixels of its images"

    def begin_epoch(self) -> None:
        """Reset the counts, as an earlier epoch may have been left early."""
        if not self._is_logged:
            self._dali_images = self._pillow_images = self._worker_images = 0

    def add(self, batch: PackedBatch) -> None:
        dali, pillow, workers = batch.image_counts
        self.sends_pixels = pillow > 0 and not (dali or self._dali_images)
        self._dali_images += dali
        self._pillow_images += pillow
        self._worker_images += workers
        self.decode_reason = self.decode_reason or batch.decode_reason
        self.has_images |= batch.has_seen_images
        if batch.has_fallen_back and not self.has_fallen_back:
            level = logging.WARNING if self.has_images else logging.INFO
            log.log(level, "%s falls back to torch's loading: %s", self._name, self.fallback_reason)
        self.has_fallen_back = batch.has_fallen_back or (self.has_fallen_back and not batch.runs)

    def end_epoch(self) -> None:
        """Log the counts of the first epoch."""
        total = self._dali_images + self._pillow_images + self._worker_images
        if self._is_logged or self.has_fallen_back or not total:
            return
        self._is_logged = True
        # An array needs no decoding, and DALI transforms it faster than torchvision.
        slow = self._worker_images + (0 if self._has_arrays else self._pillow_images)
        is_slow = slow / total > WARN_FRACTION
        is_best = NO_KERNELS in self.decode_reason  # there is nothing that a user could change
        log.log(
            logging.WARNING if is_slow and not is_best else logging.INFO,
            "%s, first epoch: DALI decoded %s images, and transformed %s that Pillow decoded or that are arrays; the "
            "dataset's code produced %s%s",
            self._name,
            *(f"{count:,}" for count in (self._dali_images, self._pillow_images, self._worker_images)),
            self._reason() if is_slow else "",
        )

    def _reason(self) -> str:
        reasons = ["Only the images that DALI decodes load faster than with torch"]
        if self._pillow_images and not self._has_arrays:
            reasons.append("Pillow decodes non-JPEGs, JPEGs DALI decodes differently, and images whose pixels are used")
        if self.decode_reason:
            reasons.append(f"The first image that the dataset's code decoded: {self.decode_reason}")
        elif self._worker_images:
            kind = "neither RGB nor gray JPEGs" if self._on_gpu else "not RGB"
            reasons.append(
                f"The dataset's code produces images that are {kind}, whose pixels it uses, or whose transform no "
                "other image of the batch shares"
            )
        return ". ".join(["", *reasons])
