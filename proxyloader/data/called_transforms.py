"""Intercept transform calls on images, wherever the dataset stores or creates the transforms.

See NOTE [ Intercepted transform calls ] in ``hooks.py``. Consecutive transforms of a Compose that have rules are
applied together, which is faster. If all have rules, the Compose also accepts a decoded image, such as that of a PNG or
an array, whose pixels are sent.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import transforms as v1, v2

from ..errors import ImageError
from ..transforms import boxes
from ..transforms.chain import START, Chain
from ..transforms.plan import Untranslatable
from ..transforms.random_numbers import draws_alike, resized_crop_box
from ..transforms.registry import COMPOSES, IMAGE_CONVERSIONS, RULES, is_changed, load_timm_rules
from ..transforms.samples import flatten, sample_patches
from .deferral import Deferral, active
from .encoded_image import EncodedImage
from .lazy_image import create_lazy_image, get_transformed, is_lazy
from .lazy_mask import LazyMask
from .lazy_tensor import (
    LazyTensor,
    create_lazy_output,
    find_transformed,
    get_values,
    is_materialized,
    is_unshared,
    materialize,
    wrap_values,
)
from .recorded import map_leaves
from .replaced_code import code_patches, find, original, replacements, unless_handled
from .transformed import TransformedImage, pixel_uses


def call_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each ``__call__`` to intercept, and of the draws of common crops."""
    if "timm.data.transforms" in sys.modules:
        load_timm_rules()
    for cls in (*RULES, *COMPOSES):
        yield cls, "__call__", _intercept(cls, cls.__call__)
    get_params = v1.RandomResizedCrop.get_params
    yield from replacements(get_params, unless_handled(original(get_params), _get_params))
    for name, method in find(*boxes.METHODS).items():
        owner, _, attribute = name.rpartition(".")
        yield find(owner)[owner], attribute, unless_handled(method, boxes.METHODS[name])
    yield from code_patches(boxes.FUNCTIONS)
    yield from code_patches({"torchvision.transforms.v2.functional._utils:_get_kernel": _get_kernel})
    yield from sample_patches()


def _get_params(get_params: Any, img: Any, scale: Any, ratio: Any) -> Any:
    """Draw the same numbers faster."""
    if not is_lazy(img) or torch.get_default_dtype() is not torch.float32 or not draws_alike():
        return NotImplemented
    return resized_crop_box(tuple(scale), tuple(ratio), img.height, img.width)


def _intercept(cls: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    is_compose = cls in COMPOSES

    @functools.wraps(call)
    def hooked(self: Any, *inputs: Any, **named: Any) -> Any:
        if (deferral := active()) is None:
            return call(self, *inputs, **named)
        is_known = type(self) is cls and not named and _starts_with_image(inputs)
        if is_compose:
            result = _compose_undecoded(deferral, self, *inputs) if is_known else NotImplemented
            return call(self, *inputs, **named) if result is NotImplemented else result
        if is_known and not is_changed(self) and (result := apply_undecoded(deferral, self, *inputs)) is not None:
            return result
        if len(inputs) == 1 and isinstance(inputs[0], LazyTensor) and is_materialized(inputs[0]):
            values = get_values(inputs[0])  # operations on a LazyTensor are slow
            result = call(self, values, **named)
            return inputs[0] if result is values else map_leaves(wrap_values, result)
        result = call(self, *inputs, **named)
        if len(inputs) == 1:
            return wrap_result(inputs[0], result)
        is_per_input = isinstance(result, tuple) and len(result) == len(inputs)
        return tuple(map(wrap_result, inputs, result)) if is_per_input else result

    return hooked


def _get_kernel(get: Any, functional: Any, input_type: Any, **kwargs: Any) -> Any:
    """Find the kernel of an undecoded tensor by its class in torch: its own would match that of tensors first."""
    return get(functional, getattr(input_type, "stock", input_type), **kwargs)


def wrap_result(image: Any, result: Any) -> Any:
    """Return the result of a transform on pixels. A tensor computed from an image becomes a LazyTensor."""
    return wrap_values(result) if isinstance(image, (Image.Image, np.ndarray)) else result


def _starts_with_image(inputs: tuple[Any, ...]) -> bool:
    return bool(inputs) and isinstance(inputs[0], (Image.Image, LazyTensor))


def _beside_image(transform: Any, others: tuple[Any, ...], compose: Any = None) -> Any:
    """Return the inputs after an image as ``transform`` returns them; None if it may change or does not accept them.

    ``compose``: the Compose that contains it, if the transforms after it are applied as well.
    """
    if not others:
        return others
    if _LABELS.issuperset(map(type, others)):
        return others if _is_v2(compose or transform) else None
    if type(transform) not in IMAGE_CONVERSIONS:
        return None
    leaves, structure = flatten(others)
    return structure.unflatten(leaves) if _LEAVES.issuperset(map(type, leaves)) else None


def _compose_undecoded(deferral: Deferral, compose: Any, *inputs: Any) -> Any:
    """Apply a Compose to an image, consecutive transforms with rules together. Return NotImplemented if it has none."""
    parts, done, outputs, unpacks = compose.transforms, 0, NotImplemented, len(inputs) > 1
    is_accepted = not unpacks or isinstance(compose, v2.Compose)  # otherwise, torchvision raises the error
    if type(parts) not in (list, tuple) or not is_accepted or is_changed(compose, inside=False):
        return NotImplemented
    while done < len(parts):
        is_known = isinstance(inputs, tuple) and (len(inputs) > 1) == unpacks and _starts_with_image(inputs)
        if is_known and (found := _apply_along(deferral, compose, done, *inputs)) is not None:
            outputs, done = found
        elif done or _find_undecoded(inputs[0]) is not None:
            outputs, done = parts[done](*inputs), done + 1
        else:
            return NotImplemented
        inputs = outputs if unpacks else (outputs,)
    return outputs


def _find_undecoded(image: Any) -> TransformedImage | None:
    if isinstance(image, LazyTensor):
        return find_transformed(image) if is_unshared(image) else None
    return get_transformed(image)


def _apply_along(deferral: Deferral, compose: Any, begin: int, image: Any, *others: Any) -> tuple[Any, int] | None:
    """Apply the transforms of a Compose to an undecoded image, from index ``begin`` up to one that needs pixels.

    Return the result and the index of that one. None if it is the first one. A decoded image is sent if no transform
    needs its pixels.
    """
    transformed = _find_undecoded(image)
    # On a CPU, sending decoded images does not pay off if the dataset has used the pixels.
    sends_pixels = not begin and isinstance(image, Image.Image) and (deferral.on_gpu or pixel_uses.why is None)
    if transformed is None and not (sends_pixels and image.mode == "RGB" and min(image.size)):
        return None
    after = _beside_image(compose.transforms[begin], others, compose)
    if after is None or _has_other_dtype():
        return None
    only = None if after is others else IMAGE_CONVERSIONS
    found = (START if transformed is None else transformed.chain).along(compose, begin, only)
    if found is None or deferral.find_obstacle(found[0].partial_plan):  # the parts are intercepted one by one
        return None
    chain, end = found
    if transformed is None:
        if chain.state.kind == "pil" or end < len(compose.transforms):
            return None
        try:
            transformed = TransformedImage.start(EncodedImage.from_pil(image, str(getattr(image, "filename", ""))))
        except ImageError:  # too many pixels
            return None
    result = _apply(transformed, chain, image, *after)
    return None if result is None else (result, end)


def apply_undecoded(deferral: Deferral, transform: Any, image: Any, *others: Any) -> Any:
    """Apply a transform to an undecoded image. Return None if it needs pixels, or may change the others."""
    transformed = _find_undecoded(image)
    after = _beside_image(transform, others)
    if transformed is None or after is None or _has_other_dtype():
        return None
    if (chain := transformed.chain.then(transform)) is None:
        if isinstance(image, LazyTensor) and not deferral.on_gpu:
            # Its operations would be recorded, and without a GPU, the main process would do alone what workers share.
            pixel_uses.explain(f"{type(transform).__name__}: there is no rule for these arguments")
            materialize(image)
        return None
    if why := deferral.find_obstacle(chain.partial_plan):
        of_grey = " of a grayscale image" if transformed.chain.state.channels == 1 else ""
        pixel_uses.explain(f"{type(transform).__name__}{of_grey}: {why}")
        # Decode now, so that the transforms it calls are not intercepted either.
        _ = materialize(image) if isinstance(image, LazyTensor) else getattr(image, "im", None)
        return None
    return _apply(transformed, chain, image, *after)


def _has_other_dtype() -> bool:
    """Return whether torch's default dtype, which may change at any time, is not float32."""
    if (dtype := torch.get_default_dtype()) is torch.float32:
        return False
    pixel_uses.explain(f"torch's default dtype is {dtype}, but images are float32")
    return True


def _apply(transformed: TransformedImage, chain: Chain, image: Any, *others: Any) -> Any:
    """Return the image, and the other inputs, after the last transforms of a chain."""
    result = image  # without steps, torchvision preserves the class and attributes
    try:
        applied = transformed.apply(chain)  # which may draw even without steps
        if chain.state.kind != "pil":
            result = create_lazy_output(applied)
        elif not isinstance(image, Image.Image):
            result = create_lazy_image(applied)
        elif chain.last.steps:
            result = create_lazy_image(applied, image, may_lose_info=True)
    except (ImageError, Untranslatable):  # too many pixels or too few; torchvision raises the error
        return None
    return (result, *others) if others else result


def _is_v2(transform: Any) -> bool:
    """Return whether a transform and those inside it are v2, and thus accept several inputs."""
    return isinstance(transform, v2.Transform) and all(map(_is_v2, getattr(transform, "transforms", ())))


_LABELS = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor})
"""Types of inputs, such as labels, that v2 returns unchanged."""

_LEAVES = _LABELS | {tv_tensors.BoundingBoxes, tv_tensors.Mask, LazyMask}
"""Types of the leaves of targets that transforms in ``IMAGE_CONVERSIONS`` return unchanged beside an image."""
