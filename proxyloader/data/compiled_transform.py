"""CompiledTransform: a Plan that a dataset calls in place of its transform. Runs in the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import InputError
from ..lifetime import cached_property
from ..transforms.chain import Chain, Snapshot, chain_of
from ..transforms.nested import TransformStandIn, find_nested, replace_nested
from ..transforms.plan import ParamRow, Plan
from ..transforms.registry import is_holder, plan_for
from .deferral import current
from .encoded_image import EncodedImage
from .lazy_image import encoded_in, is_late, late_image, path_in
from .lazy_tensor import lazy_outputs, with_values
from .transformed import Transformed


@dataclass(frozen=True)
class CompiledTransform(TransformStandIn):
    """Compiled form of a torchvision transform. Draws the random parameters, and leaves the rest to DALI.

    Attributes:
        plan: the translation.
        original: the transform itself.
        takes_all: whether inputs that DALI does not take are given to the original, which runs in the worker.
        as_translated: the transform as it was when it was translated. A dataset may change it for each image.
    """

    plan: Plan
    original: Any = field(default=None, compare=False, repr=False)
    takes_all: bool = False
    as_translated: Snapshot | None = field(default=None, compare=False, repr=False)

    @cached_property
    def _chain(self) -> Chain:
        return chain_of(self.plan, self.original)

    def __call__(
        self, image: EncodedImage | Image.Image | np.ndarray[Any, Any] | bytes, *others: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """
        Args:
            image: an EncodedImage, a PIL image in mode RGB, an array (H, W, 3) uint8, or the content of an image file.
            others: must be empty, unless the original takes them in the worker.

        Returns:
            The output tensor, whose values are computed late, or a tuple of them if the transform has several outputs.

        Raises:
            ImageError: Pillow cannot read the bytes.
            InputError: the mode is not RGB, the type is not supported, or there are more inputs than the image.
        """
        deferral, encoded = current(), None
        if deferral is not None and not deferral.is_active:
            return self.original(image.decoded() if isinstance(image, EncodedImage) else image, *others)  # type: ignore[no-any-return]
        try:
            encoded = self._encoded(image, *others)
        except InputError:
            if not self.takes_all:
                raise
        if encoded is not None and not self.is_as_translated():
            image, encoded = (encoded if isinstance(image, bytes) else image), None
        if encoded is None:
            if isinstance(image, EncodedImage):
                image = late_image(image) if is_late() else image.decoded()
            made = self.original(image, *others)
            if isinstance(made, tuple) and others:
                return with_values(made[0]), *made[1:]
            return with_values(made)  # type: ignore[no-any-return]
        return self.outputs(encoded)

    def outputs(self, image: EncodedImage) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return what a call returns, without a look at changes of the original."""
        return lazy_outputs(Transformed.of(image).then(self._chain))

    def drawn(self, image: EncodedImage) -> Transformed:
        """Draw the parameters of an image whose values are not used in the worker.

        As ``outputs``, it looks at nothing before.
        """
        row, size = ParamRow(), (image.height, image.width)
        for step in self._chain.sampling_steps:
            size = step.sample_params(size, row)
        return Transformed(image, None, self._chain, (), row, size)

    def is_as_translated(self) -> bool:
        """Return whether the original, and the dtype that it makes, are those that were translated."""
        if torch.get_default_dtype() is not torch.float32:
            return False
        return self.as_translated is None or self.as_translated.is_current()

    def _encoded(self, image: Any, *others: Any) -> EncodedImage:
        """Return the image as DALI takes it. InputError: DALI does not take it."""
        if others:
            raise InputError(
                f"the dataset gave its transform an image and {len(others)} more inputs. What is translated takes the "
                "image alone: transform(image), label",
                code="wrong-number",
            )
        if isinstance(image, bytes):
            return EncodedImage.from_bytes(image)
        if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8:
            image = Image.fromarray(image)
        if isinstance(image, Image.Image):
            return encoded_in(image) or EncodedImage.from_pil(image, path_in(image))
        if not isinstance(image, EncodedImage):
            raise InputError(
                f"the dataset gave its transform a {type(image).__name__}"
                f"{list(image.shape) if hasattr(image, 'shape') else ''}; "
                "it must be a PIL image, an EncodedImage, an array (H, W, 3) uint8, or the bytes of a file"
            )
        return image


@dataclass(frozen=True)
class WorkerTransform(TransformStandIn):
    """A transform that torchvision runs in the worker, on the image that Pillow decodes."""

    transform: Any

    def __call__(self, image: Any) -> Any:
        """Apply the transform. ImageError: the image cannot be decoded."""
        if isinstance(image, EncodedImage):
            image = image.decoded()
        return self.transform(image)


def compile_transforms(transform: Callable[..., Any]) -> Any:
    """Translate a torchvision transform that your own dataset calls.

    ``DataLoader`` does this by itself for ``dataset.transform``, and takes other transforms where they are called. So
    it is needed only for a dataset that gives them an ``EncodedImage``, and for one that is to have DALI transform
    images that it has decoded, or several images of one, in another attribute.

    Args:
        transform: a torchvision Compose (v1 or v2) or one transform. Or an object of your own that holds such
            transforms in its attributes and calls them once or several times for an image, as ``TwoCropsTransform``
            does.

    Returns:
        A CompiledTransform; or a copy of your object that holds CompiledTransforms.

    Raises:
        UnsupportedTransformError: a part has no equal in DALI; names the position and the class.
    """
    return compile_for_loader(transform, takes_all=False)


def compile_for_loader(transform: Any, takes_all: bool) -> Any:
    """Translate a transform as ``compile_transforms`` does. ``takes_all`` is that of ``CompiledTransform``."""

    def compiled(position: str, held: Any) -> CompiledTransform:
        if isinstance(held, CompiledTransform):
            return held
        return CompiledTransform(plan_for(held, f"transform{position}"), held, takes_all, as_translated=Snapshot(held))

    return replace_nested(transform, compiled) if is_holder(transform) else compiled("", transform)


def left_to_torchvision(transform: Any) -> Any:
    """Wrap a transform in a WorkerTransform. In an object that holds compiled transforms, wrap each of the others."""
    if not compiled_in(transform):
        return WorkerTransform(transform)
    return replace_nested(
        transform, lambda _, held: held if isinstance(held, CompiledTransform) else WorkerTransform(held)
    )


def compiled_in(transform: Any) -> list[CompiledTransform]:
    """Return the CompiledTransforms that ``transform`` is or holds; [] if there are none."""
    found = [transform] if isinstance(transform, CompiledTransform) else find_nested(transform).values()
    return [each for each in found if isinstance(each, CompiledTransform)]
