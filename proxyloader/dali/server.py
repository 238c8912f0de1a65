"""ProxyServer: DALI's proxy server over a RunQueue, without a thread of its own. Main process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from ..data.placeholders import Proxy, ProxyBatch, ProxyInputBatch, ProxyInputs, ProxySample, check_same_kind
from . import api
from .output_format import Outputs, stacked_or_listed
from .run_queue import RunQueue


class ProxyServer(api.DALIServer):  # type: ignore[misc]
    """A DALI proxy server, which runs a DALI pipeline on samples from a dataset.

    It has the constructor, methods and context manager of DALI's ``DALIServer``. It starts no thread.

    Use ``server.proxy`` as a transform of the dataset, and load it with
    ``proxyloader.DataLoader(dataset, server=server)``. Or keep a stock ``torch.utils.data.DataLoader`` and call
    ``server.produce_data(batch)`` on each of its batches. A pipeline has one server, which any number of loaders may
    share. A later server takes the pipeline over, and using the earlier one then raises a PipelineError.

    Args:
        pipeline: a DALI pipeline whose inputs are named ``fn.external_source`` nodes. With ``exec_async=False`` it runs
            within ``next()``, and not while the model trains.
        deterministic: as in DALI, start a run only when the loop asks for its batch, which is slower. If False, runs
            are also started in the order of the loop, and batches are reproducible. The only exception are random
            numbers of the pipeline after a loop was left early, as runs that were started ahead have drawn some.

    Raises:
        TypeError: ``pipeline`` is not a DALI pipeline.
        ValueError: the ``stream_policy`` of the pipeline lets other operators use the stream of a GPU decoder, or an
            external source has ``source=`` or ``repeat_last=True``.
        RuntimeError: the pipeline has no external source, or was deserialized.
        PipelineError: other processes use up the JPEG engines of the GPU, and the decoders of this pipeline cannot be
            changed any more to work without them. The decoders of most pipelines can be changed.
        torch.OutOfMemoryError, MemoryError: there is not enough memory for the pipeline, on the GPU or on the CPU.

    Source: ``nvidia.dali.plugin.pytorch.experimental.proxy.DALIServer``.
    """

    def __init__(self, pipeline: api.Pipeline, deterministic: bool = False) -> None:
        """Build the pipeline. The class documents arguments and errors."""
        self._thread_stop_event = None  # set before anything that can raise, as the __del__ of DALIServer reads it
        self.runs = RunQueue(pipeline, deterministic)
        self.deterministic, self._started = deterministic, False
        super().__init__(pipeline, deterministic)
        # Made here, as the dataset of a forked worker may hold the server, and there the pipeline cannot be used.
        self._proxy = Proxy(self.runs.key, tuple(self._dali_input_names), self._pipe.num_outputs)

    def __repr__(self) -> str:
        return f"ProxyServer({', '.join(self._dali_input_names)}; {self.runs.under_way} runs under way)"

    @property
    def pipeline(self) -> api.Pipeline:
        """The DALI pipeline."""
        return self._pipe

    @property
    def proxy(self) -> Proxy:
        """The callable to use in a dataset. It takes the pipeline inputs of one sample, and can be pickled."""
        return self._proxy

    def __reduce__(self) -> NoReturn:
        raise TypeError("ProxyServer cannot be pickled; give server.proxy to the dataset instead")

    def start_thread(self) -> None:
        """Open the server. No thread is started here, as DALI's own threads do the work."""
        self._started = True

    def stop_thread(self) -> None:
        """Cancel all runs, without waiting. Their outputs cannot appear in a later batch."""
        if not hasattr(self, "runs"):  # the constructor failed
            return
        self.runs.cancel_all()
        self._started = False

    def _is_thread_running(self) -> bool:
        return self._started

    def produce_data(self, obj: Any) -> Any:
        """Replace the references to pipeline outputs in a batch of a stock DataLoader.

        Args:
            obj: the batch: any structure of lists, tuples, named tuples, dicts, sets, and objects with attributes.

        Returns:
            The structure with tensors in place of this server's references. References of other servers are kept.

        Raises:
            InputError: the samples of an input differ in dtype or number of dimensions, or the pipeline declares others
                or took others before.
            PipelineError: DALI failed, or the pipeline was taken over by another server.
            torch.OutOfMemoryError, MemoryError: there is not enough memory for a run, on the GPU or on the CPU.
        """
        found: list[ProxyBatch | ProxySample] = []

        def note(ref: ProxyBatch | ProxySample) -> Any:
            if self._owns(ref):
                found.append(ref)
            return ref

        _map_references(obj, note, set())
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

        return _map_references(obj, output_of, set())

    def _owns(self, ref: ProxyBatch | ProxySample) -> bool:
        calls = [ref.call] if isinstance(ref, ProxySample) else ref.run.calls
        return any(call.server == self.runs.key for call in calls)

    def _run(self, run: ProxyInputBatch) -> Outputs | None:
        """Return the outputs of a batch, or None while it also waits for the outputs of another server."""
        if len(run.calls) <= self._pipe.max_batch_size and all(call.server == self.runs.key for call in run.calls):
            return self._run_calls(run.calls)
        own = [row for row, call in enumerate(run.calls) if call.server == self.runs.key]
        run.done.update(zip(own, self._rows_of([run.calls[row] for row in own])))
        if len(run.done) < len(run.calls):
            return None
        rows = [run.done[row] for row in range(len(run.calls))]
        return [stacked_or_listed(list(output)) for output in zip(*rows)]

    def _rows_of(self, calls: Sequence[ProxyInputs]) -> list[list[torch.Tensor]]:
        """Return the outputs of each call. Calls beyond the batch size of the pipeline take several runs."""
        rows: list[list[torch.Tensor]] = []
        for start in range(0, len(calls), self._pipe.max_batch_size):
            outputs = self._run_calls(calls[start : start + self._pipe.max_batch_size])
            rows += [[output[row] for output in outputs] for row in range(len(outputs[0]))]
        return rows

    def _run_calls(self, calls: Sequence[ProxyInputs]) -> Outputs:
        inputs = [list(arrays) for arrays in zip(*(call.inputs for call in calls))]
        for name, arrays in zip(self.runs.names, inputs):
            check_same_kind(name, arrays)
        return self.runs.collect(self.runs.submit(inputs))


def _map_references(obj: Any, of: Callable[[ProxyBatch | ProxySample], Any], seen: set[int]) -> Any:
    """Return a batch with ``of(reference)`` in place of each reference, in containers and in objects with attributes.

    Lists, dicts, sets and objects change in place. ``seen`` has the IDs of those that were visited, at first none.
    """
    if isinstance(obj, (ProxyBatch, ProxySample)):
        return of(obj)
    if id(obj) in seen or isinstance(obj, (torch.Tensor, np.ndarray, str, bytes, int, float, type, type(None))):
        return obj
    if isinstance(obj, tuple):
        items = [_map_references(item, of, seen) for item in obj]
        if all(new is old for new, old in zip(items, obj)):
            return obj
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    seen.add(id(obj))
    if isinstance(obj, (MutableSequence, MutableMapping)):
        for key in list(obj) if isinstance(obj, MutableMapping) else range(len(obj)):
            obj[key] = _map_references(obj[key], of, seen)
    elif isinstance(obj, MutableSet):
        items = [_map_references(item, of, seen) for item in obj]
        obj.clear()
        for item in items:
            obj.add(item)
    else:
        slots = itertools.chain(*(getattr(cls, "__slots__", ()) for cls in type(obj).__mro__))
        for name in [*getattr(obj, "__dict__", ()), *(name for name in slots if hasattr(obj, name))]:
            value = getattr(obj, name)
            new = _map_references(value, of, seen)
            if new is not value:
                object.__setattr__(obj, name, new)  # frozen dataclasses too
    return obj
