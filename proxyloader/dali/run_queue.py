"""RunQueue: the runs of a DALI pipeline, in the order in which they were started. Main process.

NOTE [ Run order ]
A DALI pipeline returns outputs in the order in which its runs were started. The queue keeps a PipelineRun for each run
in that order, and collecting a run collects all runs before it first. So outputs cannot be mistaken for each other.
When a loop is left, its runs are cancelled: their outputs are taken and dropped. An error stays with its run. Two
loaders may share a queue. A run starts when it is submitted, and goes on in DALI's own threads. The training thread
waits only for an output that it needs and that is not ready.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from .. import lifetime
from ..errors import PipelineError
from ..lifetime import before_exit, leak_in_child
from . import api, executor, jpeg_engines
from . import outputs as _outputs
from .device import current_stream
from .input_checks import InputKinds, Kinds, fed_sources
from .output_format import Outputs

log = logging.getLogger(__name__)

WAITED_S = 0.001
"""A wait of more than this time, in seconds, shows that the run ended during the wait."""

SURELY = 0.8
"""Share of the shortest time of a run in which a run is assumed not to end."""

WHY_LOST = {
    "forked": "this ProxyServer belongs to the process that this one was forked from: make one here, and a pipeline",
    "taken": "another ProxyServer was made over this server's pipeline, which cannot serve two: give both loaders one "
    "server, or each a pipeline of its own",
}
"""Why a queue has no pipeline any more, by the code of the error."""


class PipelineRun:
    """One run of the pipeline, from submit to collect.

    Args:
        size: number of samples.
        kinds: (dtype, number of dimensions) of each input.
    """

    def __init__(self, size: int, kinds: Kinds = ()) -> None:
        self.size, self.kinds = size, kinds
        self.outputs: Outputs | None = None
        self.error: Exception | None = None
        self.finished: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None
        self.inputs: list[Any] | None = None  # DALI should not be their last owner: see executor.tensor_list
        self.cancelled = False
        self.ended = False
        self.was_alone = False  # no other run was in flight when it was started
        self.started_s = time.monotonic()
        self.busy_until_s = 0.0  # in time.monotonic(): it is assumed not to end before
        leak_in_child(self)

    def __repr__(self) -> str:
        state = "failed" if self.error else "ended" if self.ended else "running"
        return f"PipelineRun({self.size} samples, {state}{', cancelled' if self.cancelled else ''})"

    def cancel(self) -> None:
        """Mark it as cancelled: it will not be collected."""
        self.cancelled, self.inputs = True, None

    def take_outputs(self, stream: torch.cuda.Stream | None) -> Outputs:
        """Return the outputs of a run that has ended, for use in ``stream``, once. Errors are those of ``collect``."""
        if self.cancelled:
            raise PipelineError("this run was forgotten: the server was stopped", code="stopped")
        if isinstance(self.error, (torch.OutOfMemoryError, MemoryError)):
            raise type(self.error)(str(self.error)) from self.error  # its own frames would hold the run
        if self.error is not None:
            raise PipelineError(f"the DALI pipeline failed on a batch of {self.size}: {self.error}") from self.error
        outputs, self.outputs = self.outputs, None
        if outputs is None:
            raise PipelineError("this run was interrupted, or collected before", code="stopped")
        if self.finished is not None and self.stream != stream:
            _hand_over(outputs, self.finished, stream)
        return outputs

    def inputs_released(self) -> bool:
        """Return whether DALI has finished reading the memory of the inputs."""
        return self.ended and (self.finished is None or bool(self.finished.query()))  # type: ignore[no-untyped-call]

    def wait_until_read(self) -> None:
        """Wait until the GPU has finished the run. This returns at once for a run that was not collected."""
        if self.finished is not None:
            self.finished.synchronize()


def _hand_over(outputs: Outputs, finished: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
    """Let ``stream`` use outputs that another stream received."""
    assert stream is not None
    stream.wait_event(finished)
    for output in outputs:
        for tensor in output if isinstance(output, list) else [output]:
            if tensor.is_cuda:
                tensor.record_stream(stream)


class RunQueue:
    """Starts runs of a pipeline and collects their outputs. Threads may share it.

    Args:
        pipeline: a pipeline as for ``ProxyServer``, which is built here. A later queue takes it over.
        deterministic: whether a run is started only when the loop asks for its batch.

    Attributes:
        key: unique name, by which batches refer to the queue.
        names: names of the pipeline's inputs, in its order.
        had_a_run: whether a run was started since a loader last set this to False.

    Raises:
        TypeError, ValueError, RuntimeError, PipelineError, torch.OutOfMemoryError, MemoryError: as for ``ProxyServer``.
    """

    def __init__(self, pipeline: api.Pipeline, deterministic: bool = False) -> None:
        sources = fed_sources(pipeline)
        if executor.shares_decoder_stream(pipeline):
            raise ValueError(
                f"the pipeline has stream_policy={pipeline.stream_policy.name}, with which DALI may write decoded "
                "pictures over those of an earlier batch; leave it out, or give StreamPolicy.PER_BACKEND, the default"
            )
        self.pipeline, self.deterministic = pipeline, deterministic
        self.key, self.names = f"server-{uuid.uuid4().hex}", [source.name for source in sources]
        self._runs: deque[PipelineRun] = deque()
        self.had_a_run = False
        self._lock = self._held = threading.RLock()
        self._why_lost = ""  # a key of WHY_LOST
        self._in_step = True  # the list has exactly the runs that DALI has
        executor.take_over(pipeline, self)  # from here on another queue may take the pipeline over
        executor.drop_runs(pipeline)
        jpeg_engines.build(pipeline)
        self._inputs = InputKinds(pipeline, sources)
        self._shortest_s = math.inf  # time of a run that had no other run in flight before it
        lifetime.watch(self)

    @property
    def under_way(self) -> int:
        """Number of runs in flight."""
        return len(self._runs)

    def __repr__(self) -> str:
        return f"RunQueue({', '.join(self.names)}; {self.under_way} runs under way)"

    def submit(self, inputs: Sequence[Any]) -> PipelineRun:
        """Start a run.

        Args:
            inputs: for each input of the pipeline, in its order, an array (N, ...) or a list of N arrays. Their memory
                must not change until ``PipelineRun.inputs_released()`` is true.

        Raises:
            InputError: N is too large, or an input has another dtype or number of dimensions than the pipeline declares
                or took before.
            PipelineError: the pipeline was taken over, or belongs to the parent process.
        """
        with self._lock:
            self._check_owned()
            self._get_in_step()
            if jpeg_engines.have_failed(self.pipeline):
                self.settle()
                self._rebuild()
            if not self.pipeline.exec_async:
                self.settle()  # if DALI's queue of outputs is full, the run would block this thread forever
            if self._inputs.failed is not None and not self.pipeline.exec_dynamic:
                self.settle()  # DALI's old executor fails the later runs as well
                self._rebuild()
            pipeline_run = PipelineRun(len(inputs[0]), self._kinds_of(inputs))
            batches = [executor.tensor_list(samples) for samples in inputs]
            self._in_step = False
            with before_exit():
                for name, batch in zip(self.names, batches):
                    self.pipeline.feed_input(name, batch)
                pipeline_run.inputs = batches
                executor.run(self.pipeline)
            pipeline_run.was_alone = not self._runs
            if pipeline_run.was_alone and self._shortest_s < math.inf:
                pipeline_run.busy_until_s = pipeline_run.started_s + SURELY * self._shortest_s
            self._runs.append(pipeline_run)
            self._in_step = self.had_a_run = True
            return pipeline_run

    def _kinds_of(self, inputs: Sequence[Any]) -> Kinds:
        """Check the inputs of a run, and return their kinds. DALI would keep a batch that it refuses in its queue."""
        kinds = self._inputs.kinds_of(inputs)
        if self._runs and self._runs[-1].kinds != kinds:
            self.settle()  # shows whether runs of the earlier kinds succeed
        if self._inputs.taken is None and self._inputs.failed not in (None, kinds):
            self._rebuild()  # DALI keeps the kinds of its first batch, and that batch has failed
        self._inputs.check_taken(kinds)
        return kinds

    def collect(self, pipeline_run: PipelineRun) -> Outputs:
        """Wait for a run and return its outputs.

        Returns:
            For each output of the pipeline a tensor (N, ...) on the device of the pipeline, or a list of N tensors if
            the samples differ in shape. On a GPU they are ready in the order of the current stream of the caller.

        Raises:
            PipelineError: DALI failed on this run, or the run was cancelled.
            torch.OutOfMemoryError, MemoryError: there was not enough memory, on the GPU or on the CPU.
        """
        with self._lock:
            self._check_owned()
            if not pipeline_run.ended:
                self._get_in_step()
            while not pipeline_run.ended:
                if pipeline_run not in self._runs:
                    raise PipelineError(
                        "this run was forgotten: the server was stopped, or the process was forked", code="stopped"
                    )
                self._collect_oldest()
        return pipeline_run.take_outputs(current_stream(self.pipeline.device_id))

    def _collect_oldest(self) -> None:
        pipeline_run, self._in_step = self._runs[0], False
        stream, asked_s = current_stream(self.pipeline.device_id), time.monotonic()
        outputs: Outputs = []
        try:
            with before_exit():
                outputs = self._take_outputs(stream)
        except torch.OutOfMemoryError as error:
            pipeline_run.error = error.with_traceback(None)  # the traceback would keep this frame, and the run, alive
        except (RuntimeError, MemoryError) as error:
            pipeline_run.error = executor.error_of_run(error, self.pipeline.device_id, pipeline_run.size)
            if pipeline_run.error is None:
                raise  # DALI may still have the run, so the next call rebuilds the pipeline
            self._inputs.failed = pipeline_run.kinds
        self._runs.popleft()
        pipeline_run.ended = self._in_step = True
        if pipeline_run.error is not None:
            return
        self._inputs.taken, self._inputs.failed = self._inputs.taken or pipeline_run.kinds, None
        now_s = time.monotonic()
        if pipeline_run.was_alone and now_s - asked_s > WAITED_S:  # else it ended at an unknown time before
            self._shortest_s = min(self._shortest_s, now_s - pipeline_run.started_s)
        if stream is not None:
            pipeline_run.stream, pipeline_run.finished = stream, stream.record_event()
        pipeline_run.outputs = [] if pipeline_run.cancelled else outputs

    def _get_in_step(self) -> None:
        """Rebuild the pipeline if Ctrl-C or a signal handler has left the list of runs different from DALI's."""
        if self._in_step:
            return
        for pipeline_run in self._runs:
            pipeline_run.ended, pipeline_run.error = True, RuntimeError("it was interrupted")
        self._runs.clear()
        self._rebuild()

    def _take_outputs(self, stream: torch.cuda.Stream | None) -> Outputs:
        """Return the outputs of the oldest run as torch tensors."""
        return _outputs.take_outputs(self.pipeline, stream)

    def _rebuild(self) -> None:
        log.info("building the pipeline anew after a failure")
        self._in_step = False  # if there is no memory to build it, the next run tries again
        executor.take_apart(self.pipeline)
        jpeg_engines.build(self.pipeline)
        self._inputs.failed, self._in_step = None, True

    def cancel_all(self) -> None:
        """Cancel all runs, without waiting. Their outputs cannot appear in a later batch."""
        with self._lock:
            for pipeline_run in self._runs:
                pipeline_run.cancel()

    def lose_pipeline(self) -> None:
        """Give up the pipeline, which another server or loader has taken over. Runs in flight are lost."""
        with self._lock:
            self.settle()  # so that the pipeline is not rebuilt, which would repeat its random numbers
            self._runs.clear()
            self._why_lost = "taken"

    def _check_owned(self) -> None:
        if self._why_lost:
            raise PipelineError(WHY_LOST[self._why_lost], code=self._why_lost)

    def settle(self) -> bool:
        """Wait for all runs, and keep their outputs in their PipelineRun. Return whether there were any."""
        with self._lock:
            self._get_in_step()
            under_way = bool(self._runs)
            while self._runs:
                self._collect_oldest()
            return under_way

    def pause(self) -> bool:
        """Settle, and keep other threads from starting runs until ``resume``. Return whether there were any runs."""
        held = self._lock
        held.acquire()
        self._held = held  # ``end`` may replace the lock before ``resume``
        try:
            return self.settle()
        except BaseException:
            held.release()
            raise

    def resume(self) -> None:
        """Allow runs to be started again, after ``pause``."""
        self._held.release()

    def forget_in_child(self) -> None:
        """Give up the pipeline in a forked child. It belongs to the parent process with its runs."""
        executor.forget_in_child(self.pipeline)
        self._runs.clear()
        self._why_lost = "forked"
        self._lock = threading.RLock()

    def end(self) -> None:
        """Prepare for the end of the interpreter, which ends the pipeline. A later run rebuilds it."""
        self._lock, self._in_step = threading.RLock(), False  # a thread that waits until Python ends may hold the old
