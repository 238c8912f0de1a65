"""CompiledTransform: a Plan that a dataset calls in the place of its transform. Runs in the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from PIL import Image

from ..errors import InputError
from ..transforms.nested import TransformStandIn, find_nested, replace_nested
from ..transforms.plan import Plan
from ..transforms.registry import is_holder, plan_for
from .encoded_image import EncodedImage, refuse_too_large
from .placeholders import NO_TENSOR_YET, ImageCall, ProxySample


@dataclass(frozen=True)
class CompiledTransform(TransformStandIn):
    """Takes an image where the torchvision transform took one; draws what is random, and leaves the rest to DALI.

    Attributes:
        plan: what the DALI pipeline will do.
        max_pixels: most that an image may have; by default what Pillow opens.
    """

    plan: Plan
    max_pixels: int | None = None

    def __call__(
        self, image: EncodedImage | Image.Image | np.ndarray[Any, Any] | bytes, *others: Any
    ) -> ProxySample | tuple[ProxySample, ...]:
        """
        Args:
            image: an EncodedImage, a PIL image in mode RGB, an array (H, W, 3) uint8, or all bytes of an image file.
            others: nothing; a v2 transform takes labels, too.

        Returns:
            What stands for the tensor that the transform gives, or for each of them, as behind FiveCrop.

        Raises:
            ImageError: the image is too large, or the bytes are no image that Pillow reads.
            InputError: its mode is not RGB, or it is something else; or there is more than the image.
        """
        if others:
            raise InputError(
                f"the dataset gave its transform an image and {len(others)} more inputs. What is translated takes the "
                "image alone: transform(image), label",
                code="wrong-number",
            )
        if isinstance(image, bytes):
            image = EncodedImage.from_bytes(image, max_pixels=self.max_pixels)
        if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8:
            image = Image.fromarray(image)
        if isinstance(image, Image.Image):
            image = EncodedImage.from_pil(image, getattr(image, "filename", ""))
        if isinstance(image, ProxySample):
            raise InputError(NO_TENSOR_YET, code="not-decoded")
        if not isinstance(image, EncodedImage):
            raise InputError(
                f"the dataset gave its transform a {type(image).__name__}"
                f"{list(image.shape) if hasattr(image, 'shape') else ''}; "
                "it must be a PIL image, an EncodedImage, an array (H, W, 3) uint8, or the bytes of a file"
            )
        refuse_too_large(image.height, image.width, image.path, self.max_pixels)
        call = ImageCall(self.plan, image, self.plan.sample_params(image.height, image.width))
        if self.plan.output.images == 1:
            return ProxySample(call)
        return tuple(ProxySample(call, output) for output in range(self.plan.output.images))


@dataclass(frozen=True)
class WorkerTransform(TransformStandIn):
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


def compile_transforms(transform: Callable[..., Any], *, unsupported: Literal["raise", "batch"] = "raise") -> Any:
    """Translate a torchvision transform, to be called in a dataset of your own.

    ``DataLoader`` does this by itself for every dataset that keeps its transform in ``dataset.transform``.

    Args:
        transform: a torchvision Compose (v1 or v2) or one transform; or an object of your own that holds such in its
            attributes and calls them, once or several times for an image, as ``TwoCropsTransform`` does.
        unsupported: what becomes of a part that is not translated: "raise", or "batch": it and what follows is called
            on the decoded batches, if images are tensors of one size there. Random numbers are then drawn once for
            the whole batch.

    Returns:
        A CompiledTransform; or a copy of your object, which holds CompiledTransforms.

    Raises:
        UnsupportedTransformError: something in it has no equal in DALI; names the position and the class.
    """
    if isinstance(transform, CompiledTransform):
        return transform
    rest = unsupported == "batch"
    if not is_holder(transform):
        return CompiledTransform(plan_for(transform, rest=rest))
    return replace_nested(transform, lambda at, held: _compiled(held, f"transform{at}", rest))


def left_to_torchvision(transform: Any) -> Any:
    """A WorkerTransform of it, unless it is compiled already; where some of what it holds is, of each of the others."""
    if not compiled_in(transform):
        return WorkerTransform(transform)
    return replace_nested(
        transform, lambda _, held: held if isinstance(held, CompiledTransform) else WorkerTransform(held)
    )


def _compiled(transform: Any, position: str, rest: bool) -> CompiledTransform:
    if isinstance(transform, CompiledTransform):
        return transform
    return CompiledTransform(plan_for(transform, position, rest=rest))


def compiled_in(transform: Any) -> list[CompiledTransform]:
    """What ``compile_transforms`` has put there; nothing where it has not."""
    found = [transform] if isinstance(transform, CompiledTransform) else find_nested(transform).values()
    return [each for each in found if isinstance(each, CompiledTransform)]


def with_max_pixels(transform: Any, max_pixels: int | None) -> Any:
    """As it was, with another limit for the images that it takes."""
    if isinstance(transform, (CompiledTransform, WorkerTransform)):
        return replace(transform, max_pixels=max_pixels)
    return replace_nested(
        transform, lambda _, held: replace(held, max_pixels=max_pixels) if isinstance(held, CompiledTransform) else held
    )
