"""Steps that change colours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .plan import ImageState, Step
from .registry import rule


@dataclass(frozen=True)
class Grayscale(Step):
    """``functional.rgb_to_grayscale``: ITU-R 601-2 luma. Exact, float values up to rounding.

    Attributes:
        channels: 1, or 3 equal ones.
        kind: of the image before it. Pillow rounds to the nearest level; on a uint8 tensor torchvision cuts off.
    """

    channels: int
    kind: Literal["pil", "tensor"] = "pil"

    def state_after(self, state: ImageState) -> ImageState:
        return replace(state, channels=self.channels)


@rule(v1.Grayscale, v2.Grayscale)
def grayscale(transform: Any, state: ImageState) -> tuple[Step, ...]:
    channels = transform.num_output_channels
    if channels not in (1, 3):
        raise UnsupportedTransformError(f"num_output_channels={channels!r} is not allowed; 1 and 3 are")
    # The v1 class leaves a grey tensor with one channel, also where three are asked for.
    stays_grey = channels == 1 or (state.kind == "tensor" and isinstance(transform, v1.Grayscale))
    return () if state.channels == 1 and stays_grey else (Grayscale(channels, state.kind),)
