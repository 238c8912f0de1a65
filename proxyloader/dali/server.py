"""ProxyServer: DALI's proxy server on top of a RunQueue, without its own thread. Main process."""

import itertools
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from ..data.placeholders import Proxy, ProxyBatch, ProxyInputBatch, ProxyInputs, ProxySample, check_same_kind
from . import api
from .output_format import Outputs, stack_or_list
from .run_queue import RunQueue


class ProxyServer(api.DALIServer):  # type: ignore[misc]
    """Runs a DALI pipeline on samples from a dataset.

    It has the constructor, methods and context manager of DALI's ``DALIServer``, but starts no thread.

    Use ``server.proxy`` as a transform of the dataset, and load the dataset with
    ``proxyloader.DataLoader(dataset, server=server)``. Alternatively, keep a stock ``torch.utils.data.DataLoader`` and
    call ``server.produce_data(batch)`` on each batch. A pipeline has one server, which any number of loaders may share.
    A later server takes over the pipeline, and the earlier one then raises a PipelineError.

    Args:
        pipeline: a DALI pipeline whose inputs are named ``fn.external_source`` nodes. With ``exec_async=False``, it
            runs within ``next()`` instead of concurrently with training.
        deterministic: as in DALI, start a run only when the loop requests its batch, which is slower. Otherwise, runs
            that a loop has left in flight have drawn some of the pipeline's random numbers.

    Raises:
        TypeError: ``pipeline`` is not a DALI pipeline.
        ValueError: the pipeline lacks a batch size or a number of threads, its ``stream_policy`` lets other operators
            use the stream of a GPU decoder, or an external source has ``source=`` or ``repeat_last=True``.
        RuntimeError: the pipeline has no external source, or was deserialized.
        PipelineError: other processes have exhausted the JPEG engines of the GPU, and the decoders of this pipeline
            cannot be reconfigured to work without them. Most can.
        torch.OutOfMemoryError, MemoryError: the GPU or the CPU runs out of memory.

    Source: ``nvidia.dali.plugin.pytorch.experimental.proxy.DALIServer``.
    """

    def __init__(self, pipeline: api.Pipeline, deterministic: bool = False) -> None:
        """Build the pipeline. The class documents arguments and errors."""
        self._thread_stop_event = None  # DALIServer.__del__ reads it, even after an error
        self.runs = RunQueue(pipeline, deterministic)
        self.deterministic, self._started = deterministic, False
        super().__init__(pipeline, deterministic)
        # Created here, because a forked worker cannot use the pipeline of a server that its dataset references.
        self._proxy = Proxy(self.runs.key, tuple(self._dali_input_names), self._pipe.num_outputs)

    def __repr__(self) -> str:
        return f"ProxyServer({', '.join(self._dali_input_names)}; {self.runs.num_runs} runs in flight)"

    @property
    def pipeline(self) -> api.Pipeline:
        """The DALI pipeline."""
        return self._pipe

    @property
    def proxy(self) -> Proxy:
        """Callable for a dataset, which takes the pipeline inputs of one sample. It can be pickled."""
        return self._proxy

    def __reduce__(self) -> NoReturn:
        raise TypeError("ProxyServer cannot be pickled; pass server.proxy to the dataset instead")

    def start_thread(self) -> None:
        """Open the server. No thread is started, because DALI's own threads do the work."""
        self._started = True

    def stop_thread(self) -> None:
        """Cancel all runs, without waiting. Their outputs cannot appear in a later batch."""
        if hasattr(self, "runs"):  # else the constructor failed
            self.runs.cancel_all()
            self._started = False

    def _is_thread_running(self) -> bool:
        return self._started

    def produce_data(self, obj: Any) -> Any:
        """Replace the references to pipeline outputs in a batch of a stock DataLoader.

        Args:
            obj: the batch: any structure of lists, tuples, named tuples, dicts, and objects with attributes.

        Returns:
            The structure with tensors in place of this server's references. References of other servers are kept.

        Raises:
            InputError: the samples of an input differ in dtype or number of dimensions from each other, from the
                pipeline's declaration or from earlier batches.
            PipelineError: DALI failed, or the pipeline was taken over by another server.
            torch.OutOfMemoryError, MemoryError: the GPU or the CPU runs out of memory.
        """
        calls: dict[int, ProxyInputs] = {}
        runs: dict[int, ProxyInputBatch] = {}

        def collect(ref: ProxyBatch | ProxySample) -> Any:
            if isinstance(ref, ProxySample):
                if ref.call.server == self.runs.key:
                    calls[id(ref.call)] = ref.call
            elif all(call.server == self.runs.key for call in ref.run.calls):
                runs[id(ref.run)] = ref.run
            return ref

        def resolve(ref: ProxyBatch | ProxySample) -> Any:
            result = outputs.get(id(ref.call if isinstance(ref, ProxySample) else ref.run))
            return ref if result is None else result[ref.output]

        _map_references(obj, collect, set())
        outputs: dict[int, Sequence[Any]] = dict(zip(calls, self._run_rows(list(calls.values()))))
        outputs |= {key: self._run(run) for key, run in runs.items()}
        return _map_references(obj, resolve, set())

    def _run(self, run: ProxyInputBatch) -> Outputs:
        if len(run.calls) <= self._pipe.max_batch_size:
            return self._run_calls(run.calls)
        return [stack_or_list(list(output)) for output in zip(*self._run_rows(run.calls))]

    def _run_rows(self, calls: Sequence[ProxyInputs]) -> Iterator[list[torch.Tensor]]:
        """Yield the outputs of each call. More calls than the pipeline's batch size take several runs."""
        for start in range(0, len(calls), self._pipe.max_batch_size):
            outputs = self._run_calls(calls[start : start + self._pipe.max_batch_size])
            yield from ([output[row] for output in outputs] for row in range(len(outputs[0])))

    def _run_calls(self, calls: Sequence[ProxyInputs]) -> Outputs:
        inputs = [list(arrays) for arrays in zip(*(call.inputs for call in calls))]
        for name, arrays in zip(self.runs.names, inputs):
            check_same_kind(name, arrays)
        return self.runs.collect(self.runs.submit(inputs))


def _map_references(obj: Any, function: Callable[[ProxyBatch | ProxySample], Any], seen: set[int]) -> Any:
    """Apply a function to each reference in a batch, in containers and in objects with attributes.

    Lists, dicts and objects are modified in place. ``seen`` contains the IDs of visited ones.
    """
    if isinstance(obj, (ProxyBatch, ProxySample)):
        return function(obj)
    if id(obj) in seen or isinstance(obj, (torch.Tensor, np.ndarray, str, bytes, int, float, type, type(None))):
        return obj
    if isinstance(obj, tuple):
        items = [_map_references(item, function, seen) for item in obj]
        if all(new is old for new, old in zip(items, obj)):
            return obj
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    seen.add(id(obj))
    if isinstance(obj, (MutableSequence, MutableMapping)):
        for key in list(obj) if isinstance(obj, MutableMapping) else range(len(obj)):
            obj[key] = _map_references(obj[key], function, seen)
    else:
        slots = itertools.chain(*(getattr(cls, "__slots__", ()) for cls in type(obj).__mro__))
        for name in [*getattr(obj, "__dict__", ()), *(name for name in slots if hasattr(obj, name))]:
            value = getattr(obj, name)
            if (new := _map_references(value, function, seen)) is not value:
                object.__setattr__(obj, name, new)  # frozen dataclasses too
    return obj
