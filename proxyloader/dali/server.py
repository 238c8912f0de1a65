"""ProxyServer: runs a DALI pipeline in the training process. It has no thread and no queue.

NOTE [ The order of runs ]
A DALI pipeline gives its outputs back in the order in which its runs were started. The server keeps a
PipelineRun for each in that order, and whoever collects one collects those before it first. So outputs cannot be
mistaken for each other. After a break the run is cancelled: its outputs are taken and dropped. An error stays with its
run. Two loaders may share a server. Runs start when they are submitted and go on in DALI's own threads; the thread that
trains waits only where it needs an output that is not there yet.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch

from .. import _fork_safety
from .._exit_safety import before_exit
from ..data.placeholders import Proxy, ProxyBatch, ProxyInputBatch, ProxyInputs, ProxySample, ServerInWorker, one_kind
from ..errors import InputError, PipelineError
from . import api, executor, jpeg_engines
from . import outputs as _outputs
from .input_checks import check_declared, fed_sources
from .output_format import Output as Output
from .output_format import Outputs as Outputs
from .output_format import stacked_or_listed
from .run import Kinds, PipelineRun
from .substitute import map_references

log = logging.getLogger(__name__)

WAITED_S = 0.001
"""Who waited longer for a run saw it end."""

SURELY = 0.8
"""Of the shortest time that a run took: in so much it will not end."""


class ProxyServer(api.DALIServer):  # type: ignore[misc]
    """DALI's proxy server, made safe: upstream's constructor, methods and ``with``; one message, no thread.

    Use ``server.proxy`` as a transform, and let ``proxyloader.DataLoader(dataset, server=server)`` do the rest; or keep
    a stock ``torch.utils.data.DataLoader`` and call ``server.produce_data(batch)`` on what it gives. A pipeline has one
    server, for any number of loaders; a later one takes it over, and the earlier one's use is a PipelineError then.

    Args:
        pipeline: a DALI pipeline whose inputs are named ``fn.external_source`` nodes. (With ``exec_async=False`` it
            works in ``next()`` alone, not beside the model.)
        deterministic: as upstream: no run is started before the loop asks for its batch, which is slower. Without it,
            too, runs are started in the loop's order, and batches are reproducible, but for what the pipeline itself
            draws at random after a loop was left early: runs that were started ahead have drawn.

    Raises:
        TypeError: ``pipeline`` is not a DALI pipeline.
        ValueError: its ``stream_policy`` lets other operators work in the stream of a GPU's decoder; or an external
            source has ``source=`` or ``repeat_last=True``.
        RuntimeError: it has no external source.
        PipelineError: other processes use up the GPU's JPEG engines, which its decoders are to use, and that they leave
            them alone cannot be told to them any more. (To most it can, and is.)

    Source: ``nvidia.dali.plugin.pytorch.experimental.proxy.DALIServer``.
    """

    def __init__(self, pipeline: api.Pipeline, deterministic: bool = False) -> None:
        """Build the pipeline. Arguments and errors stand at the class."""
        self._thread_stop_event = None  # before anything that can raise: upstream's __del__ looks at it
        sources = fed_sources(pipeline)
        if executor.shares_decoder_stream(pipeline):
            raise ValueError(
                f"the pipeline has stream_policy={pipeline.stream_policy.name}, with which DALI may write decoded "
                "pictures over those of an earlier batch; leave it out, or give StreamPolicy.PER_BACKEND, the default"
            )
        self._runs: deque[PipelineRun] = deque()
        self._lock = self._held = threading.RLock()
        self.deterministic = deterministic
        self._started = self._is_lost = self._is_forked = False
        self._in_step = True  # there is a PipelineRun for each run that DALI has, and no other
        executor.take_over(pipeline, self)  # from here on another server may take it from this one
        executor.drop_runs(pipeline)
        self.key = f"server-{uuid.uuid4().hex}"
        with before_exit():
            jpeg_engines.build(pipeline)  # before upstream does, which knows neither engines nor memory that is short
            super().__init__(pipeline, deterministic)
            # Made here, since in a forked worker, whose dataset may hold the server, there is no pipeline to ask.
            self._proxy = Proxy(self.key, tuple(self._dali_input_names), self._pipe.num_outputs)
        self._declared = [executor.declared_kind(pipeline, source) for source in sources]
        self._kinds: Kinds | None = None  # of the inputs of runs that succeeded
        self._failed: Kinds | None = None  # of the inputs of the last run, where it failed
        self._lone_run_s = math.inf  # the shortest time that a run took, none being before it
        _fork_safety.watch(self)

    def __repr__(self) -> str:
        return f"ProxyServer({', '.join(self._dali_input_names)}; {len(self._runs)} runs under way)"

    @property
    def pipeline(self) -> api.Pipeline:
        """The DALI pipeline."""
        return self._pipe

    @property
    def proxy(self) -> Proxy:
        """The callable that stands in for the pipeline in a dataset: give it one sample's inputs. Can be pickled."""
        return self._proxy

    def __reduce__(self) -> tuple[Any, ...]:
        """In a worker that is not forked the server is its proxy, which is all that a dataset needs of it.

        Raises:
            TypeError: it is pickled or copied for anything else.
        """
        if get_spawning_popen() is None:
            raise TypeError("a ProxyServer cannot be pickled or copied; its proxy can: server.proxy")
        return ServerInWorker, (self._proxy,)

    # --- upstream's way to start and stop ---------------------------------------------------------------------------

    def start_thread(self) -> None:
        """Open the server. DALI's own threads do the work, so none is started here."""
        self._started = True

    def stop_thread(self) -> None:
        """Forget what is under way. Returns at once; nothing of it can appear in a later batch."""
        if not hasattr(self, "_lock"):
            return
        with self._lock:
            for pipeline_run in self._runs:
                pipeline_run.cancel()
        self._started = False

    def _is_thread_running(self) -> bool:
        return self._started

    # --- runs -------------------------------------------------------------------------------------------------------

    def submit(self, inputs: Sequence[Any]) -> PipelineRun:
        """Start a run.

        Args:
            inputs: for each input of the pipeline, in its order, an array (N, ...) or a list of N arrays. Their memory
                must stay as it is until ``PipelineRun.inputs_released()``.

        Raises:
            InputError: an input has another dtype or number of dimensions than before, or than the pipeline declares,
                or N is too large.
        """
        with self._lock:
            self._check_owned()
            self._get_in_step()
            if not self._pipe.exec_async:
                self.settle()  # DALI's queue of outputs may be full: the run would wait for this very thread
            if self._failed is not None and not self._pipe.exec_dynamic:
                self.settle()  # they have failed, too
                self._rebuild()
            pipeline_run = PipelineRun(len(inputs[0]), self._kinds_of(inputs))
            batches = [executor.tensor_list(samples) for samples in inputs]
            self._in_step = False
            with before_exit():
                for name, batch in zip(self._dali_input_names, batches):
                    self._pipe.feed_input(name, batch)
                pipeline_run.inputs = batches
                executor.run(self._pipe)
            pipeline_run.was_alone = not self._runs
            if pipeline_run.was_alone and self._lone_run_s < math.inf:
                pipeline_run.busy_until_s = pipeline_run.started_s + SURELY * self._lone_run_s
            self._runs.append(pipeline_run)
            self._in_step = True
            return pipeline_run

    def _kinds_of(self, inputs: Sequence[Any]) -> Kinds:
        """Check a run's inputs. A batch that DALI refuses would stay at the head of its queue for ever."""
        if len(inputs[0]) > self._pipe.max_batch_size:
            raise InputError(
                f"a batch of {len(inputs[0])} for a pipeline of batch_size={self._pipe.max_batch_size}",
                code="large-batch",
            )
        kinds = tuple((samples[0].dtype.str, samples[0].ndim) for samples in inputs)
        for name, kind, declared in zip(self._dali_input_names, kinds, self._declared):
            check_declared(name, kind, declared)
        if self._runs and self._runs[-1].kinds != kinds:
            self.settle()  # whether those kinds are right is known when such a run has succeeded
        if self._kinds is None and self._failed not in (None, kinds):
            self._rebuild()  # DALI holds on to the kinds of the first batch, which was not the right one
        for name, kind, known in zip(self._dali_input_names, kinds, self._kinds or kinds):
            if kind != known:
                raise InputError(
                    f"input {name!r} of the pipeline was {np.dtype(known[0])} with {known[1]} dimensions until now, "
                    f"and is {np.dtype(kind[0])} with {kind[1]} in this batch. DALI takes one kind for each input",
                    code="wrong-kind",
                )
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
        if pipeline_run.cancelled:
            raise PipelineError("this run was forgotten: the server was stopped", code="stopped")
        if isinstance(pipeline_run.error, (torch.OutOfMemoryError, MemoryError)):
            raise type(pipeline_run.error)(
                str(pipeline_run.error)
            ) from pipeline_run.error  # whose own frames would hold the run
        if pipeline_run.error is not None:
            failure = f"the DALI pipeline failed on a batch of {pipeline_run.size}: {pipeline_run.error}"
            raise PipelineError(failure) from pipeline_run.error
        outputs, pipeline_run.outputs = pipeline_run.outputs, None
        if outputs is None:
            raise PipelineError("this run was interrupted, or collected before", code="stopped")
        if pipeline_run.finished is not None and pipeline_run.stream != self._stream():
            _hand_over(outputs, pipeline_run.finished, self._stream())
        return outputs

    def _collect_oldest(self) -> None:
        pipeline_run, self._in_step = self._runs[0], False
        stream, asked_s = self._stream(), time.monotonic()
        outputs: Outputs = []
        try:
            with before_exit():
                outputs = self._take_outputs(stream)
        except torch.OutOfMemoryError as error:
            pipeline_run.error = error.with_traceback(None)  # which would hold this frame, and the run in it
        except (RuntimeError, MemoryError) as error:
            if not executor.is_of_a_run(error):
                raise  # DALI may have the run still, and so all are begun anew
            pipeline_run.error = error.with_traceback(None)
            if executor.is_out_of_memory(error):
                pipeline_run.error = executor.out_of_memory(
                    error, self._pipe.device_id, f"a batch of {pipeline_run.size}"
                )
            self._failed = pipeline_run.kinds
        self._runs.popleft()
        pipeline_run.ended = self._in_step = True
        if pipeline_run.error is not None:
            return
        self._kinds, self._failed = self._kinds or pipeline_run.kinds, None
        now_s = time.monotonic()
        if pipeline_run.was_alone and now_s - asked_s > WAITED_S:  # else it was done before, nobody knows when
            self._lone_run_s = min(self._lone_run_s, now_s - pipeline_run.started_s)
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
        self._in_step = True

    def _take_outputs(self, stream: torch.cuda.Stream | None) -> Outputs:
        """Those of the oldest run, in torch's memory."""
        return _outputs.take_outputs(self._pipe, stream)

    def _rebuild(self) -> None:
        log.info("building the pipeline anew after a failure")
        self._in_step = False  # if there is no memory for it, the next run begins with it
        executor.take_apart(self._pipe)
        jpeg_engines.build(self._pipe)
        self._failed, self._in_step = None, True

    def lose_pipeline(self) -> None:
        """Another server, or a loader, was made over the pipeline. What is under way is lost."""
        with self._lock:
            self.settle()  # so that the pipeline need not be built anew, with the random numbers it began with
            self._runs.clear()
            self._is_lost = True

    def _check_owned(self) -> None:
        if self._is_forked:
            raise PipelineError(
                "this ProxyServer belongs to the process that this one was forked from: make one here, and a pipeline",
                code="forked",
            )
        if self._is_lost:
            raise PipelineError(
                "another ProxyServer or FileReaderLoader was made over this server's pipeline, which cannot serve two: "
                "give both loaders one server, or each a pipeline of its own",
                code="taken",
            )

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
        executor.forget_in_child(self._pipe)
        self._runs.clear()
        self._is_forked = True
        self._lock = threading.RLock()

    def end(self) -> None:
        """The interpreter ends, and the pipeline before. What this thread asks for after all builds it anew."""
        self._lock, self._in_step = threading.RLock(), False  # a thread that waits until Python ends may hold the other

    def _stream(self) -> torch.cuda.Stream | None:
        device_id = self._pipe.device_id
        return torch.cuda.current_stream(device_id) if device_id is not None and torch.cuda.is_available() else None

    # --- for a stock DataLoader -------------------------------------------------------------------------------------

    def produce_data(self, obj: Any) -> Any:
        """Put the pipeline's outputs where ``obj``, a batch of a stock DataLoader, has references to them.

        Args:
            obj: any structure of lists, tuples, named tuples, dicts, and objects with attributes.

        Returns:
            The structure with tensors in place of this server's references; those of other servers stay.

        Raises:
            InputError, PipelineError: as ``submit`` and ``collect``.
        """
        found: list[ProxyBatch | ProxySample] = []

        def note(ref: ProxyBatch | ProxySample) -> Any:
            if self._owns(ref):
                found.append(ref)
            return ref

        map_references(obj, note, set())
        singles = {id(ref.call): ref.call for ref in found if isinstance(ref, ProxySample)}
        of_call = dict(zip(singles, self._rows_of(list(singles.values()))))
        of_run = {id(ref.run): self._run(ref.run) for ref in found if isinstance(ref, ProxyBatch)}

        def output_of(ref: ProxyBatch | ProxySample) -> Any:
            if not self._owns(ref):
                return ref
            if isinstance(ref, ProxySample):
                return of_call[id(ref.call)][ref.output]
            outputs = of_run[id(ref.run)]
            return ref if outputs is None else outputs[ref.output]

        return map_references(obj, output_of, set())

    def _owns(self, ref: ProxyBatch | ProxySample) -> bool:
        calls = [ref.call] if isinstance(ref, ProxySample) else ref.run.calls
        return any(call.server == self.key for call in calls)

    def _run(self, run: ProxyInputBatch) -> Outputs | None:
        """The outputs of a batch; None while it waits for another server, too."""
        if len(run.calls) <= self._pipe.max_batch_size and all(call.server == self.key for call in run.calls):
            return self._run_calls(run.calls)
        own = [row for row, call in enumerate(run.calls) if call.server == self.key]
        run.done.update(zip(own, self._rows_of([run.calls[row] for row in own])))
        if len(run.done) < len(run.calls):
            return None
        rows = [run.done[row] for row in range(len(run.calls))]
        return [stacked_or_listed(list(output)) for output in zip(*rows)]

    def _rows_of(self, calls: Sequence[ProxyInputs]) -> list[list[torch.Tensor]]:
        """The outputs of each call, from as many runs as they need."""
        rows: list[list[torch.Tensor]] = []
        for start in range(0, len(calls), self._pipe.max_batch_size):
            outputs = self._run_calls(calls[start : start + self._pipe.max_batch_size])
            rows += [[output[row] for output in outputs] for row in range(len(outputs[0]))]
        return rows

    def _run_calls(self, calls: Sequence[ProxyInputs]) -> Outputs:
        inputs = [list(arrays) for arrays in zip(*(call.inputs for call in calls))]
        for name, arrays in zip(self._dali_input_names, inputs):
            one_kind(name, arrays)
        return self.collect(self.submit(inputs))


def _hand_over(outputs: Outputs, finished: torch.cuda.Event, stream: torch.cuda.Stream | None) -> None:
    """Let another stream than the one that received the outputs use them."""
    assert stream is not None
    stream.wait_event(finished)
    for output in outputs:
        for tensor in output if isinstance(output, list) else [output]:
            if tensor.is_cuda:
                tensor.record_stream(stream)
