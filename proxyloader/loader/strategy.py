"""Choose the loading strategy: DALI, torchvision in workers, or pass-through; and log the choice. Main process."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from ..data.compiled_transform import compile_transforms, left_to_torchvision
from ..data.dataset import is_for_images, plans_in, wrap
from ..data.placeholders import Proxy
from ..errors import UnsupportedTransformError
from ..transforms.plan import Plan
from .options import LoaderOptions

log = logging.getLogger(__name__)

Translated = tuple[Any, dict[str, Plan]]
"""The dataset of the workers, and its plans by their keys. Without plans DALI is not used."""


def translated(dataset: Any, options: LoaderOptions) -> Translated:
    """Return the dataset of the workers and its plans, for the chosen strategy.

    Raises:
        UnsupportedTransformError: a transform is not translated, and ``unsupported`` is not "cpu".
        ValueError: the output of a transform cannot be returned in this format.
    """
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        _say_once("NVIDIA DALI is not installed: proxyloader.DataLoader works as torch.utils.data.DataLoader does")
        return dataset, {}
    unsupported, max_pixels = options.unsupported, options.max_pixels
    compile = functools.partial(compile_transforms, unsupported="batch" if unsupported == "batch" else "raise")
    try:
        wrapped = wrap(dataset, max_pixels, compile=compile)
    except UnsupportedTransformError as error:
        if unsupported != "cpu":
            raise
        what = f"{error.position}: {error.transform}" if error.transform else error.position
        _say_once(f"{what} is not translated: as unsupported='cpu' says, torchvision does all in the workers")
        return _left_to_torchvision(dataset, max_pixels)
    plans = plans_in(wrapped)
    for plan in plans.values():
        options.format.check(plan)
    for rest in (plan.rest for plan in plans.values() if plan.rest is not None):
        _say_once(f"{rest.position} is not translated: it and what follows is called on the decoded batches")
    if not options.on_gpu:
        left, by_hand = _left_to_torchvision(dataset, max_pixels)
        if any(plan.slow_on_cpu for key, plan in plans.items() if key not in by_hand):
            _say_once(
                "on a CPU torchvision is faster at some of these transforms than DALI, so it does all of them in the "
                "workers, as with torch.utils.data.DataLoader"
            )
            return left, by_hand
    if not plans and options.server is None and not _is_in_memory(dataset):
        _say_that_nothing_is_to_do(dataset)
    return wrapped, plans


def _left_to_torchvision(dataset: Any, max_pixels: int | None) -> Translated:
    """Leave the dataset's transforms to torchvision. Transforms that the user compiled keep their plans."""
    left = wrap(dataset, max_pixels, compile=left_to_torchvision)
    return left, plans_in(left)


def _is_in_memory(dataset: Any) -> bool:
    """Return whether the samples are tensors or objects in memory, so there is nothing to decode."""
    if type(dataset) is Subset:
        return _is_in_memory(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_in_memory, dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple, range)


def _say_that_nothing_is_to_do(dataset: Any) -> None:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    kind = type(dataset).__name__
    if isinstance(getattr(dataset, "transform", None), Proxy):
        _say_once(
            f"{kind}.transform is the proxy of a server, and the loader has none: give it server=..., "
            "or call server.produce_data on each batch"
        )
        return
    within = next((name for name, value in getattr(dataset, "__dict__", {}).items() if _has_transform(value)), None)
    keep = f"Its .{within} has one: let {kind} itself keep it there and call it" if within else "Keep one there"
    _say_once(
        f"torch's DataLoader loads {kind}, at its speed: this dataset has no attribute .transform with a torchvision "
        f"transform. {keep}, or wrap it in proxyloader.compile_transforms: DALI does what that makes, wherever the "
        "dataset calls it"
    )


def _has_transform(value: Any) -> bool:
    transform = getattr(value, "transform", None) if isinstance(value, Dataset) else None
    return transform is not None and is_for_images(value, transform)


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)
