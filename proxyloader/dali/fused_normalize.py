"""Conversion to float and normalisation in one pass, from DALI's memory to torch's. Main process.

NOTE [ Single copy ]
DALI's outputs are copied to memory of torch, so that torch's rules for streams, ``record_stream`` and memory statistics
hold for them. If the remaining steps are only a conversion to float and normalisation, DALI returns uint8 levels, and
the copy does these steps in the requested dtype, with one rounding. So DALI's outputs take a quarter of the memory, and
no batch is read and written an additional time.
"""

from __future__ import annotations

import torch

from ..transforms.plan import Branch
from ..transforms.type_conversion import Normalize, ToFloat


def split(steps: Branch) -> tuple[Branch, Branch]:
    """Split the steps of a plan before the last ones, which convert uint8 levels to floats and normalize them.

    The second part is empty if the plan does not end with such steps.
    """
    at = len(steps)
    while at and isinstance(steps[at - 1], (Normalize, ToFloat)):
        at -= 1
    is_of_levels = at < len(steps) and isinstance(steps[at], ToFloat)
    return (steps[:at], steps[at:]) if is_of_levels else (steps, ())


class FusedNormalize:
    """Copies images, converts them to float and normalizes them, in one pass.

    Args:
        steps: ToFloat and Normalize steps; none, for a copy.
        channels: number of channels of the images.
        dtype: dtype of floating-point results. None: float32, or for a copy the dtype of the images.
        device: device of the images.
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
        """Return the converted images.

        Args:
            images: (N, C, H, W) or (C, H, W), uint8; for a copy also floating-point.

        Returns:
            A new tensor with the same strides. ``tests/dali/test_fused_normalize.py`` has the bounds of its difference
            from torchvision.
        """
        if self._is_copy:
            dtype = self._dtype if self._dtype is not None and images.is_floating_point() else images.dtype
            return images.to(dtype, copy=True)
        floats = torch.empty_like(images, dtype=self._dtype or torch.float32)
        return torch.addcmul(self._offset, images, self._factor, out=floats)
