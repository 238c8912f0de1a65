"""Fetch the samples of a request from the user's dataset: seed each one, and skip or replace unreadable ones.

Runs in the worker; in the main process without workers, and to replace images that DALI failed on.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Subset, get_worker_info

from .._random_state import get_rng_states, preserve_rng, seed_generators, set_rng_states
from ..data.bad_samples import OnError, UnreadableSample, is_sample_fault
from ..data.deferral import Deferral
from ..errors import ImageError, InputError, ProxyLoaderError
from .fetch_folder import FolderFetcher
from .request_sampler import BatchRequest
from .scan_checks import PassedSamples, checking

MAX_ATTEMPTS = 100
"""Maximum number of samples tried as a replacement."""

_NOT_BATCHED = object()
"""Sentinel for samples that must be fetched one by one. A dataset may return None for a batch."""


@dataclass
class FetchedSamples:
    """The samples of a request, or the result of ``__getitems__``, with their indices, and unreadable samples."""

    samples: Any = field(default_factory=list)
    indices: list[Any] = field(default_factory=list)
    unreadable: list[UnreadableSample] = field(default_factory=list)


class Fetcher:
    """Fetches samples from the dataset.

    Args:
        seed: seed of the random numbers; None: do not seed the generators.
        passed: samples whose JPEGs passed the checks for GPUs; None: no GPU decodes them, or ``check_scans`` is False.
        has_workers: whether the loader has worker processes.
        fills_batches: with ``on_error="skip"``, whether a batch without readable samples gets the next readable one,
            because processes that train together require the same number of batches.
        folders: fetches the samples of an ImageFolder; None: fetch them one by one.
        deferral: the dataset's Deferral; None: its images are not deferred.
    """

    def __init__(
        self,
        dataset: Any,
        on_error: OnError = "raise",
        seed: int | None = None,
        passed: PassedSamples | None = None,
        has_workers: bool = False,
        fills_batches: bool = False,
        folders: FolderFetcher | None = None,
        deferral: Deferral | None = None,
    ) -> None:
        self.dataset, self._on_error, self.fills_batches = dataset, on_error, fills_batches
        self._seed, self._passed, self._has_workers = seed, passed, has_workers
        self.folders, self.deferral = folders, deferral

    def __call__(self, request: BatchRequest) -> FetchedSamples:
        """Return the samples of a request. ImageError: an image cannot be read."""
        indices = request.index_list()
        if self.folders is not None and not self.has_fallen_back:
            samples: Any = self.folders(self.dataset, indices, self._sample_seeder(request.epoch))
            if samples is not None:
                return FetchedSamples(samples, indices)
        samples = self._fetch_batch(request)
        if samples is not _NOT_BATCHED:
            return FetchedSamples(samples, indices)
        self._fetch_ahead(indices)
        fetched = FetchedSamples()
        for index in indices:
            try:
                sample = self._fetch_sample(index, request.epoch)
            except Exception as error:
                if self._on_error == "raise" or not is_sample_fault(error):
                    raise
                fetched.unreadable.append(UnreadableSample.from_error(index, error))
                if self._on_error == "skip":
                    continue
                index, sample = self.next_readable(index, request.epoch, fetched.unreadable)
            fetched.samples.append(sample)
            fetched.indices.append(index)
        if self.fills_batches and not fetched.samples and fetched.unreadable:
            index, sample = self.next_readable(indices[-1], request.epoch, fetched.unreadable)
            fetched.samples, fetched.indices = [sample], [index]
        return fetched

    @property
    def has_fallen_back(self) -> bool:
        """Whether images are no longer deferred; see NOTE [ When deferral stops ]."""
        return self.deferral is not None and not self.deferral.is_active

    @property
    def transform(self) -> Any:
        """The transform of the user's dataset, or None."""
        return getattr(self.dataset, "transform", None)

    def next_readable(self, index: Any, epoch: int, unreadable: list[UnreadableSample]) -> tuple[int, Any]:
        """Return the index and sample of the next readable sample after ``index``. Add others to ``unreadable``.

        Raises:
            ImageError: none of the following samples can be read.
            ProxyLoaderError: the index is not an integer, or the dataset has no length.
        """
        try:
            first, size = operator.index(index), len(self.dataset)
        except TypeError as error:
            raise ProxyLoaderError(
                f"on_error={self._on_error!r} cannot replace dataset[{index!r}]: this requires integer indices and a "
                "dataset with a length. In a single process, on_error='skip' requires neither"
            ) from error
        for step in range(1, min(MAX_ATTEMPTS, size - 1) + 1):
            candidate = (first + step) % size
            try:
                return candidate, self._fetch_sample(candidate, epoch)
            except Exception as error:
                if not is_sample_fault(error):
                    raise
                unreadable.append(UnreadableSample.from_error(candidate, error))
        raise no_replacement(index, unreadable, min(MAX_ATTEMPTS, size - 1))

    def seed_batch(self, request: BatchRequest) -> None:
        """Seed the generators for the collate_fn from the seed, the epoch and the indices of the batch."""
        if self._seed is not None:
            seed_generators(self._seed, request.epoch, "batch", request.index_list())

    def _sample_seeder(self, epoch: int) -> Callable[[Any], None] | None:
        """Return a function that seeds the generators for a sample by its index; None without a seed."""
        seed = self._seed
        return None if seed is None else lambda index: seed_generators(seed, epoch, _to_int(index))

    def preserve_generators(self) -> contextlib.AbstractContextManager[None]:
        """Context for fetching and collating. In the main process, restores the user's generators at exit."""
        must_restore = self._seed is not None and self.worker_info() is None
        return preserve_rng() if must_restore else contextlib.nullcontext()

    def worker_info(self) -> Any:
        """Return torch's ``get_worker_info()`` in a worker of this loader; otherwise None.

        A loader without workers may run inside a worker of another loader.
        """
        return get_worker_info() if self._has_workers else None

    def _fetch_batch(self, request: BatchRequest) -> Any:
        """Return the result of ``__getitems__``; ``_NOT_BATCHED`` if samples must be fetched one by one."""
        source = self.dataset
        while isinstance(source, Subset):  # a Subset accepts lists if its dataset does
            source = source.dataset
        if not request.batched or self._seed is not None or getattr(source, "__getitems__", None) is None:
            return _NOT_BATCHED
        before = get_rng_states(include_numpy_and_python=True)
        try:
            with checking(self._passed, request.index_list()):
                return self.dataset.__getitems__(request.indices)
        except Exception as error:
            if not isinstance(error, ImageError) and (self._on_error == "raise" or not is_sample_fault(error)):
                raise
        set_rng_states(before)  # fetch samples again one by one to find the unreadable ones
        return _NOT_BATCHED

    def _fetch_ahead(self, indices: Sequence[Any]) -> None:
        """Let a dataset with a method ``fetch_ahead`` fetch the files of a batch concurrently."""
        dataset = self.dataset
        while isinstance(dataset, Subset):
            indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
        if hasattr(dataset, "fetch_ahead"):
            dataset.fetch_ahead(indices)

    def _fetch_sample(self, index: Any, epoch: int) -> Any:
        if (derive_seed := self._sample_seeder(epoch)) is not None:
            derive_seed(index)
        try:
            with checking(self._passed, [index]):
                return self.dataset[index]
        except InputError as error:
            raise error.at(f"dataset[{index}]", index=index) from error
        except ImageError as error:
            raise error.at(f"dataset[{index}]", index=index) from error.__cause__


def no_replacement(index: Any, unreadable: Sequence[UnreadableSample], attempts: int) -> ImageError:
    """Return the error for a sample that is followed by ``attempts`` unreadable samples."""
    last = unreadable[-1]
    original = next(sample for sample in unreadable if sample.index == index)
    return original.error(
        f"dataset[{index}] cannot be read, nor any of the {attempts} samples after it; the last of them is "
        f"dataset[{last.index}] ({last.path}): {last.reason}. Check the location of the data"
    )


def _to_int(index: Any) -> Any:
    """Convert integers of any type, such as NumPy's or torch's, to int. Return other indices unchanged."""
    try:
        return operator.index(index)
    except TypeError:
        return index
