"""DataLoader, as the training loop sees it."""

from __future__ import annotations

import enum
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import Sampler

from ..data.bad_samples import OnError, UnreadableSamples
from ..data.distributed import Auto
from ..data.jpeg_integrity import IntegrityTable
from ..data.live_dataset import LiveDataset
from ..data.sharded_sampler import LastBatchPolicy, build_sampler
from ..workers.loader_state import LoaderState
from ..workers.pool import WorkerPool, run_size
from .assembly import BatchAssembler
from .checkpoint import CheckpointedLoader
from .iterator import LoaderIterator
from .options import LoaderOptions
from .plan_servers import PlanServers
from .strategy import Translated, Unsupported, translated

if TYPE_CHECKING:  # importing the server imports DALI
    from ..dali.server import ProxyServer

log = logging.getLogger(__name__)

T = TypeVar("T")

_one_begins = threading.RLock()
"""Held while an iteration of a loader is given its epoch and its workers: several threads may share a loader."""

os.register_at_fork(after_in_child=_one_begins._at_fork_reinit)  # type: ignore[attr-defined]


class DataLoader(CheckpointedLoader[T]):
    """A ``torch.utils.data.DataLoader`` whose images are decoded and transformed by DALI.

    Takes every argument of torch's, positionally and by keyword, with torch's meaning and defaults. Workers read files
    and draw random numbers; the training process decodes, transforms and collates. Batches are those of the stock
    loader under the same seed: same order, same labels, same crops.

    Images arrive as tensors (N, C, H, W) on ``device``, floats or uint8 as the transform says. Labels and everything
    else arrive as from torch's loader. A dataset that has no images to translate is loaded exactly as by torch's.

    Args:
        dataset: see ``proxyloader.wrap`` for which are translated.
        collate_fn: as torch's, but it gets decoded samples, and so it runs in the main process.
        num_workers: as torch's; with 0, images are decoded in the calling thread.
        device: where images arrive; by default the current CUDA device where there is one, else the CPU. In a script
            under ``torchrun`` that has not set a device it is the one of ``LOCAL_RANK``.
        dtype: of images that the transform makes floats: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``,
            the default; ``torch.uint8`` goes with a transform that gives it. As ``images.to(dtype)``, for less.
        memory_format: of batches of images, ``torch.contiguous_format`` or ``torch.channels_last``; as
            ``images.to(memory_format=...)``, for less. (In batches that torchvision makes in the workers, or a
            ``collate_fn`` in the main process, and among the outputs of a ``server``, all tensors of four dimensions
            are taken for images: those of floats get this ``dtype``, all of them ``torch.channels_last`` where that is
            asked for.)
        server: a ``ProxyServer`` that the dataset's ``server.proxy`` belongs to, for a hand-written pipeline.
        seed: makes the order and each sample's random numbers a function of (seed, epoch, index) alone, so that they
            are the same for any number of workers and any start method, and after ``load_state_dict``. (Where a
            ``generator`` is given, or a sampler with one, that decides the order.) By default they come from torch's
            generators, as the stock loader's do.
        on_error: what becomes of a sample that cannot be read: "raise" an ImageError at its batch, "skip" it with its
            label and all else that belongs to it, or "replace" it by the next of the dataset that can be read.
            ``loader.errors`` lists them.
        max_pixels: most pixels that an image may have; by default what Pillow opens, twice
            ``PIL.Image.MAX_IMAGE_PIXELS``.
        check_scans: before a JPEG goes to a GPU for the first time, look in the worker whether its scan is whole, which
            takes 0.6 to 0.9 ms; a damaged one is left to Pillow, and so are progressive ones, in which damage may not
            be seen. Without it CUDA decodes those, and damaged ones may show parts of others.
        unsupported: what becomes of a transform that is not translated: "raise" when the loader is built; "batch": it
            and what follows it is called on each batch (N, C, H, W) on ``device``, if images are tensors of one size
            there (random numbers are then drawn once for the batch, in the training process); "cpu": torchvision does
            all of it in the workers, and the batches are CPU tensors. (On a CPU that is done by itself where
            torchvision is faster at a transform than DALI.)
        num_shards: how many processes share the dataset, each loading its shard (see ``ShardedSampler``); "auto" takes
            ``World.current()``. By default each loads all of it, as with torch's. With ``shuffle=True`` the order is a
            function of ``seed`` (or 0) and the epoch alone, and ``generator`` has no part in it.
        shard_id: which of them this is, from 0; by default its rank.
        last_batch_policy: what becomes of a shard's last batch, a ``LastBatchPolicy`` or "fill", "partial" or "drop";
            also DALI's own. By default "drop" with ``drop_last``, else "partial", with which some processes may have
            one batch more than others.
        prefetch: most decoded batches that wait for the training loop. (``prefetch_factor`` counts, as torch's, those
            of each worker that are still to be decoded.)
        num_threads: DALI's CPU threads, 1024 at most. "auto": one more than this process has cores; where a GPU
            decodes, at most 4, or what a measurement finds clearly faster.
        hw_decoder_load: share of the JPEGs, 0 to 1, for the GPU's JPEG engines where it has some. "auto": all, or what
            is found clearly faster, with the first batch of 32 images or more. The answer is kept for later runs, in
            ``~/.cache/proxyloader/decoding.json``.

    Raises:
        UnsupportedTransformError: the dataset's transform is not translated; names position and class.
        ImageError: from the loop, at the batch that holds the image; names the dataset's index and the file. The loop
            may go on with the next batch.
        ValueError: an argument is wrong, or two contradict each other; torch's own checks, and those of the above.
    """

    _pool: WorkerPool | None = None

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: str | int | torch.device | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        server: ProxyServer | None = None,
        seed: int | None = None,
        on_error: OnError = "raise",
        max_pixels: int | None = None,
        check_scans: bool = True,
        unsupported: Unsupported = "raise",
        num_shards: int | Auto | None = None,
        shard_id: int | Auto | None = None,
        last_batch_policy: str | enum.Enum | None = None,
        prefetch: int = 2,
        num_threads: int | Literal["auto"] = "auto",
        hw_decoder_load: float | Literal["auto"] = "auto",
    ) -> None:
        if hasattr(type(dataset), "produce_data"):
            raise TypeError("pass the server by keyword: DataLoader(dataset, ..., server=server)")
        sharded = build_sampler(
            dataset,
            num_shards,
            shard_id,
            last_batch_policy,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            seed=seed,
        )
        if sharded is not None:
            shuffle, sampler, drop_last = None, sharded, sharded.last_batch_policy is LastBatchPolicy.DROP
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        # Libraries build a loader anew from its public attributes, with a sampler of theirs. So each is an argument.
        # What has become the sampler, as shards have, is no attribute, as with torch's ``shuffle``.
        self.device = device
        self.dtype = dtype
        self.memory_format = memory_format
        self.server = server
        self.seed = seed
        self.on_error: OnError = on_error
        self.max_pixels = max_pixels
        self.check_scans = check_scans
        self.unsupported: Unsupported = unsupported
        self.prefetch = prefetch
        self.num_threads = num_threads
        self.hw_decoder_load = hw_decoder_load
        LoaderOptions.of(self)  # which checks them
        self._errors = UnreadableSamples()
        self._next_epoch, self._loader_state = LoaderState(), None
        self._scans: IntegrityTable | None = None
        self._servers = PlanServers(run_size(self))
        self._process = os.getpid()
        self._translate()  # a transform that is not translated is refused now, not in the first epoch

    @property
    def _iterator(self) -> Any:
        """torch's iterator over persistent workers. Trainers end these by it: ``_shutdown_workers``, and None here."""
        return None if self._pool is None else self._pool.workers._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if iterator is None and self._pool is not None and self.persistent_workers:
            self._pool.let_go(None)

    def __iter__(self) -> Any:
        with _one_begins:
            if self._process != os.getpid():
                # A forked copy: workers, pipelines and the memory between them belong to the parent.
                self._pool, self._servers, self._process = None, PlanServers(run_size(self)), os.getpid()
            loader_state = self._upcoming
            pool, at_first = self._pool_for_epoch(loader_state), loader_state.copied()
            self._next_epoch = loader_state.following()  # which another thread may begin meanwhile
        try:
            iterator = self._begin_epoch(pool, loader_state)
        except BaseException:
            self._begin(at_first)  # so that the next attempt is at this epoch
            raise
        self._loader_state = loader_state
        return iterator

    def _begin_epoch(self, pool: WorkerPool, loader_state: LoaderState) -> LoaderIterator:
        batches: Any = None
        try:
            # Workers start while the pipelines are built, and are forked before DALI has threads.
            try:
                batches = self._start(pool, loader_state)
            except RuntimeError as error:
                if not self.persistent_workers:
                    raise
                log.warning("a persistent worker was lost (%s); starting new ones", str(error))
                pool.broken = True
                pool = self._pool_for_epoch(loader_state)
                batches = self._start(pool, loader_state)
            options = self._options
            servers = self._servers.of(pool.plans, options)
            pin = self.pin_memory and not pool.workers.pin_memory and torch.cuda.is_available()
            assembler = BatchAssembler(pool, servers, self._errors, self.collate_fn, pin, options)
            serve = functools.partial(self._servers.serve, options=options)
            return LoaderIterator(batches, pool, servers, loader_state, assembler, options.prefetch, serve)
        except BaseException:
            pool.let_go(batches)
            raise

    def _start(self, pool: WorkerPool, loader_state: LoaderState) -> Any:
        pool.workers._IterableDataset_len_called = self._IterableDataset_len_called  # so that torch's warning comes
        return pool.start(loader_state, self.seed, self.generator, self._generator_of_seeds)

    @property
    def errors(self) -> UnreadableSamples:
        """The samples that could not be read, of all epochs."""
        return self._errors

    @property
    def _options(self) -> LoaderOptions:
        return LoaderOptions.of(self)

    def __getstate__(self) -> dict[str, Any]:
        # As before the first epoch: a copy has workers, and a count of epochs, of its own.
        own: dict[str, Any] = {
            "_pool": None,
            "_servers": PlanServers(run_size(self)),
            "_loader_state": None,
            "_scans": None,
        }
        return (
            self.__dict__ | own | {"_errors": UnreadableSamples(), "_next_epoch": LoaderState(self._next_epoch.epoch)}
        )

    @property
    def _translate(self) -> Callable[[], Translated]:
        """Gives the dataset that workers get, and its plans; without plans DALI has nothing to do."""
        # Without this loader, which an iterator may outlive.
        options = self._options
        how = options.max_pixels, options.unsupported, options.on_gpu, options.format, options.server
        return functools.partial(translated, self.dataset, *how)

    def _pool_for_epoch(self, loader_state: LoaderState) -> WorkerPool:
        pool, is_given_states = self._pool, loader_state.resumes and bool(loader_state.worker_states)
        if pool is not None and self.persistent_workers and not pool.broken and not is_given_states:
            if not loader_state.resumes and self._loader_state is not None:
                loader_state.worker_states = self._states_at_end(self._loader_state)
            return pool  # its workers keep the dataset that they were given
        translate = self._translate
        dataset, plans = translate()
        live = None if self.num_workers else LiveDataset(self.dataset, lambda: translate()[0])
        if live is not None:
            dataset = live()
        plans |= self._servers.found
        arena = pool.left_arena() if pool is not None else None
        options = self._options
        if self._scans is None and plans and options.checks_scans:
            self._scans = IntegrityTable(len(dataset) if hasattr(dataset, "__len__") else 0)
        scans = self._scans if options.checks_scans else None
        self._pool = WorkerPool.build(self, dataset, plans, arena, scans, loader_state, live)
        return self._pool
