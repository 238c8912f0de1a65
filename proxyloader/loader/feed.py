"""PlanServers: the pipelines of a loader. Feed: passes packed batches from the workers to them. Main process.

NOTE [ No feeder thread ]
All work is done in ``next()``, in the iterating thread. It receives batches that workers have ready until ``prefetch +
1`` runs are in flight, then collects and returns the oldest. DALI's threads process the others while the model trains.
If several small batches are ready, one run decodes them together, as a GPU's engines decode many images faster.
``next()`` waits for a worker only if no batch is in flight, and for DALI only for the oldest batch. So the sampler and
torch's generators are used in the same thread as with a stock loader, and an error stays with its batch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from ..dali.device import cuda_ordinal
from ..data.deferral import deferring
from ..errors import InputError
from ..transforms.plan import Plan
from ..workers.loader_state import LoaderState
from ..workers.messages import PackedBatch, WorkerError
from ..workers.packing import KERNELS, MAX_NEW_PLANS
from ..workers.pool import WorkerPool, WorkersIterator
from .options import LoaderOptions
from .stats import SUBMIT, profile_row

if TYPE_CHECKING:  # importing them imports DALI
    from ..dali.run_queue import RunQueue


class PlanServers:
    """The run queues of a loader's plans. A run usually has ``usual_images``, and at most ``run_size``."""

    def __init__(self, options: LoaderOptions, usual_images: int, run_size: int) -> None:
        self._usual_images, self._run_size = usual_images, run_size
        self.options = options  # of the queues
        self.queues: dict[str, RunQueue] = {}  # by the key of the plan, or KERNELS
        self.discovered: dict[str, Plan] = {}  # arrived with a batch, as the dataset does not store the transform
        self._runs_seen: dict[str, int] = {}  # runs started before this epoch, by the key of the queue

    def begin_epoch(self, plans: dict[str, Plan], options: LoaderOptions, expects_images: bool) -> None:
        """Build the run queues of an epoch.

        Those of other plans than ``plans`` are built for their first batch. ``expects_images``: whether to start
        decoding on a GPU before the first batch, although no plan is known.
        """
        if not plans and options.device is not None:
            cuda_ordinal(options.device)  # raises if the device does not exist
        active = set(plans)
        if options.has_kernels:
            active = {KERNELS} if plans or expects_images else set()
        if options != self.options:  # the user has changed one
            self.queues, self.options = {}, options
        # Drop pipelines before building others, as both may not fit into GPU memory.
        self.queues = {key: queue for key, queue in self.queues.items() if key in active}
        for key in active:
            self.serve(plans.get(key))

    def drop_unused(self) -> dict[str, Plan]:
        """Forget discovered plans without a batch since the last call. Return the others.

        A dataset may create a transform with different arguments for each image or epoch. Such plans do not recur, but
        without kernels, each has a pipeline.
        """
        used = {key for key, queue in self.queues.items() if queue.runs_started != self._runs_seen.get(queue.key, 0)}
        if KERNELS not in used:
            self.discovered = {key: plan for key, plan in self.discovered.items() if key in used}
        self._runs_seen = {queue.key: queue.runs_started for queue in self.queues.values()}
        return self.discovered

    def discover(self, plans: Iterable[Plan]) -> None:
        """Keep plans that arrived with a batch for later epochs. With kernels, only the first of them, for the log."""
        for plan in plans:
            if self.options.dtype == torch.uint8:  # from others, the dataset may compute floats
                self.options.format.check(plan)
            if not self.options.has_kernels or len(self.discovered) < MAX_NEW_PLANS:
                self.discovered[plan.key] = plan

    def serve(self, plan: Plan | None) -> RunQueue:
        """Return the run queue of a plan, or that of all plans that kernels run."""
        key = KERNELS if plan is None else plan.key
        if key not in self.queues:
            self.queues[key] = self._build(plan)
        return self.queues[key]

    def _build(self, plan: Plan | None) -> RunQueue:
        from ..dali.build import PipelineOptions
        from ..dali.plan_server import PlanServer, get_decoder

        options = self.options
        num_threads = None if options.num_threads == "auto" else options.num_threads
        hw_decoder_load = None if options.hw_decoder_load == "auto" else options.hw_decoder_load
        device_id, depth = cuda_ordinal(options.device), options.prefetch + 1
        pipeline_options = PipelineOptions(self._run_size, device_id, num_threads, depth, hw_decoder_load)
        if plan is not None:
            return PlanServer(plan, pipeline_options, options.format)
        from ..kernels.launcher import get_launcher

        with ThreadPoolExecutor(1) as pool:  # compiles the kernels while DALI starts
            launching = pool.submit(get_launcher, device_id)
            decoder = get_decoder(pipeline_options, self._usual_images)
            launching.result()
        return decoder


class Feed:
    """Receives the batches of an epoch from the workers, and submits their runs to DALI."""

    process = 0  # ID of the process that created it; 0 if the constructor failed
    worker_wait_s = 0.0  # time that ``next`` has waited for workers since the iterator reset it
    truncated = False  # whether a worker was lost, so that no batches follow its error

    def __init__(
        self, batches: Iterator[PackedBatch], pool: WorkerPool, plan_servers: PlanServers, loader_state: LoaderState
    ) -> None:
        self._in_flight: deque[PackedBatch] = deque()
        self._batches: Iterator[PackedBatch] | None = batches
        self.pool, self._plan_servers, options = pool, plan_servers, plan_servers.options
        self._prefetch = options.prefetch
        # The run queues by key, including that of the user's server. Those of plans that arrive with a batch are added.
        user_queue = {} if options.server is None else {options.server.runs.key: options.server.runs}
        self.servers: dict[str, RunQueue] = plan_servers.queues | user_queue
        # An IterableDataset has no sampler that could skip batches, so the batches before the position are discarded,
        # unless the dataset or its iterators restore their states.
        self._skip_batches = loader_state.batches if pool.requests is None and not loader_state.worker_states else 0
        self.process = os.getpid()
        pool.feed = weakref.ref(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # module globals may be gone
        if not is_finalizing():
            self.close()

    def close(self) -> None:
        """Cancel the batches in flight and release the workers."""
        if self.process == os.getpid():  # the locks of a forked copy may never be released
            while self._in_flight:
                self.release(self._in_flight.popleft())
        self._batches = None

    def __len__(self) -> int:
        """Number of batches that are decoded or in DALI, and not yet returned."""
        return len(self._in_flight)

    def next(self) -> PackedBatch | None:
        """Receive batches from the workers, and return the oldest one in flight; None at the end of the epoch."""
        while self._batches is not None and (not self._in_flight or self._can_receive()):
            self._receive_together()
        if not self._in_flight:
            return None
        self._submit([self._in_flight[0]])  # unless it was submitted, or a signal handler has raised before
        return self._in_flight.popleft()

    def request_next(self, in_flight: PackedBatch) -> None:
        """Request a batch in place of one that the training loop receives, as torch does."""
        if in_flight.delays_request and self._batches is not None:
            self._batches._try_put_index()  # type: ignore[attr-defined]

    def release(self, in_flight: PackedBatch) -> None:
        """Release the slot of a batch, and cancel its runs unless they were collected."""
        for pipeline_run in in_flight.pipeline_runs:
            pipeline_run.cancel()
        if self.pool.arena is not None and in_flight.request is not None:
            self.pool.arena.release(in_flight.request.slot, in_flight.pipeline_runs)

    def _can_receive(self) -> bool:
        has_room = sum(each.is_last for each in self._in_flight) <= self._prefetch
        return has_room and self._in_flight[-1].failure is None and self._is_ready()

    def _is_ready(self) -> bool:
        """Return whether to receive another batch before the training loop asks for it."""
        requests, queues = self.pool.requests, self.servers.values()
        # Without workers, prefetching gains nothing and would draw random numbers too early. With a deterministic
        # server, it is disabled, as leaving the loop early must not change what later runs draw.
        if not self.pool.workers.num_workers or not queues or any(queue.deterministic for queue in queues):
            return False
        if requests is not None:
            return requests.has_ready_batch(self.pool.workers.in_order)
        # A stream may wait for what the training loop does with a batch.
        return isinstance(self._batches, WorkersIterator) and self._batches.has_arrived()

    def _receive_together(self) -> None:
        """Receive the next batch from the workers, and those that are ready and can be decoded with it."""
        together: list[PackedBatch] = []
        try:
            while self._batches is not None and (not together or self._can_add(together)):
                if (in_flight := self._receive(is_ahead=bool(self._in_flight or together))) is not None:
                    together.append(in_flight)
        finally:  # whatever a signal handler has raised
            self._in_flight.extend(together)
            for in_flight in together[:-1]:
                in_flight.is_last = False
            self._submit(together)

    def _can_add(self, together: Sequence[PackedBatch]) -> bool:
        """Return whether a batch is ready that can be decoded together with these, if it is like them."""
        queue: Any = self.servers.get(KERNELS)
        schedules = [each.schedule for each in together]
        if queue is None or None in schedules or len(schedules) >= self.pool.batches_together:
            return False
        return queue.fits(schedules, others=1) and self._is_ready()

    def _receive(self, is_ahead: bool) -> PackedBatch | None:
        """Return the next batch from the workers; None at the end. ``is_ahead``: whether another is returned first."""
        assert self._batches is not None
        requests, deferral = self.pool.requests, self.pool.deferral
        workers = self._batches if isinstance(self._batches, WorkersIterator) else None
        if workers is not None:
            workers.delays_requests = is_ahead and self.pool.delays_requests
        try:
            with deferring(deferral) if deferral is not None else contextlib.nullcontext():
                while self._skip_batches:
                    self._skip_batches -= 1
                    next(self._batches)
                start_s = time.monotonic()
                message: Any = next(self._batches)
                self.worker_wait_s += time.monotonic() - start_s
        except StopIteration:
            self._batches = None
            return None
        except Exception as error:
            self.pool.broken |= getattr(self._batches, "failed", False)
            in_flight = PackedBatch(None, failure=error, has_arrived=False)
            if getattr(self._batches, "lost", False):
                self.truncated, self._batches = True, None
        else:
            request = None if requests is None else requests.pending.pop(message.number)
            in_flight = PackedBatch(request)  # releases its slot even if the next lines fail
            try:
                in_flight = message.open(request, self.pool.arena)
                if isinstance(in_flight.failure, WorkerError):
                    in_flight.failure = in_flight.failure.exception()
                # Plans of transforms that are not attributes of the dataset arrive with a batch.
                self.pool.plans.update({plan.key: plan for plan in in_flight.plans})
                self._plan_servers.discover(in_flight.plans)
            except Exception as error:
                in_flight.failure = error
                self.pool.broken |= isinstance(error, (ConnectionError, EOFError))  # its worker has died
        in_flight.delays_request = workers is not None and workers.has_delayed
        return in_flight

    def _submit(self, together: Sequence[PackedBatch]) -> None:
        """Submit one run for all batches, or the runs of each. An error becomes that of one batch."""
        try:
            if len(together) > 1:
                self._submit_as_one(together)
        except Exception as error:
            together[0].failure = error
        for in_flight in together:
            try:
                if in_flight.failure is None and not in_flight.pipeline_runs:
                    self._submit_alone(in_flight)
            except Exception as error:
                # The frames reference the feed, which must not outlive a loop that the first error ends.
                in_flight.failure = error if in_flight is together[0] else error.with_traceback(None)

    def _submit_as_one(self, together: Sequence[PackedBatch]) -> None:
        """Submit one run for all batches, if that is possible."""
        decoder: Any = self.servers.get(KERNELS)
        schedules = [each.schedule for each in together]
        if None in schedules or not decoder.fits(schedules):
            return
        with profile_row(SUBMIT):
            read = [each.read(each.runs[0], self.pool.arena) for each in together]
            files = [file for (images,), _ in read for file in images]
            pipeline_runs = decoder.submit_together(files, [schedule for _, schedule in read])
        for in_flight, pipeline_run in zip(together, pipeline_runs, strict=True):
            in_flight.pipeline_runs.append(pipeline_run)

    def _submit_alone(self, batch: PackedBatch) -> None:
        for run in batch.runs:
            plan = self.pool.plans.get(run.server)
            if run.server not in self.servers and (plan is not None or run.schedule is not None):
                self.servers[run.server] = self._plan_servers.serve(plan)
            if run.server not in self.servers:
                raise InputError(
                    "a sample comes from the proxy of a server that was not passed to the loader; pass the server "
                    "whose proxy the dataset calls: DataLoader(dataset, server=server)",
                    code="foreign-server",
                )
            with profile_row(SUBMIT):
                inputs, schedule = batch.read(run, self.pool.arena)
                batch.pipeline_runs.append(self.servers[run.server].submit(inputs, schedule))
