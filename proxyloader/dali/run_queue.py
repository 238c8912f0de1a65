"""RunQueue: the runs of a DALI pipeline, in submission order. Main process.

NOTE [ Run order ]
A DALI pipeline returns outputs in the order in which its runs were started. The queue keeps one PipelineRun per run in
that order, and collecting a run first collects all earlier ones, so outputs cannot be mixed up. When a loop is left,
its runs are cancelled: their outputs are taken and dropped. An error stays with its run. Loaders may share a queue. A
run starts when it is submitted and continues in DALI's own threads. The training thread waits only for an output that
it needs and that is not ready.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from .. import lifetime
from ..errors import InputError, PipelineError
from ..lifetime import before_exit, leak_in_child
from . import api, executor, jpeg_engines
from . import outputs as _outputs
from .device import current_stream
from .input_checks import Kinds, check_declared, check_sources, check_unchanged
from .output_format import Outputs

log = logging.getLogger(__name__)

WHY_LOST = {
    "forked": "this ProxyServer belongs to the parent of this forked process; create the pipeline and the server here",
    "taken": "the pipeline was passed to a later ProxyServer; share one server between the loaders, or give each its "
    "own pipeline",
}
"""Why a queue has lost its pipeline, by error code."""


class PipelineRun:
    """One run of the pipeline, from submit to collect.

    Args:
        size: number of samples.
        kinds: (dtype, number of dimensions) of each input.

    Attributes:
        rows: the sampled parameters, if kernels transform what the pipeline decodes.
    """

    rows: Any = None

    def __init__(self, size: int, kinds: Kinds = ()) -> None:
        self.size, self.kinds = size, kinds
        self.outputs: Outputs | None = None
        self.error: Exception | None = None
        self.finished: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None
        self.inputs: list[Any] | None = None  # DALI should not be their last owner: see executor.tensor_list
        self.cancelled = False
        self.ended = False
        leak_in_child(self)

    def cancel(self) -> None:
        self.cancelled, self.inputs = True, None

    def take_outputs(self, stream: torch.cuda.Stream | None) -> Outputs:
        """Return the outputs of a run that has ended, once, for use in ``stream``. Errors are those of ``collect``."""
        if self.cancelled:
            raise PipelineError("the run was cancelled because its server was stopped", code="stopped")
        if isinstance(self.error, (torch.OutOfMemoryError, MemoryError)):
            raise type(self.error)(str(self.error)) from self.error  # its own frames would hold the run
        if self.error is not None:
            raise PipelineError(f"the DALI pipeline failed on a batch of {self.size}: {self.error}") from self.error
        outputs, self.outputs = self.outputs, None
        if outputs is None:
            raise PipelineError("the run was interrupted or already collected", code="stopped")
        if self.finished is not None and self.stream != stream:
            assert stream is not None
            stream.wait_event(self.finished)
            for output in outputs:
                for tensor in output if isinstance(output, list) else [output]:
                    if tensor.is_cuda:
                        tensor.record_stream(stream)
        return outputs

    def inputs_released(self) -> bool:
        """Return whether DALI has finished reading the memory of the inputs."""
        return self.ended and (self.finished is None or bool(self.finished.query()))  # type: ignore[no-untyped-call]

    def wait_until_read(self) -> None:
        """Wait until the GPU has finished the run. Return at once if the run was not collected."""
        if self.finished is not None:
            self.finished.synchronize()


class RunQueue:
    """Starts runs of a pipeline and collects their outputs. Threads may share it.

    Args:
        pipeline: a pipeline as for ``ProxyServer``, which is built here. A later queue takes it over.
        deterministic: whether to start a run only when the loop asks for its batch.

    Attributes:
        key: unique name by which batches refer to the queue.
        names: names of the pipeline's inputs, in its order.
        had_a_run: whether a run was started since a loader last reset this.

    Raises:
        TypeError, ValueError, RuntimeError, PipelineError, torch.OutOfMemoryError, MemoryError: as for ``ProxyServer``.
    """

    def __init__(self, pipeline: api.Pipeline, deterministic: bool = False) -> None:
        sources = check_sources(pipeline)
        if executor.shares_decoder_stream(pipeline):
            raise ValueError(
                f"stream_policy={pipeline.stream_policy.name} lets DALI overwrite the decoded images of an earlier "
                "batch; omit it, or use the default, StreamPolicy.PER_BACKEND"
            )
        self.pipeline, self.deterministic = pipeline, deterministic
        self.key, self.names = f"server-{uuid.uuid4().hex}", [source.name for source in sources]
        self._runs: deque[PipelineRun] = deque()
        self.had_a_run = False
        self._lock = self._held = threading.RLock()
        self._why_lost = ""  # a key of WHY_LOST
        self._in_step = True  # whether the list has exactly the runs that DALI has
        executor.take_over(pipeline, self)  # from here on another queue may take the pipeline over
        executor.drop_runs(pipeline)
        jpeg_engines.build(pipeline)
        self._declared = [executor.declared_kind(pipeline, source) for source in sources]
        self._taken_kinds: Kinds | None = None  # of the runs that succeeded
        self._failed_kinds: Kinds | None = None  # of the last run, if it failed
        lifetime.watch(self)

    @property
    def under_way(self) -> int:
        """Number of runs in flight."""
        return len(self._runs)

    def __repr__(self) -> str:
        return f"RunQueue({', '.join(self.names)}; {self.under_way} runs in flight)"

    def submit(self, inputs: Sequence[Any]) -> PipelineRun:
        """Start a run.

        Args:
            inputs: for each input of the pipeline, in its order, an array (N, ...) or a list of N arrays. Their memory
                must not change until ``PipelineRun.inputs_released()`` is true.

        Raises:
            InputError: N is too large, or an input has another dtype or number of dimensions than the pipeline declares
                or than it had before.
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
            if self._failed_kinds is not None and not self.pipeline.exec_dynamic:
                self.settle()  # DALI's old executor fails the later runs as well
                self._rebuild()
            pipeline_run = PipelineRun(len(inputs[0]), self._check_inputs(inputs))
            self._prepare(inputs)
            batches = [executor.tensor_list(samples) for samples in inputs]
            self._in_step = False
            with before_exit():
                for name, batch in zip(self.names, batches):
                    self.pipeline.feed_input(name, batch)
                pipeline_run.inputs = batches
                executor.run(self.pipeline)
            self._runs.append(pipeline_run)
            self._in_step = self.had_a_run = True
            return pipeline_run

    def _check_inputs(self, inputs: Sequence[Any]) -> Kinds:
        """Return the kinds of the inputs of a run. DALI would keep a batch that it rejects in its queue."""
        if len(inputs[0]) > self.pipeline.max_batch_size:
            raise InputError(
                f"a batch of {len(inputs[0])} is larger than batch_size={self.pipeline.max_batch_size} of the pipeline",
                code="large-batch",
            )
        kinds = tuple((samples[0].dtype.str, samples[0].ndim) for samples in inputs)
        check_declared(self.names, kinds, self._declared)
        if self._runs and self._runs[-1].kinds != kinds:
            self.settle()  # shows whether runs of the earlier kinds succeed
        if self._taken_kinds is None and self._failed_kinds not in (None, kinds):
            self._rebuild()  # DALI keeps the kinds of its first batch, and that batch has failed
        check_unchanged(self.names, kinds, self._taken_kinds or kinds)
        return kinds

    def _prepare(self, inputs: Sequence[Any]) -> None:
        """Hook called before a run with inputs that passed the checks. It may replace the pipeline."""

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
                        "the run was discarded because its server was stopped or the process was forked", code="stopped"
                    )
                self._collect_oldest()
        return pipeline_run.take_outputs(current_stream(self.pipeline.device_id))

    def _collect_oldest(self) -> None:
        pipeline_run, self._in_step = self._runs[0], False
        stream = current_stream(self.pipeline.device_id)
        outputs: Outputs = []
        try:
            with before_exit():
                outputs = self._take_outputs(stream)
        except torch.OutOfMemoryError as error:
            pipeline_run.error = error.with_traceback(None)  # the traceback would keep this frame, and the run, alive
        except (RuntimeError, MemoryError) as error:
            pipeline_run.error = executor.run_error(error, self.pipeline.device_id, pipeline_run.size)
            if pipeline_run.error is None:
                raise  # DALI may still have the run, so the next call rebuilds the pipeline
            self._failed_kinds = pipeline_run.kinds
        self._runs.popleft()
        pipeline_run.ended = self._in_step = True
        if pipeline_run.error is None:
            self._taken_kinds, self._failed_kinds = self._taken_kinds or pipeline_run.kinds, None
            if stream is not None:
                pipeline_run.stream, pipeline_run.finished = stream, stream.record_event()
            pipeline_run.outputs = [] if pipeline_run.cancelled else outputs

    def _get_in_step(self) -> None:
        """Rebuild the pipeline if Ctrl-C or a signal handler left the list of runs inconsistent with DALI's."""
        if self._in_step:
            return
        for pipeline_run in self._runs:
            pipeline_run.ended, pipeline_run.error = True, RuntimeError("the run was interrupted")
        self._runs.clear()
        self._rebuild()

    def _take_outputs(self, stream: torch.cuda.Stream | None) -> Outputs:
        """Return the outputs of the oldest run as torch tensors."""
        return _outputs.take_outputs(self.pipeline, stream)

    def _rebuild(self) -> None:
        log.info("rebuilding the pipeline after a failure")
        self._in_step = False  # if there is no memory to build it, the next run tries again
        executor.take_apart(self.pipeline)
        jpeg_engines.build(self.pipeline)
        self._failed_kinds, self._in_step = None, True

    def cancel_all(self) -> None:
        """Cancel all runs, without waiting. Their outputs cannot appear in a later batch."""
        with self._lock:
            for pipeline_run in self._runs:
                pipeline_run.cancel()

    def lose_pipeline(self) -> None:
        """Give up the pipeline, which another queue has taken over. Runs in flight are lost."""
        with self._lock:
            self.settle()  # so that the pipeline is not rebuilt, which would repeat its random numbers
            self._runs.clear()
            self._why_lost = "taken"

    def _check_owned(self) -> None:
        if self._why_lost:
            raise PipelineError(WHY_LOST[self._why_lost], code=self._why_lost)

    def settle(self) -> bool:
        """Collect all runs into their PipelineRun. Return whether there were any."""
        with self._lock:
            self._get_in_step()
            under_way = bool(self._runs)
            while self._runs:
                self._collect_oldest()
            return under_way

    def pause(self) -> bool:
        """Settle, and block new runs of other threads until ``resume``. Return whether there were any runs."""
        held = self._lock
        held.acquire()
        self._held = held  # ``end`` may replace the lock before ``resume``
        try:
            return self.settle()
        except BaseException:
            held.release()
            raise

    def resume(self) -> None:
        self._held.release()

    def forget_in_child(self) -> None:
        """Give up the pipeline in a forked child. The pipeline and its runs belong to the parent process."""
        executor.forget_in_child(self.pipeline)
        self._runs.clear()
        self._why_lost = "forked"
        self._lock = threading.RLock()

    def end(self) -> None:
        """Prepare for the end of the interpreter, which ends the pipeline. A later run rebuilds it."""
        self._lock, self._in_step = threading.RLock(), False  # a thread blocked until the exit may hold the old lock
