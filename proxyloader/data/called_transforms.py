"""Intercept transform calls on undecoded images, wherever the dataset stores or creates the transforms.

See NOTE [ Intercepted transform calls ] in ``hooks.py``. If all transforms of a Compose are translated, the Compose is
intercepted as a whole, which is faster. A pipeline is built when the first batch needs it. The number of pipelines is
limited (``workers/packing.py``), because a dataset may create a transform with new arguments for every image.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from ..transforms.chain import START_AS_GREY, classes_with_rules
from ..transforms.plan import FASTER_ON_CPU
from ..transforms.registry import COMPOSES, is_changed, load_timm_rules
from .deferral import current
from .encoded_image import EncodedImage
from .lazy_image import create_lazy_image, defers_decoding, get_transformed
from .lazy_tensor import (
    LazyTensor,
    create_lazy_outputs,
    get_sample,
    get_values,
    is_materialized,
    materialize,
    wrap_values,
)
from .recorded import map_leaves
from .transformed import TransformedImage, pixel_uses


def call_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each ``__call__`` to intercept."""
    if "timm.data.transforms" in sys.modules:
        load_timm_rules()
    for cls in classes_with_rules():
        yield cls, "__call__", _intercept(cls, cls.__call__)
    for cls in COMPOSES:
        yield cls, "__call__", _intercept_compose(cls, cls.__call__)


def _is_for_gpu() -> bool:
    """Return whether images arrive on a GPU. On a CPU, torchvision runs the transforms at which it is faster."""
    deferral = current()
    return deferral is not None and deferral.on_gpu


def _intercept(cls: type, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(self: Any, *inputs: Any, **named: Any) -> Any:
        if not defers_decoding():
            return call(self, *inputs, **named)
        if type(self) is cls and inputs and not named and isinstance(inputs[0], _IMAGES) and not is_changed(self):
            result = _apply(self, inputs[0]) if _keeps_others(self, inputs[1:]) else None
            if result is not None:
                return result if len(inputs) == 1 else (result, *inputs[1:])
        if inputs and isinstance(inputs[0], EncodedImage):
            inputs = inputs[0].decoded(), *inputs[1:]
        if len(inputs) == 1 and isinstance(inputs[0], LazyTensor) and is_materialized(inputs[0]):
            given = get_values(inputs[0])  # operations on a LazyTensor are slow
            made = call(self, given, **named)
            return inputs[0] if made is given else map_leaves(wrap_values, made)
        made = call(self, *inputs, **named)
        if len(inputs) == 1:
            return _wrap_result(inputs[0], made)
        is_for_each = isinstance(made, tuple) and len(made) == len(inputs)
        return tuple(map(_wrap_result, inputs, made)) if is_for_each else made

    return called


def _intercept_compose(cls: type, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(self: Any, *inputs: Any, **named: Any) -> Any:
        if type(self) is cls and inputs and not named and isinstance(inputs[0], Image.Image) and defers_decoding():
            result = _apply_compose(self, inputs[0], inputs[1:])
            if result is not None:
                return result if len(inputs) == 1 else (result, *inputs[1:])
        return call(self, *inputs, **named)

    return called


def _keeps_others(transform: Any, others: tuple[Any, ...]) -> bool:
    """Return whether a transform returns the inputs next to an image, such as a label, unchanged."""
    return not others or (_is_v2(transform) and all(type(each) in _LABELS for each in others))


def _is_v2(transform: Any) -> bool:
    """Return whether a transform and those inside it are v2, and thus accept several inputs."""
    return isinstance(transform, v2.Transform) and all(map(_is_v2, getattr(transform, "transforms", ())))


_IMAGES = (Image.Image, EncodedImage, LazyTensor)

_LABELS = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor})


def _wrap_result(given: Any, made: Any) -> Any:
    """Return the result of a transform on pixels. A tensor computed from an image becomes a LazyTensor."""
    return wrap_values(made) if isinstance(given, (Image.Image, np.ndarray)) else made


def _apply(transform: Any, image: Any) -> Any:
    """Apply a transform to an undecoded image; return None if the image is decoded or must be."""
    transformed = _find_transformed(image)
    chain = transformed.chain.then(transform) if transformed is not None else None
    if transformed is None or chain is None or (chain.state.images > 1 and chain.state.kind == "pil"):
        return None
    if chain.slow_on_cpu and not _is_for_gpu():  # also stops intercepting the transforms it calls
        pixel_uses.explain(f"{FASTER_ON_CPU} {type(transform).__name__} with these arguments")
        _ = materialize(image) if isinstance(image, LazyTensor) else getattr(image, "im", None)
        return None
    if not chain.last_steps and isinstance(image, Image.Image) and chain.state.kind == "pil":
        return image  # like torchvision, so that the class and attributes stay
    return _create_result(image, transformed.then(chain))


def _apply_compose(compose: Any, image: Image.Image, others: tuple[Any, ...]) -> Any:
    """Apply a Compose to an undecoded image; return None if its transforms must be intercepted one by one."""
    transformed = _find_transformed(image)
    if transformed is None or not _keeps_others(compose, others):
        return None
    chain = transformed.chain.through(compose)
    if chain is None or (chain.slow_on_cpu and not _is_for_gpu()):
        return None
    return _create_result(image, transformed.then(chain))


def _create_result(image: Any, transformed: TransformedImage) -> Any:
    """Return the image, the tensor or the tensors that the transforms return."""
    if transformed.chain.state.kind == "pil":
        return create_lazy_image(transformed, image if isinstance(image, Image.Image) else None)
    return create_lazy_outputs(transformed)


def _find_transformed(image: Any) -> TransformedImage | None:
    found = _unwrap(image)
    if found is None:
        return None
    if torch.get_default_dtype() is not torch.float32:  # may change at any time
        pixel_uses.explain(f"torch's default dtype is {torch.get_default_dtype()}, but DALI returns float32")
        return None
    if found.chain is START_AS_GREY and not _is_for_gpu():  # see benchmarks/results/parts.jsonl
        pixel_uses.explain(f"{FASTER_ON_CPU} grey images")
        return None
    return found


def _unwrap(image: Any) -> TransformedImage | None:
    if isinstance(image, EncodedImage):
        return TransformedImage.start(image)
    if not isinstance(image, LazyTensor):
        return get_transformed(image)
    sample = get_sample(image)
    if sample is None or not isinstance(sample.call, TransformedImage) or sample.call.plan.output.images > 1:
        return None
    return sample.call
