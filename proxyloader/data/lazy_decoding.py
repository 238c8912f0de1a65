"""Tensors of JPEGs that ``torchvision.io`` decodes, decoded late. Runs where the dataset runs.

``read_image``, ``decode_image`` and ``decode_jpeg`` call operators of ``torch.ops.image`` by their names. Where images
are decoded late, these return a LazyTensor: see NOTE [ Tensors decoded late ]. It has values at once if the file is no
JPEG or becomes no RGB image, so that all images of a batch arrive on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchvision.io import ImageReadMode

from ..transforms.chain import START_AS_TENSOR
from .bad_samples import UndecodableError
from .encoded_image import EncodedImage
from .lazy_image import is_late
from .lazy_tensor import lazy_outputs, with_values
from .transformed import Transformed


def exchanged_operators() -> Iterator[tuple[Any, str, Any]]:
    """Yield what replaces the operators that ``torchvision.io`` calls; see ``hooks.py``."""
    for name in ("decode_image", "decode_jpeg"):
        operator = getattr(torch.ops.image, name, None)  # there are none if torchvision was built without
        if operator is not None:
            yield torch.ops.image, name, _met(operator)


def _met(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def decode(data: Any, mode: int, apply_exif_orientation: bool = False) -> torch.Tensor:
        try:
            return operator(data, mode, apply_exif_orientation)
        except RuntimeError as error:
            raise UndecodableError(str(error)) from error

    @functools.wraps(operator, assigned=(), updated=())
    def decoded(data: Any, mode: int = ImageReadMode.UNCHANGED.value, apply_exif_orientation: bool = False) -> Any:
        if not is_late():
            return operator(data, mode, apply_exif_orientation)
        image = None if apply_exif_orientation else _encoded(data, mode)
        if image is None:
            return with_values(decode(data, mode, apply_exif_orientation))
        bytes_ = data.clone()  # it may be changed before it is used
        transformed = Transformed(image, functools.partial(decode, bytes_, mode), START_AS_TENSOR)
        return lazy_outputs(transformed)

    return decoded


def _encoded(data: Any, mode: int) -> EncodedImage | None:
    """Return the JPEG; None if it becomes no RGB image, or DALI might decode it in another way."""
    if not isinstance(data, torch.Tensor) or mode not in (ImageReadMode.UNCHANGED.value, ImageReadMode.RGB.value):
        return None
    try:
        image = EncodedImage.of_jpeg(data.numpy().tobytes())
    except (RuntimeError, TypeError):
        return None
    if image is None or image.header is None or (mode == 0 and image.header.is_grey):
        return None
    return image
