"""Placeholders for an image until its batch is there: the inputs of a DALI sample, and references to outputs.

They can be pickled and do not need DALI, because workers hold nothing else.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data._utils.collate import default_collate_fn_map

from ..errors import InputError
from .encoded_image import EncodedImage


class ProxyInputs:
    """Inputs of one sample of a pipeline run, until they are packed.

    Attributes:
        server: key of the server, or of the compiled transform, whose pipeline takes them.
        inputs: one array for each external source of the pipeline, in its order.
        source, names: path of the file of the sample, and names of the inputs, for error messages; "" for none.
    """

    __slots__ = ("inputs", "names", "run", "server", "source")

    def __init__(
        self, server: str, inputs: tuple[NDArray[Any], ...], source: str = "", names: tuple[str, ...] = ()
    ) -> None:
        self.server, self.inputs, self.source = server, inputs, source
        self.names = names or ("",) * len(inputs)
        self.run: weakref.ref[ProxyInputBatch] | None = None

    def __repr__(self) -> str:
        shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in self.inputs)
        return f"ProxyCall({shapes}{', ' + self.source if self.source else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ProxyInputs, (self.server, self.inputs, self.source, self.names)


class ProxyInputBatch:
    """Calls of one batch. The outputs of the batch share it, so an image and its mask come from the same run.

    ``done`` has outputs by row, while only some of the servers have produced theirs.
    """

    def __init__(self, calls: Sequence[ProxyInputs]) -> None:
        self.calls = calls
        self.done: dict[int, Sequence[torch.Tensor]] = {}

    def __repr__(self) -> str:
        return f"ProxyRun({len(self.calls)} samples)"

    def __reduce__(self) -> tuple[Any, ...]:
        # Used only on the queue of a stock DataLoader, where torch's shared memory is the fastest way.
        data = pickle.dumps([(call.server, call.inputs, call.source, call.names) for call in self.calls], 5)
        return _unpack_run, (torch.frombuffer(bytearray(data), dtype=torch.uint8),)


def _unpack_run(data: torch.Tensor) -> ProxyInputBatch:
    return ProxyInputBatch([ProxyInputs(*call) for call in pickle.loads(data.numpy().data)])


class TensorPlaceholder:
    """Placeholder for a tensor. Using it as a tensor raises an error with advice."""

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
    """Placeholder for one output of one sample. User code may put it anywhere in the sample."""

    _advice = (
        "server.proxy returns no tensor yet: the pipeline runs once for the whole batch, after the dataset. Do this in "
        "the pipeline, in a collate_fn, or on the batch. torch's default collate_fn needs such outputs in all samples "
        "of a batch, or in none"
    )

    was_handed_out: ClassVar[bool] = False
    """Whether datasets in this process may hold some. If not, batches need not be searched for them."""

    call: ProxyInputs
    output: int = 0


@dataclass(frozen=True)
class ProxyBatch(TensorPlaceholder):
    """Placeholder for one output of a whole run. ``default_collate`` makes it from a list of ProxySample."""

    _advice = (
        "in the batches of a stock DataLoader the outputs of server.proxy are no tensors yet. First call "
        "batch = server.produce_data(batch), or load with proxyloader.DataLoader(dataset, ..., server=server)"
    )

    run: ProxyInputBatch
    output: int = 0


def collate_proxy_samples(samples: Sequence[Any], *, collate_fn_map: Any = None) -> ProxyBatch:
    """Collate ProxySamples, as a function of ``torch.utils.data.default_collate``. It raises InputError for others."""
    others = [type(sample).__name__ for sample in samples if not isinstance(sample, ProxySample)]
    if others:
        raise InputError(
            f"{len(others)} of a batch of {len(samples)} did not go through the proxy, such as a {others[0]}; let the "
            "dataset call it for all samples or for none, or give the loader a collate_fn that takes both",
            code="mixed-batch",
        )
    calls = [sample.call for sample in samples]
    run = calls[0].run() if calls[0].run else None
    if run is None or len(run.calls) != len(calls) or any(a is not b for a, b in zip(run.calls, calls)):
        run = ProxyInputBatch(calls)
        calls[0].run = weakref.ref(run)
    return ProxyBatch(run, samples[0].output)


default_collate_fn_map[ProxySample] = collate_proxy_samples


class Proxy:
    """``ProxyServer.proxy``, which a dataset calls in place of a transform. Takes the inputs of one DALI sample.

    It reaches workers under every start method.

    Attributes:
        server: key of the server that runs the pipeline.
        input_names: names of the pipeline's external sources, in its order.
        num_outputs: number of outputs of the pipeline.
    """

    def __init__(self, server: str, input_names: tuple[str, ...], num_outputs: int) -> None:
        self.server, self.input_names, self.num_outputs = server, input_names, num_outputs

    def __repr__(self) -> str:
        return f"Proxy({', '.join(self.input_names)})"

    def __call__(self, *args: Any, **inputs: Any) -> ProxySample | tuple[ProxySample, ...]:
        """
        Args:
            args: the input of a pipeline with one input; an array, a tensor, bytes, or a number.
            inputs: inputs by the names of the pipeline's external sources.

        Returns:
            A ProxySample, or a tuple of them if the pipeline has several outputs.

        Raises:
            InputError: the names differ from those of the pipeline, or DALI does not accept a value.
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
        arrays = tuple(_as_array(name, inputs[name]) for name in self.input_names)
        call = ProxyInputs(self.server, arrays, names=self.input_names)
        ProxySample.was_handed_out = True
        samples = tuple(ProxySample(call, output) for output in range(self.num_outputs))
        return samples[0] if self.num_outputs == 1 else samples


def _as_array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, EncodedImage):
        raise InputError(
            f"input {name!r} is an EncodedImage, which may hold other things than its file's bytes. A pipeline of your "
            'own is given those: loader=read_bytes for the dataset, with open(path, "rb").read() in read_bytes'
        )
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"input {name!r} is a {type(value).__name__}"
            + (f" of dtype {array.dtype}" if isinstance(value, np.ndarray) else "")
            + "; DALI takes arrays and tensors of numbers, numbers, and bytes"
        )
    return np.asarray(array, order="C")  # np.ascontiguousarray would make a 0-d array 1-d


def one_kind(name: str, arrays: Sequence[NDArray[Any]]) -> None:
    """Raise InputError if the arrays of an input differ in dtype or number of dimensions."""
    kinds = {(array.dtype.str, array.ndim) for array in arrays}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{np.dtype(dtype)} with {ndim} dimensions" for dtype, ndim in kinds))
        raise InputError(
            f"input {name!r} of the pipeline differs within a batch: {found}. DALI takes one kind", code="wrong-kind"
        )


_LARGE = (torch.Tensor, np.ndarray, bytes, bytearray, Image.Image)
"""Objects that hold no others, and are not copied by a search."""

_WITHOUT_PLACEHOLDERS = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor, np.ndarray})


def holds(content: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a sample or a batch holds an object of these kinds, in any object that pickle would visit."""
    if type(content) in (tuple, list):
        return any(holds(each, kinds) for each in content)
    if isinstance(content, kinds) or type(content) in _WITHOUT_PLACEHOLDERS:
        return isinstance(content, kinds)
    search = _Search(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    search.kinds = kinds
    with contextlib.suppress(Exception):  # what cannot be pickled is not searched further
        search.dump(content)
    return search.has_found


class _Search(ForkingPickler):
    kinds: tuple[type, ...]
    has_found = False

    def persistent_id(self, obj: Any) -> Any:
        self.has_found |= isinstance(obj, self.kinds)
        return "" if self.has_found or isinstance(obj, _LARGE) else None
