"""The dtype and memory format of the images handed out. Main process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch.utils._pytree import tree_map

from ..transforms.plan import Plan

Output = Union["torch.Tensor", "list[torch.Tensor]"]
"""Of a pipeline's run: (N, ...), or N tensors that differ in shape."""

Outputs = list[Output]

IMAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class OutputFormat:
    """
    Attributes:
        dtype: of images that are floats; None: as the transform gives them.
        memory_format: of batches of images, ``torch.contiguous_format`` or ``torch.channels_last``.

    Raises:
        ValueError: images are not handed out in such.
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
        """
        Raises:
            ValueError: what the plan gives would have to be scaled to become this dtype.
        """
        if self.dtype is None or plan.rest is not None:
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
        """(N, C, H, W), or one of them (C, H, W), which has a dtype alone. They come back without a copy where they are
        so already. A format of its own that is not the default one, such as a collate_fn gives it, a batch keeps.

        Raises:
            ValueError: floats would have to be scaled to become uint8.
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
        """Whatever a collate_fn made, with its tensors of four dimensions in this format: they are taken for images.

        Raises:
            ValueError: as of ``of_images``.
        """
        return batch if self.is_default else tree_map(self._of_leaf, batch)

    def of_outputs(self, outputs: Outputs) -> Outputs:
        """What a server made of a run, with its outputs of four dimensions in this format: they are taken for images.

        Raises:
            ValueError: as of ``of_images``.
        """
        return outputs if self.is_default else list(map(self._of_output, outputs))

    def _of_output(self, output: Output) -> Output:
        if isinstance(output, list):
            return [self.of_images(image) if image.ndim == 3 else image for image in output]
        return self.of_images(output) if output.ndim == 4 else output

    def _of_leaf(self, value: Any) -> Any:
        return self.of_images(value) if isinstance(value, torch.Tensor) and value.ndim == 4 else value


def stacked(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """As ``torch.stack`` of images (C, H, W), in their memory format."""
    if not images[0].is_contiguous() and images[0].permute(1, 2, 0).is_contiguous():
        return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return torch.stack(list(images))


def stacked_or_listed(images: list[torch.Tensor]) -> Output:
    """Stacked where they are of one shape."""
    return stacked(images) if len({image.shape for image in images}) == 1 else images
