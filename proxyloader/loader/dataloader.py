"""DataLoader, the public class. Main process."""

from __future__ import annotations

import enum
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from .._validation import check_int
from ..dali.device import check_device_exists
from ..data.bad_samples import OnError, UnreadableSamples
from ..data.dataset import describe_dataset, find_plans, get_length, get_sources, has_transform
from ..data.deferral import Deferral
from ..data.sharded_sampler import Auto, LastBatchPolicy, ShardedSampler, World, build_sampler
from ..transforms.plan import Plan
from ..workers.fetch import PassedSamples
from ..workers.loader_state import LoaderState, carry_over, is_stateful, save_state
from ..workers.pool import WorkerPool, batch_size, batches_together, run_size
from ..workers.request_sampler import record_upcoming_order, sampler_generator, sampler_state, unwrap_batch_sampler
from .assembly import BatchAssembler
from .feed import Feed, PlanServers
from .iterator import LoaderIterator
from .options import NO_DALI, OPTION_NAMES, LoaderOptions, describe_backend, find_torch_reason
from .stats import LoaderStats, StatsRecorder

if TYPE_CHECKING:  # importing the server imports DALI
    from ..dali.server import ProxyServer

log = logging.getLogger(__name__)

T = TypeVar("T")


class _IsPrepared:
    """Descriptor that is False until Accelerate sets the attribute. Reading it patches Accelerate if it is imported."""

    def __get__(self, loader: Any, owner: Any) -> bool:
        from .accelerate import patch_accelerate

        patch_accelerate()
        return False


class DataLoader(TorchDataLoader[T]):
    """A ``torch.utils.data.DataLoader`` whose images are decoded and transformed by DALI.

    It accepts every argument of torch's loader, by position and by keyword, with the same meaning and defaults. Worker
    processes read files, draw random numbers and collate. The main process decodes and transforms. With the same seed,
    the batches have the same order, labels and crops as those of the stock loader.

    Images are returned as tensors (N, C, H, W) on ``device``, floating-point or uint8 depending on the transform, and
    so are tensors that the dataset or a ``collate_fn`` computes from them. Labels and other data are returned as by
    torch's loader. torch loads datasets without images.

    Args:
        dataset: the dataset. JPEGs that its ``__getitem__`` reads with ``Image.open`` or ``torchvision.io`` are decoded
            lazily. Operations that torchvision, timm, Pillow or the dataset's own code apply to them are recorded and
            executed on ``device``. Code that uses pixels or values gets those of the stock loader.
        collate_fn: as in torch. It runs in the worker, or in the main process for samples of a ``server``.
        num_workers: as in torch. With 0, images are decoded in the calling thread.
        device: device of the images. Default: the current CUDA device if there is one, else the CPU. In a script under
            ``torchrun`` that has not set a device, it is the device of ``LOCAL_RANK``.
        dtype: dtype of images that are floating-point after the transform: ``torch.float16``, ``torch.bfloat16`` or
            ``torch.float32``, the default. ``torch.uint8`` is allowed if the transform returns uint8. Equivalent to
            ``images.to(dtype)``, but cheaper.
        memory_format: memory format of image batches, ``torch.contiguous_format`` or ``torch.channels_last``.
            Equivalent to ``images.to(memory_format=...)``, but cheaper. In batches from torchvision in the workers, a
            ``collate_fn`` or a ``server``, every four-dimensional tensor counts as images, like any tensor (C, H, W)
            computed from images: ``dtype`` applies to floating-point ones, and ``torch.channels_last`` to all.
        server: the ``ProxyServer`` of a hand-written pipeline, whose ``server.proxy`` the dataset calls.
        seed: makes the order and the random numbers of each sample a function of (seed, epoch, index) alone, so that
            they are the same for any number of workers, any start method, and after ``load_state_dict``. A
            ``generator``, or a sampler that has one, still determines the order. Default: torch's generators.
        on_error: what to do with an unreadable sample. "raise" raises an ImageError at its batch. "skip" omits the
            sample and its label. "replace" uses the next readable sample of the dataset. ``loader.errors`` lists the
            unreadable samples.
        check_scans: search JPEGs for lost blocks in the worker before a GPU decodes them for the first time, and let
            Pillow decode damaged files. If False, a damaged image may show parts of other images. ``proxyloader
            verify`` checks all files of a dataset completely.
        translate: whether images are decoded and transformed on ``device``. Operations that cannot be recorded,
            or without a GPU are faster in torchvision, run in the workers. If this slows down the first epoch, a
            warning names the transform or the line of code; see ``proxyloader.explain``. False lets torch load the
            dataset without DALI. Four-dimensional tensors then count as images and are returned on ``device``.
        masks_on_device: whether masks, integer and boolean tensors (..., H, W) of 1,024 pixels or more, are returned on
            ``device`` as well. The workers send them as bits or bytes if their values allow it. Default: masks are CPU
            tensors, as in torch.
        targets_on_device: whether all tensors of a batch, such as labels, boxes and masks, are returned on ``device``.
            Those of up to 4 KiB are copied together. Default: they are CPU tensors, as in torch.
        num_shards: number of processes that share the dataset, each of which loads the shard of its rank; see
            ``ShardedSampler``. "auto" uses ``World.current()``; a ``World`` sets both the number and the rank. Default:
            each process loads the whole dataset, as in torch. With ``shuffle=True``, the order depends only on the
            epoch and ``seed``, or 0 without a seed, and not on ``generator``.
        last_batch_policy: what to do with the last batch of a shard: a ``LastBatchPolicy`` of this package or of DALI,
            or "fill", "partial" or "drop". Default: "drop" with ``drop_last``, else "partial", with which some
            processes may have one more batch than others.
        prefetch: maximum number of batches decoded in advance; a GPU may decode several small ones in place of one.
            With ``persistent_workers``, the ``prefetch_factor`` of torch includes decoded batches.
        num_threads: number of DALI's CPU threads, at most 1024. "auto": on the CPU, the number of cores of this process
            plus one; on a GPU, at most 4.
        hw_decoder_load: fraction of the JPEGs, in [0, 1], that the GPU's JPEG engines decode, if it has any. "auto": 1.
            If this and ``num_threads`` are "auto", this process has 12 or more cores, and the JPEGs of the first batch
            have 1.2 million or more pixels on average, it is 0.65, with up to 16 threads. Up to 16 threads are also
            used if one in 50 JPEGs is progressive, as CUDA decodes these.
        torch_arguments: arguments that only newer versions of torch's loader accept.

    Raises:
        ImageError: an image cannot be read. ``next()`` raises it at the batch of the image, with the dataset index and
            the file. The loop may continue with the next batch.
        TypeError, ValueError: an argument is invalid, or two arguments contradict each other.
    """

    _pool: WorkerPool | None = None

    _logged: frozenset[str] = frozenset()  # warnings

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
        check_scans: bool = True,
        translate: bool = True,
        masks_on_device: bool = False,
        targets_on_device: bool = False,
        num_shards: int | Auto | World | None = None,
        last_batch_policy: str | enum.Enum | None = None,
        prefetch: int = 2,
        num_threads: int | Literal["auto"] = "auto",
        hw_decoder_load: float | Literal["auto"] = "auto",
        **torch_arguments: NoReturn,
    ) -> None:
        if hasattr(type(dataset), "produce_data"):
            raise TypeError("pass the server by keyword: DataLoader(dataset, ..., server=server)")
        order: dict[str, Any] = dict(batch_size=batch_size, shuffle=shuffle, sampler=sampler)
        order |= dict(batch_sampler=batch_sampler, drop_last=drop_last)
        sharded = build_sampler(dataset, num_shards, last_batch_policy, **order, seed=seed)
        if sharded is not None:
            order |= dict(shuffle=None, sampler=sharded, drop_last=sharded.last_batch_policy is LastBatchPolicy.DROP)
        super().__init__(
            dataset,
            **order,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
            **torch_arguments,
        )
        self._torch_arguments = torch_arguments
        # Libraries rebuild a loader from its public attributes, with their own sampler. So each public attribute is an
        # argument, and arguments that only define the sampler, such as num_shards, are not stored.
        self.device = device
        self.dtype = dtype
        self.memory_format = memory_format
        self.server = server
        self.seed = seed
        self.on_error: OnError = on_error
        self.check_scans = check_scans
        self.translate = translate
        self.masks_on_device = masks_on_device
        self.targets_on_device = targets_on_device
        self.prefetch = prefetch
        self.num_threads = num_threads
        self.hw_decoder_load = hw_decoder_load
        self._options = LoaderOptions.from_loader(self)
        check_device_exists(device)
        self._reset(epoch=0)
        self._transforms: list[Any] = []  # the dataset's transforms in the last epoch
        from .accelerate import patch_accelerate

        patch_accelerate()
        if self._torch_reason == NO_DALI:
            self._warn(f"{NO_DALI}: torch loads the data, without a speedup. Run `proxyloader doctor` for advice")
        self._find_plans()  # reports a dtype that no batch can have

    def _reset(self, epoch: int) -> None:
        """Initialize what iterations change."""
        self._begin_process()
        self._next_epoch = LoaderState(epoch)
        self._loader_state: LoaderState | None = None  # of the current or last epoch
        self._passed_samples: PassedSamples | None = None
        self._errors, self._recorder = UnreadableSamples(), StatsRecorder(self.dataset, self.num_workers)

    def _begin_process(self) -> None:
        """Initialize what is not shared with other processes."""
        self._process, self._pool = os.getpid(), None
        self._servers = PlanServers(self._options, batch_size(self) * batches_together(self), run_size(self))
        # Held while ``iter()`` claims the epoch and the workers, as threads may share a loader.
        self._begin_lock = threading.RLock()
        # Iterator over persistent workers. ``iter()`` restarts and returns it, as in torch.
        self._active_iterator: weakref.ref[LoaderIterator] | None = None

    _is_accelerate_prepared = _IsPrepared()

    @property
    def _proxyloader_build(self) -> Callable[..., Any]:
        """Return a function that builds a loader like this one. See NOTE [ Loaders prepared by Accelerate ]."""
        from .accelerate import PreparedLoader

        return functools.partial(PreparedLoader.from_loader, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTION_NAMES and "_options" in vars(self):  # a trainer sets loader.device, for example
            self._options = LoaderOptions.from_loader(self, **{name: value})
        if name in ("num_shards", "last_batch_policy"):
            raise ValueError(f"{name} cannot be changed; create another DataLoader")
        super().__setattr__(name, value)

    @property
    def _iterator(self) -> Any:
        """torch's iterator over persistent workers, or None. Trainers shut down its workers and set it to None."""
        return None if self._pool is None else self._pool.workers._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if iterator is None and self._pool is not None and self.persistent_workers:
            self._pool.shut_down(None)

    def __iter__(self) -> Any:
        if self._process != os.getpid():  # a copy from another process
            self._begin_process()
        with self._begin_lock:
            loader_state = self._next_state
            iterator = self._active_iterator() if self._active_iterator is not None else None
            if iterator is not None:
                iterator.close(invalidate=True)
            pool = self._prepare_pool(loader_state)
            start_state = loader_state.copy()
            self._next_epoch = LoaderState(loader_state.epoch + 1)
        iterator = LoaderIterator(self._recorder) if iterator is None else iterator
        try:
            self._begin_epoch(iterator, pool, loader_state)
        except BaseException:
            self._set_next_state(start_state)  # the next iteration retries this epoch
            raise
        self._loader_state = loader_state
        self._active_iterator = weakref.ref(iterator) if self.persistent_workers else None
        return iterator

    def _begin_epoch(self, iterator: LoaderIterator, pool: WorkerPool, loader_state: LoaderState) -> None:
        batches: Any = None
        try:
            # Workers start while the pipelines are built. They fork before DALI starts threads.
            batches = pool.start(self, loader_state)
            options, assembler = self._options, None
            is_deferring = pool.fetcher.deferral is not None and pool.fetcher.deferral.is_active
            expects_images = is_deferring and options.server is None and has_transform(self.dataset)
            known = self._find_plans()[0].keys() | self._servers.discovered
            plans = {key: plan for key, plan in pool.plans.items() if key in known}
            self._servers.begin_epoch(plans, options, expects_images)
            if self._loader_state is None:
                log.info("%s", repr(self))  # a log record must not reference the loader
            elif self.num_workers and not self.persistent_workers and self._servers.queues and not options.on_gpu:
                self._warn(
                    "set persistent_workers=True. Otherwise, each epoch starts new workers, and short epochs may take "
                    "longer than with torch's loader"
                )
            if pool.worker_dataset is not None:
                assembler = BatchAssembler(Feed(batches, pool, self._servers, loader_state), self)
            iterator.begin(batches, pool, loader_state, assembler)
        except BaseException:
            pool.shut_down(batches)
            raise

    @property
    def errors(self) -> UnreadableSamples:
        """The unreadable samples of all epochs."""
        return self._errors

    @property
    def backend(self) -> str:
        """What loads the images: "DALI on cuda: ..." with the transforms, or "torch: ..." with the reason.

        Transforms that are not stored in the attribute ``transform`` of the dataset are known after the first batch.
        """
        plans, obstacle = self._find_plans()
        plans |= self._servers.discovered
        reason = self._torch_reason or ("" if plans else obstacle)
        return describe_backend(reason, plans.values(), self._options, self._loader_state is not None, self._recorder)

    def stats(self) -> LoaderStats:
        """Return counts since the loader was created, and the times of its last 1,000 batches.

        Can be called at any time, from any thread. A copy of a loader starts from zero.
        """
        pool = self._pool
        feed = None if pool is None or pool.feed is None else pool.feed()
        return self._recorder.stats(0 if feed is None else len(feed), len(self._errors))

    def __repr__(self) -> str:
        return f"<proxyloader.DataLoader of {describe_dataset(self.dataset)}: {self.backend}>"

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts anew at the same epoch. A lock cannot be pickled.
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied._reset(self._next_epoch.epoch)
        return vars(copied) | {"_process": 0, "_begin_lock": None}

    def _prepare_pool(self, loader_state: LoaderState) -> WorkerPool:
        pool, recorder, previous = self._pool, self._recorder, self._loader_state
        discovered = self._servers.drop_unused()
        if pool is not None and self.persistent_workers and not (pool.broken or pool.has_lost_worker()):
            # Only new workers load the states of a checkpoint. torch's own batches cannot skip to its position. A
            # change of device or dtype changes what workers prepare.
            needs_new = loader_state.resumes and (pool.worker_dataset is None or bool(loader_state.worker_states))
            needs_new |= pool.packer is not None and pool.packer.kernel_output != self._options.kernel_output
            if not needs_new:
                if not loader_state.resumes and previous is not None:
                    loader_state.worker_states = self._states_at_end(previous)
                return pool  # persistent workers keep their dataset
        options, reason = self._options, self._torch_reason
        transforms = [getattr(source, "__dict__", {}).get("transform") for source in get_sources(self.dataset)]
        recorder.has_fallen_back &= [*map(id, transforms)] == [*map(id, self._transforms)]
        self._transforms = transforms
        if self._uses_torch_batches(bool(reason), loader_state):
            self._pool = WorkerPool(self)
            return self._pool
        arena = pool.reusable_arena() if pool is not None else None
        if not (options.check_scans and options.on_gpu):
            self._passed_samples = None
        elif self._passed_samples is None:
            self._passed_samples = PassedSamples(get_length(self.dataset) or 0)
        plans, deferral = self._find_plans()[0] | discovered, None
        if not reason:  # continue as an earlier epoch with the same transforms has ended
            has_fallen_back, can_stop = recorder.has_fallen_back, options.server is None
            has_images = has_fallen_back and recorder.has_images
            deferral = Deferral(options.on_gpu, options.find_obstacle, not has_fallen_back, has_images, can_stop)
        self._pool = WorkerPool(self, loader_state, plans, arena, self._passed_samples, deferral)
        return self._pool

    @property
    def _torch_reason(self) -> str:
        return find_torch_reason(self.dataset, self._options)

    def _find_plans(self) -> tuple[dict[str, Plan], str]:
        """Return the result of ``find_plans``. ValueError: the dtype does not fit a plan."""
        if self._torch_reason:
            return {}, ""
        plans, obstacle = find_plans(self.dataset, self._options.find_obstacle)
        for plan in plans.values():
            self._options.format.check(plan)
        return plans, obstacle

    def _uses_torch_batches(self, never_uses_dali: bool, loader_state: LoaderState) -> bool:
        """Return whether torch's own loader produces the next epoch. Workers may have noticed that DALI is not used."""
        options, recorder = self._options, self._recorder
        never_uses_dali |= recorder.has_fallen_back and not recorder.has_images
        sampler_type = type(self._inner_sampler)  # other samplers' states are recorded per batch
        return (
            never_uses_dali
            and not (options.on_gpu and (options.moves_masks or not options.translate))  # torch moves nothing
            and (options.server, options.seed, options.on_error) == (None, None, "raise")
            and options.format.is_default
            and not (loader_state.resumes or is_stateful(self.dataset))
            and (sampler_type is ShardedSampler or sampler_type.__module__.startswith("torch.utils.data"))
        )

    def _warn(self, warning: str) -> None:
        """Log a warning, once per loader."""
        if warning not in self._logged:
            log.warning("proxyloader: %s: %s", describe_dataset(self.dataset), warning)
        self._logged |= {warning}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, as with ``DistributedSampler``. By default the loader counts epochs."""
        check_int("epoch", epoch, 0)
        if self._next_state.epoch != epoch:
            self._set_next_state(LoaderState(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop: epoch, number of batches returned, and the states that determine the order.

        Can be called at any time, even in every step. The state can be pickled or saved with ``torch.save``. The
        semantics are those of ``torchdata.stateful_dataloader.StatefulDataLoader``.

        Raises:
            ValueError: in the middle of an epoch with ``in_order=False``, as the remaining batches are unknown.
        """
        current, is_ordered = self._loader_state, self.in_order or self.num_workers <= 1
        if current is not None and current.batches and not current.finished and not is_ordered:
            raise ValueError(
                "with in_order=False the remaining batches of an epoch are unknown; call state_dict between epochs, or "
                "use in_order=True"
            )
        state = self._state_between_epochs() if current is None or current.finished else self._state_in_epoch(current)
        depends_on_workers = isinstance(self.dataset, IterableDataset) or bool(state.worker_states)
        return state.state_dict(self._fingerprint | ({} if depends_on_workers else {"num_workers": None}))

    def _state_in_epoch(self, current: LoaderState) -> LoaderState:
        state, pool = current.copy(), self._pool
        if not state.batches and not isinstance(self.dataset, IterableDataset):
            record_upcoming_order(state, self._inner_sampler, self.seed, "next")
        if not self.num_workers and pool is not None and pool.worker_dataset is not None:
            state.worker_states = {0: saved} if (saved := pool.worker_dataset.state()) else {}
        return state

    def _state_between_epochs(self) -> LoaderState:
        state, previous = self._next_state.copy(), self._loader_state
        if state.resumes:  # a state was loaded, and its epoch has not started
            return state
        sampler = self._inner_sampler
        record_upcoming_order(state, sampler, self.seed, "iter")
        if self._seed_generator is not None:
            state.generator_states["workers"] = self._seed_generator.get_state()
        pool = self._pool if self.persistent_workers else None
        workers_persist = pool is not None and pool.workers._iterator is not None and not pool.broken
        state.new_workers = not workers_persist and (sampler_generator(sampler) is not None or self.generator is None)
        if previous is not None:
            # A sampler with set_epoch restarts at each epoch, so its position does not matter.
            if not hasattr(sampler, "set_epoch"):
                state.sampler_state = sampler_state(sampler)
            if not self.num_workers:
                state.worker_states = {0: saved} if (saved := save_state(self.dataset)) else {}
            elif self.persistent_workers:
                state.worker_states = self._states_at_end(previous)
        return state

    def _states_at_end(self, previous: LoaderState) -> dict[int, dict[str, Any]]:
        states = dict(previous.worker_states)
        if self._pool is not None and self._pool.board is not None:
            states |= self._pool.board.states()
        return {worker: carry_over(state) for worker, state in states.items()}

    @property
    def _seed_generator(self) -> torch.Generator | None:
        """The user's generator, from which torch draws worker seeds; None if the sampler also uses it."""
        generator = self.generator if isinstance(self.generator, torch.Generator) else None  # torch rejects others
        return None if generator is sampler_generator(self._inner_sampler) else generator

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume in the next iteration where ``state_dict`` was called, with the remaining batches.

        The remaining samples and their order are always restored, and so are their random numbers if the loader has a
        ``seed``. In this case, the number of workers may differ. With ``num_shards`` or a ``DistributedSampler``, the
        number of processes may differ: they share the remaining samples. A custom sampler, which must have the same
        length, is advanced past earlier batches, and so is an IterableDataset, with the same number of workers. With a
        state from between epochs and no ``seed``, torch's default generator is first set to its saved state.

        Raises:
            ValueError: the argument is not such a state, or comes from a loader with a different seed or number of
                samples; or it is from the middle of an epoch, and the order (``shuffle``, ``num_shards`` or none) or,
                for an IterableDataset, the number of workers differs.
        """
        self._set_next_state(LoaderState.from_state_dict(state_dict, self._fingerprint).resume_for(self._sharded))
        self._loader_state = None

    @property
    def _fingerprint(self) -> dict[str, Any]:
        """What a loader must have in common with the one that saved a state."""
        return {
            "seed": self.seed,
            "dataset_length": None if isinstance(self.dataset, IterableDataset) else get_length(self.dataset),
            # "" for any other sampler
            "order": {RandomSampler: "shuffled", SequentialSampler: "unshuffled"}.get(type(self._inner_sampler), ""),
            "num_workers": self.num_workers,
        }

    @property
    def _inner_sampler(self) -> Any:
        return unwrap_batch_sampler(self.sampler if self.batch_sampler is None else self.batch_sampler)

    @property
    def _sharded(self) -> ShardedSampler | None:
        return self._inner_sampler if isinstance(self._inner_sampler, ShardedSampler) else None

    def _set_next_state(self, loader_state: LoaderState) -> None:
        self._next_epoch = loader_state
        if self._sharded is not None:
            self._sharded.set_epoch(loader_state.epoch)

    @property
    def _next_state(self) -> LoaderState:
        """State of the next epoch. ``loader.sampler.set_epoch`` of a sharded sampler takes precedence."""
        if self._sharded is not None and self._sharded.epoch != self._next_epoch.epoch:
            self._next_epoch = LoaderState(self._sharded.epoch)
        return self._next_epoch
