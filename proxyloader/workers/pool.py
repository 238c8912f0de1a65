"""WorkerPool: a torch DataLoader that yields packed batches, and the shared memory of its workers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe, default_collate

from .. import lifetime
from .._random_state import SeededIterator, make_generator, preserve_rng, seed_generators
from ..data import hooks
from ..data.deferral import Deferral
from ..transforms.plan import Plan
from .arena import Arena
from .fetch import Fetcher, PassedSamples
from .loader_state import LoaderState, StateBoard, StatefulStream, is_stateful
from .packing import Packer
from .request_sampler import RequestSampler, draw_seed, is_distributed
from .torch_workers import Workers, WorkersIterator
from .worker import PackedDataset, PackStream, set_up_worker

BYTES_PER_IMAGE = 1 << 18
"""Bytes per image that are initially mapped in a slot. More are mapped when needed."""

DEFAULT_RUN_SIZE = 256


def run_size(loader: TorchDataLoader[Any]) -> int:
    """Return the maximum number of samples in a pipeline run. Larger batches are decoded in several runs."""
    if loader.batch_size is not None:
        return loader.batch_size
    return int(getattr(loader.batch_sampler, "batch_size", 1 if loader.batch_sampler is None else DEFAULT_RUN_SIZE))


@dataclass
class WorkerPool:
    """The workers of a loader.

    Attributes:
        workers: torch's loader over the dataset. It starts the processes, draws their seeds and advances the
            user's sampler, exactly as torch does.
        requests: sampler of ``workers``; None for an iterable-style dataset, whose batches are sent without slots.
        arena: shared memory; None without workers or images.
        plans: known plans of the workers' dataset, by key. Persistent workers keep their dataset.
        worker_dataset: the dataset passed to ``workers``; None if they yield torch's own batches.
        board: where workers write the states at the start and end of an epoch.
        deferral: the dataset's Deferral if there are no workers and its images are deferred; otherwise None.
        broken: whether a worker was lost, so that the next epoch requires new workers.
        feed: the feed that uses the workers.
    """

    workers: Workers
    fetcher: Fetcher
    requests: RequestSampler | None
    arena: Arena | None
    plans: dict[str, Plan]
    worker_dataset: PackedDataset | StatefulStream | None
    board: StateBoard | None
    deferral: Deferral | None = None
    packer: Packer | None = None
    broken: bool = False
    feed: weakref.ref[Any] | None = field(default=None, repr=False)

    @classmethod
    def build(
        cls,
        loader: Any,
        plans: dict[str, Plan],
        arena: Arena | None,
        passed: PassedSamples | None,
        loader_state: LoaderState,
        deferral: Deferral | None,
    ) -> WorkerPool:
        """Create a pool with the arguments of a loader.

        Args:
            plans: the plans that are known, by key.
            arena: arena of an earlier epoch to reuse; None: create one.
            passed: see ``Fetcher``.
            loader_state: state of the first epoch, including the initial states of the dataset.
            deferral: defers decoding until it stops; None: the dataset reads images as with torch's loader.
        """
        dataset = loader.dataset
        states = loader_state.worker_states if loader_state.resumes else {}
        board = StateBoard.create(dataset, loader.num_workers)
        has_images = bool(plans) or loader.server is not None
        batched, is_iterable = loader.batch_sampler is not None, isinstance(dataset, IterableDataset)
        # torch's pin-memory thread receives batches without images, which must not be in the arena.
        may_have_images = has_images or (deferral is not None and not loader.pin_memory)
        if loader.num_workers and may_have_images and arena is None and not is_iterable:
            arena = _create_arena(loader)
        fetcher = _create_fetcher(loader, plans, passed, deferral)
        packer = Packer(
            loader.collate_fn,
            arena,
            run_size(loader) if loader.server is None else loader.server.pipeline.max_batch_size,
            batched,
            keep_samples=loader.on_error != "raise",
            has_images=has_images,
            plans=frozenset(plans),
            deferral=deferral,
            kernel_output=loader._options.kernel_output,
            find_obstacle=loader._options.find_obstacle,
        )
        requests = None
        worker_dataset: Any
        if is_iterable:
            worker_dataset = StatefulStream(dataset, states, board, loader.seed)
            # torch handles data pipes by their class, so it must see the data pipe itself.
            stream = dataset if isinstance(dataset, IterDataPipe) else worker_dataset
            collate = PackStream(fetcher, packer, worker_dataset, sends_unpacked=not is_stateful(dataset))
            batching = dict(batch_size=loader.batch_size, drop_last=loader.drop_last)
            arguments = dict(dataset=stream, collate_fn=collate, **batching)
        else:
            sampler = loader.batch_sampler if batched else loader.sampler
            num_prefetched = max(1, loader.num_workers * (loader.prefetch_factor or 0))
            requests = RequestSampler(sampler, batched, arena, loader.seed, num_prefetched)
            keeps_generators = loader.persistent_workers and loader.seed is None  # across epochs
            sends_unpacked = loader.in_order and not is_stateful(dataset)
            worker_dataset = PackedDataset(fetcher, packer, arena, states, board, keeps_generators, sends_unpacked)
            arguments = dict(dataset=worker_dataset, batch_sampler=requests, collate_fn=_identity)
        workers = _create_workers(loader, arguments, has_images, deferral)
        workers.first_worker = loader_state.next_worker
        if loader.num_workers:
            deferral = None
        elif deferral is not None and deferral.is_active:
            hooks.hold(deferral)
        return cls(workers, fetcher, requests, arena, plans, worker_dataset, board, deferral, packer)

    @classmethod
    def build_torch(cls, loader: Any) -> WorkerPool:
        """Create a pool that yields torch's own batches. Of our code, its workers run only the parent watchdog."""
        batched, requests, arguments = loader.batch_sampler is not None, None, dict(batch_size=loader.batch_size)
        if isinstance(loader.dataset, IterableDataset):
            arguments |= dict(drop_last=loader.drop_last)
        else:
            requests = RequestSampler(loader.batch_sampler if batched else loader.sampler, batched, yields_indices=True)
            arguments = dict(batch_sampler=requests) if batched else dict(batch_size=None, sampler=requests)
        arguments |= dict(dataset=loader.dataset, collate_fn=loader.collate_fn)
        workers, fetcher = _create_workers(loader, arguments), _create_fetcher(loader, {})
        return cls(workers, fetcher, requests, None, {}, None, None)

    def start(
        self,
        loader_state: LoaderState,
        seed: int | None,
        generator: torch.Generator | None,
        seed_generator: torch.Generator | None,
    ) -> Any:
        """Start an epoch of torch's loader. Return its iterator.

        With a seed, the worker seeds that torch draws depend only on it. Without one, torch may draw them from the
        user's ``seed_generator``.
        """
        self.feed = None  # an earlier iterator no longer uses these workers
        if self.requests is not None:
            self.requests.begin(loader_state)
        if self.board is not None:
            self.board.begin(loader_state.epoch)
            if self.requests is None or not self.has_workers:
                self.board.clear()  # persistent workers restart their streams, and write their states again
        if seed_generator is not None:
            loader_state.restore_or_record(seed_generator, "workers")
        if seed is None:
            batches = self._start_unseeded(loader_state, generator)
        else:
            batches = self._start_seeded(loader_state, seed, generator)
        if isinstance(self.worker_dataset, PackedDataset) and not self.workers.num_workers:
            self.worker_dataset.begin(0)  # after torch has drawn its seed, because a dataset may set generator states
        return batches

    def _start_unseeded(self, loader_state: LoaderState, generator: torch.Generator | None) -> Any:
        order = loader_state.random_states if loader_state.resumes else {}
        if generator is None and "iter" in order and "next" not in order:  # a state between epochs
            self.workers.generator = torch.Generator()
            self.workers.generator.set_state(order["iter"])
            if loader_state.new_workers:
                draw_seed()  # in place of torch, which now draws from another generator
        return iter(self.workers)

    def _start_seeded(self, loader_state: LoaderState, seed: int, generator: torch.Generator | None) -> Any:
        if generator is None:  # avoid the default generator, as other threads draw from it
            self.workers.generator = make_generator(seed, loader_state.epoch, "workers")
        if self.requests is not None or self.workers.num_workers:
            return iter(self.workers)
        with preserve_rng():  # for the ``__iter__`` of the dataset
            seed_generators(seed, loader_state.epoch, "workers")
            batches = iter(self.workers)
        return SeededIterator(batches, seed, loader_state.epoch, "stream")

    def states_at_start(self, workers: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the initial states of workers that have not returned a batch yet, by worker number."""
        processes = getattr(self.feed and self.feed(), "worker_processes", ())
        if self.board is None or not processes:
            return {}
        states = {worker: self.board.read_start(worker, processes[worker].is_alive) for worker in workers}
        return {worker: state for worker, state in states.items() if state}

    @property
    def uses_torch_batches(self) -> bool:
        """Whether torch's own loader produces the batches."""
        return self.worker_dataset is None

    @property
    def has_workers(self) -> bool:
        """Whether workers of an earlier epoch are waiting for the next one."""
        return self.workers._iterator is not None and not self.broken

    def shut_down(self, batches: Any) -> None:
        """Shut down the workers of an epoch that failed to begin, as they write to the arena until they exit.

        ``batches`` is torch's iterator; None: it was not created, or ``workers`` has it.
        """
        self.broken = True
        iterator = batches if batches is not None else self.workers._iterator
        if isinstance(iterator, WorkersIterator):
            iterator._shutdown_workers()

    def reusable_arena(self) -> Arena | None:
        """Return the arena for the next pool; None if there is none or it may still be in use."""
        if self.arena is None or self.requests is None or self.broken or self.feed is None or self.feed() is not None:
            return None
        self.requests.discard_pending()  # the workers have exited
        return self.arena


def _create_workers(
    loader: Any, arguments: dict[str, Any], has_images: bool = False, deferral: Deferral | None = None
) -> Workers:
    """Create torch's loader from these arguments and the user's."""
    context = lifetime.serialize_forks(loader.multiprocessing_context) if loader.num_workers else None
    workers = Workers(
        **arguments,
        num_workers=loader.num_workers,
        worker_init_fn=functools.partial(set_up_worker, loader.worker_init_fn, deferral),
        multiprocessing_context=context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
        # Tensors that are converted to another format are pinned when that copies them.
        pin_memory=loader.pin_memory and not has_images and loader._options.format.is_default,
        **loader._torch_arguments,
    )
    workers.timeout = loader.timeout  # torch accepts a negative timeout only as an attribute
    return workers


def _create_fetcher(
    loader: Any,
    plans: dict[str, Plan],
    passed: PassedSamples | None = None,
    deferral: Deferral | None = None,
) -> Fetcher:
    batched, has_workers = loader.batch_sampler is not None, loader.num_workers > 0
    is_shared = is_distributed(loader.batch_sampler if batched else loader.sampler)
    known = frozenset(plans) if loader.collate_fn is default_collate else frozenset()
    return Fetcher(loader.dataset, loader.on_error, loader.seed, passed, has_workers, is_shared, deferral, known)


def _create_arena(loader: Any) -> Arena | None:
    # One slot for each batch that is requested from workers, in DALI, decoded or held by the loop, and two for batches
    # that the GPU may still be reading.
    slots = loader.num_workers * loader.prefetch_factor + loader.prefetch + 4
    try:
        return Arena(slots, run_size(loader) * BYTES_PER_IMAGE)
    except OSError as error:  # a limit on file sizes or open files
        loader._warn(f"cannot allocate shared memory for batches ({error}); falling back to torch's, which is slower")
        return None


def _identity(batch: Any) -> Any:
    return batch
