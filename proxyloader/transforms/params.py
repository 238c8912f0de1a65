"""Sample the random parameters of a torchvision transform without an image."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torchvision.transforms import v2

from .random_numbers import in_thread


@functools.lru_cache(maxsize=256)
def meta_image(height: int, width: int) -> torch.Tensor:
    """Return an image without data. torchvision's parameter code uses only its size."""
    return torch.empty((3, height, width), device="meta")


def bernoulli(p: float) -> bool:
    """Return ``torch.rand(1) < p``, compared in float32 as in torch, without a tensor for the result."""
    ahead = in_thread.ahead
    return (torch.rand(1).item() if ahead is None else ahead.uniform(0.0, 1.0)) < _in_float32(p)


@functools.lru_cache(maxsize=64)
def _in_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


Version = Literal["v1", "v2"]
"""Version whose parameter code is used. v1 and v2 may draw different numbers, so their plans differ."""


@functools.lru_cache(maxsize=64)
def v2_transform(cls: type[v2.Transform], *arguments: Any) -> v2.Transform:
    """Return an instance of a v2 class, which samples parameters in a method. Plans store only the arguments."""
    return cls(*arguments)


def version_of(transform: Any) -> Version:
    return "v2" if isinstance(transform, v2.Transform) else "v1"


def arithmetic_of(transform: Any, kind: str) -> Version:
    """Return the version whose arithmetic a step needs. Only that of tensors differs."""
    return version_of(transform) if kind == "tensor" else "v2"
