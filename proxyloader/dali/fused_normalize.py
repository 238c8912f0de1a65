"""Conversion to float and normalisation in one pass, from DALI's memory to torch's. Main process.

NOTE [ Copied once ]
What DALI decoded is copied into torch's own memory, so that what torch's users know about streams, ``record_stream``
and memory statistics holds. Where all that is left to do is arithmetic on each value, DALI gives whole levels, uint8,
and the copy does the rest: floats, normalized, in the dtype that was asked for, rounded once. So DALI keeps a quarter
of the memory for its outputs, and no batch is read and written once more.
"""

from __future__ import annotations

import torch

from ..transforms.plan import Branch
from ..transforms.type_conversion import Normalize, ToFloat


def split(steps: Branch) -> tuple[Branch, Branch]:
    """The steps of a plan, up to the last whole levels; and those at the end that scale and normalize them, or none."""
    at = len(steps)
    while at and isinstance(steps[at - 1], (Normalize, ToFloat)):
        at -= 1
    is_of_levels = at < len(steps) and isinstance(steps[at], ToFloat)
    return (steps[:at], steps[at:]) if is_of_levels else (steps, ())


class FusedNormalize:
    """
    Args:
        steps: ToFloat and Normalize; or none, for a mere copy.
        channels: of the images.
        dtype: of the images that come out, where they are floats; None: float32, or as they are.
        device: of the images.
    """

    def __init__(self, steps: Branch, channels: int, dtype: torch.dtype | None, device: torch.device) -> None:
        factor = torch.ones(channels, 1, 1, dtype=torch.float64)
        offset = torch.zeros_like(factor)
        for step in steps:
            if isinstance(step, Normalize):
                mean, std = (torch.tensor(values).reshape(-1, 1, 1).double() for values in (step.mean, step.std))
                factor, offset = factor / std, (offset - mean) / std
            elif isinstance(step, ToFloat) and step.scale:
                factor, offset = factor / 255, offset / 255
        self._is_copy, self._dtype = not steps, dtype
        self._factor, self._offset = factor.float().to(device), offset.float().to(device)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """
        Args:
            images: (N, C, H, W) or (C, H, W), uint8; floats where they are but copied.

        Returns:
            A new tensor, with the same strides. ``tests/dali/test_fused_normalize.py`` says how close floats are to
            torchvision's.
        """
        if self._is_copy:
            dtype = self._dtype if self._dtype is not None and images.is_floating_point() else images.dtype
            return images.to(dtype, copy=True)
        floats = torch.empty_like(images, dtype=self._dtype or torch.float32)
        return torch.addcmul(self._offset, images, self._factor, out=floats)
