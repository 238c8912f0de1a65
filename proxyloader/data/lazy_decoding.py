"""Defer decoding in ``torchvision.io``, ``torchvision.datasets`` and ``torchcodec``. Runs where the dataset runs.

``pil_loader``, the default of ``ImageFolder``, opens files without Pillow, which is faster, and names the file in
errors.

``read_image``, ``decode_image`` and ``decode_jpeg`` of torchvision look up operators of ``torch.ops.image`` by name.
While decoding is deferred, these return a LazyTensor: see NOTE [ Lazy tensors ]. It has values immediately if the file
is not a JPEG or not decoded to RGB, so that all images of a batch arrive on the same device. The same applies to
``decode_jpeg`` of torchcodec, which ``decode_image`` calls, and which applies the EXIF orientation.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile
from torchvision.datasets import folder
from torchvision.io import ImageReadMode

from ..transforms import given
from ..transforms.chain import START_AS_TENSOR
from .deferral import active, recording
from .encoded_image import EncodedImage
from .lazy_image import APP1_MARKER, create_lazy_image
from .lazy_tensor import create_lazy_output, materialize, wrap_values
from .recorded import map_leaves
from .replaced_code import find, original, replacements
from .transformed import TransformedImage


def decoder_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each operator called by ``torchvision.io``, and of other decoders."""
    if "torchcodec.decoders" in sys.modules:
        names = "torchcodec.decoders._image_decoders:decode_jpeg", "torchcodec.decoders._image_decoders:decode_image"
        for name, function in find(*names).items():
            yield from replacements(function, _patch_torchcodec(original(function), name.endswith("jpeg")))
    for name in ("decode_image", "decode_jpeg"):
        operator = getattr(torch.ops.image, name, None)  # None if torchvision was built without it
        if operator is not None:
            yield torch.ops.image, name, _patch(name, operator)


def loader_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of ``pil_loader``, which datasets have as an attribute."""
    call = original(folder.pil_loader)

    @functools.wraps(call)
    def hooked(path: Any) -> Any:
        return create_lazy_image(EncodedImage.open(path)) if active() is not None else call(path)

    yield from replacements(folder.pil_loader, hooked)


@functools.cache  # the registration below is of its id
def _patch(name: str, operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(operator, assigned=(), updated=())
    def hooked(data: Any, mode: int = ImageReadMode.UNCHANGED.value, apply_exif_orientation: bool = False) -> Any:
        if active() is None:
            return operator(data, mode, apply_exif_orientation)
        data = materialize(data)  # it may be encoded from an image, as by ``v2.JPEG``
        image = None if apply_exif_orientation else _encode(data, mode)
        if image is None:
            return wrap_values(operator(data, mode, apply_exif_orientation))
        copied = data.clone()  # data may change before it is decoded
        transformed = TransformedImage(image, functools.partial(operator, copied, mode, False), START_AS_TENSOR)
        return create_lazy_output(transformed)

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


def _patch_torchcodec(decode: Callable[..., Any], is_for_jpeg: bool) -> Callable[..., Any]:
    @functools.wraps(decode)
    def hooked(source: Any, **options: Any) -> Any:
        if active() is None:
            return decode(source, **options)
        transformed = _defer_torchcodec(decode, source, **options) if is_for_jpeg else None
        if transformed is None:
            return map_leaves(wrap_values, decode(source, **options))
        return create_lazy_output(transformed)

    return hooked


def _defer_torchcodec(
    decode: Callable[..., Any], source: Any, *, mode: Any = "RGB", output_dtype: Any = torch.uint8, device: Any = "cpu"
) -> TransformedImage | None:
    number = {"UNCHANGED": ImageReadMode.UNCHANGED, "RGB": ImageReadMode.RGB}.get(
        str(getattr(mode, "name", mode)).upper()
    )
    if number is None or output_dtype not in (torch.uint8, "auto") or torch.device(device).type != "cpu":
        return None
    if isinstance(source, (str, Path)):
        source = Path(source).read_bytes()
    if isinstance(source, (bytes, bytearray)):
        source = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    image = _encode(source, number.value)
    turn = None if image is None else find_orientation(image)
    if image is None or turn is None or (turn and recording() is None):
        return None
    transformed = TransformedImage(image, functools.partial(decode, source.clone(), mode=mode), START_AS_TENSOR)
    if not turn:
        return transformed
    # What ``decode`` returns is turned already.
    return transformed.note(turn, (), given.transposed(transformed.size, turn[0].method), lambda values: values)


def find_orientation(image: EncodedImage) -> tuple[()] | tuple[given.Transpose] | None:
    """Return the step that applies the EXIF orientation, if any; None if decoders might read it differently."""
    assert image.header is not None
    head = image.data[: image.header.first_scan]
    if APP1_MARKER not in head:
        return ()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exif = Image.Exif()
            exif.load(JpegImageFile(io.BytesIO(image.data)).info.get("exif", b""))
            orientation = exif.get(ExifTags.Base.Orientation, 1)
            return ORIENTATIONS[orientation] if head.count(b"Exif\0\0") <= 1 else None
    except Exception:
        return None


ORIENTATIONS: dict[int, tuple[()] | tuple[given.Transpose]] = {
    1: (),
    2: (given.Transpose(Image.Transpose.FLIP_LEFT_RIGHT),),
    3: (given.Transpose(Image.Transpose.ROTATE_180),),
    4: (given.Transpose(Image.Transpose.FLIP_TOP_BOTTOM),),
    5: (given.Transpose(Image.Transpose.TRANSPOSE),),
    6: (given.Transpose(Image.Transpose.ROTATE_270),),
    7: (given.Transpose(Image.Transpose.TRANSVERSE),),
    8: (given.Transpose(Image.Transpose.ROTATE_90),),
}
"""Steps that apply an EXIF orientation."""
