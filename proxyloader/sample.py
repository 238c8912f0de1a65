"""One image on its way: encoded bytes and size, then the inputs of one DALI sample. Runs in the worker."""

from __future__ import annotations

import io
import math
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch.utils.data._utils.collate import default_collate_fn_map

from .errors import ImageError, InputError

JPEG_START = b"\xff\xd8\xff"
JPEG_END = b"\xff\xd9"

# Baseline, extended and progressive Huffman: what libjpeg and the GPU's decoders agree on. Lossless, hierarchical and
# arithmetic frames go to Pillow, which decodes some of them and names the rest.
_DECODED_ALIKE = frozenset({0xC0, 0xC1, 0xC2})
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_RGB_COMPONENT_IDS = b"RGB"


@dataclass(frozen=True)
class JpegHeader:
    """What a JPEG file says of itself before its first scan.

    Attributes:
        height, width: in pixels, as stored (the EXIF orientation is not applied; torchvision ignores it too).
        as_pillow: DALI's decoders and Pillow give the same RGB for this file.
    """

    height: int
    width: int
    as_pillow: bool


def read_jpeg_header(data: bytes | memoryview) -> JpegHeader | None:
    """Read size and kind of a JPEG from its marker segments (ITU T.81, annex B). None where they make no sense."""
    at, end = 2, len(data)
    frame: tuple[int, int, bool] | None = None
    adobe_transform = None
    while at + 4 <= end:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if length < 2 or at + 2 + length > end:
            return None
        if marker in _DECODED_ALIKE or marker in _OTHER_FRAMES:
            if length < 8:
                return None
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            if length < 8 + 3 * components:
                return None
            ids = bytes(data[at + 10 : at + 10 + 3 * components : 3])
            alike = marker in _DECODED_ALIKE and bits == 8 and components in (1, 3) and ids != _RGB_COMPONENT_IDS
            frame = height, width, alike
        elif marker == 0xEE and length >= 14 and bytes(data[at + 4 : at + 9]) == b"Adobe":
            adobe_transform = data[at + 15]
        elif marker == 0xDA:
            if frame is None or 0 in frame[:2]:
                return None
            height, width, alike = frame
            # An Adobe marker with transform 0 means the three components are RGB, not YCbCr. And a scan that never
            # ends was cut off: only Pillow's verdict counts there. (A thumbnail's end lies before the scan.)
            complete = bytes(data[-2:]) == JPEG_END or bytes(data[at:]).rfind(JPEG_END) >= 0
            return JpegHeader(height, width, alike and adobe_transform != 0 and complete)
        at += 2 + length
    return None


@dataclass(frozen=True)
class EncodedImage:
    """An RGB image as bytes that DALI's image decoder turns into the same pixels as Pillow.

    Attributes:
        data: a JPEG file, or a binary PPM (uncompressed) made from what Pillow decoded.
        height, width: in pixels.
        path: the file it came from, for error messages; "" where there is none.
    """

    data: bytes = field(repr=False)
    height: int
    width: int
    path: str = ""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> EncodedImage:
        """Read an image file without decoding it, or, where DALI would see it differently, with Pillow.

        Raises:
            ImageError: the file is missing, empty, or not an image that Pillow reads.
        """
        path = os.fspath(path)
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read()
        except OSError as error:
            raise _bad(path, f"cannot be read: {error.strerror or error}") from error
        return cls.from_bytes(data, path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "") -> EncodedImage:
        """Take an image file's content. Only JPEGs stay encoded: DALI has no faster decoder for the other formats.

        Raises:
            ImageError: Pillow cannot decode it either.
        """
        if not data:
            raise _bad(path, "the file is empty (0 bytes)")
        if data.startswith(JPEG_START):
            header = read_jpeg_header(data)
            if header is not None and header.as_pillow:
                _refuse_bomb(header.height, header.width, path)
                return cls(data, header.height, header.width, path)
        return cls.by_pillow(data, path)

    @classmethod
    def by_pillow(cls, data: bytes, path: str = "") -> EncodedImage:
        """Decode with Pillow, whatever the format; the pixels travel uncompressed.

        Raises:
            ImageError: Pillow cannot decode it.
        """
        try:
            with Image.open(io.BytesIO(data)) as image:
                return cls.from_pil(image.convert("RGB"), path)
        except UnidentifiedImageError as error:
            raise _bad(path, f"{len(data)} bytes, in no image format that Pillow knows") from error
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise _bad(path, f"Pillow cannot decode it: {error}") from error

    @classmethod
    def from_pil(cls, image: Image.Image, path: str = "") -> EncodedImage:
        """Take a decoded RGB image; it travels uncompressed, as a PPM."""
        if image.mode != "RGB":
            raise ImageError(
                f"{path or 'image'}: the mode is {image.mode!r}, and images travel as 'RGB'. "
                "Convert it in the dataset: image.convert('RGB')"
            )
        return cls(b"P6\n%d %d\n255\n" % image.size + image.tobytes(), image.height, image.width, path)


def _bad(path: str, reason: str) -> ImageError:
    return ImageError(f"{path or 'an image'}: {reason}. Replace the file, or leave it out of the dataset")


def _refuse_bomb(height: int, width: int, path: str) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > 2 * limit:  # where Pillow turns its warning into an error
        raise ImageError(
            f"{path or 'image'}: {width} x {height} pixels, more than Pillow's limit of {2 * limit} "
            "(could be a decompression bomb). Raise PIL.Image.MAX_IMAGE_PIXELS if it is meant"
        )


class ProxyCall:
    """The inputs of one sample of a pipeline run, until they are packed.

    Attributes:
        server: key of the server, or of the compiled transform, that is to run it.
        inputs: one array for each external source of the pipeline, in its order.
        source: the file the sample came from, for error messages; "" where there is none.
    """

    __slots__ = ("inputs", "run", "server", "source")

    def __init__(self, server: str, inputs: tuple[NDArray[Any], ...], source: str = "") -> None:
        self.server, self.inputs, self.source = server, inputs, source
        self.run: weakref.ref[ProxyRun] | None = None

    def __repr__(self) -> str:
        shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in self.inputs)
        return f"ProxyCall({shapes}{', ' + self.source if self.source else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ProxyCall, (self.server, self.inputs, self.source)


class ProxyRun:
    """The calls of one batch. Its outputs share it, so an image and its mask come from one run of the pipeline."""

    def __init__(self, calls: Sequence[ProxyCall]) -> None:
        self.calls = calls

    def __repr__(self) -> str:
        return f"ProxyRun({len(self.calls)} samples)"

    def __reduce__(self) -> tuple[Any, ...]:
        # Only on a stock DataLoader's queue, where torch's shared memory is the fastest way there is.
        arrays = [np.ascontiguousarray(array) for call in self.calls for array in call.inputs]
        blob = torch.from_numpy(np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays]))
        shapes = [(array.dtype.str, array.shape) for array in arrays]
        return _unpack_run, (blob, shapes, [(call.server, call.source) for call in self.calls])


def _unpack_run(blob: torch.Tensor, shapes: list[tuple[str, tuple[int, ...]]], calls: list[tuple[str, str]]) -> ProxyRun:
    memory, at, inputs = blob.numpy(), 0, []
    for dtype, shape in shapes:
        end = at + math.prod(shape) * np.dtype(dtype).itemsize
        inputs.append(memory[at:end].view(dtype).reshape(shape))
        at = end
    per_call = len(inputs) // len(calls)
    groups = [tuple(inputs[k : k + per_call]) for k in range(0, len(inputs), per_call)]
    return ProxyRun([ProxyCall(server, group, source) for group, (server, source) in zip(groups, calls)])


@dataclass(frozen=True)
class ProxySample:
    """Stands for one output of one sample, wherever the user's code puts it, until the pipeline has run."""

    call: ProxyCall
    output: int = 0


@dataclass(frozen=True)
class ProxyBatch:
    """Stands for one output of a whole run: what ``default_collate`` makes of a list of ProxySample."""

    run: ProxyRun
    output: int = 0


def collate_proxy_samples(samples: Sequence[ProxySample], *, collate_fn_map: Any = None) -> ProxyBatch:
    """``default_collate`` for ProxySample (by the protocol of ``torch.utils.data.default_collate``)."""
    calls = [sample.call for sample in samples]
    run = calls[0].run() if calls[0].run else None
    if run is None or len(run.calls) != len(calls) or any(a is not b for a, b in zip(run.calls, calls)):
        run = ProxyRun(calls)
        calls[0].run = weakref.ref(run)
    return ProxyBatch(run, samples[0].output)


default_collate_fn_map[ProxySample] = collate_proxy_samples


class Proxy:
    """Stands in for a transform: takes the inputs of one DALI sample, gives what its outputs will be.

    It is ``ProxyServer.proxy``, in a form that reaches workers under every start method.

    Attributes:
        server: key of the server that runs the pipeline.
        input_names: of the pipeline's external sources, in the pipeline's order.
        num_outputs: of the pipeline.
    """

    def __init__(self, server: str, input_names: tuple[str, ...], num_outputs: int) -> None:
        self.server, self.input_names, self.num_outputs = server, input_names, num_outputs

    def __repr__(self) -> str:
        return f"Proxy({', '.join(self.input_names)})"

    def __call__(self, *args: Any, **inputs: Any) -> ProxySample | tuple[ProxySample, ...]:
        """
        Args:
            args: the input of a pipeline that has one; each is an array, a tensor, bytes, or a number.
            inputs: by the names of the pipeline's external sources.

        Returns:
            A ProxySample, or a tuple of them where the pipeline has several outputs.

        Raises:
            InputError: the names differ from the pipeline's, or a value is nothing that DALI takes.
        """
        if len(args) == 1 and len(self.input_names) == 1 and not inputs:
            inputs = {self.input_names[0]: args[0]}
        if args and len(self.input_names) > 1 or set(inputs) != set(self.input_names):
            raise InputError(
                f"the pipeline's inputs are {', '.join(self.input_names)}; got {len(args)} positional arguments and "
                f"{', '.join(inputs) or 'none by name'}. Call server.proxy({'=..., '.join(self.input_names)}=...)"
            )
        call = ProxyCall(self.server, tuple(_as_array(name, inputs[name]) for name in self.input_names))
        samples = tuple(ProxySample(call, output) for output in range(self.num_outputs))
        return samples[0] if self.num_outputs == 1 else samples


def _as_array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"input {name!r} is a {type(value).__name__}"
            + (f" of dtype {array.dtype}" if isinstance(value, np.ndarray) else "")
            + "; DALI takes arrays and tensors of numbers, numbers, and bytes"
        )
    return np.ascontiguousarray(array)
