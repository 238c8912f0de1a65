"""DeferredTransforms: the last part of a transform, which is not translated and runs on whole batches. Main process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError


@dataclass(frozen=True)
class DeferredTransforms:
    """The first transform that is not translated and all that follow, called on batches (N, C, H, W).

    Only the main process needs the transforms. A worker receives just the key, so lambdas need not be pickled.

    Attributes:
        position: position of the first one, for messages.
        transforms: the user's objects.
        key: the same for the same objects.
    """

    position: str
    transforms: tuple[Any, ...]
    key: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or "-".join(f"{id(each):x}" for each in self.transforms))

    def __reduce__(self) -> tuple[Any, ...]:
        return DeferredTransforms, (self.position, (), self.key)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """
        Args:
            batch: (N, C, H, W), on the loader's device.

        Returns:
            (N, ...)

        Raises:
            InputError: the result is not a tensor of N images. Exceptions of the transforms are not changed.
        """
        images = batch
        for transform in self.transforms:
            images = _on(batch.device, transform)(images)
        if not isinstance(images, torch.Tensor) or images.ndim == 0 or len(images) != len(batch):
            got = list(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
            raise InputError(
                f"{self.position} and what follows it were called on a batch of images, {list(batch.shape)}, as "
                f"unsupported='batch' says, and gave {got}; a tensor of {len(batch)} images is expected. "
                "With unsupported='auto' they are called on each image",
                code="wrong-output",
            )
        return images


def _on(device: torch.device, transform: Any) -> Any:
    """Return the transform with the tensors that it holds on ``device``, or a copy if any must be moved."""
    kept = {name: value for name, value in getattr(transform, "__dict__", {}).items() if torch.is_tensor(value)}
    if all(value.device == device for value in kept.values()):
        return transform
    moved = copy.copy(transform)
    vars(moved).update({name: value.to(device) for name, value in kept.items()})
    return moved
