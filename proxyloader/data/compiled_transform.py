"""CompiledTransform: a Plan that replaces the transform of a dataset. Runs in the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import InputError
from ..lifetime import cached_property
from ..transforms.chain import Chain, Snapshot, build_chain
from ..transforms.nested import TransformStandIn, find_nested, replace_nested
from ..transforms.plan import ParamRow, Plan
from ..transforms.registry import is_holder, plan_for
from .deferral import current
from .encoded_image import EncodedImage
from .lazy_image import create_lazy_image, defers_decoding, get_encoded, get_image_path
from .lazy_tensor import create_lazy_outputs, wrap_values
from .transformed import TransformedImage


@dataclass(frozen=True)
class CompiledTransform(TransformStandIn):
    """Compiled form of a torchvision transform, which only samples random parameters.

    Attributes:
        plan: the translated transform.
        original: the transform itself.
        has_fallback: whether the worker falls back to the original for inputs that DALI does not support.
        snapshot: the state of the original at translation. A dataset may change it for every image.
    """

    plan: Plan
    original: Any = field(default=None, compare=False, repr=False)
    has_fallback: bool = False
    snapshot: Snapshot | None = field(default=None, compare=False, repr=False)

    @cached_property
    def _chain(self) -> Chain:
        return build_chain(self.plan, self.original)

    def __call__(
        self, image: EncodedImage | Image.Image | np.ndarray[Any, Any] | bytes, *others: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """
        Args:
            image: an EncodedImage, an RGB PIL image, a uint8 array of shape (H, W, 3), or the bytes of an image file.
            others: further inputs, which only the original accepts.

        Returns:
            The output tensor, whose values are computed on first use, or a tuple if the transform has several outputs.

        Raises:
            ImageError: Pillow cannot decode the bytes.
            InputError: the mode is not RGB, the type is not supported, or there are further inputs.
        """
        deferral, encoded = current(), None
        if deferral is not None and not deferral.is_active:
            return self.original(image.decoded() if isinstance(image, EncodedImage) else image, *others)  # type: ignore[no-any-return]
        try:
            encoded = self._encode(image, *others)
        except InputError:
            if not self.has_fallback:
                raise
        if encoded is not None and not self.is_unchanged():
            image, encoded = (encoded if isinstance(image, bytes) else image), None
        if encoded is None:
            if isinstance(image, EncodedImage):
                image = create_lazy_image(image) if defers_decoding() else image.decoded()
            result = self.original(image, *others)
            if isinstance(result, tuple) and others:
                return wrap_values(result[0]), *result[1:]
            return wrap_values(result)  # type: ignore[no-any-return]
        return self.apply(encoded)

    def apply(self, image: EncodedImage) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Apply the transform without checking whether the original has changed."""
        return create_lazy_outputs(TransformedImage.start(image).apply(self._chain))

    def sample(self, image: EncodedImage) -> TransformedImage:
        """Sample the parameters for an image whose pixels the worker never needs. Like ``apply``, without checks."""
        row, size = ParamRow(), (image.height, image.width)
        for step in self._chain.sampling_steps:
            size = step.sample_params(size, row)
        return TransformedImage(image, None, self._chain, (), row, size)

    def is_unchanged(self) -> bool:
        """Return whether the original and its output dtype are still those that were translated."""
        if torch.get_default_dtype() is not torch.float32:
            return False
        return self.snapshot is None or self.snapshot.is_current()

    def _encode(self, image: Any, *others: Any) -> EncodedImage:
        """Convert the image for DALI. InputError: DALI does not support it."""
        if others:
            raise InputError(
                f"expected one input, got an image and {len(others)} more. A translated transform accepts only the "
                "image: transform(image), label",
                code="wrong-number",
            )
        if isinstance(image, bytes):
            return EncodedImage.from_bytes(image)
        if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8:
            image = Image.fromarray(image)
        if isinstance(image, Image.Image):
            return get_encoded(image) or EncodedImage.from_pil(image, get_image_path(image))
        if not isinstance(image, EncodedImage):
            raise InputError(
                "the input of a transform must be a PIL image, an EncodedImage, a uint8 array of shape (H, W, 3), or "
                f"the bytes of a file, got {type(image).__name__}{list(image.shape) if hasattr(image, 'shape') else ''}"
            )
        return image


@dataclass(frozen=True)
class WorkerTransform(TransformStandIn):
    """A transform that torchvision runs in the worker, on an image decoded by Pillow."""

    transform: Any

    def __call__(self, image: Any) -> Any:
        """Apply the transform. ImageError: the image cannot be decoded."""
        if isinstance(image, EncodedImage):
            image = image.decoded()
        return self.transform(image)


def compile_transforms(transform: Callable[..., Any]) -> Any:
    """Translate a torchvision transform that your own dataset calls.

    ``DataLoader`` translates ``dataset.transform``, and intercepts calls of other transforms. So this function is only
    needed if a dataset passes an ``EncodedImage`` to its transform, or if DALI should transform images that the dataset
    has decoded, or create several images from one, and the transform is stored in another attribute.

    Args:
        transform: a torchvision Compose (v1 or v2) or a single transform; or a custom object such as
            ``TwoCropsTransform``, which holds such transforms in its attributes and calls them.

    Returns:
        A CompiledTransform, or a copy of the custom object that holds CompiledTransforms.

    Raises:
        UnsupportedTransformError: a part is not supported by DALI. The message contains its position and class.
    """
    return compile_for_loader(transform, has_fallback=False)


def compile_for_loader(transform: Any, has_fallback: bool) -> Any:
    """Translate a transform like ``compile_transforms``. ``has_fallback``: see ``CompiledTransform``."""

    def compile(position: str, part: Any) -> CompiledTransform:
        if isinstance(part, CompiledTransform):
            return part
        return CompiledTransform(plan_for(part, f"transform{position}"), part, has_fallback, snapshot=Snapshot(part))

    return replace_nested(transform, compile) if is_holder(transform) else compile("", transform)


def leave_untranslated(transform: Any, options: Any) -> Any:
    """Leave a transform to torchvision, except for the parts that the user has compiled and that have no obstacle.

    On a CPU it becomes a WorkerTransform. On a GPU its calls are intercepted, so that the results arrive there.
    """

    def leave(_: str, part: Any) -> Any:
        if isinstance(part, CompiledTransform):
            if not options.find_obstacle(part.plan):
                return part
            part = part.original
        return part if options.on_gpu else WorkerTransform(part)

    has_compiled = is_holder(transform) and find_compiled(transform)
    return replace_nested(transform, leave) if has_compiled else leave("", transform)


def find_compiled(transform: Any) -> list[CompiledTransform]:
    """Return ``transform`` if it is a CompiledTransform, or those that it holds."""
    parts = [transform] if isinstance(transform, CompiledTransform) else find_nested(transform).values()
    return [each for each in parts if isinstance(each, CompiledTransform)]
