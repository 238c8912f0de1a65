"""DataLoader, as the training loop sees it."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler

from .._random_state import SeededIterator, generator_of, preserve_rng, seed_generators
from .._validation import check_int, check_num_threads
from ..dali.device import check_device, cuda_ordinal
from ..dali.output_format import OutputFormat
from ..data.bad_samples import ON_ERROR, OnError, UnreadableSamples
from ..data.distributed import Auto
from ..data.jpeg_integrity import IntegrityTable
from ..data.live_dataset import LiveDataset
from ..data.sharded_sampler import LastBatchPolicy, ShardedSampler, build_sampler, find_sharded
from ..transforms.plan import Plan
from ..workers.dataset_state import between_epochs, dataset_state
from ..workers.loader_state import LoaderState
from ..workers.pool import WorkerPool, run_size
from ..workers.request_sampler import draw_seed, note_the_order_to_come, of_samples, own_generator, sampler_state
from ..workers.worker import PackedDataset
from .iterator import LoaderIterator
from .strategy import UNSUPPORTED, Translated, Unsupported, translated

if TYPE_CHECKING:  # importing the server imports DALI
    from ..dali.server import ProxyServer

log = logging.getLogger(__name__)

T = TypeVar("T")

_one_begins = threading.RLock()
"""Held while an iteration of a loader is given its epoch and its workers: several threads may share a loader."""

os.register_at_fork(after_in_child=_one_begins._at_fork_reinit)  # type: ignore[attr-defined]


class DataLoader(TorchDataLoader[T]):
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
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: str | int | torch.device | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        server: Any = None,
        seed: int | None = None,
        on_error: OnError = "raise",
        max_pixels: int | None = None,
        check_scans: bool = True,
        unsupported: Unsupported = "raise",
        num_shards: int | Auto | None = None,
        shard_id: int | Auto | None = None,
        last_batch_policy: Any = None,
        prefetch: int = 2,
        num_threads: int | Literal["auto"] = "auto",
        hw_decoder_load: float | Literal["auto"] = "auto",
    ) -> None:
        if hasattr(type(dataset), "produce_data"):
            raise TypeError("the server goes by its name, behind the dataset: DataLoader(dataset, ..., server=server)")
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
        check_int("prefetch", prefetch, 1)
        for name, value, least in (("seed", seed, 0), ("max_pixels", max_pixels, 1)):
            if value is not None:
                check_int(name, value, least)
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error is one of {', '.join(map(repr, ON_ERROR))}; got {on_error!r}")
        if on_error == "replace" and isinstance(dataset, IterableDataset):
            raise ValueError(
                "on_error='replace' needs a dataset with indices. With an IterableDataset 'skip' leaves out what "
                "cannot be decoded; what your __iter__ cannot open, leave out there"
            )
        if num_threads != "auto":
            check_num_threads(num_threads, ", or 'auto'")
        if not isinstance(check_scans, bool):
            raise ValueError(f"check_scans is True or False; got {check_scans!r}")
        if hw_decoder_load != "auto" and not (isinstance(hw_decoder_load, (int, float)) and 0 <= hw_decoder_load <= 1):
            raise ValueError(f"hw_decoder_load is a share from 0 to 1, or 'auto'; got {hw_decoder_load!r}")
        if unsupported not in UNSUPPORTED:
            raise ValueError(f"unsupported is one of {', '.join(map(repr, UNSUPPORTED))}; got {unsupported!r}")
        check_device(device)
        OutputFormat(dtype, memory_format)
        if server is not None and not hasattr(server, "submit"):
            raise TypeError(f"server is a proxyloader.ProxyServer, got {type(server).__name__}")
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
        self._errors = UnreadableSamples()
        self._next_epoch = LoaderState()
        self._loader_state: LoaderState | None = None  # of the epoch that was begun last
        self._scans: IntegrityTable | None = None
        self._servers: dict[str, Any] = {}
        self._found_plans: dict[str, Plan] = {}  # of transforms that no attribute of the dataset holds
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
                self._pool, self._servers, self._process = None, {}, os.getpid()
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
            servers = self._servers_for(pool.plans)
            return LoaderIterator(
                batches,
                pool,
                servers,
                loader_state=loader_state,
                errors=self._errors,
                on_error=self.on_error,
                collate_fn=self.collate_fn,
                prefetch=self.prefetch,
                pin=self.pin_memory and not pool.workers.pin_memory and torch.cuda.is_available(),
                format=self._format,
                serve=self._serve_found,
            )
        except BaseException:
            pool.let_go(batches)
            raise

    @property
    def errors(self) -> UnreadableSamples:
        """The samples that could not be read, of all epochs."""
        return self._errors

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, as for a ``DistributedSampler``. Without it the loader counts them."""
        check_int("epoch", epoch, 0)
        if self._upcoming.epoch != epoch:
            self._begin(LoaderState(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: epoch, batches that it was given, and what their order came from.

        It may be called at any time, at each step too, and can be pickled (``torch.save``). The contract is that of
        ``torchdata.stateful_dataloader.StatefulDataLoader``.

        Raises:
            ValueError: with ``in_order=False``, in the middle of an epoch: what is left is not known.
        """
        begun = self._loader_state
        if begun is not None and begun.batches and not begun.finished and not self.in_order and self.num_workers > 1:
            raise ValueError(
                "with in_order=False the loader cannot say which batches of this epoch are left; "
                "call state_dict between epochs, or use in_order=True"
            )
        here = self._between_epochs() if begun is None or begun.finished else self._in_epoch(begun)
        depends_on_workers = isinstance(self.dataset, IterableDataset) or bool(here.worker_states)
        workers = self.num_workers if depends_on_workers else None
        return here.state_dict(self.seed, self._dataset_length, self._order, workers)

    def _in_epoch(self, begun: LoaderState) -> LoaderState:
        here = begun.copied()
        if not here.batches and not isinstance(self.dataset, IterableDataset):
            note_the_order_to_come(here, of_samples(self._own_sampler), self.seed, "next")
        if not self.num_workers and self._pool is not None:
            here.worker_states = {0: state} if (state := self._pool.source.state()) else {}
        elif self._pool is not None:  # the batches bring it
            unknown = [worker for worker in range(self.num_workers) if worker not in here.worker_states]
            here.worker_states |= self._pool.states_at_start(unknown)
        return here

    def _between_epochs(self) -> LoaderState:
        here, before = self._upcoming.copied(), self._loader_state
        if here.resumes:  # a state that was loaded, and not yet begun
            return here
        sampler = of_samples(self._own_sampler)
        note_the_order_to_come(here, sampler, self.seed, "iter")
        if self._generator_of_seeds is not None:
            here.generator_states["workers"] = self._generator_of_seeds.get_state()
        goes_on = self.persistent_workers and self._pool is not None and self._pool.has_workers
        here.new_workers = not goes_on and (own_generator(sampler) is not None or self.generator is None)
        if before is not None:
            # One that is told its epoch begins that anew, wherever it was in another.
            if not hasattr(sampler, "set_epoch"):
                here.sampler_state = sampler_state(sampler)
            if not self.num_workers:
                here.worker_states = {0: state} if (state := dataset_state(self.dataset)) else {}
            elif self.persistent_workers:
                here.worker_states = self._states_at_end(before)
        return here

    def _states_at_end(self, before: LoaderState) -> dict[int, dict[str, Any]]:
        states = dict(before.worker_states)
        if self._pool is not None and self._pool.board is not None:
            states |= self._pool.board.read_ends()
        return {worker: between_epochs(state) for worker, state in states.items()}

    @property
    def _generator_of_seeds(self) -> torch.Generator | None:
        """The user's, from which torch draws the workers' seeds, where the sampler draws from another one."""
        return None if self.generator is own_generator(of_samples(self._own_sampler)) else self.generator

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on where ``state_dict`` was called: with the batches that were left.

        The order and the samples are those that were left in any case. Their random numbers are, too, where both
        loaders have the same ``seed``; the number of workers may then be another, and with a ``DistributedSampler``
        the number of processes (with ``num_shards`` between epochs alone). A custom batch sampler is asked for the
        batches before and they are thrown away; so are those of an IterableDataset, which needs as many workers as
        before.

        Raises:
            ValueError: it is no such state, or that of a loader with another seed or another number of samples; or it
                is of mid-epoch, and of other shards, or in another order (``shuffle``), or of an IterableDataset with
                another number of workers.
        """
        here = self.seed, self._dataset_length, self._order, self.num_workers
        saved = LoaderState.from_state_dict(state_dict, *here)
        self._begin(saved.resume_for(self._sharded))
        self._loader_state = None

    @property
    def _own_sampler(self) -> Any:
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def _order(self) -> str:
        """Of torch's own samplers, "shuffled" or "unshuffled"; "" where the order is another one's matter."""
        names = {RandomSampler: "shuffled", SequentialSampler: "unshuffled"}
        return names.get(type(of_samples(self._own_sampler)), "")

    @property
    def _sharded(self) -> ShardedSampler | None:
        return find_sharded(self._own_sampler)

    def _begin(self, loader_state: LoaderState) -> None:
        self._next_epoch = loader_state
        if self._sharded is not None:
            self._sharded.set_epoch(loader_state.epoch)

    @property
    def _upcoming(self) -> LoaderState:
        """The next epoch: the one that a sharded sampler was set to, for scripts that do so by ``loader.sampler``."""
        if self._sharded is not None and self._sharded.epoch != self._next_epoch.epoch:
            self._next_epoch = LoaderState(self._sharded.epoch)
        return self._next_epoch

    @property
    def _dataset_length(self) -> int | None:
        try:
            return None if isinstance(self.dataset, IterableDataset) else len(self.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None

    def __getstate__(self) -> dict[str, Any]:
        # As before the first epoch: a copy has workers, and a count of epochs, of its own.
        own: dict[str, Any] = {"_pool": None, "_servers": {}, "_loader_state": None, "_scans": None}
        return (
            self.__dict__ | own | {"_errors": UnreadableSamples(), "_next_epoch": LoaderState(self._next_epoch.epoch)}
        )

    @property
    def _translate(self) -> Callable[[], Translated]:
        """Gives the dataset that workers get, and its plans; without plans DALI has nothing to do."""
        # Without this loader, which an iterator may outlive.
        how = self.max_pixels, self.unsupported, self._on_gpu, self._format, self.server
        return functools.partial(translated, self.dataset, *how)

    @property
    def _format(self) -> OutputFormat:
        return OutputFormat(self.dtype, self.memory_format)

    @property
    def _on_gpu(self) -> bool:
        return torch.cuda.is_available() if self.device is None else torch.device(self.device).type == "cuda"

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
        plans |= self._found_plans
        arena = pool.left_arena() if pool is not None else None
        if self._scans is None and plans and self._looks_at_scans:
            self._scans = IntegrityTable(len(dataset) if hasattr(dataset, "__len__") else 0)
        scans = self._scans if self._looks_at_scans else None
        self._pool = WorkerPool.build(self, dataset, plans, arena, scans, loader_state, live)
        return self._pool

    @property
    def _looks_at_scans(self) -> bool:
        return self.check_scans and self._on_gpu

    def _start(self, pool: WorkerPool, loader_state: LoaderState) -> Any:
        """Let torch start an epoch; with a seed, what it draws for its workers follows that."""
        pool.user = None  # an iterator that has these workers has them no more
        if pool.requests is not None:
            pool.requests.begin(loader_state)
        pool.workers._IterableDataset_len_called = self._IterableDataset_len_called  # so that torch's warning comes
        if pool.board is not None and (pool.requests is None or not pool.has_workers):
            pool.board.forget()  # what workers that stay will write anew, as streams begin anew there
        batches = self._begun(pool, loader_state)
        if isinstance(pool.source, PackedDataset) and not self.num_workers:
            pool.source.begin(0)  # when torch has drawn its seed, for a dataset may set the generators
        return batches

    def _begun(self, pool: WorkerPool, loader_state: LoaderState) -> Any:
        generator, states = self._generator_of_seeds, loader_state.generator_states
        if generator is not None and loader_state.resumes and "workers" in states:
            generator.set_state(states["workers"])
        elif generator is not None:
            states["workers"] = generator.get_state()
        if self.seed is None:
            order = loader_state.random_states if loader_state.resumes else {}
            if self.generator is None and "iter" in order and "next" not in order:  # of a state between epochs
                pool.workers.generator = torch.Generator()
                pool.workers.generator.set_state(order["iter"])
                if loader_state.new_workers:
                    draw_seed()  # which torch does not do now
            return iter(pool.workers)
        if self.generator is None:  # not the default one, from which other threads draw
            pool.workers.generator = generator_of(self.seed, loader_state.epoch, "workers")
        if pool.requests is not None or self.num_workers:
            return iter(pool.workers)
        with preserve_rng():  # for the dataset's __iter__
            seed_generators(self.seed, loader_state.epoch, "workers")
            batches = iter(pool.workers)
        return SeededIterator(batches, self.seed, loader_state.epoch, "stream")

    def _servers_for(self, plans: dict[str, Plan]) -> dict[str, Any]:
        if not plans:
            if self.device is not None:
                cuda_ordinal(self.device)  # which says so where it does not exist
            return {} if self.server is None else {self.server.key: self.server}
        self._servers = {key: self._servers.get(key) or self._server_of(plan) for key, plan in plans.items()}
        return self._servers if self.server is None else self._servers | {self.server.key: self.server}

    def _server_of(self, plan: Plan) -> ProxyServer:
        from ..dali.build import PipelineOptions
        from ..dali.plan_server import PlanServer

        options = PipelineOptions(
            run_size(self),
            cuda_ordinal(self.device),
            None if self.num_threads == "auto" else self.num_threads,
            self.prefetch + 1,
            None if self.hw_decoder_load == "auto" else self.hw_decoder_load,
        )
        return PlanServer(plan, options, self._format)

    def _serve_found(self, plan: Plan) -> ProxyServer:
        """The server of a plan that came with a batch, and is known from the next epoch on."""
        self._format.check(plan)
        self._found_plans[plan.key] = plan
        server: ProxyServer = self._servers.get(plan.key) or self._server_of(plan)
        self._servers[plan.key] = server
        return server
