"""Operation: a torch operation recorded on tensors without values, and replayed once DALI has produced the values.

Unpickling an operation in the main process executes it and yields its result. On a CPU, most of the time of an
operation on a batch is spent on newly allocated memory, so the result overwrites the first argument if that is the
result of a pointwise operation, and nothing else refers to it.
"""

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .placeholders import ProxyBatch, ProxySample, collate_proxy_samples

MAX_DEPTH = 50
"""Maximum length of a chain of recorded operations. Longer ones are computed, because pickling is recursive."""

MAX_CACHED = 512

DEVICE_DEPENDENT = ("conv", "mm", "linalg", "fft", "upsample", "grid_sampler", "cdist", "svd", "pool", "nested") + (
    "as_strided",  # from an offset in the storage, which images of a batch share
)
"""Substrings of the names of operators that need values: their results or shapes differ on a GPU or the meta device."""

INDEXING = frozenset({"index", "index_put", "index_put_", "index_select", "gather", "take", "put", "put_"}) | {
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("index_fill", "index_fill_"),
}
"""Operators whose second or third argument is an index, or several."""

_Tag = torch.Tag
_inferred: dict[Any, Any] = {}  # shared by all loaders, because results depend only on the keys


class Operation:
    """An operation without a computed result. In its arguments, nodes stand for tensors.

    Its name is that of torch's operator, such as "aten.mul.Tensor". "set" assigns to an index of a copy, "take" selects
    one of several results, and "paint" copies several tensors into parts of a new one.
    """

    __slots__ = ("_materialized", "args", "depth", "keeps_dtype", "keeps_shape", "kwargs", "name")

    def __init__(self, name: str, args: Any, kwargs: Any, keeps_shape: bool = False, keeps_dtype: bool = False) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs
        # Whether the result has the shape of the first argument, which is not a number, and its dtype as well.
        self.keeps_shape, self.keeps_dtype = keeps_shape, keeps_dtype
        depths = (each.depth for each in flatten((args, kwargs)) if isinstance(each, Operation))
        self.depth: int = 1 + max(depths, default=0)  # length of the longest chain of operations that ends here
        self._materialized: Any = None

    def materialize(self) -> Any:
        if self._materialized is None:
            args, kwargs = map_leaves(compute_value, self.args), map_leaves(compute_value, self.kwargs)
            self._materialized = execute(self.name, args, kwargs)
        return self._materialized

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickle reduction of the operation, which unpickles to its result."""
        first, overwrites = self.args[0] if self.args else None, False
        if self.keeps_dtype and isinstance(first, Operation) and _is_pointwise_operator(first.name):
            references, unreferenced = (sys.getrefcount(each) for each in (first, object()))
            overwrites = references == unreferenced + 2  # ``first`` and the arguments
        args, kwargs = map_leaves(_wrap_output, self.args), map_leaves(_wrap_output, self.kwargs)
        return replay, (self.name, args, kwargs, overwrites)


@dataclass(eq=False, slots=True)
class OperationInput:
    """An output of DALI as an argument. It unpickles to the tensor in the dtype of the transform, not of the loader."""

    output: ProxySample | ProxyBatch


def _wrap_output(value: Any) -> Any:
    return OperationInput(value) if isinstance(value, (ProxySample, ProxyBatch)) else value


Node = Operation | ProxySample | ProxyBatch
"""Source of the values of a tensor: the result of an operation, or an output of DALI."""


def can_record(*nodes: Any) -> bool:
    """Return whether to record an operation on nodes and tensors: some are nodes, and no chain is too long."""
    is_deep = any(isinstance(each, Operation) and each.depth >= MAX_DEPTH for each in nodes)
    return not is_deep and any(isinstance(each, Node) for each in nodes)


def compute_value(node: Any) -> Any:
    """Return the tensor of a node, computed by torchvision and torch; any other value unchanged."""
    if isinstance(node, Operation):
        return node.materialize()
    if isinstance(node, ProxySample):
        return node.call.materialize()  # type: ignore[attr-defined]
    if isinstance(node, ProxyBatch):
        return torch.stack([call.materialize() for call in node.run.calls])  # type: ignore[attr-defined]
    return node


# torch.utils._pytree takes several times as long, and does not look into slices.
def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the value with a function applied to everything inside lists, tuples, dicts and slices."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, each) for each in value])
    if kind is dict:
        return {key: map_leaves(function, each) for key, each in value.items()}
    if kind is slice:
        return slice(*(map_leaves(function, each) for each in (value.start, value.stop, value.step)))
    return function(value)


def flatten(value: Any) -> list[Any]:
    """Return everything inside lists, tuples and dicts."""
    if not issubclass(type(value), (tuple, list, dict)):
        return [value]
    leaves: list[Any] = []
    for each in value.values() if isinstance(value, dict) else value:
        if issubclass(type(each), (tuple, list, dict)):  # isinstance would also look at a LazyTensor's __class__
            leaves += flatten(each)
        else:
            leaves.append(each)
    return leaves


def execute(name: str, args: Any, kwargs: Any, overwrite: bool = False) -> Any:
    """Execute a recorded operation on tensors with values, possibly overwriting the first argument."""
    function = get_operator(name)
    if name == "set" or (name not in _OWN and function._schema.is_mutable):
        tensor = args[0] if overwrite else args[0].clone()
        function(tensor, *args[1:], **kwargs)
        return tensor
    overwrite = overwrite and args[0].is_contiguous()  # others may return other strides than their own
    return ((overwrite and _get_in_place(name)) or function)(*args, **kwargs)


def _paint(base: Any, shape: Any, dtype: torch.dtype, places: Sequence[Any], values: Sequence[Any]) -> torch.Tensor:
    """Return a copy of ``base``, or a tensor of that value, with parts (size, stride, offset) set to values."""
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    is_tensor = isinstance(base, torch.Tensor)
    painted: torch.Tensor = base.clone() if is_tensor else torch.full(shape, base, dtype=dtype, device=devices[0])
    for place, value in zip(places, values):
        part = painted.as_strided(*place)
        _ = part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)
    return painted


_OWN = {"set": operator.setitem, "take": operator.getitem, "paint": _paint}


@functools.cache
def get_operator(name: str) -> Any:
    return _OWN.get(name) or functools.reduce(getattr, name.split("."), torch.ops)


@functools.cache
def _get_in_place(name: str) -> Any:
    """Return the in-place variant of an operator; None if there is none."""
    namespace, packet, overload = name.split(".")
    in_place = getattr(getattr(getattr(torch.ops, namespace), f"{packet}_", None), overload, None)
    return in_place if _is_pointwise_operator(name) else None


def _is_pointwise_operator(name: str) -> bool:
    return _Tag.pointwise in getattr(get_operator(name), "tags", ())


def stack_nodes(nodes: Sequence[Any]) -> Node:
    """Return the node of a stack. If all nodes are the same pointwise operation, it is recorded once, on the stack."""
    first = nodes[0]
    if all(isinstance(node, ProxySample) and node.output == first.output for node in nodes):
        return collate_proxy_samples(nodes)
    is_pointwise = isinstance(first, Operation) and first.keeps_shape and isinstance(first.args[0], Node)
    if is_pointwise and _is_pointwise_operator(first.name) and all(_is_same_operation(first, node) for node in nodes):
        inner = stack_nodes([node.args[0] for node in nodes])
        return Operation(first.name, (inner, *first.args[1:]), first.kwargs, True, first.keeps_dtype)
    return Operation("aten.stack.default", (list(nodes),), {})


def _is_same_operation(first: Operation, node: Any) -> bool:
    """Return whether a node is the same operation, with equal arguments after the first."""
    if not isinstance(node, Operation) or node.name != first.name:
        return False
    expected, actual = flatten((first.args[1:], first.kwargs)), flatten((node.args[1:], node.kwargs))
    return len(expected) == len(actual) and all(map(_is_equal, expected, actual))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # With at most three dimensions, it broadcasts to a batch of images as to a single image.
        return one.ndim <= 3 and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, (Operation, ProxySample, ProxyBatch)) and bool(one == other)


def replay(name: str, args: Any, kwargs: Any, overwrite: bool) -> Any:
    """Execute a recorded operation on the device of the images."""
    devices = {each.device for each in flatten((args, kwargs)) if isinstance(each, torch.Tensor)}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device != device:
            return value.to(device, non_blocking=True)
        return device if isinstance(value, torch.device) else value

    return execute(name, map_leaves(move, args), map_leaves(move, kwargs), overwrite)


# --- shape and dtype inference ----------------------------------------------------------------------------------------


def requires_values(operator: Any, args: Any) -> bool:
    """Return whether an operation needs values now, or has a different result on a GPU."""
    packet, tags = operator.__name__.partition(".")[0], operator.tags
    if _Tag.data_dependent_output in tags or _Tag.nondeterministic_seeded in tags or packet == "is_nonzero":
        return True
    if packet in INDEXING and not all(itertools.starmap(_is_in_range, _find_indices(*args))):
        return True  # the error is raised where the code may catch it, and never on a GPU
    if _Tag.dynamic_output_shape in tags:  # allowed only for integer indices
        dtypes = {each.dtype for each in flatten(args[1:]) if isinstance(each, torch.Tensor)}
        return packet != "index" or not dtypes <= {torch.int64, torch.int32}
    return packet in ("_conj", "_neg_view") or _depends_on_device(packet)  # a LazyTensor lacks the bits that these set


def _find_indices(tensor: Any, where: Any, *others: Any) -> Iterable[tuple[int, Any]]:
    """Return the sizes of the dimensions that an operation in ``INDEXING`` indexes, and the indices."""
    if isinstance(where, int):  # a dimension
        return ((tensor.shape[where], others[0]),) if tensor.ndim else ()
    return zip(tensor.shape, where) if isinstance(where, (list, tuple)) else ((tensor.numel(), where),)


def _is_in_range(size: int, index: Any) -> bool:
    if type(index) is not torch.Tensor or index.dtype not in (torch.int64, torch.int32) or not index.numel():
        return True  # an undecoded index is not known yet
    return not index.is_cpu or bool(index.min() >= -size and index.max() < size)


@functools.cache
def _depends_on_device(packet: str) -> bool:
    return any(part in packet for part in DEVICE_DEPENDENT)


def to_meta(value: Any) -> Any:
    """Return a tensor's counterpart on the meta device; any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _to_ones(value: Any) -> Any:
    return torch.ones([1] * value.ndim, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def infer_meta(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on the meta device, or raise its error. Results are cached: this is slow.

    ValueError: it ``requires_values``.
    """
    if requires_values(operator, args):
        raise ValueError
    key = operator, _get_key(args), _get_key(kwargs), torch.get_default_dtype()
    result = _inferred.get(key)
    if result is None:
        if _Tag.pointwise in operator.tags:  # the meta device accepts more dtypes and numbers than the CPU
            operator(*map_leaves(_to_ones, args), **map_leaves(_to_ones, kwargs))
        result = operator(*map_leaves(to_meta, args), **map_leaves(to_meta, kwargs))
        if len(_inferred) >= MAX_CACHED:
            _inferred.clear()
        _inferred[key] = result
    return result


def _get_key(value: Any) -> Any:
    """Return a key that is equal for arguments with which an operation returns the same shape and dtype."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        return kind, *map(_get_key, value)
    if kind is dict:
        return kind, *((name, _get_key(each)) for name, each in value.items())
    return kind if kind is float else (kind, value)
