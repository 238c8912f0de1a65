"""Steps that change colours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .plan import ImageState, Step
from .registry import rule


@dataclass(frozen=True)
class Grayscale(Step):
    """``functional.to_grayscale``: ITU-R 601-2 luma, as Pillow's ``convert("L")``; within one level of 255."""

    channels: int

    def state_after(self, state: ImageState) -> ImageState:
        return replace(state, channels=self.channels)


@rule(v1.Grayscale, v2.Grayscale)
def grayscale(transform: Any, state: ImageState) -> tuple[Step, ...]:
    if state.dtype != "uint8":
        raise UnsupportedTransformError("grey from float values is not translated; put it before the conversion to float")
    channels = int(transform.num_output_channels)
    return (Grayscale(channels),) if state.channels == 3 or channels == 3 else ()
