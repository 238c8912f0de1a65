"""What torch does to a tensor without values: which operations can be recorded, and what their results are like."""

from __future__ import annotations

from typing import Any

import torch

from .recorded import leaves, mapped

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

DEVICES_DIFFER = ("conv", "mm", "matmul", "linalg", "fft", "upsample", "grid_sampler", "cdist", "svd", "pool")
"""Parts of the names of operations of which a GPU computes noticeably different values."""

WITHOUT_VALUES = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}) | {
    *("randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
}
"""Operations that use nothing of a tensor but its shape, strides and dtype."""

MOST_KNOWN = 512
"""Maximum number of cached results."""

_Tag = torch.Tag
_known: dict[Any, Any] = {}  # for all loaders, as it is a function of torch's operators and of its keys


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
