"""The samples of a request, from the user's dataset: each under its own seed, and without those that cannot be read.

Runs in the worker; in the main process where there are no workers, and for the few samples that replace others late.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Subset, get_worker_info

from .dataset import path_of
from .errors import ImageError, InputError, ProxyLoaderError
from .sample import NOT_YET, EncodedImage
from .sampling import Request
from .scans import Scan, opening
from .seeding import kept_generators, seed_generators
from .unreadable import OnError, UnreadableSample, is_about_the_file

MOST_TRIES = 100
"""Samples in a row that may be unreadable before nothing is found that could replace one."""


@dataclass
class Fetched:
    """
    Attributes:
        samples: as the dataset gave them.
        indices: of each.
        unreadable: those that are missing.
        damaged: indices whose JPEG is not whole; see NOTE [ Damaged scans ].
    """

    samples: list[Any] = field(default_factory=list)
    indices: list[Any] = field(default_factory=list)
    unreadable: list[UnreadableSample] = field(default_factory=list)
    damaged: list[Any] = field(default_factory=list)


class Fetcher:
    """
    Args:
        dataset: the user's, wrapped.
        on_error: what becomes of a sample that cannot be read.
        seed: that draws follow; None: torch's generators, as they are.
        check_scans: requests say what is known of the samples' JPEGs, and those that come in the place of others are
            looked at.
    """

    def __init__(
        self, dataset: Any, on_error: OnError = "raise", seed: int | None = None, check_scans: bool = False
    ) -> None:
        self.dataset, self._on_error, self._seed = dataset, on_error, seed
        self._check_scans = check_scans

    def __call__(self, request: Request) -> Fetched:
        """
        Raises:
            ImageError: an image cannot be read; names the index.
        """
        # No scans come with a request all of whose samples are sound.
        otherwise = Scan.SOUND if self._check_scans else Scan.UNCHECKED
        scans = request.scans or b""
        if request.batched and self._seed is None and self._takes_lists and Scan.DAMAGED not in scans:
            try:
                with opening(Scan.UNKNOWN if Scan.UNKNOWN in scans else otherwise) as watch:
                    samples = self.dataset.__getitems__(request.indices)
                if not watch.found_damage:
                    return Fetched(samples, request.each())
            except Exception as error:
                if self._on_error == "raise" or not is_about_the_file(error):
                    raise
            # Each by itself, to know which of them it is.
        fetched = Fetched()
        for index, known in zip(request.each(), scans or itertools.repeat(otherwise)):
            try:
                with opening(Scan(known)) as watch:
                    sample = self._sample(index, request.epoch)
                if watch.found_damage:
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
                with opening(Scan.UNKNOWN if self._check_scans else Scan.UNCHECKED):
                    return candidate, self._sample(candidate, epoch)
            except Exception as error:
                if not is_about_the_file(error):
                    raise
                unreadable.append(UnreadableSample.of(candidate, error))
        raise nothing_replaces(index, unreadable, min(MOST_TRIES, size - 1))

    def seed_batch(self, request: Request) -> None:
        """Let a collate_fn draw what depends on the seed, the epoch and the batch's indices alone."""
        if self._seed is not None:
            seed_generators(self._seed, request.epoch, "batch", request.each())

    def generators(self) -> contextlib.AbstractContextManager[None]:
        """Around all of the above: where the loop is, the user's own random numbers go on as if nothing had been."""
        return kept_generators() if self._seed is not None and own_worker_info(self.dataset) is None else _as_they_are()

    @property
    def _takes_lists(self) -> bool:
        dataset = self.dataset
        while isinstance(dataset, Subset):  # which takes lists where what it is a part of does
            dataset = dataset.dataset
        return getattr(dataset, "__getitems__", None) is not None

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
            raise InputError(f"dataset[{index}]: {error}") from error
        except TypeError as error:
            if EncodedImage.__name__ not in str(error) or NOT_YET in str(error):
                raise
            raise InputError(
                f"dataset[{index}]: an image is used that is not decoded yet: {error}. {NOT_YET}"
            ) from error
        except ImageError as error:
            path = error.path or path_of(self.dataset, index)
            where = f"dataset[{index}]" + (f" ({path})" if path != error.path else "")
            named = ImageError(f"{where}: {error}", index=index, path=path, reason=error.reason)
            named.errno = error.errno
            raise named from error.__cause__


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
    )


def _plain(index: Any) -> Any:
    """A number as Python writes it, whether it came as numpy's or torch's."""
    try:
        return operator.index(index)
    except TypeError:
        return index


@contextlib.contextmanager
def _as_they_are() -> Iterator[None]:
    yield
