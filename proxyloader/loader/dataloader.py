"""DataLoader: the public class. Main process."""

from __future__ import annotations

import enum
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import Sampler

from ..data.bad_samples import OnError, UnreadableSamples
from ..data.called_transforms import meet_transforms
from ..data.distributed import Auto
from ..data.live_dataset import LiveDataset
from ..data.sharded_sampler import LastBatchPolicy, build_sampler
from ..workers.early_draws import EarlyDraws
from ..workers.loader_state import LoaderState
from ..workers.pool import WorkerPool, run_size
from ..workers.scan_checks import IntegrityTable
from .accelerate import Build, NotPrepared, keep_loaders
from .assembly import BatchAssembler
from .audit import Audit
from .checkpoint import CheckpointedLoader
from .early_epoch import EarlyEpoch
from .feed import Feed
from .iterator import LoaderIterator
from .options import CheckScans, LoaderOptions, Unsupported
from .plan_servers import PlanServers
from .ray import let_ray_keep_loaders

if TYPE_CHECKING:  # importing the server imports DALI
    from ..dali.server import ProxyServer

log = logging.getLogger(__name__)

T = TypeVar("T")


class DataLoader(CheckpointedLoader[T]):
    """A ``torch.utils.data.DataLoader`` whose images are decoded and transformed by DALI.

    It takes every argument of torch's loader, positionally and by keyword, with the same meaning and defaults. Worker
    processes read files, draw random numbers and collate. The main process decodes and transforms. Under the same seed
    the batches have the order, labels and crops of the stock loader.

    Images are returned as tensors (N, C, H, W) on ``device``, floating-point or uint8 depending on the transform. So is
    all that the dataset or a ``collate_fn`` computes from them. Labels and all other data are returned as by torch's
    loader. A dataset without images is loaded as by torch's.

    Args:
        dataset: the dataset. In its ``__getitem__``, JPEGs that ``Image.open`` or ``torchvision.io`` reads are decoded
            late. DALI does the transforms of torchvision and timm that are translated, wherever they are called. They
            return tensors whose values are computed late. Code that uses pixels or values gets those of the stock
            loader. The loader uses a copy of the dataset with another ``.transform``; see ``proxyloader.wrap``.
        collate_fn: as in torch. It runs in the worker. With a ``server``, or a part that ``unsupported="batch"`` leaves
            to the batches, it is called on decoded samples, in the main process.
        num_workers: as in torch. With 0, images are decoded in the calling thread.
        device: device of the images. Default: the current CUDA device if there is one, else the CPU. In a script under
            ``torchrun`` that has not set a device, it is the device of ``LOCAL_RANK``.
        dtype: dtype of images that are floating-point after the transform: ``torch.float16``, ``torch.bfloat16`` or
            ``torch.float32``, the default. ``torch.uint8`` is allowed if the transform returns uint8. The values are
            those of ``images.to(dtype)``, at less cost.
        memory_format: memory format of image batches, ``torch.contiguous_format`` or ``torch.channels_last``. The
            result is that of ``images.to(memory_format=...)``, at less cost. In batches made by torchvision in the
            workers or by a ``collate_fn``, and among the outputs of a ``server``, every four-dimensional tensor counts
            as images. There ``dtype`` applies to floating-point tensors, and ``torch.channels_last`` to all of them.
        server: the ``ProxyServer`` of a hand-written pipeline, whose ``server.proxy`` the dataset calls.
        seed: makes the order and the random numbers of each sample a function of (seed, epoch, index) alone. They are
            then the same for any number of workers, any start method, and after ``load_state_dict``. A ``generator``,
            or a sampler that has one, still decides the order. Default: torch's generators, as in the stock loader.
        on_error: what to do with a sample that cannot be read. "raise" raises an ImageError at its batch. "skip" leaves
            out the sample with its label. "replace" uses the next readable sample of the dataset. ``loader.errors``
            lists these samples.
        max_pixels: maximum number of pixels of an image. Default: the limit of Pillow, which is twice
            ``PIL.Image.MAX_IMAGE_PIXELS``.
        check_scans: check in the worker that the scan of a JPEG is complete, before the first time a GPU decodes it.
            Pillow decodes damaged JPEGs. True looks at the tables and markers of the JPEG and for lost blocks, in
            0.1 ms, 0.5 ms if it is progressive, which finds all truncated files. "strict" reads the whole scan, in
            1 ms, keeps what it finds in the user's cache folder for later runs, and leaves progressive JPEGs, in
            which it would miss damage, to Pillow. If False, a damaged image may show parts of other images.
        unsupported: what to do with a part of the dataset's ``.transform`` that is not translated. "auto" runs it in
            the worker, on the stock loader's image. What it does to a tensor is done on ``device``. If the first epoch
            is slower for it, a warning names it. "raise" raises when the loader is built. "batch" calls it and the
            parts after it on each batch (N, C, H, W) on ``device``. This needs tensors of one size at that point, and
            draws random numbers once per batch, in the main process. "cpu" runs the whole transform with torchvision in
            the workers and returns CPU tensors. Without a GPU this is always done for a dataset with a transform at
            which torchvision is faster than DALI. With "auto", torchvision also takes inputs in the worker that DALI
            does not take, such as a grey image.
        translate: if False, torch loads the dataset, without DALI. Tensors of four dimensions count as images, and are
            returned on ``device``. ``dtype``, ``memory_format``, ``seed``, ``on_error`` and states work as with DALI.
        num_shards: number of processes that share the dataset, each of which loads its shard. See ``ShardedSampler``.
            "auto" uses ``World.current()``. Default: each process loads the whole dataset, as in torch. With
            ``shuffle=True`` the order depends only on ``seed``, or 0, and the epoch. ``generator`` is not used for it.
        shard_id: index of this process's shard, from 0. Default: the rank of the process.
        last_batch_policy: what to do with the last batch of a shard: a ``LastBatchPolicy`` of this package or of DALI,
            or "fill", "partial" or "drop". Default: "drop" with ``drop_last``, else "partial", with which some
            processes may have one batch more than others.
        prefetch: maximum number of decoded batches that wait for the training loop. ``prefetch_factor`` counts, as in
            torch, the batches of each worker, which are not decoded yet.
        num_threads: number of DALI's CPU threads, at most 1024. "auto": on the CPU, the number of cores of this process
            plus one; on a GPU, at most 4.
        hw_decoder_load: share of the JPEGs, 0 to 1, that the JPEG engines of the GPU decode, if it has any. "auto": all
            of them. If this and ``num_threads`` are "auto", there are 12 cores or more for this process, and the JPEGs
            of the first batch have 1.2 million pixels or more on average, the share is 0.65, and there are up to 16
            threads. There are up to 16 threads, too, if one in 50 is progressive, as CUDA decodes these.
        audit: share of the JPEGs that DALI decodes, 0 to 1, that the workers also make as the stock loader makes them,
            to be compared with DALI's. Beyond the bound of its transforms, an image is saved, and a warning names it.
            ``Audit`` says what else can be done then. Batches are the same with and without an audit.

    Raises:
        UnsupportedTransformError: a part of ``.transform`` is not translated, and ``unsupported`` is "raise", or
            "batch" and it cannot be called on batches. The error names its position and class.
        ImageError: an image cannot be read. Raised by the loop at the batch of the image, with the dataset index and
            the file. The loop may continue with the next batch.
        AuditError: an audited image differs by more than its bound, and the ``Audit`` is to raise. As above.
        TypeError, ValueError: an argument is invalid, or two arguments contradict each other.
    """

    _pool: WorkerPool | None = None
    _early: EarlyEpoch
    _process: int
    _one_begins: threading.RLock
    """Held where an iteration gets its epoch and its workers. Several threads may share a loader."""

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
        check_scans: CheckScans = True,
        unsupported: Unsupported = "auto",
        translate: bool = True,
        num_shards: int | Auto | None = None,
        shard_id: int | Auto | None = None,
        last_batch_policy: str | enum.Enum | None = None,
        prefetch: int = 2,
        num_threads: int | Literal["auto"] = "auto",
        hw_decoder_load: float | Literal["auto"] = "auto",
        audit: float | Audit = 0.0,
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
        # Libraries rebuild a loader from its public attributes, with their own sampler. So each attribute is an
        # argument. Arguments that only define the sampler, as num_shards and torch's ``shuffle``, are not attributes.
        self.device = device
        self.dtype = dtype
        self.memory_format = memory_format
        self.server = server
        self.seed = seed
        self.on_error: OnError = on_error
        self.max_pixels = max_pixels
        self.check_scans = check_scans
        self.unsupported: Unsupported = unsupported
        self.translate = translate
        self.prefetch = prefetch
        self.num_threads = num_threads
        self.hw_decoder_load = hw_decoder_load
        self.audit = audit
        LoaderOptions.of(self)  # which checks them
        self._errors = UnreadableSamples()
        self._next_epoch, self._loader_state = LoaderState(), None
        self._scans: IntegrityTable | None = None
        vars(self).update(_of_this_process(self))
        vars(self).update(self._new_counts())
        keep_loaders()
        let_ray_keep_loaders()
        self._warn_of(self._translate())  # a transform that is to be refused is refused now, not in the first epoch

    _is_accelerate_prepared, _proxyloader_build = NotPrepared(), Build()  # NOTE [ Loaders that Accelerate prepares ]

    @property
    def _iterator(self) -> Any:
        """torch's iterator over persistent workers, or None. Trainers end the workers by it, and set it to None."""
        return None if self._pool is None else self._pool.workers._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if iterator is None and self._pool is not None and self.persistent_workers:
            self._pool.let_go(None)

    def __iter__(self) -> Any:
        if self._process != os.getpid():
            vars(self).update(_of_this_process(self))  # a copy: those belong to another process
        with self._one_begins:
            early = self._early.take(self)
            loader_state = self._upcoming if early is None else early.loader_state
            pool = self._pool_for_epoch(loader_state) if early is None else early.pool
            at_first = loader_state.copied()
            self._next_epoch = loader_state.following()  # another thread may begin this epoch meanwhile
        try:
            feed = self._begin_epoch(pool, loader_state) if early is None else early
            iterator = _iterator_over(feed, self)
        except BaseException:
            self._begin(at_first)  # the next iteration tries this epoch again
            raise
        self._loader_state = loader_state
        return iterator

    def _begin_epoch(self, pool: WorkerPool, loader_state: LoaderState, early: EarlyDraws | None = None) -> Feed:
        batches: Any = None
        try:
            # Workers start while the pipelines are built. They are forked before DALI starts threads.
            try:
                batches = self._start(pool, loader_state, early)
            except RuntimeError as error:
                if not self.persistent_workers or early is not None:
                    raise
                log.warning("a persistent worker was lost (%s); starting new ones", str(error))
                pool.broken = True
                pool = self._pool_for_epoch(loader_state)
                batches = self._start(pool, loader_state)
            options = self._options
            servers = self._servers.of(pool.plans, options)
            self._say_what_begins()
            serve = functools.partial(self._servers.serve, options=options)
            begin_next = functools.partial(_begin_next, weakref.ref(self))
            return Feed(batches, pool, servers, serve, loader_state, options.prefetch, begin_next)
        except BaseException:
            pool.let_go(batches)
            raise

    def _start(self, pool: WorkerPool, loader_state: LoaderState, early: EarlyDraws | None = None) -> Any:
        pool.workers._IterableDataset_len_called = self._IterableDataset_len_called  # for torch's warning
        return pool.start(loader_state, self.seed, self.generator, self._generator_of_seeds, early)

    @property
    def errors(self) -> UnreadableSamples:
        """The samples of all epochs that could not be read."""
        return self._errors

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts without workers and pipelines, at the same epoch, and counts its epochs itself.
        fresh = {"_loader_state": None, "_scans": None, "_errors": UnreadableSamples()}
        epochs = {"_next_epoch": LoaderState(self._next_epoch.epoch)}
        nowhere = {"_process": 0, "_one_begins": None}  # a lock cannot be pickled
        return self.__dict__ | _of_this_process(self) | fresh | epochs | self._new_counts() | nowhere

    def _pool_for_epoch(self, loader_state: LoaderState) -> WorkerPool:
        pool, is_given_states = self._pool, loader_state.resumes and bool(loader_state.worker_states)
        if pool is not None and pool.requests is not None:
            pool.requests.undo_draws_ahead()
        if pool is not None and self.persistent_workers and not pool.broken and not is_given_states:
            if not loader_state.resumes and self._loader_state is not None:
                loader_state.worker_states = self._states_at_end(self._loader_state)
            return pool  # its workers keep their dataset
        translate, options = self._translate, self._options
        found = translate()
        self._warn_of(found)
        dataset, plans = found.dataset, found.plans
        live = None if self.num_workers else LiveDataset(self.dataset, lambda: translate().dataset)
        if live is not None:
            dataset = live()
            meet_transforms(options.on_gpu)
        plans |= self._servers.still_used()
        arena = pool.left_arena() if pool is not None else None
        is_strict = options.check_scans == "strict"
        self._scans = IntegrityTable.for_dataset(dataset, is_strict, self._scans) if options.checks_scans else None
        found = found._replace(dataset=dataset, plans=plans)
        self._pool = WorkerPool.build(self, found, arena, self._scans, loader_state, live)
        return self._pool


def _iterator_over(feed: Feed, loader: DataLoader[Any]) -> LoaderIterator:
    errors, counts, auditor = loader._errors, loader._counts, loader._auditor
    assembler = BatchAssembler(feed, errors, loader.collate_fn, counts, loader.pin_memory, loader._options, auditor)
    return LoaderIterator(feed, assembler, loader._recorder)


def _of_this_process(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the attributes of a loader that has no workers and no pipelines yet in this process."""
    servers = PlanServers(run_size(loader))
    here = {"_process": os.getpid(), "_one_begins": threading.RLock()}
    return {"_pool": None, "_servers": servers, "_early": EarlyEpoch()} | here


def _begin_next(loader_ref: weakref.ref[DataLoader[Any]]) -> EarlyEpoch | None:
    """Begin the next epoch of a loader if it still exists, as an iterator does not keep its loader."""
    loader = loader_ref()
    if loader is None:
        return None
    with loader._one_begins:
        return loader._early if loader._early.begin(loader) else None
