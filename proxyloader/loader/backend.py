"""What loads the images of a loader, chosen, and in words: for ``loader.backend`` and the log. Main process."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import DataLoader as TorchDataLoader

from ..data.bad_samples import UnreadableSamples
from ..data.dataset import Translated, length_of, sources_of
from ..transforms.plan import Plan
from ..workers.loader_state import LoaderState
from ..workers.messages import PackedBatch
from ..workers.pool import WorkerPool
from .options import LoaderOptions
from .plan_servers import PlanServers
from .stats import LoaderStats, StatsRecorder
from .strategy import translated

log = logging.getLogger(__name__)

T = TypeVar("T")

NEW_WORKERS = (
    "each epoch forks new workers. What this process then writes to first has to be copied, DALI's memory among it, so "
    "that short epochs may take longer than with torch's loader. Give the loader persistent_workers=True"
)
SHORT_S = 60.0
"""A second epoch that begins earlier after the first one is worth a warning of ``NEW_WORKERS``."""

MANY = 0.05
"""Share of the images of an epoch from which it is worth a warning that DALI does not make them."""


def described(
    found: Translated, plans: Iterable[Plan], options: LoaderOptions, has_begun: bool, counts: ImageCounts
) -> str:
    """Return what loads the images of a loader, and with which transforms, or why torch does.

    ``plans`` are those of all transforms that are known by now, and ``has_begun`` says whether a batch was loaded.
    """
    if counts.has_given_up:
        return f"torch: {counts.why_given_up}"
    first = f", the first: {counts.decoded_why}" if counts.decoded_why else ""
    device = options.device if options.device is not None else "cuda" if options.on_gpu else "cpu"
    parts = [", ".join(_names(plan)) for plan in plans]
    if options.server is not None:
        parts.append("the pipeline of the server")
    if parts:
        but = f"; the workers decode some images{first}" if first else ""
        return f"DALI on {device}: {'; '.join(parts)}; JPEGs travel encoded{but}"
    if found.reason:
        return f"torch: {found.reason}"
    if has_begun:
        return f"torch: the workers have made all that was loaded so far{first}"
    return f"DALI on {device}, if the dataset calls transforms on JPEGs"


def name_of(dataset: Any) -> str:
    """Return the class and the size of a dataset, as in "Subset of ImageFolder, 500 samples"."""
    length = length_of(dataset)
    size = f", {length:,} samples" if length is not None else ""
    names = [type(dataset).__name__]
    while type(dataset) in (Subset, ConcatDataset):
        dataset = dataset.dataset if type(dataset) is Subset else next(iter(dataset.datasets))
        names.append(type(dataset).__name__)
    return " of ".join(names) + size


def _is_of_arrays(dataset: Any) -> bool:
    """Return whether a dataset makes its images of an array in memory, as CIFAR10 does, so that nobody decodes them."""
    return all(
        isinstance(data := getattr(source, "data", None), (np.ndarray, torch.Tensor)) and len(data) == length_of(source)
        for source in sources_of(dataset)
    )


def _names(plan: Plan) -> list[str]:
    return [type(step).__name__ for step in plan.steps]


class ImageCounts:
    """How many images of the first epoch of a loader were made by whom, for the log."""

    def __init__(self, dataset: Any, on_gpu: bool) -> None:
        self._name, self._is_of_arrays, self._on_gpu = name_of(dataset), _is_of_arrays(dataset), on_gpu
        self._by_dali = self._by_pillow = self._in_workers = 0
        self._is_said = self.is_server_idle = False
        self.decoded_why = ""
        """Why the workers decoded the first image that was to be decoded late; "" if that is not known."""
        self.not_translated: tuple[str, ...] = ()
        """The transforms that are not translated, and why."""
        self.reason = ""
        """Why torch loads the dataset, if that is known before its first batch."""
        self.has_given_up = False
        """Whether workers have given up deferring: NOTE [ When deferring is given up ] in ``data/deferral.py``."""
        self.has_images = False
        """Whether undecoded images were handed out so far."""

    @property
    def why_given_up(self) -> str:
        if not self.has_images:
            return self.reason or "the dataset opens no JPEGs that DALI could decode"
        return self.decoded_why or "the dataset uses the pixels of its images"

    def add(self, batch: PackedBatch) -> None:
        by_dali, by_pillow, in_workers = batch.images_by
        self._by_dali += by_dali
        self._by_pillow += by_pillow
        self._in_workers += in_workers
        self.decoded_why = self.decoded_why or batch.decoded_why
        self.has_images |= batch.has_seen_images
        if batch.gave_up and not self.has_given_up:
            level = logging.WARNING if self.has_images else logging.INFO
            log.log(level, "%s is loaded as by torch: %s", self._name, self.why_given_up)
        self.has_given_up = batch.gave_up or (self.has_given_up and not batch.runs)

    def end_epoch(self) -> None:
        """Log the counts of the first epoch."""
        total = self._by_dali + self._by_pillow + self._in_workers
        if self._is_said or self.has_given_up or not total:
            return
        self._is_said = True
        # An array needs no decoder, and DALI is faster than torchvision at the rest.
        slow = self._in_workers + (0 if self._is_of_arrays else self._by_pillow)
        is_slow = slow / total > MANY
        log.log(
            logging.WARNING if is_slow else logging.INFO,
            "%s, first epoch: DALI decoded %s images, and transformed %s that Pillow decoded or that are arrays; %s "
            "were made in the workers%s",
            self._name,
            *(f"{count:,}" for count in (self._by_dali, self._by_pillow, self._in_workers)),
            self._reason() if is_slow else "",
        )

    def _reason(self) -> str:
        reasons = ["That is slower than where DALI decodes" if self._on_gpu else "That is torch's speed at best"]
        if self._by_pillow and not self._is_of_arrays:
            reasons.append("Pillow decodes what is no JPEG, or DALI would decode differently, or whose pixels are used")
        if self.decoded_why:
            reasons.append(f"The first image that the workers decoded: {self.decoded_why}")
        if self._in_workers:
            reasons.append("The workers make images whose pixels are used there")
            reasons.append(f"They make those that are {'neither RGB nor grey JPEGs' if self._on_gpu else 'not RGB'}")
            if not self._on_gpu:
                reasons.append("Without a GPU they make those of transforms at which torchvision is faster")
            reasons.append("They make those of a transform that one image of a batch has alone")
        return ". ".join(["", *reasons, *(f"They also do all up to {each}" for each in self.not_translated)])


class DescribedLoader(TorchDataLoader[T]):
    """Base class of DataLoader that says what loads its images."""

    _options: LoaderOptions
    """Checked when the loader is built, and when one of its attributes is set."""

    _servers: PlanServers
    _counts: ImageCounts
    _loader_state: LoaderState | None
    _recorder: StatsRecorder
    _errors: UnreadableSamples
    _pool: WorkerPool | None

    _began_s: float
    """When the first epoch began, in seconds of ``time.monotonic``."""

    _said: frozenset[str] = frozenset()
    """The warnings that were logged for this loader."""

    @property
    def backend(self) -> str:
        """What loads the images, as a text.

        It is "DALI on cuda: ..." with the transforms, or "torch: ..." with the reason. Transforms that no attribute of
        the dataset holds are known after the first batch.
        """
        found = self._translate()
        plans = (found.plans | self._servers.found).values()
        return described(found, plans, self._options, self._loader_state is not None, self._counts)

    def stats(self) -> LoaderStats:
        """Return what this loader has given since it was made, and the times of its last 1,000 batches.

        It may be called at any time, in any thread. A copy of a loader counts anew.
        """
        pool = self._pool
        iterator = None if pool is None or pool.user is None else pool.user()
        return self._recorder.stats(0 if iterator is None else iterator.batches_ahead, len(self._errors))

    def _new_counts(self) -> dict[str, Any]:
        """Return the attributes that count what the loader gives, at zero."""
        return {
            "_counts": ImageCounts(self.dataset, self._options.on_gpu),
            "_recorder": StatsRecorder(name_of(self.dataset), self.num_workers),
        }

    def __repr__(self) -> str:
        return f"<proxyloader.DataLoader of {name_of(self.dataset)}: {self.backend}>"

    def _warn_of(self, found: Translated) -> None:
        """Log what makes the dataset slower than it might be, once for this loader."""
        self._counts.not_translated, self._counts.reason = found.not_translated, found.reason
        for warning in found.warnings:
            self._warn(warning)

    def _warn(self, warning: str) -> None:
        """Log a warning, once for this loader."""
        if warning not in self._said:
            log.warning("%s: %s", name_of(self.dataset), warning)
        self._said |= {warning}

    def _say_what_begins(self) -> None:
        """Log what loads the images, in the first epoch, and in the second one if new workers make it slower."""
        if self._loader_state is None:
            log.info("%s", repr(self))  # not the loader itself, which a record of the log would keep
            self._began_s = time.monotonic()
            return
        context: Any = self.multiprocessing_context or multiprocessing
        is_forked = self.num_workers > 0 and not self.persistent_workers and context.get_start_method() == "fork"
        is_short = time.monotonic() - self._began_s < SHORT_S
        if is_forked and is_short and self._servers.kept and not self._options.on_gpu:
            self._warn(NEW_WORKERS)

    @property
    def _translate(self) -> Callable[[], Translated]:
        """A function that returns the dataset of the workers."""
        # It holds no reference to this loader, as an iterator may outlive the loader.
        return functools.partial(translated, self.dataset, self._options)
