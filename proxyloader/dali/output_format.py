"""The dtype and memory format of returned images. Main process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..transforms.plan import Plan

Outputs = list[torch.Tensor | list[torch.Tensor]]
"""The outputs of a run. Each is (N, ...), or a list of N tensors if they differ in shape."""

IMAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class OutputFormat:
    """The dtype and memory format of images. ValueError: one of them is not supported."""

    dtype: torch.dtype | None = None  # of floating-point images; None: as the transform returns them
    memory_format: torch.memory_format = torch.contiguous_format  # of batches of images; or ``torch.channels_last``

    def __post_init__(self) -> None:
        if self.dtype not in (None, *IMAGE_DTYPES):
            raise ValueError(f"dtype must be one of {', '.join(map(str, IMAGE_DTYPES))}, got {self.dtype!r}")
        if self.memory_format not in (torch.contiguous_format, torch.channels_last):
            raise ValueError(
                f"memory_format must be torch.contiguous_format or torch.channels_last, got {self.memory_format!r}"
            )

    def check(self, plan: Plan) -> None:
        """Raise ValueError if converting the output of a plan from or to uint8 would require a scale."""
        if self.dtype == torch.uint8 and plan.output.dtype != "uint8":
            raise ValueError(
                "dtype=torch.uint8, but the transform returns floats. Omit steps that convert to float, such as "
                "ToTensor() and Normalize(), and end it with PILToTensor()"
            )
        if self.dtype not in (None, torch.uint8) and plan.output.dtype == "uint8":
            raise ValueError(
                f"dtype={self.dtype}, but the transform returns uint8. End it with ToTensor() or "
                "v2.ToDtype(torch.float32, scale=True), which defines the scale"
            )

    @property
    def is_default(self) -> bool:
        return self == OutputFormat()

    @property
    def channels_last(self) -> bool:
        return self.memory_format == torch.channels_last

    def convert_batch(self, batch: Any) -> Any:
        """Convert the four-dimensional tensors of a batch of a collate_fn, which count as images."""
        return batch if self.is_default else tree_map(self.convert, batch, is_leaf=is_size)

    def convert(self, value: Any, image_ndim: int = 4) -> Any:
        """Convert images (N, C, H, W), or the dtype of one image (C, H, W). Return anything else unchanged.

        With ``torch.contiguous_format``, the default, images keep their memory format, for example from a collate_fn.
        ValueError: the images are a floating-point batch and the dtype is uint8, which would require a scale.
        """
        if not isinstance(value, torch.Tensor) or value.ndim != image_ndim:
            return value
        dtype = self.dtype if value.is_floating_point() else None
        if dtype == torch.uint8 and image_ndim == 3:  # perhaps not an image
            return value
        if dtype == torch.uint8:
            raise ValueError(
                f"dtype=torch.uint8, but the batch has {value.dtype} {list(value.shape)}. Omit dtype, or the steps "
                "that convert to float, such as ToTensor() and Normalize()"
            )
        memory_format = torch.channels_last if self.channels_last and image_ndim == 4 else torch.preserve_format
        return value.to(dtype=dtype or value.dtype, memory_format=memory_format)


def is_size(value: Any) -> bool:
    """Return whether ``tree_map`` would return this as a tuple."""
    return isinstance(value, torch.Size)


def stack(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack images (C, H, W) as ``torch.stack`` does, but keep their memory format."""
    if not images[0].is_contiguous() and images[0].permute(1, 2, 0).is_contiguous():
        return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return torch.stack(list(images))


def stack_or_list(images: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Stack images of one shape. Return images of several shapes as a list."""
    return stack(images) if len({image.shape for image in images}) == 1 else images
