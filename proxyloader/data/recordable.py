"""What torch does to a tensor without values: which operations can be recorded, and which use the values."""

from __future__ import annotations

from typing import Any

import torch

from .recorded import leaves

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

_Tag = torch.Tag


def uses_values(packet: str, tags: Any, args: Any) -> bool:
    """Return whether an operation of torch, such as "add", uses the values, or has another result on a GPU."""
    if _Tag.data_dependent_output in tags or _Tag.nondeterministic_seeded in tags or packet == "is_nonzero":
        return True
    if _Tag.dynamic_output_shape in tags:  # but not for indices that are whole numbers
        dtypes = {each.dtype for each in leaves(args[1:]) if isinstance(each, torch.Tensor)}
        return packet != "index" or not dtypes <= {torch.int64, torch.int32}
    if packet in ("sub", "rsub", "neg") and any(getattr(each, "dtype", None) is torch.bool for each in args):
        return True  # which the meta device does not refuse
    return "nested" in packet or any(part in packet for part in DEVICES_DIFFER)
