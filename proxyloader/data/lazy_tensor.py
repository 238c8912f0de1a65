"""LazyTensor: a torch tensor of an image that is decoded when its values are used. Runs where the dataset runs.

NOTE [ Tensors decoded late ]
A compiled transform returns tensors without values, as DALI makes those of a whole batch later. Shape and dtype are
known. What torch does to such a tensor is recorded, and done on the loader's device when DALI has made the values. So a
dataset may write ``transform(image) * 2``, and a collate_fn may stack, mix and cut, and draws its random numbers where
the stock loader draws them.

Code that uses values, as ``float(x.mean())``, ``x.numpy()`` or ``if (x > 0).any()`` do, gets those that torchvision
makes of the image that Pillow decodes, with the random numbers that were drawn: those of the stock loader. The tensor
then has these values, and travels as any other. The same holds for operations that draw random numbers, that have a
result whose shape depends on values, or that CUDA computes in a noticeably different way.

torch says of each operation which of this applies: ``torch.Tag``. A result's shape is asked of torch's meta device.
Its type equals that of the tensor that it stands for, so that it is found in dicts by type: see ``_StockType``. An
operation with a gradient is computed at once, from values to values, as a graph cannot be recorded.

An operation in place is recorded for a tensor alone. If others share its memory, all of them are made real first.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import operator as operators
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torchvision import tv_tensors
from torchvision.tv_tensors._torch_function_helpers import _FORCE_TORCHFUNCTION_SUBCLASS, _must_return_subclass

from .lazy_image import is_late
from .placeholders import ProxyBatch, ProxySample, collate_proxy_samples
from .recorded import Node, Operation, leaves, mapped, may_go_on, on_meta, result_like, stack_of, uses_values, value_of
from .transformed import Transformed

CONVERT = 'Convert all of them to one mode, as by image.convert("RGB"), or put Grayscale(3) into the transform'
"""Advice for images of several numbers of channels."""

RESIZE = (
    "Add a Resize to (height, width) or a crop to the transform, or give the loader a collate_fn that takes images of "
    "several sizes"
)
"""Advice for images of several sizes."""

UNREACHABLE = (
    "the values of an image, or of what is computed from it, are read in a way that proxyloader does not see. "
    "Load this dataset with DataLoader(translate=False)"
)
"""The error of C++ code that reads the memory of a LazyTensor by itself, and would find none."""

SET_DATA = vars(torch._C.TensorBase)["data"].__set__
"""What ``tensor.data = other`` calls."""

GET_GRAD = vars(torch._C.TensorBase)["grad"].__get__
SET_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__set__

USES_VALUES = frozenset(
    {
        *("numpy", "tolist", "item", "data_ptr", "storage", "untyped_storage", "_typed_storage", "share_memory_"),
        *("pin_memory", "is_shared", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__", "__repr__"),
        *("__format__", "__contains__", "__bool__", "__float__", "__int__", "__index__", "set_", "apply_", "map_"),
        "new_tensor",
    }
)
"""Methods of tensors that use the values without an operation of torch's."""

WITHOUT_VALUES = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}) | {
    *("randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
}
"""Operations that use nothing of a tensor but its shape, strides and dtype."""

_CPU = torch.device("cpu")
_Tag = torch.Tag
_set_class = vars(object)["__class__"].__set__


class _StockType(type(torch.Tensor)):  # type: ignore[misc]
    """Type of a class that equals the one that others take it for, as which it is found in dicts and sets."""

    stock: type[torch.Tensor]

    def __eq__(cls, other: object) -> bool:
        return cls is other or cls.stock is other

    def __hash__(cls) -> int:
        return hash(cls.stock)


copyreg.pickle(_StockType, lambda cls: (operators.getitem, ((cls.stock,), 0)))


class LazyTensor(torch.Tensor, metaclass=_StockType):
    """A tensor on the CPU whose values may not be computed yet. To other code it is a ``torch.Tensor``.

    All that is computed from one is one. So the loader knows what belongs on its device, whoever has computed it.
    """

    stock = torch.Tensor

    __class__ = property(lambda self: type(self).stock)

    was_made: ClassVar[bool] = False
    """Whether this process has created one. If not, batches need not be searched for them."""

    is_packed: ClassVar[bool] = False
    """Whether this process is a worker of a loader that takes tensors without values, which it is for good."""

    _node: Node | torch.Tensor
    """What its values will be; a tensor when they are there."""

    _source: tuple[LazyTensor, Callable[[torch.Tensor], torch.Tensor]] | None = None
    """The tensor whose memory it shares, and the function that gives its part of that; None for memory of its own."""

    _sharing: list[weakref.ref[LazyTensor]] | None = None
    """All tensors that share its memory; None if there is no other."""

    _has_known_order: bool = True
    """Whether its strides are those that torchvision's tensor has, in whose order random numbers are dealt out."""

    @staticmethod
    def __new__(cls, like: torch.Tensor, node: Node | torch.Tensor) -> LazyTensor:
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=_CPU
        )
        made._node = node
        with torch._C.DisableTorchFunctionSubclass():
            torch._C._set_storage_data_ptr_access_error_msg(made.untyped_storage()._cdata, UNREACHABLE)
        LazyTensor.was_made = True
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Also called by ``tv_tensors.Image(late)``, which is given one of these by ``as_subclass``."""

    def __getattr__(self, name: str) -> Any:
        if name != "_node":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # A plain tensor that ``tv_tensors.wrap(tensor, like=...)`` has given this class.
        with no_dispatch():
            values = torch.Tensor.as_subclass(self, torch.Tensor)
        self._node = values
        return values

    def as_subclass(self, cls: Any) -> Any:  # torch asks neither of the functions below
        stock = getattr(cls, "stock", cls)
        if stock in (torch.Tensor, tv_tensors.Image) and not has_gradient(self):
            return _alias(self, LazyTensor if stock is torch.Tensor else LazyImageTensor)
        return with_values(real(self).as_subclass(stock))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _needs_graph(function, args, kwargs):
            if _sets_requires_grad(function):
                real(args[0])
                args[0]._node = values_of(args[0])
                with torch._C.DisableTorchFunctionSubclass():
                    function(*args, **kwargs)  # for an autograd.Function, of whose arguments torch asks no class
            if function == GET_GRAD:
                _gather_grad(args[0])
            return _computed(function, args, kwargs)
        name = getattr(function, "__name__", "")
        if function is torch.Tensor.__setitem__:
            return _set(*args)
        if name in USES_VALUES or function == SET_DATA:
            return function(*mapped(real, args), **mapped(real, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator is torch.ops.aten.view.default:  # the strides of the values may be others than torch was told
            operator = torch.ops.aten.reshape.default
        result = _recorded(operator, args, kwargs)
        if result is not NotImplemented:
            return result
        result = _computed(operator, args, kwargs)
        if _Tag.inplace_view in operator.tags and isinstance(args[0], LazyTensor):
            with no_dispatch():
                operator(*args, **kwargs)
        return result


class LazyImageTensor(LazyTensor, tv_tensors.Image):  # type: ignore[misc]
    """A LazyTensor that others take for a ``torchvision.tv_tensors.Image``."""

    stock = tv_tensors.Image

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return an image where torchvision does, and a pure tensor elsewhere."""
        if function is torch.Tensor.__repr__:
            return repr(values_of(args[0]) if is_real(args[0]) else real(args[0]).as_subclass(tv_tensors.Image))
        result = LazyTensor.__torch_function__(function, types, args, kwargs)
        is_forced = function in _FORCE_TORCHFUNCTION_SUBCLASS and isinstance(args[0], LazyImageTensor)
        if is_forced or _must_return_subclass():
            return mapped(as_image, result)
        return result.as_subclass(torch.Tensor) if isinstance(result, tv_tensors.Image) else result

    def __deepcopy__(self, memo: Any) -> Any:
        copied = copy.deepcopy(values_of(self), memo) if has_gradient(self) else as_image(self.detach().clone())
        return memo.setdefault(id(self), copied)


for _lazy in (LazyTensor, LazyImageTensor):
    for _name in ("__module__", "__qualname__", "__name__"):  # errors that name its type say what others take it for
        setattr(_lazy, _name, getattr(_lazy.stock, _name))


class _Values(torch.autograd.Function):
    """The values of a LazyTensor, in its graph: for the results of a user's ``autograd.Function``."""

    @staticmethod
    def forward(ctx: Any, late: Any) -> Any:
        return late._node.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def lazy_outputs(transformed: Transformed) -> LazyTensor | tuple[LazyTensor, ...]:
    """Return the tensor, or the several tensors, that an image is after its transforms."""
    images = transformed.plan.output.images
    return _late(transformed, 0) if images == 1 else tuple(_late(transformed, output) for output in range(images))


def _late(transformed: Transformed, output: int) -> LazyTensor:
    state = transformed.plan.output
    like = _meta(state.channels, *transformed.size, getattr(torch, state.dtype), state.order == "HWC")
    kind = LazyTensor if transformed.chain.state.pure else LazyImageTensor
    made = kind.__new__(kind, like, ProxySample(transformed, output))
    if state.order is None:
        made._has_known_order = False
    if not LazyTensor.is_packed and get_worker_info() is not None and not is_late():
        # A stock loader's worker pickles in a thread, which must not draw beside the dataset.
        real(made)
    return made


def with_values(value: Any) -> Any:
    """Return a tensor or an image with values as a LazyTensor; any other value unchanged."""
    if isinstance(value, LazyTensor) or not isinstance(value, torch.Tensor) or value.is_nested or value.requires_grad:
        return value  # of a LazyTensor torch would not see the graph
    if value.layout is not torch.strided:
        return value
    if value.is_conj() or value.is_neg():  # bits that a LazyTensor does not have
        value = value.resolve_conj().resolve_neg()
    if isinstance(value, tv_tensors.Image):
        return LazyImageTensor(value, value)
    return value if isinstance(value, tv_tensors.TVTensor) else LazyTensor(value, value)


def as_image(value: Any) -> Any:
    """Let others take a LazyTensor for a ``tv_tensors.Image`` from now on. Return it, or any other value."""
    if type(value) is LazyTensor:
        _set_class(value, LazyImageTensor)
    return value.as_subclass(tv_tensors.Image) if type(value) is torch.Tensor else value


def to_pure_tensor(image: LazyImageTensor) -> LazyTensor:
    """Return the same tensor, which others do not take for a ``tv_tensors.Image``, as ``v2.ToPureTensor`` does."""
    node = image._node
    return LazyTensor(image, node.as_subclass(torch.Tensor) if isinstance(node, torch.Tensor) else node)


def sample_of(tensor: LazyTensor) -> ProxySample | None:
    """Return the output of DALI's that a tensor is, if nothing was done to it; otherwise None."""
    node = tensor._node
    return node if isinstance(node, ProxySample) and len(list(_sharers(tensor))) <= 1 else None


def is_real(tensor: LazyTensor) -> bool:
    """Return whether the values of a tensor were used."""
    return isinstance(tensor._node, torch.Tensor)


def values_of(tensor: LazyTensor) -> torch.Tensor:
    """Return the tensor that one with values stands for, of the class that others take it for."""
    assert isinstance(tensor._node, torch.Tensor)
    if isinstance(tensor, LazyImageTensor) and not isinstance(tensor._node, tv_tensors.Image):
        return tensor._node.as_subclass(tv_tensors.Image)  # type: ignore[no-any-return]
    return tensor._node


def real(value: Any) -> Any:
    """Return the tensor that a LazyTensor stands for, with its values; any other value unchanged."""
    if not isinstance(value, LazyTensor):
        return value
    if not isinstance(value._node, torch.Tensor):
        root = value
        while root._source is not None:
            root = root._source[0]
        _own(root)
        for each in _sharers(root):
            _own(each)
    if _is_in_graph(value) and not _is_in_graph(values_of(value)):
        with torch._C.DisableTorchFunctionSubclass():
            is_leaf = value.is_leaf
        value._node = values_of(value).requires_grad_() if is_leaf else _Values.apply(value)
    return value._node


def _is_in_graph(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


def has_gradient(*tensors: torch.Tensor) -> bool:
    """Return whether autograd is to see what is done to one of these tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        for each in tensors:
            if each.requires_grad:
                return True
            if isinstance(each, LazyTensor) and isinstance(each._node, torch.Tensor) and each._node.requires_grad:
                return True
    return False


def _gather_grad(tensor: LazyTensor) -> None:
    """Add the gradient that a leaf has got itself to that of its values."""
    with torch._C.DisableTorchFunctionSubclass():
        own, tensor.grad = tensor.grad, None
    if own is not None:
        values = real(tensor)
        values.grad = real(own) if values.grad is None else values.grad + real(own)


def _sets_requires_grad(function: Any) -> bool:
    return function is torch.Tensor.requires_grad_ or function == SET_REQUIRES_GRAD


def _needs_graph(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function is to be called with values, as its result is to have a gradient."""
    if getattr(function, "__name__", "") == "__get__":
        node = args[0]._node
        return isinstance(node, torch.Tensor) and node.requires_grad
    if _sets_requires_grad(function):
        return bool({"requires_grad": True, **dict(zip(("self", "requires_grad"), args)), **kwargs}["requires_grad"])
    is_flat = not kwargs and not any(isinstance(each, (tuple, list, dict)) for each in args)
    kind = torch.Tensor if torch.is_grad_enabled() else LazyTensor
    return has_gradient(*(each for each in (args if is_flat else leaves((args, kwargs))) if isinstance(each, kind)))


def _computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what a function makes of values, as tensors with values. A result that is an argument stays the same."""
    given = {id(real(each)): each for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
    result = function(*mapped(real, args), **mapped(real, kwargs))
    return mapped(lambda each: given[id(each)] if id(each) in given else with_values(each), result)


def _alias(tensor: LazyTensor, kind: type[LazyTensor]) -> LazyTensor:
    """Return the same tensor as one of another class, which shares its memory."""
    made = kind.__new__(kind, tensor, tensor._node)
    made._has_known_order = tensor._has_known_order
    return _sharing_with(tensor, made, lambda values: values)


def _own(tensor: LazyTensor) -> torch.Tensor:
    """Give a tensor its values, in memory that it shares with the tensors that it shared it with before."""
    if not isinstance(tensor._node, torch.Tensor):
        if tensor._source is None:
            tensor._node = value_of(tensor._node).clone()
        else:
            source, part = tensor._source
            tensor._node = part(_own(source))
    assert isinstance(tensor._node, torch.Tensor)
    return tensor._node


def _sharers(tensor: LazyTensor) -> Iterator[LazyTensor]:
    for reference in tensor._sharing or ():
        other = reference()
        if other is not None:
            yield other


def _node_of(value: Any) -> Any:
    """Return what stands for an argument in a recorded operation."""
    if isinstance(value, LazyTensor):
        return value._node if not isinstance(value._node, torch.Tensor) else value._node.clone()
    return value.clone() if isinstance(value, torch.Tensor) else value  # it may be changed before it is used


@functools.lru_cache(maxsize=256)  # for ones of a few shapes, as torch takes longer
def _meta(channels: int, height: int, width: int, dtype: torch.dtype, is_hwc: bool) -> torch.Tensor:
    if is_hwc:
        return torch.empty((height, width, channels), dtype=dtype, device="meta").permute(2, 0, 1)
    return torch.empty((channels, height, width), dtype=dtype, device="meta")


def _empty(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return value


def _recorded(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation without values; NotImplemented if it needs them."""
    name, tags = str(operator), operator.tags
    packet = name.split(".")[1]
    found = [each for each in leaves((args, kwargs)) if isinstance(each, LazyTensor)]
    has_known_order = all(each._has_known_order for each in found)
    if packet in WITHOUT_VALUES and (has_known_order or _Tag.nondeterministic_seeded not in tags):
        return operator(*mapped(_empty, args), **mapped(_empty, kwargs))
    if operator is torch.ops.aten.stack.default and _is_first(*args[1:], **kwargs):
        return stacked(args[0])
    if not may_go_on(*(each._node for each in found)) or uses_values(packet, tags, args):
        return NotImplemented
    is_in_place = operator._schema.is_mutable
    if is_in_place and not _is_alone(operator, args):
        return NotImplemented
    device = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
    try:
        like = result_like(operator, args, {**kwargs, **device})
    except Exception:
        return NotImplemented  # with values it raises the right error, or works
    shape, dtype = (getattr(args[0], name, None) if args else None for name in ("shape", "dtype"))
    keeps_shape = bool(shape) and getattr(like, "shape", None) == shape
    keeps_kind = keeps_shape and getattr(like, "dtype", None) == dtype
    made = Operation(name, mapped(_node_of, args), mapped(_node_of, kwargs), keeps_shape, keeps_kind)
    if is_in_place:
        if _Tag.inplace_view in tags:
            with no_dispatch():
                operator(*args, **kwargs)
        args[0]._node = made
        return args[0]

    def result(like: torch.Tensor, node: Operation, part: int | None = None) -> LazyTensor:
        tensor = _shared(LazyTensor(like, node), operator, args, kwargs, part)
        tensor._has_known_order = has_known_order
        return tensor

    if isinstance(like, torch.Tensor):
        return result(like, made)
    if not isinstance(like, (list, tuple)) or not all(isinstance(each, torch.Tensor) for each in like):
        return NotImplemented
    return type(like)(result(each, Operation("take", (made, k), {}), k) for k, each in enumerate(like))


def _is_alone(operator: Any, args: Any) -> bool:
    """Return whether an operation in place changes its first argument only, and that shares memory with no other."""
    changed = [k for k, each in enumerate(operator._schema.arguments) if each.alias_info and each.alias_info.is_write]
    first = args[0] if args else None
    if changed != [0] or not isinstance(first, LazyTensor) or is_real(first):
        return False
    return all(other is first for other in _sharers(first))


def _is_first(dim: int = 0) -> bool:
    return dim == 0


def _shared(made: LazyTensor, operator: Any, args: Any, kwargs: Any, part: int | None) -> LazyTensor:
    """Note that a result shares the memory of the first argument, if it does."""
    returns = operator._schema.returns[0].alias_info
    if returns is None or not isinstance(args[0], LazyTensor):
        return made

    def again(source: torch.Tensor) -> torch.Tensor:
        result = operator(source, *mapped(real, args[1:]), **mapped(real, kwargs))
        return result if part is None else result[part]  # type: ignore[no-any-return]

    return _sharing_with(args[0], made, again)


def _sharing_with(source: LazyTensor, made: LazyTensor, part: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    made._source = source, part
    sharing = source._sharing or [weakref.ref(source)]
    sharing.append(weakref.ref(made))
    source._sharing = made._sharing = sharing
    return made


def _set(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """``tensor[index] = value``"""
    alone = isinstance(tensor, LazyTensor) and may_go_on(tensor._node) and all(o is tensor for o in _sharers(tensor))
    alone &= not any(each is tensor for each in leaves((index, value)))  # torch may refuse to read what it writes
    if alone:
        try:
            with no_dispatch():
                meta, place = on_meta(tensor), mapped(on_meta, index)
                meta[place] = on_meta(value)
                if isinstance(value, torch.Tensor):  # of lists of indices, the line above does not look at shapes
                    extra = max(0, value.ndim - meta[place].ndim)
                    meta[place].copy_(on_meta(value).reshape(value.shape[extra:]))
        except Exception:
            alone = False
    if alone:
        assert isinstance(tensor, LazyTensor)
        given = tensor._node, mapped(_node_of, index), _node_of(value)
        tensor._node = Operation("set", given, {}, keeps_kind=True)
    else:
        real(tensor)[mapped(real, index)] = real(value)


def stacked(tensors: Sequence[torch.Tensor], stack: Callable[[list[torch.Tensor]], Any] = torch.stack) -> torch.Tensor:
    """Return ``torch.stack(tensors)`` without values, if some of the tensors have none. ``stack`` stacks values.

    An operation that was done alike to each of the tensors is recorded once, for all of them.

    Raises:
        RuntimeError: they have several shapes.
    """
    is_late = any(isinstance(each, LazyTensor) and not is_real(each) for each in tensors)
    if not is_late or not all(isinstance(each, torch.Tensor) for each in tensors) or has_gradient(*tensors):
        return with_values(stack([real(each) for each in tensors]))  # type: ignore[no-any-return]
    nodes = [_node_of(each) for each in tensors]
    if len(set(map(_kind_of, nodes))) == 1 and isinstance(nodes[0], ProxySample):  # as most often, and faster
        dtype = tensors[0].dtype
    else:
        refuse_several_sizes(tensors, RESIZE)
        dtype = functools.reduce(torch.promote_types, {each.dtype for each in tensors})
    like = torch.empty((len(tensors), *tensors[0].shape), dtype=dtype, device="meta")
    batch: torch.Tensor = LazyTensor(like, stack_of(nodes))
    return batch


def _kind_of(node: Any) -> Any:
    """Return a key that is the same for outputs of the same transforms and size only."""
    if not isinstance(node, ProxySample) or not isinstance(node.call, Transformed):
        return id(node)
    return node.call.server, node.output, node.call.size


def refuse_several_sizes(images: Sequence[torch.Tensor], advice: str) -> None:
    """Raise RuntimeError if the images are of several sizes."""
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        advice = CONVERT if len({shape[-2:] for shape in shapes}) == 1 else advice  # they differ in channels alone
        raise RuntimeError(
            f"the images of a batch must be of one size to be stacked; these are {shapes[0]}, {shapes[1]}"
            f"{' and others' if len(shapes) > 2 else ''}. {advice}"
        )


_OURS = frozenset(map(id, (LazyTensor, LazyImageTensor, ProxySample)))  # not types, as those equal torch's


def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor | ProxyBatch:
    """Collate tensors, for ``torch.utils.data.default_collate``."""
    if _OURS.isdisjoint(map(id, map(type, batch))):  # of other datasets, which this should not slow down
        plain: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return plain
    if any(isinstance(each, ProxySample) for each in batch):  # of a pipeline or a folder
        return collate_proxy_samples([each._node if isinstance(each, LazyTensor) else each for each in batch])
    return stacked(batch, collate_tensor_fn)


def _reduced(tensor: torch.Tensor) -> Any:
    return reduce_tensor(real(tensor))  # type: ignore[no-untyped-call]


# These are also the functions for a LazyTensor, which is found as a torch.Tensor.
default_collate_fn_map.update(dict.fromkeys((torch.Tensor, ProxySample), collate_tensors))
ForkingPickler.register(torch.Tensor, _reduced)

_overloaded_args = torch.overrides._get_overloaded_args


@functools.wraps(_overloaded_args)
def _overloaded_args_lazy_first(args: Any, *more: Any) -> Any:
    """Look at LazyTensors before tensors, as torch takes one argument of each type, and these types are equal."""
    return _overloaded_args(sorted(args, key=lambda each: not isinstance(each, LazyTensor)), *more)


setattr(torch.overrides, "_get_overloaded_args", _overloaded_args_lazy_first)  # noqa: B010
