"""Placeholders for images before DALI runs: the inputs of a sample, and references to outputs."""

from __future__ import annotations

import contextlib
import io
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data._utils.collate import default_collate_fn_map

from ..errors import InputError


class ProxyInputs:
    """Inputs of one sample of a pipeline run, until they are packed."""

    __slots__ = ("inputs", "names", "run", "server", "source")

    def __init__(
        self, server: str, inputs: tuple[NDArray[Any], ...], source: str = "", names: tuple[str, ...] = ()
    ) -> None:
        self.server = server  # key of the server or the plan whose pipeline they are for
        self.inputs = inputs  # one array per external source of the pipeline, in the pipeline's order
        self.source = source  # path of the sample's file, for error messages; "" if unknown
        self.names = names or ("",) * len(inputs)  # of the inputs, for error messages
        self.run: weakref.ref[ProxyInputBatch] | None = None  # the batch they were collated into

    def __reduce__(self) -> tuple[Any, ...]:
        return ProxyInputs, (self.server, self.inputs, self.source, self.names)


@dataclass(eq=False)
class ProxyInputBatch:
    """Inputs of one batch, shared by all outputs of the batch, so that an image and its mask come from the same run."""

    calls: Sequence[ProxyInputs]

    def __reduce__(self) -> tuple[Any, ...]:
        # Only for the queue of a stock DataLoader, where torch's shared memory is the fastest transport.
        data = pickle.dumps([(call.server, call.inputs, call.source, call.names) for call in self.calls], 5)
        return _unpickle_batch, (torch.frombuffer(bytearray(data), dtype=torch.uint8),)


def _unpickle_batch(data: torch.Tensor) -> ProxyInputBatch:
    return ProxyInputBatch([ProxyInputs(*call) for call in pickle.loads(data.numpy().data)])


class TensorPlaceholder:
    """Placeholder for a tensor, whose operations raise an error with advice."""

    _advice: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: {self._advice}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise TypeError(f"{getattr(function, '__name__', function)}: {cls._advice}")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(self._advice)

    __array__ = __len__ = __bool__ = __getitem__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _refuse


@dataclass(eq=False)
class ProxySample(TensorPlaceholder):
    """Placeholder for one output of one sample, which user code may store anywhere in the sample."""

    _advice = (
        "server.proxy returns a placeholder, because the pipeline runs later, once for the whole batch. Do this in the "
        "pipeline, in a collate_fn, or on the batch. torch's default collate_fn requires such outputs in all samples "
        "of a batch, or in none"
    )

    any_created: ClassVar[bool] = False
    """Whether this process has created one. If not, batches are not searched for them."""

    call: ProxyInputs
    output: int = 0


@dataclass(frozen=True)
class ProxyBatch(TensorPlaceholder):
    """Placeholder for one output of an entire run. ``default_collate`` creates it from a list of ProxySample."""

    _advice = (
        "the batches of a stock DataLoader contain placeholders for the outputs of server.proxy. First call "
        "batch = server.produce_data(batch), or use proxyloader.DataLoader(dataset, ..., server=server)"
    )

    run: ProxyInputBatch
    output: int = 0


def collate_proxy_samples(samples: Sequence[Any], *, collate_fn_map: Any = None) -> ProxyBatch:
    """Collate ProxySamples in ``torch.utils.data.default_collate``. InputError: some are not ProxySamples."""
    if others := [type(sample).__name__ for sample in samples if not isinstance(sample, ProxySample)]:
        raise InputError(
            f"{len(others)} of {len(samples)} samples in a batch did not go through the proxy, such as a {others[0]}. "
            "Call it for all samples or for none, or pass a collate_fn that accepts both",
            code="mixed-batch",
        )
    calls = [sample.call for sample in samples]
    run = calls[0].run() if calls[0].run else None
    if run is None or len(run.calls) != len(calls) or any(a is not b for a, b in zip(run.calls, calls)):
        run = ProxyInputBatch(calls)
        calls[0].run = weakref.ref(run)
    return ProxyBatch(run, samples[0].output)


default_collate_fn_map[ProxySample] = collate_proxy_samples


@dataclass(eq=False)
class Proxy:
    """``ProxyServer.proxy``, which a dataset calls instead of a transform, with the inputs of one DALI sample.

    It can be sent to workers with every start method.
    """

    server: str  # key of the server that runs the pipeline
    input_names: tuple[str, ...]  # of the pipeline's external sources, in order
    num_outputs: int  # of the pipeline

    def __call__(self, *args: Any, **inputs: Any) -> ProxySample | tuple[ProxySample, ...]:
        """
        Args:
            args: the input of a pipeline with one input: an array, a tensor, bytes, or a number.
            inputs: the inputs by the names of the pipeline's external sources.

        Returns:
            A ProxySample, or a tuple of them if the pipeline has several outputs.

        Raises:
            InputError: the names do not match the pipeline, or DALI does not accept a value.
        """
        if len(args) == len(self.input_names) == 1 and not inputs:
            inputs, args = {self.input_names[0]: args[0]}, ()
        if args or set(inputs) != set(self.input_names):
            raise InputError(
                f"{'too many positional arguments: ' if args else ''}the pipeline's inputs are "
                f"{', '.join(self.input_names)}; got {len(args)} positional arguments and "
                f"{', '.join(inputs) or 'none by name'}. Call server.proxy({'=..., '.join(self.input_names)}=...)",
                code="wrong-number",
            )
        arrays = tuple(_to_array(name, inputs[name]) for name in self.input_names)
        call = ProxyInputs(self.server, arrays, names=self.input_names)
        ProxySample.any_created = True
        samples = tuple(ProxySample(call, output) for output in range(self.num_outputs))
        return samples[0] if self.num_outputs == 1 else samples


def _to_array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"input {name!r} must be an array or tensor of numbers, a number, or bytes, got {type(value).__name__}"
            + (f" of dtype {array.dtype}" if isinstance(value, np.ndarray) else "")
        )
    return np.asarray(array, order="C")  # np.ascontiguousarray returns at least 1-d


def check_same_kind(name: str, arrays: Sequence[NDArray[Any]]) -> None:
    """Raise InputError if the arrays of an input differ in dtype or number of dimensions."""
    kinds = {(array.dtype.str, array.ndim) for array in arrays}
    if len(kinds) > 1:
        described = ", ".join(sorted(f"{np.dtype(dtype)} with {ndim} dimensions" for dtype, ndim in kinds))
        raise InputError(
            f"input {name!r} must have one dtype and number of dimensions per batch, got {described}", code="wrong-kind"
        )


# What a search should not copy, or cannot pickle:
_SKIPPED = torch.Tensor, np.ndarray, bytes, bytearray, Image.Image, type, FunctionType, BuiltinFunctionType
_WITHOUT_PLACEHOLDERS = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor, np.ndarray})


def contains(content: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a sample or a batch contains an object of these types, wherever pickle would visit it."""
    if type(content) in (tuple, list):
        return any(contains(each, kinds) for each in content)
    if isinstance(content, kinds) or type(content) in _WITHOUT_PLACEHOLDERS:
        return isinstance(content, kinds)
    search = _Search(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    search.kinds = kinds
    with contextlib.suppress(Exception):
        search.dump(content)
    return search.is_found


class _Search(ForkingPickler):
    kinds: tuple[type, ...]
    is_found = False

    def persistent_id(self, obj: Any) -> Any:
        self.is_found |= isinstance(obj, self.kinds)
        return "" if self.is_found or isinstance(obj, _SKIPPED) else None

    def reducer_override(self, obj: Any) -> Any:
        with contextlib.suppress(Exception):
            obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return NotImplemented
        return object, ()  # continue the search after what cannot be pickled
