"""Sample the random parameters of a torchvision transform without an image."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torchvision.transforms import v2


@functools.lru_cache(maxsize=4096)
def meta_image(height: int, width: int) -> torch.Tensor:
    """An image without pixels: torchvision's parameter code looks at the size only."""
    return torch.empty((3, height, width), device="meta")


def bernoulli(p: float) -> bool:
    """``torch.rand(1) < p``, compared in float32 as torch does, without a tensor for the answer."""
    return torch.rand(1).item() < _in_float32(p)


@functools.lru_cache(maxsize=64)
def _in_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


Version = Literal["v1", "v2"]
"""Whose parameter code draws: they take other numbers from the generator in some cases, so plans of both differ."""


@functools.lru_cache(maxsize=64)
def v2_transform(cls: type[v2.Transform], *arguments: Any) -> v2.Transform:
    """The v2 classes draw in a method, so it takes an instance; the plan keeps the numbers that make one."""
    return cls(*arguments)


def parameter_function(version: Version) -> str:
    """The name of the function of a transform that draws its parameters."""
    return "get_params" if version == "v1" else "make_params"


def version_of(transform: Any) -> Version:
    return "v2" if isinstance(transform, v2.Transform) else "v1"
