"""What loads the images of a loader, in words: for ``loader.backend`` and the log. Main process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from ..data.dataset import Translated
from ..transforms.plan import Plan
from ..workers.messages import PackedBatch
from .options import LoaderOptions

log = logging.getLogger(__name__)

MANY = 0.05
"""Share of the images of an epoch from which it is worth a warning that DALI does not make them."""


def described(found: Translated, plans: Iterable[Plan], options: LoaderOptions, has_begun: bool) -> str:
    """Return what loads the images of a loader, and with which transforms, or why torch does.

    ``plans`` are those of all transforms that are known by now, and ``has_begun`` says whether a batch was loaded.
    """
    device = options.device if options.device is not None else "cuda" if options.on_gpu else "cpu"
    parts = [", ".join(_names(plan)) for plan in plans]
    if options.server is not None:
        parts.append("the pipeline of the server")
    if parts:
        return f"DALI on {device}: {'; '.join(parts)}; JPEGs travel encoded"
    if found.reason:
        return f"torch: {found.reason}"
    if has_begun:
        return "torch: no transform that is translated was called on an image that was not decoded"
    return f"DALI on {device}, for the transforms that the dataset will call on JPEGs"


def name_of(dataset: Any) -> str:
    """Return the class and the size of a dataset, as in "Subset of ImageFolder, 500 samples"."""
    size = f", {len(dataset):,} samples" if hasattr(dataset, "__len__") else ""
    names = [type(dataset).__name__]
    while type(dataset) in (Subset, ConcatDataset):
        dataset = dataset.dataset if type(dataset) is Subset else next(iter(dataset.datasets))
        names.append(type(dataset).__name__)
    return " of ".join(names) + size


def _names(plan: Plan) -> list[str]:
    return [type(step).__name__ for step in plan.steps]


class ImageCounts:
    """How many images of the first epoch of a loader were made by whom, for the log."""

    def __init__(self, dataset: Any) -> None:
        self._name = name_of(dataset)
        self._by_dali = self._by_pillow = self._in_workers = 0
        self._is_said = False
        self.not_translated: tuple[str, ...] = ()
        """The transforms that are not translated, and why."""

    def add(self, batch: PackedBatch) -> None:
        by_dali, by_pillow, in_workers = batch.images_by
        self._by_dali += by_dali
        self._by_pillow += by_pillow
        self._in_workers += in_workers

    def end_epoch(self) -> None:
        """Log the counts of the first epoch."""
        total = self._by_dali + self._by_pillow + self._in_workers
        if self._is_said or not total:
            return
        self._is_said = True
        is_slow = (self._by_pillow + self._in_workers) / total > MANY
        log.log(
            logging.WARNING if is_slow else logging.INFO,
            "%s, first epoch: DALI decoded %s images, Pillow %s that DALI then transformed; %s were made in the workers"
            "%s",
            self._name,
            *(f"{count:,}" for count in (self._by_dali, self._by_pillow, self._in_workers)),
            self._reason() if is_slow else "",
        )

    def _reason(self) -> str:
        reasons = ["That is slower"]
        if self._by_pillow:
            reasons.append("Pillow decodes what is no JPEG, or one that DALI would decode differently")
        if self._in_workers:
            reasons.append("The workers make images whose pixels are used there, and images that are not RGB")
        return ". ".join(["", *reasons, *(f"They do what comes before {each}" for each in self.not_translated)])
