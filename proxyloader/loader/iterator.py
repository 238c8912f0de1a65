"""LoaderIterator: keeps DALI busy with packed batches, and hands out finished batches in order.

NOTE [ Who waits for what ]
All of it runs in the thread that iterates, at each ``next()``: batches that workers have ready are taken until
``prefetch`` + 1 are under way, then the oldest is collected and handed out, and the others go on in DALI's threads
while the model trains. ``next()`` waits for a worker only when nothing is under way, or while the oldest batch will not
be done anyway, and for DALI only for the oldest batch. So the sampler and torch's generators are used where a stock
loader uses them, and an error stays with its batch. (What takes long about a batch that is not urgent is left to a
thread: see NOTE [ Beside the model ] in ``loader/submitter.py``.)
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from ..dali.output_format import OutputFormat, stacked
from ..data.bad_samples import OnError, UnreadableSample, UnreadableSamples
from ..errors import ImageError, PipelineError
from ..transforms.plan import Plan
from ..workers.loader_state import LoaderState
from ..workers.messages import BatchMessage, PackedBatch, PackedRun
from ..workers.packing import ContentUnpickler
from ..workers.pool import WorkerPool
from ..workers.request_sampler import BatchRequest
from .recovery import BatchRecovery, RecoveredBatch
from .submitter import InFlightBatch, RunSubmitter

if TYPE_CHECKING:  # importing the server imports DALI
    from ..dali.run import PipelineRun
    from ..dali.server import Outputs, ProxyServer


log = logging.getLogger(__name__)

POLLS = 20
"""Looks at the workers while DALI decodes a batch."""

RESIZE = (
    "Add a Resize to (height, width) or a crop to the transform, or give the loader a collate_fn that takes images of "
    "several sizes"
)
RESIZE_IN_GRAPH = (
    "Give them one size in the pipeline, with fn.resize(images, size=[height, width]) or the size=... of a ready one, "
    "or give the loader a collate_fn that takes tensors of several shapes"
)
"""What to do about images of several sizes, of a transform and of a hand-written pipeline."""

ENOUGH = 2
"""Batches under way, with which the next one is not urgent."""

LONG_STEP_S = 2 * sys.getswitchinterval()
"""Of the loop: in so much a thread gets the interpreter, even from one that never waits."""

OF_TORCHS_ITERATOR = ("_workers", "_pin_memory_thread")
"""Attributes, where it has workers, or a thread that pins."""

_NOTHING = object()
"""In the place of a batch, none of whose samples could be read."""


class LoaderIterator:
    """The iterator of a DataLoader.

    Args:
        batches: torch's iterator over the pool's workers.
        pool: where they come from.
        servers: by the key that runs name them with.
        loader_state: of the epoch, from where it goes on; kept up to date.
        errors: of the loader; what cannot be read is noted there.
        on_error: what becomes of a sample that cannot be read.
        collate_fn: for batches that come as lists of samples.
        prefetch: most decoded batches that wait.
        pin: put CPU tensors into page-locked memory.
        format: of images; those of plans are in it already.
        serve: makes the server of a plan that came with a batch.
    """

    _process = 0
    """That it belongs to; 0: it was not finished."""

    _is_interpreter_ending = staticmethod(sys.is_finalizing)
    """Here, since a module's names are gone then."""

    def __init__(
        self,
        batches: Iterator[BatchMessage | PackedBatch],
        pool: WorkerPool,
        servers: dict[str, ProxyServer],
        *,
        loader_state: LoaderState,
        errors: UnreadableSamples,
        on_error: OnError,
        collate_fn: Callable[[Any], Any],
        prefetch: int,
        pin: bool,
        format: OutputFormat,
        serve: Callable[[Plan], ProxyServer],
    ) -> None:
        self._fed: deque[InFlightBatch] = deque()
        self._batches: Iterator[BatchMessage | PackedBatch] | None = batches
        self._pool, self._servers, self._collate_fn = pool, servers, collate_fn
        self._loader_state, self._errors, self._on_error = loader_state, errors, on_error
        self._run_starter, self._rescue = RunSubmitter(pool, servers), BatchRecovery(servers, pool, on_error, format)
        # In the calling thread nothing is gained by decoding ahead, and random numbers would be drawn too early.
        # Nor may runs be started ahead of a loop that is left early, where what they draw is to be the same again.
        runs_ahead = pool.workers.num_workers and servers and not any(each.deterministic for each in servers.values())
        self._ahead = prefetch if runs_ahead else 0
        self._pin, self._format, self._serve = pin, format, serve
        # Scripts ask torch's iterators for these, to see that the workers end.
        vars(self).update({name: getattr(batches, name) for name in OF_TORCHS_ITERATOR if hasattr(batches, name)})
        # A stream has no sampler that could start further on: what the loop had of it is thrown away.
        # Not where its dataset or its iterators were given their states.
        self._to_throw_away = loader_state.batches if pool.requests is None and not loader_state.worker_states else 0
        self._nothing_yet = not loader_state.batches
        self._handed_out_s = time.monotonic()
        self._cut_short = False  # a worker was lost: the error, and then no more batches
        self._was_interrupted = False
        self._turn = threading.RLock()  # threads that share the iterator take turns
        self._process = os.getpid()
        pool.user = weakref.ref(self)

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._pool.workers._index_sampler)  # as torch's iterators; those of streams have none

    def __del__(self) -> None:
        if not self._is_interpreter_ending():
            self.close()

    def close(self) -> None:
        """Forget the batches under way and let the workers go. An iterator that is dropped does it by itself."""
        if self._process == os.getpid():  # what a forked child has are copies, and locks that nobody may ever open
            while self._fed:
                in_flight = self._fed.popleft()
                self._run_starter.forget(in_flight)
                self._give_back_slot(in_flight)
            self._run_starter.close()
        self._batches = None

    def __next__(self) -> Any:
        if self._process != os.getpid():
            raise RuntimeError("this iterator belongs to the process that made it; a forked child makes one of its own")
        with self._turn:
            if self._was_interrupted:
                raise RuntimeError(
                    "this iterator was interrupted (KeyboardInterrupt, SystemExit) in the middle of a batch, which may "
                    "be lost; begin a new one: iter(loader)"
                )
            try:
                batch = self._next()
                for in_flight in self._fed:
                    self._run_starter.start_soon(in_flight)
                self._handed_out_s = time.monotonic()
            except (KeyboardInterrupt, SystemExit):  # in whatever line it was, of torch's queues, too
                self._was_interrupted = self._pool.broken = True
                raise
            return batch

    def _next(self) -> Any:
        step_s, batch = time.monotonic() - self._handed_out_s, _NOTHING
        while batch is _NOTHING:
            while self._should_feed():
                self._prefetch_one(is_urgent=len(self._fed) < ENOUGH or step_s < LONG_STEP_S)
                self._wait_while_dali_is_busy()
            if not self._fed:
                if not self._cut_short:
                    self._end()
                raise StopIteration
            in_flight = self._fed.popleft()
            try:
                self._run_starter.start(in_flight)
                self._note_progress(in_flight)
                batch = self._finished(in_flight)
            finally:
                self._give_back_slot(in_flight)
        self._nothing_yet = False
        return batch

    def _note_progress(self, in_flight: InFlightBatch) -> None:
        if self._pool.requests is None:
            self._loader_state.batches += 1
        elif in_flight.batch is not None and in_flight.batch.request is not None:
            self._pool.requests.handed_out(in_flight.batch.request)
        if in_flight.batch is not None and in_flight.batch.worker_state is not None:
            self._loader_state.worker_states[in_flight.batch.worker] = in_flight.batch.worker_state
            self._loader_state.next_worker = (in_flight.batch.worker + 1) % self._pool.workers.num_workers

    def _end(self) -> None:
        self._loader_state.finished = True
        if self._nothing_yet and self._errors and self._on_error == "skip":
            self._nothing_yet = False
            first = self._errors[0]
            path = f" ({first.path})" if first.path else ""
            raise ImageError(
                f"not one sample of this epoch could be read; {len(self._errors)} were left out, the first of them "
                f"dataset[{first.index}]{path}: {first.reason}. Is the data where it should be?",
                index=first.index,
                path=first.path,
                reason=first.reason,
            )

    def _should_feed(self) -> bool:
        if self._batches is None:
            return False
        if self._pool.user is None or self._pool.user() is not self:
            raise RuntimeError(
                "a newer iterator of this DataLoader has taken its persistent workers; finish one before the next "
                "begins, or use persistent_workers=False"
            )
        return not self._fed or (self._has_room() and self._has_ready_batch())

    def _has_room(self) -> bool:
        return len(self._fed) <= self._ahead and self._fed[-1].error is None

    def _has_ready_batch(self) -> bool:
        requests = self._pool.requests
        return requests is None or requests.has_ready_batch(self._pool.in_order)

    def _wait_while_dali_is_busy(self) -> None:
        """Let the next batches join the first one of an epoch: waiting for DALI, nobody would look for them."""
        if self._batches is None or not self._has_room():
            return
        until_s = max((pipeline_run.busy_until_s for pipeline_run in self._fed[0].pipeline_runs), default=0.0)
        pause_s = (until_s - time.monotonic()) / POLLS
        while time.monotonic() < until_s - pause_s and not self._has_ready_batch():
            time.sleep(pause_s)

    def _prefetch_one(self, is_urgent: bool) -> None:
        """Take the next batch from the workers, and start its runs, or leave that for later."""
        assert self._batches is not None
        in_flight = InFlightBatch()
        try:
            while self._to_throw_away:
                self._to_throw_away -= 1
                next(self._batches)
            self._pool.fetcher.look_again()
            message = next(self._batches)
        except StopIteration:
            self._batches = None
            return
        except Exception as error:
            self._pool.broken |= getattr(self._batches, "failed", False)
            in_flight.error = error
            if getattr(self._batches, "lost", False):
                self._cut_short, self._batches = True, None
        else:
            request = self._request_of(message)
            in_flight.batch = PackedBatch(request)  # whose slot will go back in any case
            try:
                in_flight.batch = (
                    message.open(request, self._pool.arena) if isinstance(message, BatchMessage) else message
                )
                if self._pool.requests is not None and request is not None and in_flight.batch.failure is None:
                    unreadable = [each.index for each in in_flight.batch.unreadable]
                    self._pool.requests.note_scans(request, unreadable, in_flight.batch.damaged)
                for plan in in_flight.batch.plans:  # of a transform that no attribute of the dataset holds
                    self._servers[plan.key] = self._serve(plan)
                    self._pool.plans[plan.key] = plan
                in_flight.is_to_start = True
            except Exception as error:
                in_flight.error = error
            if is_urgent:
                for each in (*self._fed, in_flight):
                    self._run_starter.start(each)
        self._fed.append(in_flight)

    def _request_of(self, message: BatchMessage | PackedBatch) -> BatchRequest | None:
        requests = self._pool.requests
        number = (
            message.number if isinstance(message, BatchMessage) else message.request.number if message.request else None
        )
        return requests.answered(number) if requests is not None and number is not None else None

    def _give_back_slot(self, in_flight: InFlightBatch) -> None:
        if self._pool.arena is not None and in_flight.batch is not None and in_flight.batch.request is not None:
            self._pool.arena.give_back(in_flight.batch.request.slot, in_flight)

    # --- finished batches -------------------------------------------------------------------------------------------

    def _finished(self, in_flight: InFlightBatch) -> Any:
        if in_flight.batch is not None:
            # Of a batch that has failed nothing is left out or replaced.
            self._errors.add(in_flight.batch.unreadable, self._on_error if in_flight.batch.failure is None else "raise")
        if in_flight.error is not None:
            error, in_flight.error = in_flight.error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        batch = in_flight.batch
        assert batch is not None
        if batch.is_empty:
            return _NOTHING
        if self._nothing_yet:
            self._say_if_a_server_is_idle(batch)
        if not batch.runs:
            content = self._format.of_batch(batch.content)
            return pin_memory(content) if self._pin else content  # type: ignore[no-untyped-call]
        found = [self._collected(run, pipeline_run) for run, pipeline_run in zip(batch.runs, in_flight.pipeline_runs)]
        outputs = [each for each in found if not isinstance(each, PipelineError)]
        if len(outputs) < len(found):
            saved = self._rescue.save(batch, found)
            if saved.lost:
                return self._without_lost(batch, saved)
            outputs = saved.outputs
        by_hand = any(run.server not in self._pool.plans for run in batch.runs)
        resolve = functools.partial(_resolve, outputs, RESIZE_IN_GRAPH if by_hand else RESIZE)
        content = ContentUnpickler(batch.content, resolve, self._pin, batch.kept).load()
        return content if batch.collated else self._collated(batch, content)

    def _say_if_a_server_is_idle(self, batch: PackedBatch) -> None:
        if self._servers.keys() - self._pool.plans.keys() - {run.server for run in batch.runs}:
            log.warning(
                "the loader was given a server=, and nothing in its first batch goes through that: let the dataset's "
                "transform be server.proxy, or call it"
            )

    def _collected(self, run: PackedRun, pipeline_run: PipelineRun) -> Outputs | PipelineError:
        try:
            return self._format.of_outputs(self._servers[run.server].collect(pipeline_run))
        except PipelineError as error:
            return error.with_traceback(None)  # which would hold this frame

    def _without_lost(self, batch: PackedBatch, saved: RecoveredBatch) -> Any:
        """The batch with what ``on_error`` puts in the place of samples whose images are lost."""
        if self._on_error == "raise":
            errors = self._rescue.errors(batch, saved)
            self._errors.add([UnreadableSample.of(error.index, error) for error in errors], self._on_error)
            first = errors[0]
            raise ImageError("; ".join(map(str, errors)), index=first.index, path=first.path, reason=first.reason)
        try:
            samples, unreadable = self._rescue.samples(batch, saved)
        except ImageError as error:  # nothing replaces one of them
            self._errors.add([UnreadableSample.of(error.index, error)], "raise")
            raise
        self._errors.add(unreadable, self._on_error)
        if not samples:
            return _NOTHING
        return self._collated(batch, samples if batch.batched else samples[0])

    def _collated(self, batch: PackedBatch, samples: Any) -> Any:
        """The user's collate_fn over decoded samples, under its own seed where there is one."""
        fetcher = self._pool.fetcher
        with fetcher.generators():
            if batch.request is not None:
                fetcher.seed_batch(batch.request)
            return self._format.of_batch(self._collate_fn(samples))


def _resolve(outputs: list[Outputs], advice: str, output: int, place: Any) -> Any:
    """The tensor that a reference stands for: a run's whole output, one row of it, or rows gathered from several."""
    if isinstance(place, int):
        found = outputs[place][output]
        return found if isinstance(found, torch.Tensor) else _stacked(found, advice)
    if isinstance(place, tuple):
        run, row = place
        return outputs[run][output][row]
    return _stacked([outputs[run][output][row] for run, row in place], advice)


def _stacked(images: Sequence[torch.Tensor], advice: str) -> torch.Tensor:
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        raise RuntimeError(
            f"the images of a batch must be of one size to be stacked; these are {shapes[0]}, {shapes[1]}"
            f"{' and others' if len(shapes) > 2 else ''}. {advice}"
        )
    return stacked(images)
