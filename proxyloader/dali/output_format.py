"""The dtype and memory format of the images handed out. Main process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch.utils._pytree import tree_map

from ..transforms.plan import Plan

Output = Union["torch.Tensor", "list[torch.Tensor]"]
"""An output of a run: (N, ...), or a list of N tensors if they differ in shape."""

Outputs = list[Output]

IMAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class OutputFormat:
    """The dtype and memory format of images.

    Attributes:
        dtype: dtype of floating-point images. None: as the transform returns them.
        memory_format: memory format of batches of images, ``torch.contiguous_format`` or ``torch.channels_last``.

    Raises:
        ValueError: the dtype or the memory format is not supported.
    """

    dtype: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format

    def __post_init__(self) -> None:
        if self.dtype not in (None, *IMAGE_DTYPES):
            raise ValueError(f"dtype is one of {', '.join(map(str, IMAGE_DTYPES))}, got {self.dtype!r}")
        if self.memory_format not in (torch.contiguous_format, torch.channels_last):
            raise ValueError(
                f"memory_format is torch.contiguous_format or torch.channels_last, got {self.memory_format!r}"
            )

    def check(self, plan: Plan) -> None:
        """Raise ValueError if converting the output of a plan from or to uint8 would need a scale."""
        if self.dtype is None:
            return
        if self.dtype == torch.uint8 and plan.output.dtype != "uint8":
            raise ValueError(
                "dtype=torch.uint8, and the transform gives floats. Leave out what makes them, such as ToTensor() and "
                "Normalize(), and end it with PILToTensor()"
            )
        if self.dtype != torch.uint8 and plan.output.dtype == "uint8":
            raise ValueError(
                f"dtype={self.dtype}, and the transform gives uint8. Let it end with ToTensor(), or "
                "v2.ToDtype(torch.float32, scale=True), which says what becomes of 255"
            )

    @property
    def is_default(self) -> bool:
        return self == OutputFormat()

    @property
    def channels_last(self) -> bool:
        return self.memory_format == torch.channels_last

    def of_images(self, images: torch.Tensor) -> torch.Tensor:
        """Return images in this format, without a copy if they have it already.

        With ``torch.contiguous_format``, the default, images keep the memory format that they have, for example from a
        collate_fn.

        Args:
            images: (N, C, H, W), or one image (C, H, W), of which only the dtype is converted.

        Raises:
            ValueError: the images are floating-point and the dtype is uint8, which would need a scale.
        """
        if self.dtype == torch.uint8 and images.is_floating_point():
            raise ValueError(
                f"dtype=torch.uint8, and the batch has {images.dtype} {list(images.shape)}. Leave out what makes it "
                "floats, such as ToTensor() and Normalize(), or leave out dtype"
            )
        dtype = self.dtype if images.is_floating_point() else None
        memory_format = torch.channels_last if self.channels_last and images.ndim == 4 else torch.preserve_format
        return images.to(dtype=dtype or images.dtype, memory_format=memory_format)

    def of_batch(self, batch: Any) -> Any:
        """Return a batch of a collate_fn with its four-dimensional tensors, which count as images, in this format."""
        return batch if self.is_default else tree_map(self._of_leaf, batch)

    def of_outputs(self, outputs: Outputs) -> Outputs:
        """Return the outputs of a run with the four-dimensional ones, which count as images, in this format."""
        if self.is_default:
            return outputs
        return [
            [self._of_leaf(image, 3) for image in output] if isinstance(output, list) else self._of_leaf(output)
            for output in outputs
        ]

    def _of_leaf(self, value: Any, image_ndim: int = 4) -> Any:
        return self.of_images(value) if isinstance(value, torch.Tensor) and value.ndim == image_ndim else value


def stacked(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack images (C, H, W) as ``torch.stack`` does, and keep their memory format."""
    if not images[0].is_contiguous() and images[0].permute(1, 2, 0).is_contiguous():
        return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return torch.stack(list(images))


def stacked_or_listed(images: list[torch.Tensor]) -> Output:
    """Stack images of one shape. Images of several shapes are returned as a list."""
    return stacked(images) if len({image.shape for image in images}) == 1 else images
