"""Fetch the samples of a request from the user's dataset: each under its own seed, without unreadable ones.

Runs in the worker; in the main process where there are no workers, and for the few samples that replace others late.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Subset, get_worker_info

from .._random_state import preserve_rng, seed_generators
from ..data.bad_samples import OnError, UnreadableSample, is_about_the_file
from ..data.dataset import path_of
from ..data.encoded_image import NOT_YET, EncodedImage
from ..data.jpeg_integrity import ScanStatus, leave_to_pillow
from ..errors import ImageError, InputError, ProxyLoaderError
from .request_sampler import BatchRequest

MOST_TRIES = 100
"""Samples in a row that may be unreadable before nothing is found that could replace one."""


_NOTHING = object()
"""In the place of a list of samples; a dataset may give anything, None too."""


@dataclass
class Fetched:
    """
    Attributes:
        samples: as the dataset gave them; a list, or what it gave for a list of indices.
        indices: of each.
        unreadable: those that are missing.
        damaged: indices whose JPEG is not whole; see NOTE [ Damaged scans ].
    """

    samples: Any = field(default_factory=list)
    indices: list[Any] = field(default_factory=list)
    unreadable: list[UnreadableSample] = field(default_factory=list)
    damaged: list[Any] = field(default_factory=list)


class Fetcher:
    """
    Args:
        dataset: the user's, wrapped.
        on_error: what becomes of a sample that cannot be read.
        seed: that draws follow; None: torch's generators, as they are.
        otherwise: what is known of samples of which the request does not say it.
        live: gives the dataset as it is when a batch begins. None: it is what it was.
    """

    def __init__(
        self,
        dataset: Any,
        on_error: OnError = "raise",
        seed: int | None = None,
        otherwise: ScanStatus = ScanStatus.UNCHECKED,
        live: Callable[[], Any] | None = None,
    ) -> None:
        self.dataset, self._on_error, self._seed = dataset, on_error, seed
        self._live = live
        self._otherwise = otherwise
        self._unknown = ScanStatus.UNCHECKED if otherwise is ScanStatus.UNCHECKED else ScanStatus.UNKNOWN

    def __call__(self, request: BatchRequest) -> Fetched:
        """
        Raises:
            ImageError: an image cannot be read; names the index.
        """
        indices, scans = request.each(), request.scans or itertools.repeat(self._otherwise)
        at_once = self._at_once(request)
        is_at_once = at_once is not _NOTHING
        if is_at_once and (not isinstance(at_once, (list, tuple)) or len(at_once) != len(indices)):
            # A batch of the dataset's own making, in which nobody knows which image is whose.
            damaged = leave_to_pillow(at_once, self._unknown if request.scans else self._otherwise)
            return Fetched(at_once, indices, damaged=indices if damaged else [])
        fetched = Fetched()
        for place, (index, known) in enumerate(zip(indices, scans)):
            try:
                sample = at_once[place] if is_at_once else self._sample(index, request.epoch)
                if self._leaves_to_pillow(sample, known, index):
                    fetched.damaged.append(index)
            except Exception as error:
                if self._on_error == "raise" or not is_about_the_file(error):
                    raise
                fetched.unreadable.append(UnreadableSample.of(index, error))
                if self._on_error == "skip":
                    continue
                index, sample = self.next_readable(index, request.epoch, fetched.unreadable)
            fetched.samples.append(sample)
            fetched.indices.append(index)
        if is_at_once and not fetched.unreadable:
            fetched.samples = at_once  # of whatever kind that list is
        return fetched

    def look_again(self) -> None:
        """Take the dataset as it is now, before a batch is asked for."""
        if self._live is not None:
            self.dataset = self._live()

    def of_stream(self, samples: list[Any]) -> Fetched:
        """
        Args:
            samples: as an IterableDataset gave them.

        Raises:
            ImageError: an image cannot be decoded.
        """
        fetched = Fetched()
        for sample in samples:
            try:
                leave_to_pillow(sample, self._otherwise)
                fetched.samples.append(sample)
            except ImageError as error:
                if self._on_error == "raise":
                    raise
                fetched.unreadable.append(UnreadableSample.of(None, error))
        return fetched

    def next_readable(self, index: Any, epoch: int, unreadable: list[UnreadableSample]) -> tuple[int, Any]:
        """The index and the sample that come after ``index`` and can be read; those between are noted.

        Raises:
            ImageError: there is none nearby.
            ProxyLoaderError: nothing comes after an index of this kind.
        """
        try:
            first, size = operator.index(index), len(self.dataset)
        except TypeError as error:
            raise ProxyLoaderError(
                f"on_error='replace' looks for the sample after dataset[{index!r}], and that needs whole numbers for "
                "indices and a dataset with a length. Use on_error='skip'"
            ) from error
        for step in range(1, min(MOST_TRIES, size - 1) + 1):
            candidate = (first + step) % size
            try:
                sample = self._sample(candidate, epoch)
                self._leaves_to_pillow(sample, self._unknown, candidate)
                return candidate, sample
            except Exception as error:
                if not is_about_the_file(error):
                    raise
                unreadable.append(UnreadableSample.of(candidate, error))
        raise nothing_replaces(index, unreadable, min(MOST_TRIES, size - 1))

    def seed_batch(self, request: BatchRequest) -> None:
        """Let a collate_fn draw what depends on the seed, the epoch and the batch's indices alone."""
        if self._seed is not None:
            seed_generators(self._seed, request.epoch, "batch", request.each())

    def generators(self) -> contextlib.AbstractContextManager[None]:
        """Around all of the above: where the loop is, the user's own random numbers go on as if nothing had been."""
        draws_here = self._seed is not None and own_worker_info(self.dataset) is None
        return preserve_rng() if draws_here else contextlib.nullcontext()

    @property
    def _takes_lists(self) -> bool:
        dataset = self.dataset
        while isinstance(dataset, Subset):  # which takes lists where what it is a part of does
            dataset = dataset.dataset
        return getattr(dataset, "__getitems__", None) is not None

    def _at_once(self, request: BatchRequest) -> Any:
        """What the dataset gives for a list of indices; nothing where each sample is to be read by itself."""
        if not request.batched or self._seed is not None or not self._takes_lists:
            return _NOTHING
        try:
            return self.dataset.__getitems__(request.indices)
        except Exception as error:
            if self._on_error == "raise" or not is_about_the_file(error):
                raise
            return _NOTHING  # to know which of them it is

    def _leaves_to_pillow(self, sample: Any, known: int, index: Any) -> bool:
        try:
            return leave_to_pillow(sample, known)
        except ImageError as error:
            raise self._named(error, index) from error.__cause__

    def _sample(self, index: Any, epoch: int) -> Any:
        if self._seed is not None:
            seed_generators(self._seed, epoch, _plain(index))
        try:
            return self.dataset[index]
        except StopIteration as error:
            # Which would end the epoch without a word.
            raise RuntimeError(
                f"dataset[{index}] raised StopIteration, and a dataset with indices has no end"
            ) from error
        except InputError as error:
            raise error.at(f"dataset[{index}]", index=index) from error
        except TypeError as error:
            if EncodedImage.__name__ not in str(error) or NOT_YET in str(error):
                raise
            raise InputError(
                f"dataset[{index}]: an image is used that is not decoded yet: {error}. {NOT_YET}",
                code="not-decoded",
                index=index,
            ) from error
        except ImageError as error:
            raise self._named(error, index) from error.__cause__

    def _named(self, error: ImageError, index: Any) -> ImageError:
        path = error.path or path_of(self.dataset, index)
        where = f"dataset[{index}]" + (f" ({path})" if path != error.path else "")
        return error.at(where, index=index, path=path)


def own_worker_info(dataset: Any) -> Any:
    """torch's ``get_worker_info()`` in a worker of the loader that reads this dataset.

    None elsewhere: in the main process, and where a loader without workers runs in a worker of another one.
    """
    info = get_worker_info()
    return info if info is not None and info.dataset is dataset else None


def nothing_replaces(index: Any, unreadable: Sequence[UnreadableSample], tries: int) -> ImageError:
    """The error of a sample with so many unreadable ones behind it, all of which were noted."""
    last = unreadable[-1]
    itself, *_ = (each for each in unreadable if each.index == index)
    return ImageError(
        f"dataset[{index}] cannot be read, nor any of the {tries} samples after it; the last of them is "
        f"dataset[{last.index}] ({last.path}): {last.reason}. Is the data where it should be?",
        index=index,
        path=itself.path,
        reason=itself.reason,
        code="none-readable",
    )


def _plain(index: Any) -> Any:
    """A number as Python writes it, whether it came as numpy's or torch's."""
    try:
        return operator.index(index)
    except TypeError:
        return index
