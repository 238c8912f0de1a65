"""A plan in the place of the transform it was made from: the dataset calls it for each image. Runs in the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ..errors import InputError
from ..proxy import ProxyCall, ProxySample
from ..sample import EncodedImage, refuse_too_large
from .plan import Plan
from .registry import plan_for


@dataclass(frozen=True)
class CompiledTransform:
    """Takes an image where the torchvision transform took one; draws what is random, and leaves the rest to DALI.

    Attributes:
        plan: what the DALI pipeline will do.
        max_pixels: most that an image may have; by default what Pillow opens.
    """

    plan: Plan
    max_pixels: int | None = None

    def __call__(self, image: EncodedImage | Image.Image | np.ndarray[Any, Any] | bytes) -> ProxySample:
        """
        Args:
            image: an EncodedImage, a PIL image in mode RGB, an array (H, W, 3) uint8, or all bytes of an image file.

        Raises:
            ImageError: the image is too large, or the bytes are no image that Pillow reads.
            InputError: its mode is not RGB, or it is something else.
        """
        if isinstance(image, bytes):
            image = EncodedImage.from_bytes(image, max_pixels=self.max_pixels)
        if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8:
            image = Image.fromarray(image)
        if isinstance(image, Image.Image):
            image = EncodedImage.from_pil(image, getattr(image, "filename", ""))
        if not isinstance(image, EncodedImage):
            raise InputError(
                f"the dataset gave its transform a {type(image).__name__}"
                f"{list(image.shape) if hasattr(image, 'shape') else ''}; "
                "it must be a PIL image, an EncodedImage, an array (H, W, 3) uint8, or the bytes of a file"
            )
        refuse_too_large(image.height, image.width, image.path, self.max_pixels)
        encoded = np.frombuffer(image.data, np.uint8)
        row = self.plan.draw(image.height, image.width)
        return ProxySample(ProxyCall(self.plan.key, (encoded, row) if row.size else (encoded,), image.path))


@dataclass(frozen=True)
class WorkerTransform:
    """Takes an image where the torchvision transform took one, and lets torchvision do all of it, in the worker.

    Attributes:
        transform: torchvision's, or of any kind.
        max_pixels: as of CompiledTransform.
    """

    transform: Any
    max_pixels: int | None = None

    def __call__(self, image: Any) -> Any:
        """What the transform makes of the image; an EncodedImage is decoded by Pillow.

        Raises:
            ImageError: it cannot be, or it is too large.
        """
        if isinstance(image, EncodedImage):
            refuse_too_large(image.height, image.width, image.path, self.max_pixels)
            image = image.decoded()
        return self.transform(image)


def compile_transforms(transform: Any) -> CompiledTransform:
    """Translate a torchvision transform, to be called in a dataset of your own.

    ``DataLoader`` does this by itself for every dataset that keeps its transform in ``dataset.transform``.

    Args:
        transform: a torchvision Compose (v1 or v2), one transform, or a callable whose ``.transforms`` is a Compose.

    Raises:
        UnsupportedTransformError: something in it has no equal in DALI; names the position and the class.
    """
    return transform if isinstance(transform, CompiledTransform) else CompiledTransform(plan_for(transform))
