"""Masks of a batch: packed into bits or bytes in the worker, restored on the device. See ``masks_on_device``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision import tv_tensors

MIN_PIXELS = 1024
"""Minimum number of pixels of a mask. Smaller tensors may be anything, such as boxes."""

DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def is_mask(value: Any) -> bool:
    """Return whether an object is an integer or boolean tensor (..., H, W) with at least ``MIN_PIXELS`` pixels."""
    if type(value) not in (torch.Tensor, tv_tensors.Mask) or value.dtype not in DTYPES or value.ndim < 2:
        return False
    return value.shape[-2] * value.shape[-1] >= MIN_PIXELS and value.device.type == "cpu" and not value.is_sparse


class MaskPlace(NamedTuple):
    """Where a mask begins among those of its kind, and what it is restored to."""

    kind: int
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_tv_tensor: bool


UNCHANGED, BITS, BYTES = range(3)
"""Kinds of masks, in the order in which they are stored: BITS have values of 0 and 1, BYTES of up to 255."""


class PackedMasks(NamedTuple):
    """The masks of a batch in its memory: where they begin, and the size of each kind, in bytes."""

    offset: int
    sizes: tuple[int, ...]


class MaskWriter:
    """Packs the masks of a batch. Worker."""

    def __init__(self) -> None:
        self._parts: tuple[list[NDArray[np.uint8]], ...] = [], [], []

    def add(self, mask: torch.Tensor) -> MaskPlace:
        values = mask.detach().as_subclass(torch.Tensor).numpy()
        highest = values.max(initial=0)
        kind = UNCHANGED if values.min(initial=0) < 0 or highest > 255 else BITS if highest <= 1 else BYTES
        begin = sum(map(len, self._parts[kind])) * (8 if kind == BITS else 1)
        if kind == UNCHANGED:
            packed = np.zeros(-(-values.nbytes // 8) * 8, np.uint8)  # so that the next one is aligned
            packed[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        else:
            packed = np.packbits(values, bitorder="little") if kind == BITS else values.astype(np.uint8).reshape(-1)
        self._parts[kind].append(packed)
        return MaskPlace(kind, begin, tuple(mask.shape), mask.dtype, isinstance(mask, tv_tensors.Mask))

    def packed(self) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """Return the packed masks, and the size of each kind."""
        parts = [np.concatenate([np.empty(0, np.uint8), *each]) for each in self._parts]
        return np.concatenate(parts), tuple(map(len, parts))


class MaskReader:
    """Restores the masks of a batch on a device, as views of few tensors. Main process."""

    def __init__(self, packed: NDArray[np.uint8], sizes: tuple[int, ...], device: torch.device) -> None:
        staged = torch.empty(len(packed), dtype=torch.uint8, pin_memory=device.type == "cuda")
        staged.numpy()[:] = packed
        unchanged, bits, levels = torch.split(staged.to(device, non_blocking=True), list(sizes))
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        self._read: dict[MaskPlace, torch.Tensor] = {}  # a mask may be referenced several times
        self._values = unchanged, (bits[:, None] >> shifts).bitwise_and_(1).view(-1), levels

    def read(self, place: MaskPlace) -> torch.Tensor:
        if place not in self._read:
            self._read[place] = self._restore(place)
        return self._read[place]

    def _restore(self, place: MaskPlace) -> torch.Tensor:
        size = math.prod(place.shape) * (place.dtype.itemsize if place.kind == UNCHANGED else 1)
        values: torch.Tensor = self._values[place.kind][place.begin : place.begin + size]
        is_viewed = place.kind == UNCHANGED or (place.kind == BITS and place.dtype == torch.bool)
        values = (values.view(place.dtype) if is_viewed else values.to(place.dtype)).view(place.shape)
        mask: torch.Tensor = tv_tensors.Mask(values) if place.is_tv_tensor else values
        return mask
