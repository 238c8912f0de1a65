"""LazyMask: a mask whose resize is recorded, with the flips, crops, padding and casts after it, and the batch's stack.

Each of these operations selects rows and columns, and so does a chain of them. If masks are for a device, a worker
sends the original pixels and the selection, which ``workers/masks.py`` applies there. Any other use of a LazyMask turns
it into the tensor of its stock class that torchvision would have returned. Runs where the dataset runs.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._mode_utils import no_dispatch
from torchvision import tv_tensors
from torchvision.tv_tensors._torch_function_helpers import _must_return_subclass

from ..transforms.geometry import as_ltrb, as_pair, center_box
from ..transforms.plan import Size
from ..transforms.resize import interpolation_value, nearest_pixels, parse_size
from .lazy_tensor import UNREACHABLE, StockType, set_class
from .recorded import flatten
from .replaced_code import kernel_patches

DTYPES = frozenset({torch.bool, torch.uint8})
"""Dtypes of masks whose operations are recorded. torch resizes others as float32."""

MIN_PIXELS = 1024  # of a mask. Smaller tensors may not be masks, for example boxes

METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_sparse", "is_nested", "requires_grad", "is_cuda")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__}
"""Functions that do not use values."""

STATE = "_lazy_state"  # attribute of a LazyMask; missing if torch only assigned the class

OUTSIDE = -1

Indices = NDArray[np.int64]  # row or column indices


class Selection(NamedTuple):
    """Rows and columns of masks. Those that are OUTSIDE contain ``fill``."""

    pixels: torch.Tensor  # (..., H, W), whose values do not change
    rows: Indices
    columns: Indices
    fill: int = 0

    def without_outside(self) -> Selection:
        """Return an equivalent selection without OUTSIDE, appending a row and a column of ``fill`` if needed."""
        if not has_outside(self.rows) and not has_outside(self.columns):
            return self
        height, width = self.pixels.shape[-2:]
        pixels = torch.nn.functional.pad(self.pixels, [0, 1, 0, 1], value=self.fill)
        rows, columns = np.where(self.rows < 0, height, self.rows), np.where(self.columns < 0, width, self.columns)
        return Selection(pixels, rows, columns)

    def values(self) -> torch.Tensor:
        """Return the values, which may share the memory of ``pixels``."""
        if self.rows.max() < 0 or self.columns.max() < 0:
            return self.pixels.new_full((*self.pixels.shape[:-2], len(self.rows), len(self.columns)), self.fill)
        values, padding = self.pixels, [0, 0, 0, 0]  # left, right, top, bottom
        axes = [(-2, self.rows), (-1, self.columns)]
        for axis, indices in axes if len(self.rows) < values.shape[-2] else axes[::-1]:
            inside = np.flatnonzero(indices >= 0)  # consecutive, because all operations keep or reverse the order
            side = 2 * (-1 - axis)
            padding[side : side + 2] = int(inside[0]), len(indices) - 1 - int(inside[-1])
            values = _select(values, axis, indices[inside])
        return torch.nn.functional.pad(values, padding, value=self.fill) if any(padding) else values


def _select(pixels: torch.Tensor, axis: int, indices: Indices) -> torch.Tensor:
    steps, low = set(np.diff(indices).tolist()), int(indices.min())
    if steps <= {1}:
        return pixels.narrow(axis, low, len(indices))
    if steps == {-1}:
        return pixels.narrow(axis, low, len(indices)).flip(axis)
    return torch.from_numpy(pixels.numpy().take(indices, axis))


@dataclass(eq=False)
class _State:
    """State of a LazyMask."""

    selection: Selection | list[Selection]  # its values before casts; a list for a stack
    owner: LazyMask | None = None  # the mask whose memory it shares; None for its own memory
    # Masks that share its memory, and functions that return their part of it.
    views: list[tuple[weakref.ref[LazyMask], Callable[[torch.Tensor], torch.Tensor]]] = field(default_factory=list)


class LazyMask(torch.Tensor):
    """A CPU tensor without values, in place of one of the class ``stock``."""

    stock: ClassVar[type[torch.Tensor]]

    __class__ = property(lambda self: self.stock)

    any_created: ClassVar[bool] = False
    """Whether this process has created one. If not, batches are not searched for them."""

    def as_subclass(self, cls: Any) -> Any:
        stock = getattr(cls, "stock", cls)
        with _lock:
            selection = get_selection(self)
            if selection is None or stock not in (torch.Tensor, tv_tensors.Mask):
                compute(self)
                return self.as_subclass(stock)
            view = _create(selection, self.shape, self.dtype, is_pure=stock is torch.Tensor)
            return _share(self, view, lambda values: values.view_as(values))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        record = _RECORDERS.get(function)
        if record is not None and (mask := record(*args, *kwargs.values())) is not None:
            return mask
        compute_all((args, kwargs))
        return function(*args, **kwargs)

    @staticmethod
    def stack_masks(masks: Any, *dims: Any) -> LazyMask | None:
        """Return a stack of masks without values; None if some have values, or their shapes or dtypes differ."""
        if not isinstance(masks, (list, tuple)) or not all(type(dim) is int and dim == 0 for dim in dims):
            return None
        parts = [get_selection(each) if isinstance(each, LazyMask) else None for each in masks]
        if {*map(type, parts)} != {Selection} or len({(each.shape, each.dtype) for each in masks}) > 1:
            return None
        is_pure = not _must_return_subclass() or all(each.stock is torch.Tensor for each in masks)
        return _create(parts, (len(masks), *masks[0].shape), masks[0].dtype, is_pure)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        compute_all((args, kwargs))
        return op(*args, **(kwargs or {}))


class _LazyPureTensor(LazyMask, metaclass=StockType):
    stock = torch.Tensor


class _LazyTVTensor(LazyMask, tv_tensors.Mask, metaclass=StockType):  # type: ignore[misc]
    stock = tv_tensors.Mask


_lock = threading.RLock()  # a dataset may use a mask in several threads
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def get_selection(mask: Any) -> Selection | list[Selection] | None:
    """Return what a LazyMask stands for, without its casts; None for a tensor with values."""
    state = vars(mask).get(STATE)
    return None if state is None else state.selection


def _create(selection: Any, shape: tuple[int, ...], dtype: torch.dtype, is_pure: bool = False) -> LazyMask:
    LazyMask.any_created = True
    kind = _LazyPureTensor if is_pure else _LazyTVTensor
    with torch._C.DisableTorchFunctionSubclass():
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype)
        torch._C._set_storage_data_ptr_access_error_msg(mask.untyped_storage()._cdata, UNREACHABLE)
    setattr(mask, STATE, _State(selection))
    return mask


def _values(mask: LazyMask, is_shared: bool) -> torch.Tensor:
    selection, stack = getattr(mask, STATE).selection, torch.empty(0, dtype=mask.dtype)
    if isinstance(selection, Selection):
        values = selection.values()
        is_view = values.untyped_storage().data_ptr() == selection.pixels.untyped_storage().data_ptr()
        return values.to(mask.dtype, copy=is_view).contiguous()
    if is_shared:
        stack.set_(torch.UntypedStorage._new_shared(mask.nbytes)).resize_(mask.shape)  # type: ignore[no-untyped-call]
    return torch.stack([part.values() for part in selection], out=stack)


def _share(mask: LazyMask, view: LazyMask, get_part: Callable[[torch.Tensor], torch.Tensor]) -> LazyMask:
    """Record that ``view`` shares the part ``get_part(values)`` of the memory of a mask. Return it."""
    getattr(view, STATE).owner = mask
    state = getattr(mask, STATE)
    state.views = [*(each for each in state.views if each[0]() is not None), (weakref.ref(view), get_part)]
    return view


def compute(mask: LazyMask, is_shared: bool = False) -> None:
    """Turn all masks that share the memory of a mask into stock tensors; ``is_shared``: stacks into shared memory."""
    with _lock, torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        if get_selection(mask) is None:
            if isinstance(mask, LazyMask):
                with no_dispatch():
                    values = torch.Tensor.as_subclass(mask, torch.Tensor)
                _replace(mask, values)
            return
        while (owner := getattr(mask, STATE).owner) is not None:
            mask = owner
        _become(mask, _values(mask, is_shared))


def _become(mask: LazyMask, values: torch.Tensor) -> None:
    views = vars(mask).pop(STATE).views
    parts = [(view, get_part(values)) for reference, get_part in views if (view := reference()) is not None]
    _replace(mask, values)
    for view, part in parts:
        _become(view, part)


def _replace(mask: LazyMask, values: torch.Tensor) -> None:
    stock = mask.stock
    torch._C._swap_tensor_impl(mask, values)
    set_class(mask, stock)


def compute_all(value: Any) -> None:
    """Compute the masks inside lists, tuples and dicts."""
    for each in flatten(value):
        if isinstance(each, LazyMask):
            compute(each)


# --- recorded functions -----------------------------------------------------------------------------------------------


def mask_patches() -> Iterator[tuple[Any, Any, Any]]:
    """Yield v2's registry of each function of masks that is recorded, the key, and the replacement."""
    notes: dict[str, Any] = {note.__name__: note for note in (crop, pad, resize, resized_crop)}
    notes["center_crop"] = lambda shape, output_size: crop(shape, *center_box(as_pair(output_size), *shape))
    notes["horizontal_flip"] = lambda shape: Note(np.arange(shape[0]), np.arange(shape[1])[::-1])
    notes["vertical_flip"] = lambda shape: Note(np.arange(shape[0])[::-1], np.arange(shape[1]))
    return kernel_patches(tv_tensors.Mask, {name: functools.partial(_apply, note) for name, note in notes.items()})


class Note(NamedTuple):
    """The rows and columns that a call selects. ``is_view``: whether torchvision's result shares the memory."""

    rows: Indices
    columns: Indices
    fill: Any = 0  # value of those OUTSIDE the mask
    is_view: bool = False


def _apply(note: Callable[..., Note | None], call: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a call without values; NotImplemented to let torchvision handle the call."""
    if type(mask) != tv_tensors.Mask or mask.device.type != "cpu" or mask.ndim < 2:  # noqa: E721
        return NotImplemented
    *leading, height, width = mask.shape
    if height * width < MIN_PIXELS:
        return NotImplemented
    if get_selection(mask) is None and (mask.dtype not in DTYPES or note not in (resize, resized_crop)):
        return NotImplemented  # torchvision is as fast
    noted = note((height, width), *args, **kwargs)
    if noted is None or not (len(noted.rows) and len(noted.columns)):
        return NotImplemented
    rows, columns, fill, is_view = noted
    with _lock:
        before = get_selection(mask)
        if isinstance(before, list) or (before is None and is_view):
            return NotImplemented  # the mask may change
        if before is None:
            pixels = mask.as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
            before = Selection(pixels, np.arange(height), np.arange(width))
        if has_outside(rows) or has_outside(columns):
            is_mixed = fill != before.fill and (has_outside(before.rows) or has_outside(before.columns))
            if is_mixed or fill not in range(2 if before.pixels.dtype is torch.bool else 256):
                return NotImplemented
        else:
            fill = before.fill
        after = Selection(before.pixels, _compose(before.rows, rows), _compose(before.columns, columns), int(fill))
        result = _create(after, (*leading, len(rows), len(columns)), mask.dtype)
        if not is_view:
            return result
        box = ..., *(slice(int(each[0]), int(each[0]) + len(each)) for each in (rows, columns))
        return _share(mask, result, operator.itemgetter(box))


def has_outside(indices: Indices) -> bool:
    return bool(indices.min() < 0)


def _compose(before: Indices, indices: Indices) -> Indices:
    return np.where(indices < 0, OUTSIDE, before[indices])


def _span(begin: int, count: int, available: int) -> Indices:
    indices = np.arange(begin, begin + count)
    return np.where(indices < available, indices.clip(OUTSIDE), OUTSIDE)


def crop(shape: Size, top: int, left: int, height: int, width: int) -> Note | None:
    rows, columns = _span(top, height, shape[0]), _span(left, width, shape[1])
    is_view = not has_outside(rows) and not has_outside(columns)
    return Note(rows, columns, 0, is_view) if rows.max() >= 0 and columns.max() >= 0 else None


def pad(shape: Size, padding: Any, fill: Any = None, padding_mode: str = "constant") -> Note | None:
    left, top, right, bottom = as_ltrb(padding)
    if padding_mode != "constant" or min(left, top, right, bottom) < 0:
        return None
    rows, columns = _span(-top, top + shape[0] + bottom, shape[0]), _span(-left, left + shape[1] + right, shape[1])
    return Note(rows, columns, 0 if fill is None else fill)


def resize(shape: Size, size: Any, interpolation: Any = "nearest", max_size: Any = None, **others: Any) -> Note | None:
    if interpolation_value(interpolation) == "nearest-exact":
        return None
    new_size = parse_size(size, max_size).resolve(shape)
    rows, columns = nearest_pixels(shape, new_size, "nearest")
    return Note(rows.astype(np.int64), columns.astype(np.int64), 0, new_size == shape)


def resized_crop(
    shape: Size, top: int, left: int, height: int, width: int, size: Any, interpolation: Any = "nearest", **others: Any
) -> Note | None:
    cropped, resized = crop(shape, top, left, height, width), resize((height, width), size, interpolation)
    if cropped is None or resized is None:
        return None
    is_view = cropped.is_view and resized.is_view
    return Note(cropped.rows[resized.rows], cropped.columns[resized.columns], 0, is_view)


_CASTS: dict[Any, Any] = {torch.Tensor.long: [torch.int64], torch.Tensor.int: [torch.int32]}
_CASTS |= {torch.Tensor.to: [], torch.Tensor.type: []}  # to their argument
_CAST_DTYPES = {torch.uint8, torch.int16, torch.int32, torch.int64}  # which have all values of masks


def _cast(function: Any, mask: Any, *dtypes: Any) -> Any:
    """Return a mask in another dtype, without values; None if the cast is not recorded."""
    selection, dtypes = get_selection(mask), (*_CASTS[function], *dtypes)
    if selection is None or len(dtypes) != 1 or not _CAST_DTYPES.issuperset(dtypes):
        return None
    is_pure = mask.stock is torch.Tensor or not (function is torch.Tensor.to or _must_return_subclass())
    if dtypes[0] is not mask.dtype:
        return _create(selection, mask.shape, dtypes[0], is_pure)
    return mask.as_subclass(torch.Tensor) if is_pure and mask.stock is not torch.Tensor else mask


def _index(masks: Any, index: Any) -> LazyMask | None:
    """Return ``masks[index]`` without values if it indexes a stack of masks with a bool vector; otherwise None."""
    selection = get_selection(masks)
    is_vector = getattr(index, "dtype", None) is torch.bool and index.shape == masks.shape[:1] and index.any()
    if not isinstance(selection, Selection) or masks.ndim != 3 or not is_vector:
        return None
    pixels = torch.from_numpy(selection.pixels.numpy()[index.numpy()])  # faster than torch
    is_pure = masks.stock is torch.Tensor or not _must_return_subclass()
    return _create(selection._replace(pixels=pixels), (len(pixels), *masks.shape[1:]), masks.dtype, is_pure)


_RECORDERS: dict[Any, Any] = {torch.stack: LazyMask.stack_masks, torch.Tensor.__getitem__: _index}
_RECORDERS |= {function: functools.partial(_cast, function) for function in _CASTS}
