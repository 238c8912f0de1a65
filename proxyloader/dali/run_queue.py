"""RunQueue: the runs of a DALI pipeline, in the order in which they were started. Main process.

NOTE [ The order of runs ]
A DALI pipeline gives its outputs back in the order in which its runs were started. The queue keeps a PipelineRun for
each in that order, and whoever collects one collects those before it first. So outputs cannot be mistaken for each
other. After a break the run is cancelled: its outputs are taken and dropped. An error stays with its run. Two loaders
may share a queue. Runs start when they are submitted and go on in DALI's own threads; the thread that trains waits only
where it needs an output that is not there yet.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from .. import _fork_safety
from .._exit_safety import before_exit
from ..errors import PipelineError
from . import api, executor, jpeg_engines
from . import outputs as _outputs
from .device import current_stream
from .input_checks import InputKinds, fed_sources
from .output_format import Outputs
from .run import Kinds, PipelineRun, RunTimes

log = logging.getLogger(__name__)

WHY_LOST = {
    "forked": "this ProxyServer belongs to the process that this one was forked from: make one here, and a pipeline",
    "taken": "another ProxyServer or FileReaderLoader was made over this server's pipeline, which cannot serve two: "
    "give both loaders one server, or each a pipeline of its own",
}
"""By the code of the error: why a queue has no pipeline any more."""


class RunQueue:
    """Starts runs of a pipeline and collects their outputs. Threads may share it.

    Args:
        pipeline: as ``ProxyServer`` takes it. It is built here. A later queue over it takes it over.
        deterministic: no run is to be started before the loop asks for its batch.

    Attributes:
        key: that a batch names it with.
        names: of the pipeline's inputs, in its order.

    Raises:
        TypeError, ValueError, RuntimeError, PipelineError: as of ``ProxyServer``.
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
        self._lock = self._held = threading.RLock()
        self._why_lost = ""  # of WHY_LOST
        self._in_step = True  # there is a PipelineRun for each run that DALI has, and no other
        executor.take_over(pipeline, self)  # from here on another queue may take it from this one
        executor.drop_runs(pipeline)
        with before_exit():
            jpeg_engines.build(pipeline)
        self._inputs = InputKinds(pipeline, sources)
        self._times = RunTimes()
        _fork_safety.watch(self)

    @property
    def under_way(self) -> int:
        """How many runs are."""
        return len(self._runs)

    def __repr__(self) -> str:
        return f"RunQueue({', '.join(self.names)}; {self.under_way} runs under way)"

    def submit(self, inputs: Sequence[Any]) -> PipelineRun:
        """Start a run.

        Args:
            inputs: for each input of the pipeline, in its order, an array (N, ...) or a list of N arrays. Their memory
                must stay as it is until ``PipelineRun.inputs_released()``.

        Raises:
            InputError: N is too large, or an input is of another kind than before, or than the pipeline declares.
        """
        with self._lock:
            self._check_owned()
            self._get_in_step()
            if not self.pipeline.exec_async:
                self.settle()  # DALI's queue of outputs may be full: the run would wait for this very thread
            if self._inputs.failed is not None and not self.pipeline.exec_dynamic:
                self.settle()  # they have failed, too
                self._rebuild()
            pipeline_run = PipelineRun(len(inputs[0]), self._kinds_of(inputs))
            batches = [executor.tensor_list(samples) for samples in inputs]
            self._in_step = False
            with before_exit():
                for name, batch in zip(self.names, batches):
                    self.pipeline.feed_input(name, batch)
                pipeline_run.inputs = batches
                executor.run(self.pipeline)
            self._times.note_start(pipeline_run, is_alone=not self._runs)
            self._runs.append(pipeline_run)
            self._in_step = True
            return pipeline_run

    def _kinds_of(self, inputs: Sequence[Any]) -> Kinds:
        """Check a run's inputs. A batch that DALI refuses would stay at the head of its queue for ever."""
        kinds = self._inputs.kinds_of(inputs)
        if self._runs and self._runs[-1].kinds != kinds:
            self.settle()  # whether those kinds are right is known when such a run has succeeded
        if self._inputs.taken is None and self._inputs.failed not in (None, kinds):
            self._rebuild()  # DALI holds on to the kinds of the first batch, which was not the right one
        self._inputs.check_taken(kinds)
        return kinds

    def collect(self, pipeline_run: PipelineRun) -> Outputs:
        """Wait for a run.

        Returns:
            For each output of the pipeline a tensor (N, ...), on the pipeline's device, or a list of N tensors where
            the samples differ in shape. On a GPU they are ready in the order of the caller's current stream.

        Raises:
            PipelineError: DALI failed on this run.
            torch.OutOfMemoryError, MemoryError: there was no memory for it, on the GPU or on the CPU.
        """
        with self._lock:
            self._check_owned()
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
            pipeline_run.error = error.with_traceback(None)  # which would hold this frame, and the run in it
        except (RuntimeError, MemoryError) as error:
            if not executor.is_of_a_run(error):
                raise  # DALI may have the run still, and so all are begun anew
            pipeline_run.error = executor.error_of_run(error, self.pipeline.device_id, pipeline_run.size)
            self._inputs.failed = pipeline_run.kinds
        self._runs.popleft()
        pipeline_run.ended = self._in_step = True
        if pipeline_run.error is not None:
            return
        self._inputs.note_success(pipeline_run.kinds)
        self._times.note_end(pipeline_run, asked_s)
        if stream is not None:
            pipeline_run.stream, pipeline_run.finished = stream, stream.record_event()
        pipeline_run.outputs = [] if pipeline_run.cancelled else outputs

    def _get_in_step(self) -> None:
        """Begin anew where Ctrl-C or a signal handler came between DALI and our own list: one has a run more."""
        if self._in_step:
            return
        for pipeline_run in self._runs:
            pipeline_run.ended, pipeline_run.error = True, RuntimeError("it was interrupted")
        self._runs.clear()
        self._rebuild()

    def _take_outputs(self, stream: torch.cuda.Stream | None) -> Outputs:
        """Those of the oldest run, in torch's memory."""
        return _outputs.take_outputs(self.pipeline, stream)

    def _rebuild(self) -> None:
        log.info("building the pipeline anew after a failure")
        self._in_step = False  # if there is no memory for it, the next run begins with it
        executor.take_apart(self.pipeline)
        jpeg_engines.build(self.pipeline)
        self._inputs.failed, self._in_step = None, True

    def cancel_all(self) -> None:
        """Forget what is under way. Returns at once; nothing of it can appear in a later batch."""
        with self._lock:
            for pipeline_run in self._runs:
                pipeline_run.cancel()

    def lose_pipeline(self) -> None:
        """Another server, or a loader, was made over the pipeline. What is under way is lost."""
        with self._lock:
            self.settle()  # so that the pipeline need not be built anew, with the random numbers it began with
            self._runs.clear()
            self._why_lost = "taken"

    def _check_owned(self) -> None:
        if self._why_lost:
            raise PipelineError(WHY_LOST[self._why_lost], code=self._why_lost)

    def settle(self) -> bool:
        """Wait for all runs, and keep what they give for their PipelineRun. Says whether there were any."""
        with self._lock:
            self._get_in_step()
            under_way = bool(self._runs)
            while self._runs:
                self._collect_oldest()
            return under_way

    def pause(self) -> bool:
        """As ``settle``; no thread starts another run, until ``resume``."""
        held = self._lock
        held.acquire()
        self._held = held  # as ``end`` may come before ``resume``
        try:
            return self.settle()
        except BaseException:
            held.release()
            raise

    def resume(self) -> None:
        """After ``pause``: runs may be started again."""
        self._held.release()

    def forget_in_child(self) -> None:
        """In a forked child: the pipeline and its runs are the parent's."""
        executor.forget_in_child(self.pipeline)
        self._runs.clear()
        self._why_lost = "forked"
        self._lock = threading.RLock()

    def end(self) -> None:
        """The interpreter ends, and the pipeline before. What this thread asks for after all builds it anew."""
        self._lock, self._in_step = threading.RLock(), False  # a thread that waits until Python ends may hold the other
