"""Defer decoding in ``torchvision.io``. Runs where the dataset runs.

``read_image``, ``decode_image`` and ``decode_jpeg`` look up operators of ``torch.ops.image`` by name. While decoding is
deferred, these return a LazyTensor: see NOTE [ Lazy tensors ]. It has values immediately if the file is not a JPEG or
not decoded to RGB, so that all images of a batch arrive on the same device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchvision.io import ImageReadMode

from ..transforms.chain import START_AS_TENSOR
from .encoded_image import EncodedImage
from .lazy_image import defers_decoding
from .lazy_tensor import create_lazy_outputs, wrap_values
from .transformed import TransformedImage


def operator_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each operator called by ``torchvision.io``."""
    for name in ("decode_image", "decode_jpeg"):
        operator = getattr(torch.ops.image, name, None)  # None if torchvision was built without it
        if operator is not None:
            yield torch.ops.image, name, _patch(name, operator)


@functools.cache  # the registration below is of its id
def _patch(name: str, operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(operator, assigned=(), updated=())
    def hooked(data: Any, mode: int = ImageReadMode.UNCHANGED.value, apply_exif_orientation: bool = False) -> Any:
        if not defers_decoding():
            return operator(data, mode, apply_exif_orientation)
        image = None if apply_exif_orientation else _encode(data, mode)
        if image is None:
            return wrap_values(operator(data, mode, apply_exif_orientation))
        copied = data.clone()  # data may change before it is decoded
        transformed = TransformedImage(image, functools.partial(operator, copied, mode, False), START_AS_TENSOR)
        return create_lazy_outputs(transformed)

    with contextlib.suppress(AttributeError):  # for ``torch.jit.script`` of functions that call it
        torch.jit._builtins._register_builtin(hooked, f"image::{name}")
    return hooked


def _encode(data: Any, mode: int) -> EncodedImage | None:
    """Return the JPEG; None if the mode is not RGB, or DALI might decode it differently."""
    if not isinstance(data, torch.Tensor) or mode not in (ImageReadMode.UNCHANGED.value, ImageReadMode.RGB.value):
        return None
    try:
        image = EncodedImage.from_jpeg(data.numpy().tobytes())
    except (RuntimeError, TypeError):
        return None
    if image is None or image.header is None or (mode == 0 and image.header.is_gray):
        return None
    return image
