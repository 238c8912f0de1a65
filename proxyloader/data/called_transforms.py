"""Transforms that are met where a dataset calls them: under any attribute, made in ``__getitem__``, one after another.

See NOTE [ Where transforms are met ] in ``hooks.py``. If all parts of a Compose are translated, it is met as a whole,
which takes less time. The pipelines of these transforms are built when the first batch arrives that needs them. Their
number is limited (``workers/packing.py``), as a dataset may make a transform with other arguments for each image.
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
from .lazy_image import is_late, late_image, transformed_in
from .lazy_tensor import LazyTensor, is_real, lazy_outputs, real, sample_of, values_of, with_values
from .recorded import mapped
from .transformed import Transformed, pixel_uses


def exchanged_calls() -> Iterator[tuple[Any, str, Any]]:
    """Yield what replaces the calls of the transforms that are translated; see ``hooks.py``."""
    if "timm.data.transforms" in sys.modules:
        load_timm_rules()
    for cls in classes_with_rules():
        yield cls, "__call__", _met(cls, cls.__call__)
    for cls in COMPOSES:
        yield cls, "__call__", _met_as_whole(cls, cls.__call__)


def _is_for_gpu() -> bool:
    """Return whether images arrive on a GPU. On a CPU, transforms at which torchvision is faster are left to it."""
    deferral = current()
    return deferral is not None and deferral.on_gpu


def _met(cls: type, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(self: Any, *inputs: Any, **named: Any) -> Any:
        if not is_late():
            return call(self, *inputs, **named)
        if type(self) is cls and inputs and not named and isinstance(inputs[0], _IMAGES) and not is_changed(self):
            result = _after(self, inputs[0]) if _leaves_alone(self, inputs[1:]) else None
            if result is not None:
                return result if len(inputs) == 1 else (result, *inputs[1:])
        if inputs and isinstance(inputs[0], EncodedImage):
            inputs = inputs[0].decoded(), *inputs[1:]
        if len(inputs) == 1 and isinstance(inputs[0], LazyTensor) and is_real(inputs[0]):
            given = values_of(inputs[0])  # torch takes long for each operation on a LazyTensor
            made = call(self, given, **named)
            return inputs[0] if made is given else mapped(with_values, made)
        made = call(self, *inputs, **named)
        if len(inputs) == 1:
            return _of_image(inputs[0], made)
        is_for_each = isinstance(made, tuple) and len(made) == len(inputs)
        return tuple(map(_of_image, inputs, made)) if is_for_each else made

    return called


def _met_as_whole(cls: type, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(self: Any, *inputs: Any, **named: Any) -> Any:
        if type(self) is cls and inputs and not named and isinstance(inputs[0], Image.Image) and is_late():
            result = _after_all(self, inputs[0], inputs[1:])
            if result is not None:
                return result if len(inputs) == 1 else (result, *inputs[1:])
        return call(self, *inputs, **named)

    return called


def _leaves_alone(transform: Any, others: tuple[Any, ...]) -> bool:
    """Return whether a transform returns what it is given beside an image as it is, such as a label."""
    return not others or (_is_of_v2(transform) and all(type(each) in _LABELS for each in others))


def _is_of_v2(transform: Any) -> bool:
    """Return whether a transform and those inside it take an image and more."""
    return isinstance(transform, v2.Transform) and all(map(_is_of_v2, getattr(transform, "transforms", ())))


_IMAGES = (Image.Image, EncodedImage, LazyTensor)

_LABELS = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor})


def _of_image(given: Any, made: Any) -> Any:
    """Return what a transform made with values. A tensor that it made of an image counts as an image."""
    return with_values(made) if isinstance(given, (Image.Image, np.ndarray)) else made


def _after(transform: Any, image: Any) -> Any:
    """Return what a transform makes of an image that is not decoded; None if it is, or cannot stay so."""
    transformed = _transformed(image)
    chain = transformed.chain.then(transform) if transformed is not None else None
    if transformed is None or chain is None or (chain.state.images > 1 and chain.state.kind == "pil"):
        return None
    if chain.slow_on_cpu and not _is_for_gpu():  # nor are the transforms that this one calls for DALI
        pixel_uses.note_why(f"{FASTER_ON_CPU} {type(transform).__name__} with these arguments")
        _ = real(image) if isinstance(image, LazyTensor) else getattr(image, "im", None)
        return None
    if not chain.last_steps and isinstance(image, Image.Image) and chain.state.kind == "pil":
        return image  # as torchvision does, of which the class and the file's attributes stay
    return _made(image, transformed.then(chain))


def _after_all(compose: Any, image: Image.Image, others: tuple[Any, ...]) -> Any:
    """Return what a Compose makes of an image that is not decoded; None if its parts must be met one by one."""
    transformed = _transformed(image)
    if transformed is None or not _leaves_alone(compose, others):
        return None
    chain = transformed.chain.through(compose)
    if chain is None or (chain.slow_on_cpu and not _is_for_gpu()):
        return None
    return _made(image, transformed.then(chain))


def _made(image: Any, transformed: Transformed) -> Any:
    """Return the image, the tensor, or the several tensors, that an image is after its transforms."""
    if transformed.chain.state.kind == "pil":
        return late_image(transformed, image if isinstance(image, Image.Image) else None)
    return lazy_outputs(transformed)


def _transformed(image: Any) -> Transformed | None:
    found = _transformed_so_far(image)
    if found is None:
        return None
    if torch.get_default_dtype() is not torch.float32:  # which it may become after a transform was called for DALI
        pixel_uses.note_why(f"torch's default dtype is {torch.get_default_dtype()}, and DALI makes float32")
        return None
    if found.chain is START_AS_GREY and not _is_for_gpu():  # see benchmarks/results/parts.jsonl
        pixel_uses.note_why(f"{FASTER_ON_CPU} grey images")
        return None
    return found


def _transformed_so_far(image: Any) -> Transformed | None:
    if isinstance(image, EncodedImage):
        return Transformed.of(image)
    if not isinstance(image, LazyTensor):
        return transformed_in(image)
    sample = sample_of(image)
    if sample is None or not isinstance(sample.call, Transformed) or sample.call.plan.output.images > 1:
        return None
    return sample.call
