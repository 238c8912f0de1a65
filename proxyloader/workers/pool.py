"""WorkerPool: a stock torch DataLoader that yields packed batches, and the memory its workers write to."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from .. import _fork_safety
from .._exit_safety import END_S, at_exit
from .._random_state import SeededIterator, generator_of, preserve_rng, seed_generators
from ..data.jpeg_integrity import IntegrityTable, ScanStatus
from ..data.live_dataset import LiveDataset
from ..transforms.plan import Plan
from .arena import Arena
from .dataset_state import StateBoard, StatefulStream
from .fetch import Fetcher
from .loader_state import LoaderState
from .messages import BatchMessage, PackedBatch
from .packing import Packer
from .request_sampler import RequestSampler, draw_seed
from .worker import PackedDataset, PackStream, set_up_worker

log = logging.getLogger(__name__)

BYTES_PER_IMAGE = 1 << 18
"""Room that is mapped in a slot for each image of a batch at first; more is mapped where it is needed."""

DEFAULT_RUN_SIZE = 256

LOOK_FOR_DEAD_WORKERS_S = 1.0
GRACE_S = 0.2


def run_size(loader: TorchDataLoader[Any]) -> int:
    """Most samples that one pipeline run takes; larger batches are decoded in several."""
    if loader.batch_size is not None:
        return loader.batch_size
    return int(getattr(loader.batch_sampler, "batch_size", 1 if loader.batch_sampler is None else DEFAULT_RUN_SIZE))


@dataclass
class WorkerPool:
    """
    Attributes:
        workers: torch's loader over the wrapped dataset. It is the one that starts processes, draws seeds and advances
            the user's sampler, so all of that is torch's.
        fetcher: what the workers read samples with.
        requests: its sampler, or None for an iterable-style dataset, whose batches travel without slots.
        arena: the memory, or None where there are no workers to share it with, or no images.
        plans: of the dataset that the workers hold, by key; persistent workers keep it, whatever becomes of the user's.
        in_order: torch gives batches in the order of the sampler.
        source: what the workers hold.
        board: where they leave the states of an epoch's start and end.
        broken: a worker was lost; the next epoch needs new ones.
    """

    workers: TorchDataLoader[BatchMessage | PackedBatch]
    fetcher: Fetcher
    requests: RequestSampler | None
    arena: Arena | None
    plans: dict[str, Plan]
    source: PackedDataset | StatefulStream
    board: StateBoard | None
    in_order: bool = True
    broken: bool = False
    user: weakref.ref[Any] | None = field(default=None, repr=False)

    @classmethod
    def build(
        cls,
        loader: Any,
        dataset: Any,
        plans: dict[str, Plan],
        arena: Arena | None,
        scans: IntegrityTable | None,
        loader_state: LoaderState,
        live: LiveDataset | None = None,
    ) -> WorkerPool:
        """
        Args:
            loader: whose arguments count.
            dataset: the wrapped one.
            plans: that it refers to.
            arena: of an earlier epoch, to be used again; None: a new one.
            scans: what is known of its JPEGs; None where that is not remembered.
            loader_state: of the epoch that comes first, with the states that its dataset begins with.
            live: gives the dataset for each batch, where there are no workers.
        """
        states = loader_state.worker_states if loader_state.resumes else {}
        board = StateBoard.of(dataset, loader.num_workers)
        has_images = bool(plans) or loader.server is not None
        batched, streams = _is_batched(loader), isinstance(dataset, IterableDataset)
        if loader.num_workers and has_images and arena is None and not streams:
            arena = _arena_for(loader)
        otherwise = _status_unless_told(loader, scans)
        fetcher = Fetcher(dataset, loader.on_error, loader.seed, otherwise, live)
        packer = Packer(
            loader.collate_fn,
            arena,
            run_size(loader) if loader.server is None else loader.server.pipeline.max_batch_size,
            batched,
            keep_samples=loader.on_error != "raise",
            has_images=has_images,
            plans=frozenset(plans),
        )
        requests = None
        source: Any
        if streams:
            source = StatefulStream(dataset, states, board)
            # torch prepares data pipes itself, and knows them by their class.
            first = dataset if isinstance(dataset, IterDataPipe) else source
            collate = PackStream(fetcher, packer, source, batched)
            arguments = dict(dataset=first, collate_fn=collate, batch_size=loader.batch_size)
            if loader.batch_size is not None:
                arguments["drop_last"] = loader.drop_last
        else:
            sampler = loader.batch_sampler if batched else loader.sampler
            requests = RequestSampler(sampler, batched, arena, loader.seed, scans)
            source = PackedDataset(fetcher, packer, arena, states, board)
            arguments = dict(dataset=source, batch_sampler=requests, collate_fn=_as_it_is)
        workers = _Workers(**arguments, **_torch_arguments(loader, has_images))
        workers.first_worker = loader_state.next_worker
        return cls(workers, fetcher, requests, arena, plans, source, board, loader.in_order)

    def start(
        self,
        loader_state: LoaderState,
        seed: int | None,
        generator: torch.Generator | None,
        generator_of_seeds: torch.Generator | None,
    ) -> Any:
        """Let torch start an epoch; with a seed, what it draws for its workers follows that.

        Args:
            loader_state: of the epoch.
            seed, generator: of the loader.
            generator_of_seeds: the one that torch draws the workers' seeds from, where it is the user's own.

        Returns:
            torch's iterator.
        """
        self.user = None  # an iterator that has these workers has them no more
        if self.requests is not None:
            self.requests.begin(loader_state)
        if self.board is not None and (self.requests is None or not self.has_workers):
            self.board.forget()  # what workers that stay will write anew, as streams begin anew there
        states = loader_state.generator_states
        if generator_of_seeds is not None and loader_state.resumes and "workers" in states:
            generator_of_seeds.set_state(states["workers"])
        elif generator_of_seeds is not None:
            states["workers"] = generator_of_seeds.get_state()
        if seed is None:
            batches = self._started_unseeded(loader_state, generator)
        else:
            batches = self._started_seeded(loader_state, seed, generator)
        if isinstance(self.source, PackedDataset) and not self.workers.num_workers:
            self.source.begin(0)  # when torch has drawn its seed, for a dataset may set the generators
        return batches

    def _started_unseeded(self, loader_state: LoaderState, generator: torch.Generator | None) -> Any:
        order = loader_state.random_states if loader_state.resumes else {}
        if generator is None and "iter" in order and "next" not in order:  # of a state between epochs
            self.workers.generator = torch.Generator()
            self.workers.generator.set_state(order["iter"])
            if loader_state.new_workers:
                draw_seed()  # which torch does not do now
        return iter(self.workers)

    def _started_seeded(self, loader_state: LoaderState, seed: int, generator: torch.Generator | None) -> Any:
        if generator is None:  # not the default one, from which other threads draw
            self.workers.generator = generator_of(seed, loader_state.epoch, "workers")
        if self.requests is not None or self.workers.num_workers:
            return iter(self.workers)
        with preserve_rng():  # for the dataset's __iter__
            seed_generators(seed, loader_state.epoch, "workers")
            batches = iter(self.workers)
        return SeededIterator(batches, seed, loader_state.epoch, "stream")

    def states_at_start(self, workers: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Of the datasets of these workers, none of whose batches has come yet."""
        processes = getattr(self.user and self.user(), "_workers", ())
        if self.board is None or not processes:
            return {}
        found = {worker: self.board.read_start(worker, processes[worker].is_alive) for worker in workers}
        return {worker: state for worker, state in found.items() if state}

    @property
    def has_workers(self) -> bool:
        """Workers of an earlier epoch wait for the next."""
        return self.workers._iterator is not None and not self.broken

    def let_go(self, batches: Any) -> None:
        """End the workers of an epoch that could not begin. Until then they write to the arena, so nobody else may.

        Args:
            batches: torch's iterator over them; None: it was not made, or is the one that ``workers`` keeps.
        """
        self.broken = True
        iterator = batches if batches is not None else self.workers._iterator
        if isinstance(iterator, _WorkersIterator):
            iterator._shutdown_workers()

    def left_arena(self) -> Arena | None:
        """The memory, for the next pool; None while somebody may still use it."""
        if self.arena is None or self.requests is None or self.broken or self.user is None or self.user() is not None:
            return None
        self.requests.forget_unanswered()  # its workers have ended
        return self.arena


def _status_unless_told(loader: Any, scans: IntegrityTable | None) -> ScanStatus:
    """Of a sample whose status does not come with its request: none do in a stream's, nor where all are sound."""
    if not loader._options.checks_scans:
        return ScanStatus.UNCHECKED
    return ScanStatus.UNKNOWN if isinstance(loader.dataset, IterableDataset) or scans is None else ScanStatus.SOUND


def _is_batched(loader: TorchDataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        return loader.batch_size is not None
    return loader.batch_sampler is not None


def _torch_arguments(loader: Any, has_images: bool) -> dict[str, Any]:
    """What torch's loader takes as the user has given it."""
    return dict(
        num_workers=loader.num_workers,
        timeout=loader.timeout,
        worker_init_fn=functools.partial(set_up_worker, loader.worker_init_fn),
        multiprocessing_context=_fork_safety.in_turn(loader.multiprocessing_context) if loader.num_workers else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
        # What gets another format is copied once more, and pinned then.
        pin_memory=loader.pin_memory and not has_images and loader._options.format.is_default,
    )


def _arena_for(loader: Any) -> Arena | None:
    # One slot for each batch that torch asks workers for, each that DALI works on or holds ready, the one handed out,
    # and two that the GPU may still be reading.
    slots = loader.num_workers * loader.prefetch_factor + loader.prefetch + 4
    try:
        return Arena(slots, (loader.batch_size or run_size(loader)) * BYTES_PER_IMAGE)
    except OSError as error:  # a limit on the size of files, or on their number
        log.warning("no memory for batches can be had (%s); they travel by torch's, which is slower", str(error))
        return None


def _as_it_is(batch: Any) -> Any:
    return batch


class _Workers(TorchDataLoader[Any]):
    """torch's loader, quicker to see that a worker is gone and to let workers go."""

    first_worker = 0
    """That is asked for the first batch when workers start."""

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return super()._get_iterator()
        return _WorkersIterator(self)


class _WorkersIterator(_MultiProcessingDataLoaderIter):
    failed = False
    """A worker is gone or late; those that are left cannot begin another epoch."""

    lost = False
    """A worker is gone, and the batches that it had: some that are waited for never come."""

    _send_idx = _rcvd_idx = 0
    """What workers were asked for and have given. torch counts from when it has started them, which may fail."""

    _is_interpreter_ending = staticmethod(sys.is_finalizing)
    """Here, since a module's names are gone then."""

    def __init__(self, loader: _Workers) -> None:
        self._process = os.getpid()
        self._first_worker = loader.first_worker
        super().__init__(loader)
        _iterators.add(self)

    def _try_put_index(self) -> None:
        for _ in range(self._first_worker):
            next(self._worker_queue_idx_cycle)
        self._first_worker = 0
        super()._try_put_index()

    def _get_data(self) -> Any:
        in_use = list(self._workers_status)  # torch may mark a lost one as unused before it raises
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except Exception:
            self.failed = True
            self.lost = bool(self._dead(in_use))
            raise

    def _try_get_data(self, timeout: float = LOOK_FOR_DEAD_WORKERS_S) -> Any:
        # Outside the main thread this poll is all that tells of a dead worker; torch's takes five seconds, or the
        # user's timeout, and sees nothing as long as another worker has something to give.
        deadline_s = time.monotonic() + timeout
        found = False, None
        while not found[0] and time.monotonic() < deadline_s:
            wait_s = min(LOOK_FOR_DEAD_WORKERS_S, max(0.01, deadline_s - time.monotonic()))
            found = super()._try_get_data(wait_s)  # type: ignore[no-untyped-call]
            dead = self._dead(self._workers_status)
            if dead:
                pids = ", ".join(str(worker.pid) for worker in dead)
                raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly")
        return found

    def _dead(self, in_use: list[bool]) -> list[Any]:
        """The workers that ended and should not have."""
        return [worker for worker, used in zip(self._workers, in_use) if used and not worker.is_alive()]

    def _shutdown_workers(self) -> None:
        if self._is_interpreter_ending():
            return
        if self._process != os.getpid():
            self._shutdown = True  # a forked copy: the workers are the parent's
            return
        if not self._shutdown:
            queue: Any
            for queue in self._index_queues:
                # An interrupt in the middle of `put` may leave its lock closed, and torch puts something in once more.
                queue._notempty.acquire(timeout=GRACE_S)
                queue._notempty.release()
            # torch waits five seconds for each worker that is busy; and what it is busy with is wanted no more. Those
            # that have given all they were asked for may take them for what they do at their end.
            if not 0 < self._rcvd_idx == self._send_idx:
                deadline_s = time.monotonic() + GRACE_S
                self._workers: Any = [_Impatient(worker, deadline_s) for worker in self._workers]
        super()._shutdown_workers()

    def end_workers(self) -> None:
        """Those of a script that closed nothing, before it ends. multiprocessing waits for a deaf one for ever."""
        # A spawned one that is still starting dies of the signal, which torch would report as a lost worker.
        if self._worker_pids_set:
            with contextlib.suppress(ValueError):  # another thread was quicker
                signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
        for worker in self._workers:
            worker._popen.terminate()
        until_s = time.monotonic() + END_S
        for worker in self._workers:
            _Impatient(worker, until_s).join()
            if worker.is_alive():
                worker.kill()


class _Impatient:
    """A worker process whose ``join`` ends soon: at a deadline, and where it was terminated, with a kill."""

    def __init__(self, process: Any, deadline_s: float) -> None:
        self._process, self._deadline_s = process, deadline_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def join(self, timeout: float | None = None) -> None:
        self._process.join(max(0.0, self._deadline_s - time.monotonic()))

    def terminate(self) -> None:
        self._process.terminate()
        self._process.join(GRACE_S / 4)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(GRACE_S)
        self._deadline_s = time.monotonic() + GRACE_S


_iterators: weakref.WeakSet[_WorkersIterator] = weakref.WeakSet()


@at_exit
def _end_workers() -> None:
    for iterator in list(_iterators):
        if iterator._process == os.getpid():
            iterator.end_workers()
