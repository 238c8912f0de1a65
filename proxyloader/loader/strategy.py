"""Choose what loads the images: DALI, torchvision in the workers, or torch. Describe the choice. Main process."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torchvision.datasets import MNIST, SEMEION, USPS

from ..data.compiled_transform import compile_for_loader, leave_untranslated
from ..data.dataset import Translated, collect_compiled, collect_plans, get_length, get_sources, wrap
from ..data.placeholders import Proxy
from ..errors import UnsupportedTransformError
from ..kernels.support import NO_KERNELS, explain_obstacle
from ..transforms.plan import Plan
from ..transforms.registry import translate
from ..workers.messages import PackedBatch
from .options import LoaderOptions

log = logging.getLogger(__name__)

NO_SERVER = (
    "its .transform is the proxy of a server, but the loader has none: pass server=..., or call server.produce_data on "
    "each batch"
)

GREY_ARRAYS = (MNIST, SEMEION, USPS)
"""FashionMNIST, KMNIST, QMNIST and EMNIST are subclasses of MNIST."""

WARN_FRACTION = 0.05
"""Fraction of the first epoch's images not decoded by DALI above which a warning is logged."""


def translate_dataset(dataset: Any, options: LoaderOptions) -> Translated:
    """Return the dataset for the workers.

    Raises:
        UnsupportedTransformError: a transform is not translated, and ``translate`` is "all".
        ValueError: the output of a transform cannot be converted to the format of the options.
    """
    if not options.translate:
        never_uses_dali = not options.on_gpu and not collect_compiled(dataset)
        return Translated(dataset, {}, reason="translate=False", never_uses_dali=never_uses_dali)
    if not _dali_is_installed():
        missing = "NVIDIA DALI is not installed"
        warning = f"{missing}: torch loads the data, without a speedup. Run `proxyloader doctor` for advice"
        return Translated(dataset, {}, reason=missing, warnings=(warning,), never_uses_dali=True)
    # With a GPU, such arrays become LazyTensors, so that results computed from them arrive on the loader's device.
    if options.translate is True and options.server is None and not options.on_gpu and _has_grey_arrays(dataset):
        return Translated(
            dataset, {}, reason="its images are grayscale arrays, which DALI does not accept", never_uses_dali=True
        )
    not_translated: list[str] = []
    try:
        wrapped = wrap(dataset, compile=functools.partial(_compile, options=options, not_translated=not_translated))
    except TypeError:  # its transform cannot be set
        if options.translate == "all":
            raise
        wrapped = dataset
    plans = collect_plans(wrapped)
    for plan in plans.values():
        options.format.check(plan)
    with_obstacle = [each for each in collect_compiled(wrapped) if options.find_obstacle(each.plan)]
    if with_obstacle:
        reason = explain_obstacle(translate(with_obstacle[0].original), options.has_kernels)
        untranslated = wrap(dataset, compile=functools.partial(leave_untranslated, options=options))
        plans = {key: plan for key, plan in collect_plans(untranslated).items() if not options.find_obstacle(plan)}
        warning = f"torchvision transforms in the workers: {reason}"
        return Translated(untranslated, plans, options.on_gpu, reason=reason, warnings=(warning,))
    sources = get_sources(dataset)
    kinds = set(map(type, sources))
    if kinds <= {TensorDataset, list, tuple, range}:
        reason = "" if plans else "its samples are in memory, with nothing to decode"
        return Translated(wrapped, plans, reason=reason, never_uses_dali=kinds == {TensorDataset})
    is_proxy = len(sources) == 1 and isinstance(getattr(sources[0], "transform", None), Proxy)
    warnings = (NO_SERVER,) if options.server is None and is_proxy else ()
    return Translated(wrapped, plans, is_deferred=True, warnings=warnings, not_translated=tuple(not_translated))


@functools.cache  # without workers, the dataset is translated for each batch
def _dali_is_installed() -> bool:
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def _compile(transform: Any, options: LoaderOptions, not_translated: list[str]) -> Any:
    """Translate a transform, or return it unchanged if calls of its parts are to be intercepted."""
    try:
        return compile_for_loader(transform, has_fallback=options.translate is True)
    except UnsupportedTransformError as error:
        if options.translate == "all":
            raise
        if error.code != "no-tensor":  # the dataset may decode images to tensors itself
            where = f"{error.position}: {error.transform}" if error.transform else error.position
            not_translated.append(f"{where}: {error.reason}")
        return transform


def _has_grey_arrays(dataset: Any) -> bool:
    """Return whether this is a torchvision dataset that creates images in mode L from arrays in memory."""
    return all(
        isinstance(source, GREY_ARRAYS)
        and getattr(type(source).__getitem__, "__module__", "").startswith("torchvision.")
        for source in get_sources(dataset)
    )


def describe_backend(
    translated: Translated, plans: Iterable[Plan], options: LoaderOptions, has_begun: bool, counts: ImageCounts
) -> str:
    """Describe DALI's transforms, or why torch loads the images.

    ``plans`` are those of all transforms known so far. ``has_begun``: whether an epoch has begun.
    """
    if counts.has_fallen_back:
        return f"torch: {counts.fallback_reason}"
    first = f", the first: {counts.decode_reason}" if counts.decode_reason else ""
    device = options.device if options.device is not None else "cuda" if options.on_gpu else "cpu"
    parts = [", ".join(type(step).__name__ for step in plan.steps) for plan in plans]
    if options.server is not None:
        parts.append("the pipeline of the server")
    if not parts and counts._dali_images:
        parts.append("different transforms for each image")
    if parts:
        exceptions = f"; the dataset's code decodes some images{first}" if first else ""
        return f"DALI on {device}: {'; '.join(parts)}; JPEGs are sent encoded{exceptions}"
    if translated.reason:
        return f"torch: {translated.reason}"
    if has_begun:
        return f"torch: the workers have produced all images loaded so far{first}"
    return f"DALI on {device}, if the dataset calls transforms on JPEGs"


def describe_dataset(dataset: Any) -> str:
    """Return the class and the size of a dataset, as in "Subset of ImageFolder, 500 samples"."""
    length = get_length(dataset)
    size = f", {length:,} samples" if length is not None else ""
    names = [type(dataset).__name__]
    while type(dataset) in (Subset, ConcatDataset):
        dataset = dataset.dataset if type(dataset) is Subset else next(iter(dataset.datasets))
        names.append(type(dataset).__name__)
    return " of ".join(names) + size


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
        self.not_translated: tuple[str, ...] = ()  # the transforms that are not translated, and why
        self.reason = ""  # why torch loads the dataset, if known before its first batch
        self.has_fallen_back = False  # whether the workers have: NOTE [ When deferral stops ] in ``data/deferral.py``
        self.has_images = False  # whether the workers have created undecoded images

    @property
    def fallback_reason(self) -> str:
        if self.reason or not self.has_images:
            return self.reason or self.decode_reason or "the dataset opens no JPEGs that DALI could decode"
        return self.decode_reason or "the dataset uses the pixels of its images"

    def begin_epoch(self) -> None:
        """Reset the counts, as an earlier epoch may have been left early."""
        if not self._is_logged:
            self._dali_images = self._pillow_images = self._worker_images = 0

    def add(self, batch: PackedBatch) -> None:
        dali, pillow, workers = batch.image_counts
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
        return ". ".join(["", *reasons, *(f"It also runs everything up to {part}" for part in self.not_translated)])
