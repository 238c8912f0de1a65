"""Fetch the samples of a request from the user's dataset: each under its own seed, without unreadable ones.

Runs in the worker. Runs in the main process if there are no workers, and for a few samples that are replaced late.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Subset, get_worker_info

from .._random_state import preserve_rng, seed_generators, set_states, states_now
from ..data.bad_samples import OnError, UnreadableSample, is_sample_fault
from ..data.dataset import get_sample_path
from ..data.deferral import Deferral
from ..data.encoded_image import NOT_DECODED_ADVICE, EncodedImage
from ..data.live_dataset import LiveDataset
from ..errors import ImageError, InputError, ProxyLoaderError
from .fetch_folder import FolderFetcher
from .request_sampler import BatchRequest
from .scan_checks import PassedSamples, checking

MOST_TRIES = 100
"""Most consecutive unreadable samples before the search for a replacement fails."""


_NOTHING = object()
"""Marks a missing list of samples. None does not work, because a dataset may return None."""


@dataclass
class Fetched:
    """The samples of a request, or what ``__getitems__`` returned for it, their indices, and what could not be read."""

    samples: Any = field(default_factory=list)
    indices: list[Any] = field(default_factory=list)
    unreadable: list[UnreadableSample] = field(default_factory=list)


class Fetcher:
    """Reads samples from the wrapped dataset.

    Args:
        seed: seed of the random numbers; None: use torch's generators as they are.
        passed: samples whose JPEGs passed the checks before a GPU; None: no GPU decodes them, or nobody asked.
        live: returns the dataset as it is when a batch begins; None: the dataset does not change.
        has_workers: whether the loader has worker processes.
        keeps_batches: with ``on_error="skip"``, whether a batch without a readable sample gets the next one. Processes
            that train together need as many batches each.
        folders: fetches the samples of an ImageFolder; None: they are fetched one by one.
        deferral: of the dataset; None: its images are not deferred.
    """

    def __init__(
        self,
        dataset: Any,
        on_error: OnError = "raise",
        seed: int | None = None,
        passed: PassedSamples | None = None,
        live: LiveDataset | None = None,
        has_workers: bool = False,
        keeps_batches: bool = False,
        folders: FolderFetcher | None = None,
        deferral: Deferral | None = None,
    ) -> None:
        self.dataset, self._on_error, self.keeps_batches = dataset, on_error, keeps_batches
        self._deferral = deferral
        self._seed, self._passed, self._live, self._has_workers, self.folders = seed, passed, live, has_workers, folders

    def __call__(self, request: BatchRequest) -> Fetched:
        """Return the samples of a request. ImageError: an image cannot be read; names the index."""
        indices = request.each()
        folders = None if self.has_given_up else self.folders
        of_folder = folders(self.dataset, indices, self._seeds(request.epoch)) if folders is not None else None
        if of_folder is not None:
            return Fetched(of_folder, indices)
        at_once = self._at_once(request)
        if at_once is not _NOTHING:
            return Fetched(at_once, indices)
        self._fetch_ahead(indices)
        fetched = Fetched()
        for index in indices:
            try:
                sample = self._sample(index, request.epoch)
            except Exception as error:
                if self._on_error == "raise" or not is_sample_fault(error):
                    raise
                fetched.unreadable.append(UnreadableSample.from_error(index, error))
                if self._on_error == "skip":
                    continue
                index, sample = self.next_readable(index, request.epoch, fetched.unreadable)
            fetched.samples.append(sample)
            fetched.indices.append(index)
        if self.keeps_batches and not fetched.samples and fetched.unreadable:
            index, sample = self.next_readable(indices[-1], request.epoch, fetched.unreadable)
            fetched.samples, fetched.indices = [sample], [index]
        return fetched

    def look_again(self) -> None:
        """Update to the current state of the user's dataset before a batch is requested."""
        if self._live is not None:
            self.dataset = self._live.dataset if self.has_given_up else self._live()

    @property
    def has_given_up(self) -> bool:
        """Whether images are not deferred any more; see NOTE [ When deferral stops ]."""
        return self._deferral is not None and not self._deferral.is_active

    @property
    def transform(self) -> Any:
        """The transform of the user's dataset, or None."""
        return getattr(self.dataset if self._live is None else self._live.dataset, "transform", None)

    def next_readable(self, index: Any, epoch: int, unreadable: list[UnreadableSample]) -> tuple[int, Any]:
        """Return index and sample of the next readable sample after ``index``. Add skipped ones to ``unreadable``.

        Raises:
            ImageError: none of the following samples can be read.
            ProxyLoaderError: the index is not an integer, or the dataset has no length.
        """
        try:
            first, size = operator.index(index), len(self.dataset)
        except TypeError as error:
            raise ProxyLoaderError(
                f"on_error={self._on_error!r} looks for the sample after dataset[{index!r}], and that needs whole "
                "numbers for indices and a dataset with a length. In a process alone, on_error='skip' needs neither"
            ) from error
        for step in range(1, min(MOST_TRIES, size - 1) + 1):
            candidate = (first + step) % size
            try:
                return candidate, self._sample(candidate, epoch)
            except Exception as error:
                if not is_sample_fault(error):
                    raise
                unreadable.append(UnreadableSample.from_error(candidate, error))
        raise nothing_replaces(index, unreadable, min(MOST_TRIES, size - 1))

    def seed_batch(self, request: BatchRequest) -> None:
        """Seed the generators for the collate_fn with the seed, the epoch and the indices of the batch."""
        if self._seed is not None:
            seed_generators(self._seed, request.epoch, "batch", request.each())

    def _seeds(self, epoch: int) -> Callable[[Any], None] | None:
        """Return a function that seeds the generators for the sample of an index; None: they go on as they are."""
        seed = self._seed
        return None if seed is None else lambda index: seed_generators(seed, epoch, _plain(index))

    def generators(self) -> contextlib.AbstractContextManager[None]:
        """Context for all calls above. In the process of the training loop it restores the user's generators."""
        draws_here = self._seed is not None and self.worker_info() is None
        return preserve_rng() if draws_here else contextlib.nullcontext()

    def worker_info(self) -> Any:
        """Return torch's ``get_worker_info()`` in a worker of this loader; otherwise None.

        A loader without workers may run inside a worker of another loader.
        """
        return get_worker_info() if self._has_workers else None

    def _at_once(self, request: BatchRequest) -> Any:
        """Return what the dataset gives for a list of indices; ``_NOTHING`` if each sample must be read by itself."""
        source = self.dataset
        while isinstance(source, Subset):  # a Subset accepts lists if its dataset does
            source = source.dataset
        if not request.batched or self._seed is not None or getattr(source, "__getitems__", None) is None:
            return _NOTHING
        before = states_now(beside_torch=True)
        try:
            with checking(self._passed, request.each()):
                return self.dataset.__getitems__(request.indices)
        except Exception as error:
            if not isinstance(error, ImageError) and (self._on_error == "raise" or not is_sample_fault(error)):
                raise
        set_states(before)  # each sample is read again by itself, to find the unreadable one
        return _NOTHING

    def _fetch_ahead(self, indices: Sequence[Any]) -> None:
        """Let a dataset with a method ``fetch_ahead`` fetch the files of a batch at the same time."""
        dataset = self.dataset
        while isinstance(dataset, Subset):
            indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
        if hasattr(dataset, "fetch_ahead"):
            dataset.fetch_ahead(indices)

    def _sample(self, index: Any, epoch: int) -> Any:
        if (seed_for := self._seeds(epoch)) is not None:
            seed_for(index)
        try:
            with checking(self._passed, [index]):
                return self.dataset[index]
        except InputError as error:
            raise error.at(f"dataset[{index}]", index=index) from error
        except TypeError as error:
            if EncodedImage.__name__ not in str(error) or NOT_DECODED_ADVICE in str(error):
                raise
            raise InputError(
                f"dataset[{index}]: an image is used that is not decoded yet: {error}. {NOT_DECODED_ADVICE}",
                code="not-decoded",
                index=index,
            ) from error
        except ImageError as error:
            path = error.path or get_sample_path(self.dataset, index)
            where = f"dataset[{index}]" + (f" ({path})" if path != error.path else "")
            raise error.at(where, index=index, path=path) from error.__cause__


def nothing_replaces(index: Any, unreadable: Sequence[UnreadableSample], tries: int) -> ImageError:
    """Return the error for a sample that is followed by ``tries`` unreadable samples."""
    last = unreadable[-1]
    itself, *_ = (each for each in unreadable if each.index == index)
    return itself.error(
        f"dataset[{index}] cannot be read, nor any of the {tries} samples after it; the last of them is "
        f"dataset[{last.index}] ({last.path}): {last.reason}. Is the data where it should be?"
    )


def _plain(index: Any) -> Any:
    """Return an integer of any type, such as numpy's or torch's, as a Python int; other indices unchanged."""
    try:
        return operator.index(index)
    except TypeError:
        return index
