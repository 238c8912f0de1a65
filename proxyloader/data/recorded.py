"""Operations of torch's on tensors without values, recorded by a dataset and done when DALI has made the values.

They are recorded in the worker. Pickled, an operation becomes its result: it is done where it is unpickled. A batch is
large, and on a CPU most of the time of an operation goes into new memory. So an operation writes over its first
argument where nothing else uses that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .placeholders import ProxyBatch, ProxySample, collate_proxy_samples

DEEPEST = 50
"""Number of operations, each on the result of the one before, after which values are made. Pickle recurses as deep."""

MOST_KNOWN = 512
"""Maximum number of cached results."""

DEVICES_DIFFER = ("conv", "mm", "matmul", "linalg", "fft", "upsample", "grid_sampler", "cdist", "svd", "pool")
"""Parts of the names of operations of which a GPU computes noticeably different values."""

_Tag = torch.Tag
_known: dict[Any, Any] = {}  # for all loaders, as it is a function of torch's operators and of its keys


class Operation:
    """An operation whose values are not computed yet. In its arguments nodes stand for tensors.

    ``name`` is that of torch's operator, such as "aten.mul.Tensor". "set" assigns to an index of a copy. "take" takes
    one of several results. ``keeps_shape`` says that the result has the shape of the first argument, not that of a
    number; ``keeps_kind``, that it has its dtype, too. ``depth`` counts it and those before it.
    """

    __slots__ = ("_real", "args", "depth", "keeps_kind", "keeps_shape", "kwargs", "name")

    def __init__(self, name: str, args: Any, kwargs: Any, keeps_shape: bool = False, keeps_kind: bool = False) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs
        self.keeps_shape, self.keeps_kind = keeps_shape, keeps_kind
        before = (each.depth for each in leaves((args, kwargs)) if isinstance(each, Operation))
        self.depth: int = 1 + max(before, default=0)
        self._real: Any = None

    def real(self) -> Any:
        if self._real is None:
            self._real = done(self.name, mapped(value_of, self.args), mapped(value_of, self.kwargs))
        return self._real

    def reduced(self, is_used_once: Callable[[Any], bool] = lambda output: False) -> tuple[Any, ...]:
        """Return what pickle takes for an object, which becomes the result of the operation.

        ``is_used_once`` says of an output of DALI's that the pickle refers to it only here.
        """
        first = self.args[0] if self.args else None
        used_once = is_used_once(first) if isinstance(first, (ProxySample, ProxyBatch)) else False
        if isinstance(first, Operation):  # two references are those of this function
            used_once = first.is_fresh and sys.getrefcount(first) == 1 + 2
        args, kwargs = mapped(_as_recorded, self.args), mapped(_as_recorded, self.kwargs)
        return _replayed, (self.name, args, kwargs, used_once and self.keeps_kind)

    __reduce__ = reduced

    @property
    def is_fresh(self) -> bool:
        """Whether the result has memory of its own."""
        if self.name in ("set", "take"):
            return self.name == "set"
        return _is_by_value(self.name) or operator_of(self.name)._schema.is_mutable


class _Input:
    """An output of DALI's that an operation is done to. Pickled, it becomes the tensor, in the dtype of the transform.

    DALI makes it in the dtype of the loader, to which the result of the operation is converted at last.
    """

    __slots__ = ("output",)

    def __init__(self, output: ProxySample | ProxyBatch) -> None:
        self.output = output

    def __reduce__(self) -> tuple[Any, ...]:
        call = self.output.call if isinstance(self.output, ProxySample) else self.output.run.calls[0]
        return torch.Tensor.to, (self.output, getattr(torch, call.plan.output.dtype))  # type: ignore[attr-defined]


def _as_recorded(value: Any) -> Any:
    return _Input(value) if isinstance(value, (ProxySample, ProxyBatch)) else value


Node = Operation | ProxySample | ProxyBatch
"""What the values of a tensor will be: the result of an operation, or an output of DALI's."""


def may_go_on(*nodes: Any) -> bool:
    """Return whether an operation on nodes and tensors is recorded: one has no values yet, and none is too deep."""
    is_deep = any(isinstance(each, Operation) and each.depth >= DEEPEST for each in nodes)
    return not is_deep and any(isinstance(each, Node) for each in nodes)


def value_of(node: Any) -> Any:
    """Return the tensor that a node stands for, as torchvision makes it; any other value unchanged."""
    if isinstance(node, Operation):
        return node.real()
    if isinstance(node, ProxySample):
        return node.call.outputs()[node.output]  # type: ignore[attr-defined]
    if isinstance(node, ProxyBatch):
        return torch.stack([call.outputs()[node.output] for call in node.run.calls])  # type: ignore[attr-defined]
    return node


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the value with a function applied to all that is in lists, tuples and dicts."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(function, each) for each in value])
    if kind is dict:
        return {key: mapped(function, each) for key, each in value.items()}
    if kind is slice:
        return slice(*(mapped(function, each) for each in (value.start, value.stop, value.step)))
    return function(value)


def leaves(value: Any) -> list[Any]:
    """Return all that is in lists, tuples and dicts, in order."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return [value]
    found: list[Any] = []
    for each in value:
        if isinstance(each, (tuple, list, dict)):
            found += leaves(each)
        else:
            found.append(each)
    return found


def done(name: str, args: Any, kwargs: Any, writes_over: bool = False) -> Any:
    """Return the result of a recorded operation on tensors with values. It may be written over the first argument."""
    if name == "take":
        return args[0][args[1]]
    if name == "set":
        tensor = args[0] if writes_over else args[0].clone()
        tensor[args[1]] = args[2]
        return tensor
    operator = operator_of(name)
    if operator._schema.is_mutable:
        tensor = args[0] if writes_over else args[0].clone()
        operator(tensor, *args[1:], **kwargs)
        return tensor
    in_place = _in_place(name) if writes_over else None
    return (in_place or operator)(*args, **kwargs)


@functools.cache
def operator_of(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), torch.ops)


@functools.cache
def _in_place(name: str) -> Any:
    """Return the operator that writes the result over the first argument; None if there is none."""
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), f"{packet}_", None), overload, None)
    return found if _is_by_value(name) else None


def _is_by_value(name: str) -> bool:
    """Return whether an operator makes each value of its result by itself."""
    return _Tag.pointwise in operator_of(name).tags


def stack_of(nodes: Sequence[Any]) -> Node:
    """Return the node of a stack. An operation that was done alike to each is done once, for all of them."""
    first = nodes[0]
    if all(isinstance(node, ProxySample) and node.output == first.output for node in nodes):
        return collate_proxy_samples(nodes)
    if _is_pointwise(first) and all(_is_alike(first, node) for node in nodes):
        inner = stack_of([node.args[0] for node in nodes])
        return Operation(first.name, (inner, *first.args[1:]), first.kwargs, True, first.keeps_kind)
    return Operation("aten.stack.default", (list(nodes),), {})


def _is_pointwise(node: Any) -> bool:
    """Return whether a node is an operation on each value of its first argument by itself."""
    if not isinstance(node, Operation) or not node.keeps_shape or not isinstance(node.args[0], Node):
        return False
    return _is_by_value(node.name)  # "set" and "take" do not keep a shape


def _is_alike(first: Operation, node: Any) -> bool:
    """Return whether an operation does the same, with the same numbers, to another tensor."""
    if not isinstance(node, Operation) or node.name != first.name:
        return False
    rest, others = leaves((first.args[1:], first.kwargs)), leaves((node.args[1:], node.kwargs))
    return len(rest) == len(others) and all(map(_is_equal, rest, others))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # One of fewer dimensions is broadcast to a batch of images as it is to an image.
        return one.ndim <= 3 and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, (Operation, ProxySample, ProxyBatch)) and bool(one == other)


def _replayed(name: str, args: Any, kwargs: Any, writes_over: bool) -> Any:
    """Do a recorded operation on the device of the images."""
    devices = {each.device for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))

    def placed(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device != device:
            return value.to(device, non_blocking=True)
        return device if isinstance(value, torch.device) else value

    return done(name, mapped(placed, args), mapped(placed, kwargs), writes_over)


# --- shape and dtype of results ---------------------------------------------------------------------------------------


def uses_values(packet: str, tags: Any, args: Any) -> bool:
    """Return whether an operation of torch, such as "add", uses the values, or has another result on a GPU."""
    if _Tag.data_dependent_output in tags or _Tag.nondeterministic_seeded in tags or packet == "is_nonzero":
        return True
    if _Tag.dynamic_output_shape in tags:  # but not for indices that are whole numbers
        dtypes = {each.dtype for each in leaves(args[1:]) if isinstance(each, torch.Tensor)}
        return packet != "index" or not dtypes <= {torch.int64, torch.int32}
    if packet in ("sub", "rsub", "neg") and any(getattr(each, "dtype", None) is torch.bool for each in args):
        return True  # which the meta device does not refuse
    if packet in ("_conj", "_neg_view"):
        return True  # they set a bit, which a LazyTensor does not have
    return "nested" in packet or any(part in packet for part in DEVICES_DIFFER)


def on_meta(value: Any) -> Any:
    """Return a tensor like the value on torch's meta device, where it has no values; what is no tensor unchanged."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def result_like(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation without values. It takes torch long, so the last ones are kept.

    Raises:
        Exception: the operator does not take the arguments, or is not defined without values.
    """
    key = operator, _kind_of(args), _kind_of(kwargs), torch.get_default_dtype()
    try:
        found = _known.get(key)
    except TypeError:  # an argument cannot be hashed
        return operator(*mapped(on_meta, args), **mapped(on_meta, kwargs))
    if found is None:
        found = operator(*mapped(on_meta, args), **mapped(on_meta, kwargs))
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = found
    return found


def _kind_of(value: Any) -> Any:
    """Return a key that is the same for arguments with which an operation has results of one shape and dtype."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        return kind, *map(_kind_of, value)
    if kind is dict:
        return kind, *((name, _kind_of(each)) for name, each in value.items())
    return kind if kind is float else (kind, value)
