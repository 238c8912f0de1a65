"""Masks of a batch: packed into bits or bytes in the worker, restored on the device. See ``masks_on_device``."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision import tv_tensors

from ..data.lazy_mask import MIN_PIXELS, STATE, Selection, get_selection

DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def is_mask(value: Any) -> bool:
    """Return whether an object is an integer or boolean tensor (..., H, W) with at least ``MIN_PIXELS`` pixels."""
    if type(value) not in (torch.Tensor, tv_tensors.Mask) or value.dtype not in DTYPES or value.device.type != "cpu":
        return False
    if value.is_nested or value.layout is not torch.strided or value.ndim < 2:
        return False
    has_attributes = not vars(value).keys() <= {STATE}  # the user's, which pickle preserves
    return value.shape[-2] * value.shape[-1] >= MIN_PIXELS and not has_attributes


class MaskPlace(NamedTuple):
    """Location of a mask in the buffer of its kind, and how to restore it."""

    dtype: torch.dtype
    is_tv_tensor: bool
    kind: int = 0
    begin: int = 0
    shape: tuple[int, ...] = ()  # of the pixels
    indices: tuple[int, int, int] | None = None  # of a LazyMask: where its rows begin, number of rows and of columns
    parts: "tuple[MaskPlace, ...]" = ()  # of a stack


UNCHANGED, INDICES, BITS, BYTES = range(4)
"""Parts of the packed masks, in this order. BITS holds masks with values 0 and 1; BYTES, values 0 to 255.

INDICES holds the row and column indices of LazyMasks, int32."""


class MaskWriter:
    """Packs the masks of a batch. Runs in the worker."""

    def __init__(self) -> None:
        self._parts: tuple[list[NDArray[np.uint8]], ...] = [], [], [], []
        self._sizes = [0, 0, 0, 0]

    def add(self, mask: torch.Tensor, part: Selection | None = None) -> MaskPlace:
        """Add a mask, or one of a stack. Return its place."""
        selection, indices = part or get_selection(mask), None
        result = mask.dtype, isinstance(mask, tv_tensors.Mask)
        if isinstance(selection, list):
            return MaskPlace(*result, parts=tuple(self.add(mask, part) for part in selection))
        if selection is None:
            pixels = mask.detach().as_subclass(torch.Tensor)
        elif len(selection.rows) * len(selection.columns) < math.prod(selection.pixels.shape[-2:]):
            pixels = selection.values()
        else:
            pixels, rows, columns, _ = selection.without_outside()
            both = np.concatenate([rows, columns]).astype(np.int32)
            indices = self._append(INDICES, both) // both.itemsize, len(rows), len(columns)
        values = pixels.numpy()
        highest = values.max(initial=0)
        kind = UNCHANGED if values.min(initial=0) < 0 or highest > 255 else BITS if highest <= 1 else BYTES
        if kind == UNCHANGED:
            packed = np.zeros(-(-values.nbytes // 8) * 8, np.uint8)  # so that the next one is aligned
            packed[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        else:
            packed = values.astype(np.uint8, copy=False).reshape(-1)
            packed = np.packbits(packed, bitorder="little") if kind == BITS else packed
        begin = self._append(kind, packed) * (8 if kind == BITS else 1)
        return MaskPlace(*result, kind, begin, values.shape, indices)

    def _append(self, part: int, values: NDArray[Any]) -> int:
        """Append values to a part. Return their offset in bytes."""
        self._parts[part].append(values.view(np.uint8))
        self._sizes[part] += values.nbytes
        return self._sizes[part] - values.nbytes

    def packed(self) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """Return the packed masks, and the size of each part in bytes."""
        return np.concatenate([np.empty(0, np.uint8), *itertools.chain(*self._parts)]), tuple(self._sizes)


class MaskReader:
    """Restores the masks of a batch on a device. Runs in the main process."""

    def __init__(self, packed: NDArray[np.uint8], sizes: tuple[int, ...], device: torch.device) -> None:
        staged = torch.empty(len(packed), dtype=torch.uint8, pin_memory=device.type == "cuda")
        staged.numpy()[:] = packed
        unchanged, indices, bits, levels = torch.split(staged.to(device, non_blocking=True), list(sizes))
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        self._read: dict[MaskPlace, torch.Tensor] = {}  # a mask may be referenced several times
        self._indices = indices.view(torch.int32)
        self._values = unchanged, self._indices, (bits[:, None] >> shifts).bitwise_and_(1).view(-1), levels

    def read(self, place: MaskPlace) -> torch.Tensor:
        if place not in self._read:
            values = torch.stack([*map(self._select, place.parts)]) if place.parts else self._select(place)
            values = values.to(place.dtype, copy=place.indices is None and not place.parts)  # its own memory
            self._read[place] = tv_tensors.Mask(values) if place.is_tv_tensor else values
        return self._read[place]

    def _select(self, place: MaskPlace) -> torch.Tensor:
        """Return the values at a place, as uint8 unless they are UNCHANGED."""
        size = math.prod(place.shape) * (place.dtype.itemsize if place.kind == UNCHANGED else 1)
        values: torch.Tensor = self._values[place.kind][place.begin : place.begin + size]
        values = (values.view(place.dtype) if place.kind == UNCHANGED else values).view(place.shape)
        if place.indices is not None:
            begin, *counts = place.indices
            rows, columns = torch.split(self._indices[begin : begin + sum(counts)], counts)
            values = values.index_select(-2, rows).index_select(-1, columns)
        return values
