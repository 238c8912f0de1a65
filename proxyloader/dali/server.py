"""ProxyServer: DALI's proxy server over a RunQueue, which has no thread. Main process."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from .._exit_safety import before_exit
from ..data.placeholders import Proxy, ProxyBatch, ProxyInputBatch, ProxyInputs, ProxySample, ServerInWorker, one_kind
from . import api
from .output_format import Outputs, stacked_or_listed
from .run_queue import RunQueue
from .substitute import map_references


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
        self.runs = RunQueue(pipeline, deterministic)
        self.deterministic, self._started = deterministic, False
        with before_exit():
            super().__init__(pipeline, deterministic)
            # Made here, since in a forked worker, whose dataset may hold the server, there is no pipeline to ask.
            self._proxy = Proxy(self.runs.key, tuple(self._dali_input_names), self._pipe.num_outputs)

    def __repr__(self) -> str:
        return f"ProxyServer({', '.join(self._dali_input_names)}; {self.runs.under_way} runs under way)"

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
        if not hasattr(self, "runs"):  # it could not be made
            return
        self.runs.cancel_all()
        self._started = False

    def _is_thread_running(self) -> bool:
        return self._started

    # --- for a stock DataLoader -------------------------------------------------------------------------------------

    def produce_data(self, obj: Any) -> Any:
        """Put the pipeline's outputs where ``obj``, a batch of a stock DataLoader, has references to them.

        Args:
            obj: any structure of lists, tuples, named tuples, dicts, and objects with attributes.

        Returns:
            The structure with tensors in place of this server's references; those of other servers stay.

        Raises:
            InputError, PipelineError: as ``RunQueue.submit`` and ``collect``.
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
        return any(call.server == self.runs.key for call in calls)

    def _run(self, run: ProxyInputBatch) -> Outputs | None:
        """The outputs of a batch; None while it waits for another server, too."""
        if len(run.calls) <= self._pipe.max_batch_size and all(call.server == self.runs.key for call in run.calls):
            return self._run_calls(run.calls)
        own = [row for row, call in enumerate(run.calls) if call.server == self.runs.key]
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
        for name, arrays in zip(self.runs.names, inputs):
            one_kind(name, arrays)
        return self.runs.collect(self.runs.submit(inputs))
