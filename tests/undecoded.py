"""What holds in a loader's worker, and while a loader without workers fetches a batch, for tests of one image."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils._pytree import tree_leaves
from torchvision.datasets.folder import default_loader

from proxyloader.data import hooks
from proxyloader.data.deferral import Deferral, defer_in_process, deferring
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.jpeg import read_jpeg_header
from proxyloader.data.lazy_image import create_lazy_image, find_undecoded
from proxyloader.data.lazy_tensor import LazyTensor
from proxyloader.data.placeholders import ProxyBatch, ProxySample
from proxyloader.kernels.operations import find_obstacle
from proxyloader.transforms.random_numbers import in_thread


@contextlib.contextmanager
def opened_late(on_gpu: bool = True) -> Iterator[None]:
    """Let images stay undecoded in this thread, with all transforms for DALI, or those that are for it on a CPU."""
    deferral = Deferral(on_gpu, functools.partial(find_obstacle, has_kernels=on_gpu))
    hooks.hold(deferral)
    in_thread.draw_from_state()
    try:
        with deferring(deferral):
            yield
    finally:
        in_thread.from_state = None
        hooks.release(deferral)


@contextlib.contextmanager
def in_worker() -> Iterator[None]:
    """As ``opened_late``, in all threads."""
    deferral = Deferral(True, functools.partial(find_obstacle, has_kernels=True))
    hooks.hold(deferral)
    defer_in_process(deferral)
    try:
        yield
    finally:
        defer_in_process(None)
        hooks.release(deferral)


def image_calls_in(content: Any) -> list[Any]:
    """The undecoded images in a sample or a batch, each once."""
    nodes = [each._node if isinstance(each, LazyTensor) else each for each in tree_leaves(content)]
    calls = [each.call for each in nodes if isinstance(each, ProxySample)]
    calls += [call for each in nodes if isinstance(each, ProxyBatch) for call in each.run.calls]
    return list(dict.fromkeys(calls))


def unchecked(path: str, damage: Callable[[bytes], bytes] = bytes) -> Any:
    """A user's own image of a file, which may be damaged, of which DALI is the first to decode a JPEG."""
    data = Path(path).read_bytes()
    header = read_jpeg_header(data)
    if header is None:
        return default_loader(path)
    return create_lazy_image(EncodedImage(damage(data), header.height, header.width, path, header))


def get_encoded(image: Image.Image) -> EncodedImage | None:
    """The JPEG behind an undecoded RGB image without transforms; None for any other image."""
    encoded = find_undecoded(image) if image.mode == "RGB" else None
    return encoded if isinstance(encoded, EncodedImage) else None
