"""Canvas: a tensor that a collate_fn makes to copy images into, whose values are computed on first use. Worker.

NOTE [ Padded batches ]
A collate_fn for images of several sizes makes a tensor of one value, such as ``torch.zeros(shape)``, and copies each
image into a part of it. While a collate_fn runs, such a tensor is a Canvas. It has memory, but undecoded images that
are copied into it or its views are noted, and the main process copies them on the loader's device. Code that reads the
Canvas continues with a LazyTensor. If it needs values, or writes in another way, the images are first copied from
Pillow. A Canvas without images behaves like its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from .deferral import is_materializing
from .lazy_tensor import SET_DATA, VALUE_METHODS, LazyTensor, is_materialized, run_eagerly, to_node
from .recorded import Node, Operation, can_record, compute_value, flatten, map_leaves, to_meta

MAX_WRITES = 4096
"""Maximum number of noted writes. Further ones copy the images at once, because a collate_fn may keep its tensor."""

DTYPES = frozenset({torch.uint8, torch.float32, torch.float16, torch.bfloat16})
"""Dtypes of tensors that may be for images."""

_UNIFORM = frozenset({torch.zeros, torch.ones, torch.full, torch.zeros_like, torch.ones_like, torch.full_like}) | {
    *(torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full)
}
_UNDEFINED = frozenset({torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.Tensor.new})

_aten = torch.ops.aten
_FILLS = _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default


@dataclass(eq=False)
class _Painting:
    """The memory of a Canvas and its views."""

    memory: torch.Tensor  # contains all but the noted writes
    fill: float | bool | None  # the value of all elements; None: they may have different values
    # Noted writes, as parts of the memory, and what they are set to: a node, a tensor or a number.
    writes: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    has_images: bool = False  # whether the write of an image was ever noted
    is_exported: bool = False  # whether other code may access the memory
    _node: Operation | None = None

    @property
    def node(self) -> Operation:
        """The operation that has the values of the whole memory as its result."""
        if self._node is None:
            base = self.memory.clone() if self.fill is None else self.fill
            places = [(tuple(part.shape), part.stride(), part.storage_offset()) for part, _ in self.writes]
            values = [value for _, value in self.writes]
            self._node = Operation("paint", (base, tuple(self.memory.shape), self.memory.dtype, places, values), {})
        return self._node

    def write(self, part: torch.Tensor, value: Any) -> None:
        self.writes.append((part, value))
        self.has_images |= isinstance(value, Node)
        self._node = None
        if len(self.writes) > MAX_WRITES:
            self.compute()

    def compute(self) -> None:
        """Do the noted writes. Code may change the memory afterwards."""
        for part, value in self.writes:
            value = compute_value(value)
            part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)
        self.writes.clear()
        self.fill = self._node = None


class Canvas(LazyTensor):  # type: ignore[metaclass]
    """A tensor to which undecoded images may be copied, or a view of one. See NOTE [ Padded batches ]."""

    _painting: _Painting
    _part: torch.Tensor  # its part of the memory

    @classmethod
    def create(cls, painting: _Painting, part: torch.Tensor) -> Canvas:
        canvas = cast(Canvas, LazyTensor.__new__(cls, part, part))
        canvas._painting = painting
        return canvas

    @property
    def _node(self) -> Node | torch.Tensor:
        painting, part = self._painting, self._part
        if not painting.writes:
            return part
        if part.shape == painting.memory.shape and part.stride() == painting.memory.stride():
            return painting.node
        place = tuple(part.shape), part.stride(), part.storage_offset()
        return Operation("aten.as_strided.default", (painting.node, *place), {})

    @_node.setter
    def _node(self, values: Any) -> None:
        self._part = values

    @property
    def has_images(self) -> bool:
        return self._painting.has_images

    def compute(self) -> None:
        self._painting.compute()

    def export(self) -> None:
        """Prepare for access to the memory by other code."""
        self._painting.compute()
        self._painting.is_exported = True

    def as_subclass(self, cls: Any) -> Any:
        if getattr(cls, "stock", cls) is torch.Tensor:
            return Canvas.create(self._painting, self._part)
        self.export()
        return super().as_subclass(cls) if self.has_images else self._part.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__setitem__ and isinstance(args[0], Canvas):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args)  # a view, and a copy into it
        is_value_method = getattr(function, "__name__", "") in VALUE_METHODS and function is not torch.Tensor.new_tensor
        if is_value_method or function == SET_DATA:
            for each in flatten((args, kwargs or {})):
                if isinstance(each, Canvas):
                    each.export()
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        alias = operator._schema.returns[0].alias_info if operator._schema.returns else None
        if isinstance(first, Canvas):
            painting = first._painting
            if alias is not None and not alias.is_write:
                views = operator(first._part, *args[1:], **kwargs)
                return map_leaves(lambda part: Canvas.create(painting, part), views)
            if operator is _aten.copy_.default and _notes_copy(first, args[1]):
                painting.write(first._part, to_node(args[1]))
                return first
            if operator in _FILLS and painting.writes:
                painting.write(first._part, to_node(args[1]) if len(args) > 1 else 0)
                return first
        return _run(operator, args, kwargs)


def _notes_copy(canvas: Canvas, value: Any) -> bool:
    """Return whether to note a copy: of an undecoded image, or after one."""
    painting = canvas._painting
    if not isinstance(value, LazyTensor) or is_materialized(value):
        return bool(painting.writes) and isinstance(value, torch.Tensor) and not value.requires_grad
    if painting.is_exported or (painting.has_images and not painting.writes):
        return False
    try:
        torch.empty(canvas.shape, dtype=canvas.dtype, device="meta").copy_(to_meta(value))
    except Exception:
        return False
    return can_record(value._node)


def _run(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that neither is a view of a Canvas nor copies an image into it."""
    leaves = flatten((args, kwargs))
    canvases = [each for each in leaves if isinstance(each, Canvas)]
    if operator._schema.is_mutable:
        for each in canvases:
            each.compute()
    is_plain = not any(isinstance(each, LazyTensor) and not isinstance(each, Canvas) for each in leaves)
    if not is_plain or any(each.has_images for each in canvases) or torch.Tag.inplace_view in operator.tags:
        return LazyTensor.__torch_dispatch__.__func__(LazyTensor, operator, (), args, kwargs)  # type: ignore[attr-defined]
    return run_eagerly(operator, args, kwargs, wrap=lambda value: value)


class Canvases(TorchFunctionMode):
    """Context in which a Canvas is created in place of new tensors that may be for images."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_uniform = function in _UNIFORM
        is_new = (is_uniform or function in _UNDEFINED) and not is_materializing()
        if not is_new or not _may_be_for_images(result):
            return result
        return Canvas.create(_Painting(result, result.view(-1)[0].item() if is_uniform else 0), result)


def _may_be_for_images(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, LazyTensor) or tensor.device.type != "cpu":
        return False
    is_dense = tensor.layout is torch.strided and tensor.ndim >= 3 and tensor.numel() > 0 and tensor.is_contiguous()
    return is_dense and tensor.dtype in DTYPES and not tensor.requires_grad
