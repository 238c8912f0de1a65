"""Fetch the samples of a request from the user's dataset: seed each one, and skip or replace unreadable ones.

Runs in the worker; in the main process without workers, and to replace images that DALI failed on.

NOTE [ Reading before sampling ]
Reading a file of a hundred kilobytes evicts the code that draws random numbers, and its tables, from the CPU caches. A
dataset that alternates between reading a file and calling its transform reloads them for each image. But
``DatasetFolder`` runs no user code for a sample, and the order of reads does not matter. So if only torch's
``collate_fn`` receives the samples, ``Fetcher`` reads all files first, and then draws the numbers for all images, in
their order. In unexpected cases, such as a missing file or images of several sizes, it fetches the samples one by one.
"""

import contextlib
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Subset, get_worker_info
from torch.utils.data._utils import collate
from torchvision import get_image_backend
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import default_loader, pil_loader

from .._random_state import get_rng_states, preserve_rng, seed_generators, set_rng_states
from ..data.bad_samples import OnError, UnreadableSample, is_sample_fault
from ..data.deferral import Deferral
from ..data.encoded_image import EncodedImage
from ..data.jpeg import checks
from ..data.lazy_tensor import collate_tensors
from ..data.placeholders import ProxySample
from ..data.transformed import TransformedImage
from ..errors import ImageError, InputError, ProxyLoaderError
from ..transforms.chain import START
from ..transforms.random_numbers import how_torch_draws, in_thread
from .arena import Arena
from .request_sampler import BatchRequest

MAX_ATTEMPTS = 100  # number of samples tried as a replacement

_NOT_BATCHED = object()  # stands for samples that must be fetched one by one; a dataset may return None for a batch

_FOLDER_GETITEM = DatasetFolder.__getitem__


class PassedSamples:
    """The indices of samples whose JPEGs passed the checks in an earlier epoch, in shared memory.

    See NOTE [ Damaged scans ]. Indices other than integers below ``size`` never count as passed. If a dataset later
    opens other files for the same index, their scans are not searched for lost blocks. ``EncodedImage`` checks segments
    and the end of a file in every epoch.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._arena: Arena | None = None
        with contextlib.suppress(OSError):  # without shared memory, all files are checked in each epoch
            self._arena = Arena(1) if size else None

    @property
    def _passed(self) -> Any:
        return b"" if self._arena is None else self._arena.memory(0)[: self._size].data

    def has_all(self, indices: Sequence[Any]) -> bool:
        passed = self._passed
        try:
            return all(passed[operator.index(index)] for index in indices)
        except (IndexError, TypeError):
            return False

    def add(self, indices: Sequence[Any]) -> None:
        passed = self._passed
        with contextlib.suppress(IndexError, TypeError):
            for index in indices:
                passed[operator.index(index)] = 1


class checking:
    """Context for reading samples: skip the checks if all have passed before, or record that all pass."""

    # A class rather than a generator, because it is entered once per sample.
    def __init__(self, passed: PassedSamples | None, indices: Sequence[Any]) -> None:
        self._passed, self._indices = passed, indices

    def __enter__(self) -> None:
        checks.find_zeros = self._passed is not None
        checks.already_passed = self._are_passed = self._passed is not None and self._passed.has_all(self._indices)
        self._damaged = checks.damaged

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        checks.find_zeros, checks.already_passed = True, False  # the collate_fn may read other files
        if kind is None and self._passed is not None and not self._are_passed and self._damaged == checks.damaged:
            self._passed.add(self._indices)


@dataclass(eq=False)
class Fetcher:
    dataset: Any
    on_error: OnError = "raise"
    seed: int | None = None  # base seed; None: do not seed the generators
    passed: PassedSamples | None = None  # None: no GPU decodes the JPEGs, or ``check_scans`` is False
    has_workers: bool = False
    # With ``on_error="skip"``, whether a batch without readable samples gets the next readable one, because processes
    # that train together require the same number of batches.
    fills_batches: bool = False
    deferral: Deferral | None = None  # None: the images of the dataset are not deferred
    plans: Collection[str] = ()  # known to the loader, if only torch's default ``collate_fn`` receives the samples

    def __post_init__(self) -> None:
        if self.has_workers and self.deferral is not None:
            how_torch_draws()  # once, before workers are forked

    def __call__(self, request: BatchRequest) -> tuple[Any, list[Any], tuple[UnreadableSample, ...]]:
        """Return the samples of a request, or the result of ``__getitems__``, their indices, and unreadable samples.

        Raises ImageError if an image cannot be read.
        """
        indices = request.index_list()
        for fetch in (self._fetch_folder, self._fetch_batch):
            if (samples := fetch(request, indices)) is not _NOT_BATCHED:
                return samples, indices, ()
        base, files = _resolve_subsets(self.dataset, indices)
        if hasattr(base, "fetch_ahead"):
            base.fetch_ahead(files)
        samples, read = list[Any](), list[Any]()
        unreadable: list[UnreadableSample] = []
        for index in indices:
            try:
                sample = self._fetch_sample(index, request.epoch)
            except Exception as error:
                if self.on_error == "raise" or not is_sample_fault(error):
                    raise
                unreadable.append(UnreadableSample.from_error(index, error))
                if self.on_error == "skip":
                    continue
                index, sample = self.next_readable(index, request.epoch, unreadable)
            samples.append(sample)
            read.append(index)
        if self.fills_batches and not samples and unreadable:
            index, sample = self.next_readable(indices[-1], request.epoch, unreadable)
            samples, read = [sample], [index]
        return samples, read, tuple(unreadable)

    def next_readable(self, index: Any, epoch: int, unreadable: list[UnreadableSample]) -> tuple[int, Any]:
        """Return the index and sample of the next readable sample after ``index``. Add others to ``unreadable``.

        ImageError: there is none. ProxyLoaderError: the index is not an integer, or the dataset has no length.
        """
        try:
            first, size = operator.index(index), len(self.dataset)
        except TypeError as error:
            raise ProxyLoaderError(
                f"on_error={self.on_error!r} cannot replace dataset[{index!r}]: replacement requires integer indices "
                "and a dataset with a length. Outside distributed training, on_error='skip' has no such requirement"
            ) from error
        attempts = min(MAX_ATTEMPTS, size - 1)
        for step in range(1, attempts + 1):
            candidate = (first + step) % size
            try:
                return candidate, self._fetch_sample(candidate, epoch)
            except Exception as error:
                if not is_sample_fault(error):
                    raise
                unreadable.append(UnreadableSample.from_error(candidate, error))
        raise no_replacement(index, unreadable, attempts)

    def seed_batch(self, request: BatchRequest) -> None:
        """Seed the generators for the collate_fn from the seed, the epoch and the indices of the batch."""
        if self.seed is not None:
            seed_generators(self.seed, request.epoch, "batch", request.index_list())

    def _seed_sample(self, index: Any, epoch: int) -> None:
        if self.seed is None:
            return
        with contextlib.suppress(TypeError):  # NumPy's and torch's integers count as int
            index = operator.index(index)
        seed_generators(self.seed, epoch, index)

    def preserve_generators(self) -> contextlib.AbstractContextManager[None]:
        """Context for fetching and collating. In the main process, restores the user's generators at exit."""
        return preserve_rng() if self.seed is not None and self.worker_info() is None else contextlib.nullcontext()

    def worker_info(self) -> Any:
        """Return torch's ``get_worker_info()`` in a worker of this loader; otherwise None.

        A loader without workers may run inside a worker of another loader.
        """
        return get_worker_info() if self.has_workers else None

    def _fetch_folder(self, request: BatchRequest, indices: Sequence[Any]) -> Any:
        """Return the samples of a ``DatasetFolder``; ``_NOT_BATCHED`` if they must be fetched one by one."""
        if self.deferral is None or not self.deferral.is_active or not request.batched:
            return _NOT_BATCHED
        folder, _ = _resolve_subsets(self.dataset, ())
        chain = START.through(folder.transform) if _is_stock_folder(folder) else None
        if chain is None or chain.state.kind != "tensor" or chain.plan.key not in self.plans:
            return _NOT_BATCHED
        is_drawn_together = chain.last.draws in ("", "numbers") and self.seed is None
        states = get_rng_states()
        with contextlib.suppress(Exception):
            files = [folder.samples[position] for position in _resolve_subsets(self.dataset, indices)[1]]
            with checking(self.passed, indices):
                images = [EncodedImage.open(path) for path, _ in files]
            samples, sizes = [], set()
            with in_thread.fastest if is_drawn_together else contextlib.nullcontext():
                for index, image, (_, target) in zip(indices, images, files):
                    self._seed_sample(index, request.epoch)
                    call = TransformedImage.sample(image, chain)
                    samples.append((ProxySample(call), target))
                    sizes.add(call.size)
            if len(sizes) <= 1:
                return samples
        set_rng_states(states)
        return _NOT_BATCHED

    def _fetch_batch(self, request: BatchRequest, indices: Sequence[Any]) -> Any:
        """Return the result of ``__getitems__``; ``_NOT_BATCHED`` if samples must be fetched one by one."""
        base, _ = _resolve_subsets(self.dataset, ())  # a Subset accepts lists if its dataset does
        if not request.batched or self.seed is not None or getattr(base, "__getitems__", None) is None:
            return _NOT_BATCHED
        before = get_rng_states()
        try:
            with checking(self.passed, indices):
                return self.dataset.__getitems__(request.indices)
        except Exception as error:
            if not isinstance(error, ImageError) and (self.on_error == "raise" or not is_sample_fault(error)):
                raise
        set_rng_states(before)  # fetch samples again one by one to find the unreadable ones
        return _NOT_BATCHED

    def _fetch_sample(self, index: Any, epoch: int) -> Any:
        self._seed_sample(index, epoch)
        try:
            with checking(self.passed, [index]):
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
        f"could not read dataset[{index}] or any of the {attempts} samples after it; the last error was for "
        f"dataset[{last.index}] ({last.path}): {last.reason}. Check the dataset path"
    )


def _is_stock_folder(folder: Any) -> bool:
    """Return whether a dataset, and torch's default ``collate_fn``, run no user code for a sample or an image."""
    return (
        getattr(type(folder), "__getitem__", None) is _FOLDER_GETITEM
        and not hasattr(folder, "__getitems__")
        and not hasattr(folder, "fetch_ahead")
        and vars(folder).keys() >= {"loader", "samples", "transform", "target_transform"}  # no properties
        and type(folder.samples) is list
        and folder.target_transform is None
        and folder.loader in (default_loader, pil_loader)
        and get_image_backend() == "PIL"
        and torch.get_default_dtype() is torch.float32
        and collate.default_collate_fn_map.get(torch.Tensor) is collate_tensors
        and not any(isinstance((), kind) for kind in collate.default_collate_fn_map)
    )


def _resolve_subsets(dataset: Any, indices: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the dataset inside a Subset, or the dataset itself, and its indices."""
    while type(dataset) is Subset:
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    return dataset, indices
