"""WorkerPool: a torch DataLoader that yields packed batches, and the shared memory of its workers. Main process."""

import contextlib
import functools
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader as StockLoader, IterableDataset, IterDataPipe, default_collate, default_convert
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from .. import lifetime
from .._random_state import SeededIterator, make_generator, preserve_rng, seed_generators
from ..data import hooks
from ..data.deferral import Deferral
from ..transforms.plan import Plan
from .arena import Arena
from .fetch import Fetcher, PassedSamples
from .loader_state import LoaderState, StateBoard, StatefulStream
from .packing import Packer
from .request_sampler import RequestSampler, is_distributed, sampler_generator
from .worker import PackedDataset, pack_stream, set_up_worker

MIN_RUN_SIZE = 256
GRACE_S = 0.2  # for workers to exit

MAX_TOGETHER, MAX_BATCHES_TOGETHER = 112, 16
"""Numbers of samples and of batches up to which small batches are decoded in one run. The engines of a GPU are idle for
a part of each run, and towards its end if the number of images is not a multiple of theirs, seven in an H200."""


def batch_size(loader: StockLoader[Any]) -> int:
    """Return the usual number of samples in a batch; 0 if a user's batch sampler does not have it."""
    if loader.batch_sampler is None:
        return 1
    return int(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0)


def run_size(loader: StockLoader[Any]) -> int:
    """Return the maximum number of images in a pipeline run. More images of a batch are decoded in several runs."""
    return max(batch_size(loader), MIN_RUN_SIZE)


def batches_together(loader: StockLoader[Any]) -> int:
    """Return the maximum number of batches in a pipeline run."""
    return max(1, min(MAX_BATCHES_TOGETHER, MAX_TOGETHER // (batch_size(loader) or MAX_TOGETHER)))


class Workers(StockLoader[Any]):
    first_worker = 0  # number of the worker that receives the first request

    def _get_iterator(self) -> Any:
        return WorkersIterator(self) if self.num_workers else super()._get_iterator()


class WorkersIterator(_MultiProcessingDataLoaderIter):
    failed = False  # whether a worker died or timed out, so that the others cannot begin another epoch
    lost = False  # whether a worker died, with batches that may still be expected
    delays_requests = False  # whether receiving a batch does not request another one
    has_delayed = False  # whether that was so for the last batch
    _is_received = False
    _send_idx = _rcvd_idx = 0  # torch sets them after starting the workers, which may fail

    def __init__(self, loader: Workers) -> None:
        self._process = os.getpid()
        self._first_worker = loader.first_worker
        super().__init__(loader)

    def _process_data(self, data: Any, *worker: Any) -> Any:
        self._is_received, self.has_delayed = True, False
        try:
            return super()._process_data(data, *worker)  # type: ignore[no-untyped-call]
        finally:
            self._is_received = False

    def _try_put_index(self) -> None:
        if self._is_received and self.delays_requests:
            self.has_delayed = True
            return
        for _ in range(self._first_worker):
            next(self._worker_queue_idx_cycle)
        self._first_worker = 0
        super()._try_put_index()

    def has_arrived(self) -> bool:
        """Return whether a batch has arrived, which may be a later one than the next."""
        return len(self._task_info.get(self._rcvd_idx, ())) > 1 or not self._data_queue.empty()

    def _get_data(self) -> Any:
        active = list(self._workers_status)  # torch may mark a dead worker as inactive before it raises
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except Exception:
            self.failed = True
            self.lost = not all(worker.is_alive() for worker in itertools.compress(self._workers, active))
            raise

    def _shutdown_workers(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # module globals may be gone
            return
        if self._process != os.getpid():
            self._shutdown = True  # a forked copy of the iterator: the workers belong to the parent
            return
        # torch waits up to five seconds for each busy worker, whose batches are no longer needed. Only workers that
        # have answered all requests get that time to exit.
        if not self._shutdown and not 0 < self._rcvd_idx == self._send_idx:
            deadline_s = time.monotonic() + GRACE_S
            self._workers: Any = [_DeadlineProcess(worker, deadline_s) for worker in self._workers]
        super()._shutdown_workers()


class _DeadlineProcess:
    """A worker process whose ``join`` returns by a deadline. ``terminate`` kills the process if it does not exit."""

    def __init__(self, process: Any, deadline_s: float) -> None:
        self._process, self._deadline_s = process, deadline_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def join(self, timeout: float | None = None) -> None:
        self._process.join(max(0.0, self._deadline_s - time.monotonic()))

    def terminate(self) -> None:
        self._process.terminate()
        self._process.join(GRACE_S / 4)
        self._process.kill()
        self._process.join(GRACE_S)
        self._deadline_s = time.monotonic() + GRACE_S


class WorkerPool:
    """The workers of a loader, with its arguments."""

    broken = False  # whether a worker was lost, so that the next epoch requires new workers
    requests: RequestSampler | None = None  # None for an iterable-style dataset, whose batches are sent without slots
    worker_dataset: PackedDataset | StatefulStream | None = None  # None if the workers yield torch's own batches
    delays_requests = False  # whether to request a batch only when the training loop receives one, like torch
    board: StateBoard | None = None  # where the workers of a stream write their states at the end of an epoch
    deferral: Deferral | None = None  # of the dataset, if there are no workers and its images are deferred
    packer: Packer | None = None
    feed: weakref.ref[Any] | None = None  # that uses the workers

    def __init__(
        self,
        loader: Any,
        loader_state: LoaderState | None = None,  # of the first epoch; None: torch's own loader produces the batches
        plans: dict[str, Plan] | None = None,  # known plans of the dataset, by key
        arena: Arena | None = None,  # of an earlier epoch to reuse; None: create one
        passed: PassedSamples | None = None,
        deferral: Deferral | None = None,
    ) -> None:
        dataset, batched = loader.dataset, loader.batch_sampler is not None
        sampler = loader.batch_sampler if batched else loader.sampler
        self.plans, self.arena, self.batches_together = plans or {}, arena, batches_together(loader)
        known = frozenset(self.plans) if loader.collate_fn is default_collate else frozenset()
        has_workers, is_shared = loader.num_workers > 0, is_distributed(sampler)
        self.fetcher = Fetcher(dataset, loader.on_error, loader.seed, passed, has_workers, is_shared, deferral, known)
        arguments: dict[str, Any] = dict(dataset=dataset, collate_fn=loader.collate_fn)
        if isinstance(dataset, IterableDataset):
            arguments |= dict(batch_size=loader.batch_size, drop_last=loader.drop_last)
        elif loader_state is None:
            self.requests = RequestSampler(sampler, batched, yields_indices=True)
            arguments |= dict(batch_sampler=self.requests) if batched else dict(batch_size=None, sampler=self.requests)
        has_images = bool(plans) or loader.server is not None
        if loader_state is not None:
            arguments |= self._pack_arguments(loader, loader_state, sampler, has_images)
        self.workers = Workers(
            **arguments,
            num_workers=loader.num_workers,
            worker_init_fn=functools.partial(set_up_worker, loader.worker_init_fn, deferral),
            multiprocessing_context=lifetime.serialize_forks(loader.multiprocessing_context) if has_workers else None,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor if has_workers else None,
            persistent_workers=loader.persistent_workers,
            in_order=loader.in_order,
            # Tensors that are converted to another format are pinned when that copies them.
            pin_memory=loader.pin_memory and not has_images and loader._options.format.is_default,
            **loader._torch_arguments,
        )
        self.workers.timeout = loader.timeout  # torch accepts a negative timeout only as an attribute
        if loader_state is not None:
            self.workers.first_worker = loader_state.next_worker
        if deferral is not None and not has_workers:
            self.deferral = deferral
            if deferral.is_active:
                hooks.hold(deferral)

    def _pack_arguments(self, loader: Any, loader_state: LoaderState, sampler: Any, has_images: bool) -> dict[str, Any]:
        """Return the arguments of torch's loader with which its workers pack batches."""
        dataset, batched = loader.dataset, loader.batch_sampler is not None
        states = loader_state.worker_states if loader_state.resumes else {}
        is_iterable = isinstance(dataset, IterableDataset)
        # torch's pin-memory thread receives batches without images, which must not be in the arena.
        may_have_images = has_images or (self.fetcher.deferral is not None and not loader.pin_memory)
        if loader.num_workers and may_have_images and self.arena is None and not is_iterable:
            # One slot for each batch that is requested from workers, in DALI, decoded or held by the loop, and two for
            # batches that the GPU may still be reading.
            slots = loader.num_workers * loader.prefetch_factor + (loader.prefetch + 1) * self.batches_together + 3
            try:
                self.arena = Arena(slots)
            except OSError as error:  # a limit on file sizes, open files or address space
                loader._warn(
                    f"cannot allocate shared memory for batches ({error}); falling back to torch's, which is slower"
                )
        self.packer = Packer(
            loader.collate_fn,
            self.arena,
            run_size(loader) if loader.server is None else loader.server.pipeline.max_batch_size,
            batched,
            keep_samples=loader.on_error != "raise",
            has_images=has_images,
            plans=frozenset(self.plans),
            deferral=self.fetcher.deferral,
            kernel_output=loader._options.kernel_output,
            find_obstacle=loader._options.find_obstacle,
            packs_masks=loader._options.moves_masks and loader._options.on_gpu,
        )
        # Requests also replace batches in DALI, unless draws for batches that a loop leaves behind affect later epochs:
        # those of persistent workers, and of samplers that do not draw the order of each epoch at once.
        self.delays_requests = loader.persistent_workers
        if is_iterable:
            if loader.num_workers:
                with contextlib.suppress(AttributeError, OSError):  # without Linux, or without shared memory
                    self.board = StateBoard(loader.num_workers)
            self.worker_dataset = StatefulStream(dataset, states, self.board, loader.seed)
            # torch handles data pipes by their class, so it must see the data pipe itself.
            stream = dataset if isinstance(dataset, IterDataPipe) else self.worker_dataset
            pack = functools.partial(pack_stream, self.fetcher, self.packer, self.worker_dataset)
            return dict(dataset=stream, collate_fn=pack)
        self.requests = RequestSampler(sampler, batched, self.arena, loader.seed)
        is_torchs = type(loader._inner_sampler).__module__.startswith("torch.utils.data") or loader._sharded is not None
        self.delays_requests |= not is_torchs or sampler_generator(loader._inner_sampler) is not None
        self.worker_dataset = PackedDataset(self.fetcher, self.packer, self.arena, states)
        # default_convert returns messages unchanged.
        return dict(dataset=self.worker_dataset, batch_sampler=self.requests, collate_fn=default_convert)

    def start(self, loader: Any, loader_state: LoaderState) -> Any:
        """Start an epoch of torch's loader. Return its iterator.

        With a seed, the worker seeds that torch draws depend only on it. Without one, torch may draw them from the
        user's generator.
        """
        seed, generator = loader.seed, loader.generator
        self.feed = None  # an earlier iterator no longer uses these workers
        self.workers._IterableDataset_len_called = loader._IterableDataset_len_called  # for torch's warning
        if self.requests is not None:
            self.requests.loader_state = loader_state
        if self.board is not None:
            self.board.begin(loader_state.epoch)
        if loader._seed_generator is not None:
            loader_state.restore_or_record(loader._seed_generator, "workers")
        if generator is None and seed is not None:  # avoid the default generator, as other threads draw from it
            self.workers.generator = make_generator(seed, loader_state.epoch, "workers")
        elif self.requests is None and loader_state.resumes and "iter" in loader_state.generator_states:
            torch.set_rng_state(loader_state.generator_states["iter"])  # of a state between epochs
        if seed is None or self.requests is not None or self.workers.num_workers:
            batches: Any = iter(self.workers)
        else:
            with preserve_rng():  # for the ``__iter__`` of the dataset
                seed_generators(seed, loader_state.epoch, "workers")
                batches = iter(self.workers)
            batches = SeededIterator(batches, seed, loader_state.epoch, "stream")
        if isinstance(self.worker_dataset, PackedDataset) and not self.workers.num_workers:
            self.worker_dataset.begin(0)  # after torch has drawn its seed, because a dataset may set generator states
        return batches

    def has_lost_worker(self) -> bool:
        """Return whether a persistent worker has died."""
        return any(worker.exitcode for worker in getattr(self.workers._iterator, "_workers", ()))

    def shut_down(self, batches: Any) -> None:
        """Shut down the workers of an epoch that failed to begin, as they write to the arena until they exit."""
        self.broken = True
        iterator = batches if batches is not None else self.workers._iterator  # if it was created
        if isinstance(iterator, WorkersIterator):
            iterator._shutdown_workers()

    def reusable_arena(self) -> Arena | None:
        """Return the arena for the next pool; None if there is none or it may still be in use."""
        if self.arena is None or self.requests is None or self.broken or self.feed is None or self.feed() is not None:
            return None
        self.requests.discard_pending()  # the workers have exited
        return self.arena
