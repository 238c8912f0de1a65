"""LazyTensor: a tensor whose values are computed on first use. Runs where the dataset runs.

NOTE [ Lazy tensors ]
A transform returns tensors without values, because DALI computes them later for the whole batch. Torch operations on
such a tensor are recorded and replayed on the loader's device. The meta device infers shapes and dtypes.

Code that needs values, such as ``float(x.mean())`` or ``x.numpy()``, gets those of the stock loader: Pillow decodes the
image, and torchvision transforms it with the random numbers already drawn. From then on, the tensor has values and is
sent like any other. The same applies to operations that draw random numbers, whose output shape depends on values, or
whose results differ noticeably on CUDA (see ``requires_values``), and to gradients.

An in-place operation is recorded only if no other tensor shares the memory. Otherwise, the values of all tensors that
share it are computed first.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import operator as operators
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torchvision import tv_tensors
from torchvision.tv_tensors._torch_function_helpers import _FORCE_TORCHFUNCTION_SUBCLASS, _must_return_subclass

from .deferral import current
from .placeholders import ProxyBatch, ProxySample, collate_proxy_samples
from .recorded import Node, Operation, can_record, compute_value, flatten, infer_meta, map_leaves, stack_nodes, to_meta
from .transformed import TransformedImage

CONVERT = 'Convert them to the same mode, for example with image.convert("RGB"), or add Grayscale(3) to the transform'

RESIZE = (
    "Add a Resize to (height, width) or a crop to the transform or pipeline, or pass a collate_fn that accepts images "
    "of different sizes"
)

UNREACHABLE = (
    "the memory of an undecoded image, or of a tensor computed from one, is accessed in a way that proxyloader cannot "
    "intercept. Load this dataset with DataLoader(translate=False)"
)
"""Error for C++ code that accesses the memory of a LazyTensor directly, because there is none."""

SET_DATA = vars(torch._C.TensorBase)["data"].__set__
SET_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__set__

VALUE_METHODS = frozenset({"numpy", "tolist", "item", "data_ptr", "storage", "untyped_storage", "_typed_storage"}) | {
    *("share_memory_", "pin_memory", "is_shared", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__", "set_"),
    *("__repr__", "__format__", "__contains__", "__bool__", "__float__", "__int__", "__index__", "apply_", "map_"),
    "new_tensor",
}
"""Tensor methods that access values without dispatching an operation."""

FACTORY_OPERATORS = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}) | {
    *("randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
}
"""Operations that use only the shape, strides and dtype of a tensor."""

recorders: dict[Any, Callable[..., Any]] = {}
"""Functions that record an operator as a call on an undecoded image."""

BASIC_INDICES = frozenset({int, slice, type(None), type(...)})
_CPU = torch.device("cpu")
_Tag = torch.Tag
set_class = vars(object)["__class__"].__set__


class StockType(type(torch.Tensor)):  # type: ignore[misc]
    """Metaclass of classes that compare equal to the stock class they stand for, also as keys of dicts and sets."""

    stock: type[torch.Tensor]

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        for name in ("__module__", "__qualname__", "__name__"):  # for error messages
            setattr(cls, name, getattr(cls.stock, name))

    def __eq__(cls, other: object) -> bool:
        return cls is other or cls.stock is other

    def __hash__(cls) -> int:
        return hash(cls.stock)


copyreg.pickle(StockType, lambda cls: (operators.getitem, ((cls.stock,), 0)))


class LazyTensor(torch.Tensor, metaclass=StockType):
    """A tensor whose values may not be computed yet. A tensor computed from one is also one."""

    stock = torch.Tensor

    __class__ = property(lambda self: type(self).stock)

    any_created: ClassVar[bool] = False
    """Whether this process has created one. If not, batches are not searched for them."""

    _node: Node | torch.Tensor
    """The source of its values; a tensor once they are computed."""

    _source: tuple[LazyTensor, Callable[[torch.Tensor], torch.Tensor]] | None = None
    """The tensor whose memory it shares, and a function that returns the shared part; None for its own memory."""

    _alias_refs: list[weakref.ref[LazyTensor]] | None = None
    """All tensors that share its memory; None if there are no others."""

    _has_known_strides: bool = True
    """Whether its strides are those of torchvision's tensor, which determine the order of random values."""

    @staticmethod
    def __new__(cls, like: torch.Tensor, node: Node | torch.Tensor, device: torch.device | None = None) -> LazyTensor:
        """``device``: that of ``like`` if None."""
        with torch._C.DisableTorchFunctionSubclass():  # which is faster if ``like`` is a LazyTensor
            tensor: LazyTensor = torch.Tensor._make_wrapper_subclass(
                cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device or like.device
            )
            torch._C._set_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata, UNREACHABLE)
        tensor._node = node
        LazyTensor.any_created = True
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...  # called by ``tv_tensors.Image(lazy)``

    def __getattr__(self, name: str) -> Any:
        if name == "encoded" and isinstance(sample := self._node, ProxySample):
            return sample.call.image.data  # type: ignore[attr-defined]
        if name != "_node":
            hint = "; read it before the values are used, for example by print()" if name == "encoded" else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
        # ``tv_tensors.wrap(tensor, like=...)`` has set the class of a plain tensor.
        with no_dispatch():
            values = torch.Tensor.as_subclass(self, torch.Tensor)
        self._node = values
        return values

    def compute(self) -> None:
        """Compute the values of all tensors that share its memory."""
        for each in (self, *_aliases(self)):
            _compute(each)

    def as_subclass(self, cls: Any) -> Any:  # bypasses the functions below
        stock = getattr(cls, "stock", cls)
        if stock in (torch.Tensor, tv_tensors.Image) and not is_materialized(self):
            kind = LazyTensor if stock is torch.Tensor else LazyImageTensor
            alias = kind.__new__(kind, self, self._node)
            alias._has_known_strides = self._has_known_strides
            return share(self, alias, torch.ops.aten.alias.default)
        return wrap_values(materialize(self).as_subclass(stock))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sets_gradient = function in (torch.Tensor.requires_grad_, SET_REQUIRES_GRAD)
        if function == SET_DATA or (sets_gradient and not any(each is False for each in (*args[1:], *kwargs.values()))):
            torch._C._swap_tensor_impl(args[0], materialize(args[0]))
            vars(args[0]).clear()
            set_class(args[0], type(args[0]).stock)  # now a tensor of its stock class, with values
            return function(args[0], *map(materialize, args[1:]), **kwargs)
        if _needs_autograd(function, args, kwargs) or not all(issubclass(each, _TYPES) for each in types):
            return run_eagerly(function, args, kwargs)
        name = getattr(function, "__name__", "")
        if function is torch.Tensor.__setitem__:
            return _assign(*args)
        if isinstance(function, torch._ops.OpOverloadPacket) and not function._qualified_op_name.startswith("aten::"):
            return run_eagerly(function, args, kwargs)  # such as "image::encode_jpeg", which may not dispatch
        if name in ("fill_diagonal_", "storage_offset"):  # they need that of a view, and the undecoded one has none
            return run_eagerly(function, args, kwargs)
        if function is torch.Tensor.new_tensor:  # of the same dtype; its values do not matter
            args = torch.empty(0, dtype=args[0].dtype), *args[1:]
        if name in VALUE_METHODS:
            return function(*map_leaves(materialize, args), **map_leaves(materialize, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if operator is torch.ops.aten.view.default:  # the actual strides may differ
            operator = torch.ops.aten.reshape.default
        result = _record(operator, args, kwargs)
        if result is not NotImplemented:
            return result
        result = run_eagerly(operator, args, kwargs)
        if _Tag.inplace_view in operator.tags and isinstance(args[0], LazyTensor):
            with no_dispatch():
                operator(*args, **kwargs)
        return result


class LazyImageTensor(LazyTensor, tv_tensors.Image):  # type: ignore[misc]
    stock = tv_tensors.Image

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.__repr__, torch.Tensor.__reduce_ex__):
            materialize(args[0])
            return getattr(get_values(args[0]), function.__name__)(*args[1:])
        result = LazyTensor.__torch_function__(function, types, args, kwargs)
        is_forced = function in _FORCE_TORCHFUNCTION_SUBCLASS and isinstance(args[0], LazyImageTensor)
        if is_forced or _must_return_subclass():
            return map_leaves(as_image, result)
        return result.as_subclass(torch.Tensor) if isinstance(result, tv_tensors.Image) else result


class _Values(torch.autograd.Function):
    """The values of a LazyTensor as part of its graph, for the results of a custom ``autograd.Function``."""

    @staticmethod
    def forward(ctx: Any, lazy: Any) -> Any:
        return lazy._node.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


_TYPES = LazyTensor, tv_tensors.TVTensor


def create_lazy_output(transformed: TransformedImage) -> LazyTensor:
    """Return the tensor that the transforms of an image return."""
    state = transformed.chain.state
    like = _empty_meta(state.channels, *transformed.size, getattr(torch, state.dtype), state.order == "HWC")
    kind = LazyTensor if state.pure else LazyImageTensor
    tensor = kind.__new__(kind, like, ProxySample(transformed), _CPU)
    tensor._has_known_strides = state.order is not None
    return tensor


def wrap_values(value: Any) -> Any:
    """Return a tensor with values as a LazyTensor; any other value, also of a class of the user's, unchanged."""
    if isinstance(value, LazyTensor) or type(value) not in (torch.Tensor, tv_tensors.Image):
        return value
    if value.is_nested or value.layout is not torch.strided or value.requires_grad:  # a LazyTensor would hide the graph
        return value
    if value.is_conj() or value.is_neg():  # a LazyTensor does not have these bits
        value = value.resolve_conj().resolve_neg()
    return LazyTensor(value, value) if type(value) is torch.Tensor else LazyImageTensor(value, value)


def as_image(value: Any) -> Any:
    """Return a tensor as a ``tv_tensors.Image``; any other value unchanged."""
    if type(value) is LazyTensor:
        set_class(value, LazyImageTensor)
    return value.as_subclass(tv_tensors.Image) if type(value) is torch.Tensor else value


def find_transformed(tensor: LazyTensor) -> TransformedImage | None:
    """Return the undecoded image whose transforms return a tensor; None if operations were applied to it."""
    node = tensor._node
    call = node.call if isinstance(node, ProxySample) else None
    return call if isinstance(call, TransformedImage) else None


def is_materialized(tensor: LazyTensor) -> bool:
    return isinstance(tensor._node, torch.Tensor)


def get_values(tensor: LazyTensor) -> torch.Tensor:
    """Return the tensor that a materialized one stands for, in its stock class."""
    assert isinstance(tensor._node, torch.Tensor)
    if isinstance(tensor, LazyImageTensor) and not isinstance(tensor._node, tv_tensors.Image):
        return tensor._node.as_subclass(tv_tensors.Image)  # type: ignore[no-any-return]
    return tensor._node


def materialize(value: Any) -> Any:
    """Return the tensor that a LazyTensor stands for, computing its values; any other value unchanged."""
    if not isinstance(value, LazyTensor):
        return value
    if not isinstance(value._node, torch.Tensor):
        value.compute()
    with torch._C.DisableTorchFunctionSubclass():
        is_in_graph = value.requires_grad
    if is_in_graph and not get_values(value).requires_grad:
        value._node = _Values.apply(value)
    return value._node


def requires_grad(*tensors: torch.Tensor) -> bool:
    """Return whether autograd must record operations on these tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        nodes = [each._node for each in tensors if isinstance(each, LazyTensor)]
        return any(each.requires_grad for each in (*tensors, *nodes) if isinstance(each, torch.Tensor))


def _needs_autograd(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function must be called on values, because its result may require gradients."""
    if getattr(function, "__name__", "") == "__get__":
        node = args[0]._node
        return isinstance(node, torch.Tensor) and node.requires_grad
    kind = torch.Tensor if torch.is_grad_enabled() else LazyTensor
    return requires_grad(*[each for each in flatten((args, kwargs)) if isinstance(each, kind)])


def run_eagerly(function: Any, args: Any, kwargs: dict[str, Any], wrap: Callable[[Any], Any] = wrap_values) -> Any:
    """Call a function on values and wrap its results. An argument among the results stays the same object."""
    originals = {id(materialize(each)): each for each in flatten((args, kwargs)) if isinstance(each, torch.Tensor)}
    result = function(*map_leaves(materialize, args), **map_leaves(materialize, kwargs))
    return map_leaves(lambda each: originals[id(each)] if id(each) in originals else wrap(each), result)


def _compute(tensor: LazyTensor) -> torch.Tensor:
    """Compute the values of a tensor, in memory shared with its source."""
    if not isinstance(tensor._node, torch.Tensor):
        if tensor._source is None:
            tensor._node = compute_value(tensor._node).clone()
        else:
            source, compute = tensor._source
            tensor._node = compute(_compute(source))
    assert isinstance(tensor._node, torch.Tensor)
    return tensor._node


def _aliases(tensor: LazyTensor) -> list[LazyTensor]:
    return [other for reference in tensor._alias_refs or () if (other := reference()) is not None]


def to_node(value: Any) -> Any:
    """Return what a recorded operation stores for an argument."""
    node = value._node if isinstance(value, LazyTensor) else value
    return node.clone() if isinstance(node, torch.Tensor) else node  # it may change before the replay


@functools.lru_cache(maxsize=256)
def _empty_meta(channels: int, height: int, width: int, dtype: torch.dtype, is_hwc: bool) -> torch.Tensor:
    if is_hwc:
        return torch.empty((height, width, channels), dtype=dtype, device="meta").permute(2, 0, 1)
    return torch.empty((channels, height, width), dtype=dtype, device="meta")


def _drop_values(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return value


def _record(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation without computing values; NotImplemented if it needs values."""
    if operator in recorders and (call := recorders[operator](operator, *args, **kwargs)) is not NotImplemented:
        return call
    name, tags = str(operator), operator.tags
    packet = name.split(".")[1]
    lazy = [each for each in flatten((args, kwargs)) if isinstance(each, LazyTensor)]
    has_known_strides = all(each._has_known_strides for each in lazy)
    if packet in FACTORY_OPERATORS and (has_known_strides or _Tag.nondeterministic_seeded not in tags):
        return operator(*map_leaves(_drop_values, args), **map_leaves(_drop_values, kwargs))
    if operator is torch.ops.aten.stack.default and (*args[1:], *kwargs.values(), 0)[0] == 0:
        return stack_tensors(args[0])
    if not can_record(*(each._node for each in lazy)) or _is_for_worker(lazy, args):
        return NotImplemented
    is_in_place = operator._schema.is_mutable
    if is_in_place and not _is_unshared(operator, args):
        return NotImplemented
    device = kwargs.get("device")
    try:
        like = infer_meta(operator, args, kwargs | {"device": torch.device("meta")} if device is not None else kwargs)
    except Exception:
        return NotImplemented  # on values, it works or raises the proper error
    shape, dtype = (getattr(args[0], name, None) if args else None for name in ("shape", "dtype"))
    keeps_shape = bool(shape) and getattr(like, "shape", None) == shape
    keeps_dtype = keeps_shape and getattr(like, "dtype", None) == dtype
    node = Operation(name, map_leaves(to_node, args), map_leaves(to_node, kwargs), keeps_shape, keeps_dtype)
    if is_in_place:
        if _Tag.inplace_view in tags:
            with no_dispatch():
                operator(*args, **kwargs)
        args[0]._node = node
        return args[0]

    def result(like: torch.Tensor, node: Operation, part: int | None = None) -> LazyTensor:
        tensor = LazyTensor(like, node, lazy[0].device if device is None else device)
        tensor._has_known_strides = has_known_strides
        if operator._schema.returns[0].alias_info is None or not isinstance(args[0], LazyTensor):
            return tensor
        return share(args[0], tensor, functools.partial(compute, part))

    def compute(part: int | None, source: torch.Tensor) -> torch.Tensor:
        values = operator(source, *map_leaves(materialize, args[1:]), **map_leaves(materialize, kwargs))
        return values if part is None else values[part]  # type: ignore[no-any-return]

    if isinstance(like, torch.Tensor):
        return result(like, node)
    if not isinstance(like, (list, tuple)) or not all(isinstance(each, torch.Tensor) for each in like):
        return NotImplemented
    return type(like)(result(each, Operation("take", (node, k), {}), k) for k, each in enumerate(like))


def _is_for_worker(lazy: Sequence[LazyTensor], args: Any) -> bool:
    """Return whether to compute an operation of one image now, because another operand is as large as the image."""
    deferral = current()  # without a GPU, the main process would do alone what workers share
    if deferral is None or deferral.on_gpu or any(each.ndim > 3 for each in lazy):
        return False
    others = [each for each in flatten(args) if isinstance(each, torch.Tensor) and not isinstance(each, LazyTensor)]
    return any(other.numel() >= each.numel() > 1 for other in others for each in lazy)


def _is_unshared(operator: Any, args: Any) -> bool:
    """Return whether an in-place operation modifies only its first argument, whose memory no other tensor shares."""
    written = [k for k, each in enumerate(operator._schema.arguments) if each.alias_info and each.alias_info.is_write]
    first = args[0] if args else None
    return written == [0] and isinstance(first, LazyTensor) and not is_materialized(first) and is_unshared(first)


def is_unshared(tensor: LazyTensor) -> bool:
    """Return whether no other tensor shares the memory of a tensor."""
    return all(other is tensor for other in _aliases(tensor))


def share(source: LazyTensor, alias: LazyTensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    """Record that ``alias`` shares the part ``compute(source)`` of the memory of its source. Return it."""
    alias._source = source, compute
    references = source._alias_refs or [weakref.ref(source)]
    references.append(weakref.ref(alias))
    source._alias_refs = alias._alias_refs = references
    return alias


def _assign(tensor: Any, index: Any, value: Any) -> None:
    """Execute or record ``tensor[index] = value``."""
    is_alone = isinstance(tensor, LazyTensor) and can_record(tensor._node) and is_unshared(tensor)
    # torch may refuse to read what it writes, and checks other indices only on values.
    indices = index if isinstance(index, tuple) else (index,)
    if is_alone and value is not tensor and all(type(each) in BASIC_INDICES for each in indices):
        with contextlib.suppress(Exception):  # on values, it works or raises the proper error
            with no_dispatch():
                to_meta(tensor)[index] = to_meta(value)
            args = tensor._node, map_leaves(to_node, index), to_node(value)
            tensor._node = Operation("set", args, {}, keeps_dtype=True)
            return
    materialize(tensor)[map_leaves(materialize, index)] = materialize(value)


def stack_tensors(
    tensors: Sequence[torch.Tensor], stack: Callable[[list[torch.Tensor]], Any] = torch.stack
) -> torch.Tensor:
    """Return ``torch.stack(tensors)``, without values if some have none. ``stack`` stacks tensors with values."""
    is_lazy = any(isinstance(each, LazyTensor) and not is_materialized(each) for each in tensors)
    if not is_lazy or not all(isinstance(each, torch.Tensor) for each in tensors) or requires_grad(*tensors):
        return wrap_values(stack([materialize(each) for each in tensors]))  # type: ignore[no-any-return]
    with torch._C.DisableTorchFunctionSubclass():  # faster
        check_same_size(tensors)
        dtype = functools.reduce(torch.promote_types, {each.dtype for each in tensors})
        like = torch.empty((len(tensors), *tensors[0].shape), dtype=dtype, device="meta")
        device = tensors[0].device
    return LazyTensor(like, stack_nodes(list(map(to_node, tensors))), device)


def check_same_size(images: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError if the shapes of the images differ."""
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        advice = CONVERT if len({shape[-2:] for shape in shapes}) == 1 else RESIZE  # only channels differ
        raise RuntimeError(
            f"images in a batch must have the same shape to be stacked, got {shapes[0]}, {shapes[1]}"
            f"{' and others' if len(shapes) > 2 else ''}. {advice}"
        )


_LAZY_TYPES = frozenset(map(id, (LazyTensor, LazyImageTensor, ProxySample)))  # these types compare equal to torch's


def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor | ProxyBatch:
    """Collate tensors in ``torch.utils.data.default_collate``."""
    if _LAZY_TYPES.isdisjoint(map(id, map(type, batch))):  # the fast path of other datasets
        stack: torch.Tensor | None = getattr(type(batch[0]), "stack_masks", lambda batch: None)(batch)
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map) if stack is None else stack
    if any(isinstance(each, ProxySample) for each in batch):  # from a server or an ImageFolder
        return collate_proxy_samples([each._node if isinstance(each, LazyTensor) else each for each in batch])
    return stack_tensors(batch, collate_tensor_fn)


# A LazyTensor is looked up as torch.Tensor, so it uses these functions, too.
default_collate_fn_map.update(dict.fromkeys((torch.Tensor, ProxySample), collate_tensors))
ForkingPickler.register(torch.Tensor, lambda tensor: reduce_tensor(materialize(tensor)))  # type: ignore[no-untyped-call]

_overloaded_args = torch.overrides._get_overloaded_args


@functools.wraps(_overloaded_args)
def _overloaded_args_lazy_first(args: Any, *more: Any) -> Any:
    """Sort LazyTensors first, because torch dispatches on one argument per type, and these types compare equal."""
    return _overloaded_args(sorted(args, key=lambda each: type(type(each)) is not StockType), *more)


setattr(torch.overrides, "_get_overloaded_args", _overloaded_args_lazy_first)  # noqa: B010
