"""RunQueue: the runs of a DALI pipeline, in submission order. Main process.

NOTE [ Run order ]
A DALI pipeline returns outputs in the order in which its runs were started. The queue keeps one DaliRun per run in that
order, and collecting a run first collects all earlier ones, so outputs cannot be mixed up. A run has a PipelineRun for
each batch that it serves, with its place among the samples and its own error. Leaving a loop cancels its runs: their
outputs are taken and dropped. Loaders may share a queue. A run starts when it is submitted, in DALI's own threads. The
training thread waits only for outputs that are not ready.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.dlpack import from_dlpack

from ..errors import InputError, PipelineError
from ..lifetime import delay_exit, leak_in_child, watch
from . import executor, jpeg_engines
from .api import Pipeline, to_torch_tensor
from .device import current_stream
from .interrupts import avoid_busy_cores
from .output_format import Outputs

log = logging.getLogger(__name__)

LOST_MESSAGES = {  # by error code
    "forked": "this ProxyServer belongs to the parent of this forked process; create the pipeline and the server here",
    "taken": "the pipeline was passed to a later ProxyServer; share one server between the loaders, or give each its "
    "own pipeline",
}

BYTES_ADVICE = (
    ": the images are decoded, but the pipeline expects encoded ones. Give the dataset a loader that reads bytes: "
    'ImageFolder(root, transform=server.proxy, loader=read_bytes), with open(path, "rb").read() in read_bytes'
)

MAX_UNREAD = 2
"""Maximum number of runs whose outputs the GPU has not read when the next ones are taken. A loop may be so far ahead of
the GPU without waiting for it."""

Kinds = tuple[tuple[str, int], ...]  # dtype and number of dimensions of each input of a pipeline


class PipelineRun:
    """The part of a run that serves one batch, from submit to collect."""

    run: DaliRun
    begin: int  # number of the first sample in the run

    def __init__(self, size: int, schedule: Any = None) -> None:
        self.size = size  # number of samples
        self.schedule = schedule  # launches of kernels that transform what the pipeline decodes, if any
        self.outputs: Outputs | None = None
        self.error: Exception | None = None
        self.finished: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None
        self.cancelled = False
        leak_in_child(self)

    def cancel(self) -> None:
        self.cancelled = True
        self.run.end_part(self)
        if not self.run.parts and not self.run.ended:
            self.run.inputs = None

    def take_outputs(self, stream: torch.cuda.Stream | None) -> Outputs:
        """Return the outputs of an ended run, once, for use in ``stream``. Raises the errors of ``collect``."""
        if self.cancelled:
            raise PipelineError("the run was cancelled because its server was stopped", code="stopped")
        if isinstance(self.error, (torch.OutOfMemoryError, MemoryError)):
            raise type(self.error)(str(self.error)) from self.error  # a new traceback does not keep the run alive
        if self.error is not None:
            raise PipelineError(f"the DALI pipeline failed on a batch of {self.size}: {self.error}") from self.error
        outputs, self.outputs = self.outputs, None
        if outputs is None:
            raise PipelineError("the run was interrupted or already collected", code="stopped")
        if stream is not None and self.finished is not None and self.stream != stream:
            stream.wait_event(self.finished)
            for tensor in tree_leaves(outputs):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return outputs

    def inputs_released(self) -> bool:
        """Return whether DALI has finished reading the memory of the inputs."""
        ready = self.run.ready
        return self.run.ended and (ready is None or bool(ready.query()))  # type: ignore[no-untyped-call]

    def wait_until_read(self) -> None:
        """Wait until DALI has finished reading the inputs. Return immediately if the run was not collected."""
        if self.run.ready is not None:
            self.run.ready.synchronize()


class DaliRun:
    """A run of the pipeline, which serves one batch or, to decode more images at once, several small ones."""

    def __init__(self, parts: Sequence[PipelineRun]) -> None:
        self.size = 0  # number of samples
        for part in parts:
            part.run, part.begin = self, self.size
            self.size += part.size
        self.parts = [*parts]  # that still need the outputs
        self.inputs: list[Any] | None = None  # kept for DALI; see executor.tensor_list
        self.outputs: Any = None  # kept until the GPU has read them
        self.decoded: Any = None  # shape and address of each image in them, for kernels
        self.ended = False
        self.stream: torch.cuda.Stream | None = None
        self.ready: torch.cuda.Event | None = None  # when DALI has finished
        self.events: list[torch.cuda.Event] = []  # this, and when the GPU has read the outputs for a part
        leak_in_child(self)

    def end_part(self, part: PipelineRun) -> None:
        self.parts = [each for each in self.parts if each is not part]  # safe in several threads

    def fail(self, error: Exception) -> None:
        self.ended = True
        if len(self.parts) > 1 and isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            error = RuntimeError(str(error))  # each batch is repeated alone
        for part in self.parts:
            part.error = error
        self.parts = []


class RunQueue:
    """Starts runs of a pipeline and collects their outputs. Threads may share it.

    The arguments and errors are those of ``ProxyServer``. A later queue may take over the pipeline.
    """

    def __init__(self, pipeline: Pipeline, deterministic: bool = False) -> None:
        sources = executor.check_sources(pipeline)
        self.pipeline, self.deterministic = pipeline, deterministic
        self.key = f"server-{uuid.uuid4().hex}"  # by which batches refer to the queue
        self.names = [source.name for source in sources]  # of the inputs, in the order of the pipeline
        self._runs: deque[DaliRun] = deque()
        self._unread: list[DaliRun] = []  # whose outputs the GPU may not have read yet
        self.runs_started = 0
        self._lock = threading.RLock()
        self.lost_code = ""  # a key of LOST_MESSAGES if the pipeline belongs to another queue or process
        self._in_sync = True  # whether _runs matches the runs in DALI
        executor.claim(pipeline, self)  # from now on, another queue may take over the pipeline
        executor.drop_runs(pipeline)
        jpeg_engines.build(pipeline)
        self._declared = [executor.get_declared_kind(pipeline, source) for source in sources]
        self._kinds: Kinds | None = None  # of earlier runs
        self._has_succeeded = self._has_failed = False  # any run, the last run
        watch(self)

    @property
    def num_runs(self) -> int:
        """Number of runs in flight."""
        return len(self._runs)

    def submit(self, inputs: Sequence[Any], schedule: Any = None) -> PipelineRun:
        """Start a run of an array (N, ...), or a list of N arrays, for each input of the pipeline, in order.

        Their memory must not change until ``PipelineRun.inputs_released()``. InputError: N is too large, or the dtype
        or number of dimensions of an input differs from the pipeline's declaration or from earlier runs. PipelineError:
        the pipeline was taken over, or belongs to the parent process.
        """
        return self._submit(inputs, [PipelineRun(len(inputs[0]), schedule)])[0]

    def _submit(self, inputs: Sequence[Any], parts: Sequence[PipelineRun]) -> Sequence[PipelineRun]:
        """Start a run whose samples are those of ``parts``, in order."""
        with self._lock:
            self._check_owned()
            self._release_read()
            self._resync()
            if self.pipeline.device_id is not None:
                avoid_busy_cores()
            if not self.pipeline.exec_async:
                self.drain()  # a run in this thread would wait forever for space in the queue of outputs
            # After a failure, DALI's old executor fails all later runs.
            is_useless = self._has_failed and not self.pipeline.exec_dynamic
            if is_useless or jpeg_engines.must_rebuild(self.pipeline):
                self.drain()
                self._rebuild()
            self._check_inputs(inputs)
            run = DaliRun(parts)
            batches = [executor.tensor_list(samples) for samples in self._prepare(inputs)]
            self._in_sync = False
            with delay_exit():
                for name, batch in zip(self.names, batches):
                    self.pipeline.feed_input(name, batch)
                run.inputs = batches
                self.pipeline._run_once()
            self._runs.append(run)
            self._in_sync = True
            self.runs_started += 1
            return parts

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        """Check the kinds of inputs, because DALI would leave a rejected batch in its queue."""
        if len(inputs[0]) > self.pipeline.max_batch_size:
            raise InputError(
                f"a batch of {len(inputs[0])} is larger than batch_size={self.pipeline.max_batch_size} of the pipeline",
                code="large-batch",
            )
        kinds = tuple((samples[0].dtype.str, samples[0].ndim) for samples in inputs)
        self._check_kinds(kinds, self._declared)
        if self._kinds is not None and self._kinds != kinds:
            self.drain()  # determine whether a run of the earlier kinds succeeds
            if self._has_succeeded:
                self._check_kinds(kinds, self._kinds, " as in earlier batches")
            self._rebuild()  # DALI keeps the kinds of its first batch, which failed
        self._kinds = kinds

    def _check_kinds(self, kinds: Kinds, expected: Sequence[tuple[str | None, int | None]], when: str = "") -> None:
        for name, kind, wanted in zip(self.names, kinds, expected):
            if any(value not in (None, found) for value, found in zip(wanted, kind)):
                advice = BYTES_ADVICE if kind == ("|u1", 3) and wanted[1] == 1 else ""
                message = f"must be {_describe(*wanted)}{when}, got {_describe(*kind)}{advice}"
                raise InputError(f"input {name!r} of the pipeline {message}", code="wrong-kind")

    def _prepare(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Hook called before each run. Returns the checked inputs, maybe with more samples at the end.

        It may replace the pipeline.
        """
        return inputs

    def collect(self, pipeline_run: PipelineRun) -> Outputs:
        """Wait for a run and return its outputs: tensors (N, ...), or lists of N tensors if their shapes differ.

        On a GPU, they are ready for use in the caller's current stream. PipelineError: DALI failed on this run, or the
        run was cancelled. torch.OutOfMemoryError, MemoryError: the GPU or the CPU ran out of memory.
        """
        stream = current_stream(self.pipeline.device_id)
        with self._lock:
            self._check_owned()
            run = pipeline_run.run
            if not run.ended:
                self._resync()
            while not run.ended:
                if run not in self._runs:
                    raise PipelineError(
                        "the run was discarded because its server was stopped or the process was forked", code="stopped"
                    )
                self._collect_oldest(stream, keep=run)
            self._convert_part(pipeline_run, stream)
        return pipeline_run.take_outputs(stream)

    def _collect_oldest(self, stream: torch.cuda.Stream | None, keep: DaliRun | None = None) -> None:
        """Wait for the oldest run. Convert its outputs, unless it is ``keep`` and has several parts."""
        self._release_read()
        run, self._in_sync = self._runs[0], False
        try:
            with delay_exit():
                # On the CPU, this waits for the run. With ``exec_dynamic``, ``stream`` waits for it instead.
                run.outputs = self.pipeline.outputs(cuda_stream=stream if self.pipeline.exec_dynamic else None)
                if run is not keep or len(run.parts) == 1:
                    for part in run.parts:
                        self._convert_part(part, stream)
        except (RuntimeError, MemoryError) as error:
            converted = executor.convert_run_error(error, self.pipeline.device_id, run.size)
            if converted is None:
                raise  # DALI may still have the run, so the next call rebuilds the pipeline
            run.fail(converted)
            self._has_failed = True
        else:
            self._has_succeeded, self._has_failed = True, False
            if stream is not None:
                run.stream, run.ready = stream, stream.record_event()
                run.events.append(run.ready)
            if stream is not None or run.parts:
                self._unread.append(run)
            else:
                run.outputs = None
        self._runs.popleft()
        run.ended = self._in_sync = True

    def _convert_part(self, part: PipelineRun, stream: torch.cuda.Stream | None) -> None:
        """Set the outputs of a part of a run, or its error, in ``stream``."""
        run = part.run
        if part not in run.parts:
            return
        run.end_part(part)
        if stream is not None and run.ready is not None and run.stream != stream:
            stream.wait_event(run.ready)
        try:
            with delay_exit():
                part.outputs = self._convert(part, stream)
        except (torch.OutOfMemoryError, PipelineError) as error:  # of the kernels
            part.error = error.with_traceback(None)  # the traceback would keep the run alive
        except (RuntimeError, MemoryError) as error:
            part.error = executor.convert_run_error(error, self.pipeline.device_id, part.size)
            if part.error is None:
                raise
        if stream is not None:
            part.stream, part.finished = stream, stream.record_event()
            run.events.append(part.finished)

    def _resync(self) -> None:
        """Rebuild the pipeline if Ctrl-C or a signal handler left ``_runs`` inconsistent with DALI."""
        if self._in_sync:
            return
        for run in self._runs:
            run.fail(RuntimeError("the run was interrupted"))
        self._runs.clear()
        self._convert_rest()
        self._rebuild()

    def _convert(self, pipeline_run: PipelineRun, stream: torch.cuda.Stream | None) -> Outputs:
        """Return the outputs of a run as torch tensors."""
        return to_torch(pipeline_run.run.outputs, self.pipeline.exec_dynamic)

    def _release_read(self, most: int = MAX_UNREAD) -> None:
        """Return outputs that the GPU has read to DALI. Wait if there are more others: NOTE [ DALI's GPU memory ]."""
        converted = [run for run in self._unread if not run.parts]
        for number, run in enumerate(converted, 1):
            if not all(event.query() for event in run.events):  # type: ignore[no-untyped-call]
                if len(converted) - number < most:
                    break
                for event in run.events:
                    event.synchronize()
            run.outputs = None
            self._unread.remove(run)

    def _rebuild(self) -> None:
        log.info("rebuilding the pipeline after a failure")
        self._in_sync = False  # if memory is short, the next run retries
        executor.discard_executor(self.pipeline)
        jpeg_engines.build(self.pipeline)
        self._has_failed, self._in_sync = False, True

    def cancel_all(self) -> None:
        """Cancel all runs, without waiting. Their outputs cannot appear in a later batch."""
        with self._lock:
            for run in self._runs:
                for part in run.parts:
                    part.cancel()

    def release_pipeline(self) -> None:
        """Give up the pipeline to another queue. Runs in flight are lost."""
        with self._lock:
            self.drain()  # otherwise the pipeline would be rebuilt, and repeat its random numbers
            self._release_read(0)
            self._runs.clear()
            self.lost_code = "taken"

    def _check_owned(self) -> None:
        if self.lost_code:
            raise PipelineError(LOST_MESSAGES[self.lost_code], code=self.lost_code)

    def drain(self) -> bool:
        """Collect the outputs of all runs in flight. Return whether there were any."""
        with self._lock:
            self._resync()
            had_runs = bool(self._runs)
            while self._runs:
                self._collect_oldest(current_stream(self.pipeline.device_id))
            self._convert_rest()
            return had_runs

    def _convert_rest(self) -> None:
        """Convert what a new pipeline might overwrite."""
        for part in [part for run in self._unread for part in run.parts]:
            self._convert_part(part, current_stream(self.pipeline.device_id))

    @contextlib.contextmanager
    def paused(self) -> Iterator[bool]:
        """Drain the queue, and block new runs of other threads in the body. Yield whether there were any runs."""
        with self._lock:  # which ``end`` may replace in the meantime
            yield self.drain()

    def forget_in_child(self) -> None:
        """Give up the pipeline in a forked child, because it belongs to the parent process."""
        executor.forget_in_child(self.pipeline)
        self._runs.clear()
        self._unread.clear()
        self.lost_code = "forked"
        self._lock = threading.RLock()

    def end(self) -> None:
        """Prepare for interpreter shutdown, which ends the pipeline. A later run rebuilds it."""
        self._lock, self._in_sync = threading.RLock(), False  # a blocked thread may still hold the old lock
        self._unread.clear()


def to_torch(outputs: Sequence[Any], exec_dynamic: bool) -> Outputs:
    """Return outputs as torch tensors: one for each, or a list if the shapes of its samples differ."""

    def convert(tensor: Any) -> Any:
        if exec_dynamic and "CPU" in type(tensor).__name__:
            # Pass a capsule: for other objects torch calls DALI's code for the device, in which a Ctrl-C is lost.
            return from_dlpack(tensor.__dlpack__())
        # On a GPU, torch allocates the copy, so its rules for streams, ``record_stream`` and memory statistics apply.
        return to_torch_tensor(tensor, copy=True)

    return [convert(each.as_tensor()) if each.is_dense_tensor() else list(map(convert, each)) for each in outputs]


def _describe(dtype: str | None, ndim: int | None) -> str:
    return f"{np.dtype(dtype) if dtype else 'an array'} with {'any number of' if ndim is None else ndim} dimension(s)"
