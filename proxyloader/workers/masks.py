"""Masks of a batch: packed into bits or bytes in the worker, restored on the device. See ``masks_on_device``."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision import tv_tensors

from ..data.lazy_mask import MIN_PIXELS, STATE, get_selection

DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def is_mask(value: Any) -> bool:
    """Return whether an object is an integer or boolean tensor (..., H, W) with at least ``MIN_PIXELS`` pixels."""
    if type(value) not in (torch.Tensor, tv_tensors.Mask) or value.dtype not in DTYPES or value.ndim < 2:
        return False
    if not vars(value).keys() <= {STATE}:  # the user's attributes, which pickle preserves
        return False
    return value.shape[-2] * value.shape[-1] >= MIN_PIXELS and value.device.type == "cpu" and not value.is_sparse


class MaskPlace(NamedTuple):
    """Where a mask begins among those of its kind, and what it is restored to."""

    kind: int
    begin: int
    shape: tuple[int, ...]  # of the pixels
    dtype: torch.dtype
    is_tv_tensor: bool
    lines: tuple[int, int, int] | None  # of a LazyMask: where its rows begin, and how many rows and columns follow


UNCHANGED, LINES, BITS, BYTES = range(4)
"""Parts, in the order in which they are stored: masks, and the numbers of rows and columns of LazyMasks, int32.

BITS are masks with values of 0 and 1, BYTES of up to 255."""


class MaskWriter:
    """Packs the masks of a batch. Worker."""

    def __init__(self) -> None:
        self._parts: tuple[list[NDArray[np.uint8]], ...] = [], [], [], []

    def add(self, mask: torch.Tensor) -> MaskPlace:
        lines, selection = None, get_selection(mask)
        if selection is not None:
            pixels, rows, columns, _ = selection.without_outside()
            lines = sum(map(len, self._parts[LINES])) // 4, len(rows), len(columns)
            self._parts[LINES].append(np.concatenate([rows, columns]).astype(np.int32).view(np.uint8))
        else:
            pixels = mask.detach().as_subclass(torch.Tensor)
        values = pixels.numpy()
        highest = values.max(initial=0)
        kind = UNCHANGED if values.min(initial=0) < 0 or highest > 255 else BITS if highest <= 1 else BYTES
        begin = sum(map(len, self._parts[kind])) * (8 if kind == BITS else 1)
        if kind == UNCHANGED:
            packed = np.zeros(-(-values.nbytes // 8) * 8, np.uint8)  # so that the next one is aligned
            packed[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        else:
            packed = np.packbits(values, bitorder="little") if kind == BITS else values.astype(np.uint8).reshape(-1)
        self._parts[kind].append(packed)
        return MaskPlace(kind, begin, values.shape, mask.dtype, isinstance(mask, tv_tensors.Mask), lines)

    def packed(self) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """Return the packed masks, and the size of each part in bytes."""
        parts = [np.concatenate([np.empty(0, np.uint8), *each]) for each in self._parts]
        return np.concatenate(parts), tuple(map(len, parts))


class MaskReader:
    """Restores the masks of a batch on a device, as views of few tensors. Main process."""

    def __init__(self, packed: NDArray[np.uint8], sizes: tuple[int, ...], device: torch.device) -> None:
        staged = torch.empty(len(packed), dtype=torch.uint8, pin_memory=device.type == "cuda")
        staged.numpy()[:] = packed
        unchanged, lines, bits, levels = torch.split(staged.to(device, non_blocking=True), list(sizes))
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        self._read: dict[MaskPlace, torch.Tensor] = {}  # a mask may be referenced several times
        self._lines = lines.view(torch.int32)
        self._values = unchanged, self._lines, (bits[:, None] >> shifts).bitwise_and_(1).view(-1), levels

    def read(self, place: MaskPlace) -> torch.Tensor:
        if place in self._read:
            return self._read[place]
        size = math.prod(place.shape) * (place.dtype.itemsize if place.kind == UNCHANGED else 1)
        values: torch.Tensor = self._values[place.kind][place.begin : place.begin + size]
        is_viewed = place.kind == UNCHANGED or (place.kind == BITS and place.dtype == torch.bool)
        values = (values.view(place.dtype) if is_viewed else values).view(place.shape)
        if place.lines is not None:
            begin, *counts = place.lines
            rows, columns = torch.split(self._lines[begin : begin + sum(counts)], counts)
            values = values.index_select(-2, rows).index_select(-1, columns)
        values = values.to(place.dtype)
        self._read[place] = tv_tensors.Mask(values) if place.is_tv_tensor else values
        return self._read[place]
