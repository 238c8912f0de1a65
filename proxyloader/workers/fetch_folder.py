"""Fetch the samples of a request from an ImageFolder: read all files, then draw for all images. Runs in the worker.

NOTE [ Reading before sampling ]
Reading a file of a hundred kilobytes evicts the code that draws random numbers, and its tables, from the CPU caches. A
dataset that alternates between reading a file and calling its transform reloads them for each image. But
``DatasetFolder`` runs no user code for a sample, and the order of reads does not matter. So ``FolderFetcher`` reads all
files first, and then calls the transform for all images, in their order.

If only torch's ``collate_fn`` receives the samples, ``FolderFetcher`` only draws the numbers, which is faster than
calling the transform.

In unexpected cases, such as a missing file or images of several sizes, ``Fetcher`` fetches the samples one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils.data import Subset
from torch.utils.data._utils import collate
from torchvision import get_image_backend
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import default_loader, pil_loader

from .._random_state import get_rng_states, set_rng_states
from ..data.deferral import Deferral
from ..data.encoded_image import EncodedImage
from ..data.lazy_tensor import collate_tensors, create_lazy_output
from ..data.placeholders import ProxySample
from ..data.transformed import TransformedImage
from ..transforms.chain import START, Chain
from ..transforms.random_numbers import are_alike_ahead, drawing_ahead
from .scan_checks import PassedSamples, checking

MIN_ADVANCE_IMAGES = 8
"""Minimum number of images for which drawing their numbers in advance is faster."""

_GETITEM = DatasetFolder.__getitem__


class FolderFetcher:
    """Fetches the samples of a ``DatasetFolder``, an ``ImageFolder``, or a ``Subset`` of one.

    Args:
        plans: keys of the plans that the loader knows, if only torch's default ``collate_fn`` receives the samples.
        passed: samples whose JPEGs passed the checks for GPUs; None: no GPU decodes them, or ``check_scans`` is False.
        deferral: the dataset's Deferral.
        is_in_worker: whether it runs in a worker, where no other thread draws from the generators.
    """

    def __init__(
        self, plans: Collection[str], passed: PassedSamples | None, deferral: Deferral, is_in_worker: bool = False
    ) -> None:
        self._plans, self._passed, self._deferral = plans, passed, deferral
        self._can_draw_ahead = is_in_worker and are_alike_ahead()

    def __call__(
        self, dataset: Any, indices: Sequence[Any], derive_seed: Callable[[Any], None] | None = None
    ) -> list[tuple[Any, Any]] | None:
        """Return the samples; None if the samples must be fetched one by one.

        Args:
            derive_seed: seeds the generators for a sample by its index; None: do not seed them.
        """
        folder = dataset
        while type(folder) is Subset:
            folder = folder.dataset
        chain = START.through(folder.transform) if _is_stock_folder(folder) else None
        if chain is None or chain.state.kind != "tensor" or self._deferral.find_obstacle(chain.plan):
            return None
        states = get_rng_states(include_numpy_and_python=True)
        try:
            samples = [folder.samples[index] for index in _resolve_indices(dataset, indices)]
            with checking(self._passed, indices):
                images = [EncodedImage.open(path) for path, _ in samples]
            transformed = self._transform(chain, images, indices, derive_seed)
        except Exception:
            transformed = None
        if transformed is None:
            set_rng_states(states)
            return None
        return [(image, target) for image, (_, target) in zip(transformed, samples)]

    def _transform(
        self,
        chain: Chain,
        images: Sequence[EncodedImage],
        indices: Sequence[Any],
        derive_seed: Callable[[Any], None] | None,
    ) -> list[Any] | None:
        """Return a placeholder for each transformed image; None if the images cannot form a batch."""
        plan, sizes = chain.plan, set()
        outputs: list[Any] = []
        only_draws = plan.key in self._plans and _collates_like_torch()
        draws_ahead = only_draws and derive_seed is None and self._can_draw_ahead and chain.last.draws in ("", "ahead")
        draws_ahead &= len(images) >= MIN_ADVANCE_IMAGES
        with drawing_ahead() if draws_ahead else contextlib.nullcontext():
            for index, image in zip(indices, images):
                if derive_seed is not None:
                    derive_seed(index)
                if only_draws:
                    call = TransformedImage.sample(image, chain)
                    outputs.append(ProxySample(call))
                    sizes.add(call.size)
                else:
                    outputs.append(create_lazy_output(TransformedImage.start(image).apply(chain)))
        return outputs if len(sizes) <= 1 else None


def _collates_like_torch() -> bool:
    """Return whether torch's default ``collate_fn`` calls no user function for a sample or an image."""
    known = collate.default_collate_fn_map
    return known.get(torch.Tensor) is collate_tensors and not any(isinstance((), kind) for kind in known)


def _is_stock_folder(folder: Any) -> bool:
    """Return whether a dataset runs no user code for a sample."""
    if getattr(type(folder), "__getitem__", None) is not _GETITEM:
        return False
    return (
        not hasattr(folder, "__getitems__")
        and not hasattr(folder, "fetch_ahead")
        and type(folder.samples) is list
        and folder.target_transform is None
        and folder.loader in (default_loader, pil_loader)
        and get_image_backend() == "PIL"
        and torch.get_default_dtype() is torch.float32
    )


def _resolve_indices(dataset: Any, indices: Sequence[Any]) -> Sequence[Any]:
    """Translate the indices of a Subset to those of its dataset."""
    while type(dataset) is Subset:
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    return indices
