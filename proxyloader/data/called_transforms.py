"""Intercept transform calls on images, wherever the dataset stores or creates the transforms.

See NOTE [ Intercepted transform calls ] in ``hooks.py``. A Compose of transforms with rules is intercepted as a whole,
which is faster. It also accepts a decoded image, such as that of a PNG or an array, whose pixels are sent.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..errors import ImageError
from ..transforms import iou_crop
from ..transforms.chain import START
from ..transforms.plan import Untranslatable
from ..transforms.random_numbers import resized_crop_box
from ..transforms.registry import COMPOSES, RULES, is_changed, load_timm_rules
from .deferral import Deferral, active
from .encoded_image import EncodedImage
from .lazy_image import create_lazy_image, get_transformed, is_lazy
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
from .replaced_code import find, original, replacements, unless_handled
from .transformed import TransformedImage, pixel_uses


def call_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each ``__call__`` to intercept, and of the draws of common crops."""
    if "timm.data.transforms" in sys.modules:
        load_timm_rules()
    for cls in (*RULES, *COMPOSES):
        yield cls, "__call__", _intercept(cls, cls.__call__)
    get_params = v1.RandomResizedCrop.get_params
    yield from replacements(get_params, unless_handled(original(get_params), _get_params))
    for make_params in find("torchvision.transforms.v2:RandomIoUCrop.make_params").values():
        yield v2.RandomIoUCrop, "make_params", unless_handled(make_params, iou_crop.make_params)


def _get_params(get_params: Any, img: Any, scale: Any, ratio: Any) -> Any:
    """Draw the same numbers faster."""
    if not is_lazy(img) or torch.get_default_dtype() is not torch.float32:
        return NotImplemented
    return resized_crop_box(tuple(scale), tuple(ratio))[0](img.height, img.width)


def _intercept(cls: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    is_compose = cls in COMPOSES
    images = Image.Image if is_compose else (Image.Image, LazyTensor)

    @functools.wraps(call)
    def hooked(self: Any, *inputs: Any, **named: Any) -> Any:
        if (deferral := active()) is None:
            return call(self, *inputs, **named)
        is_known = type(self) is cls and inputs and not named and isinstance(inputs[0], images)
        # Before other checks, because most joint transforms have a target.
        if is_known and _LABELS.issuperset(map(type, inputs[1:])) and not is_changed(self):
            result = apply_undecoded(deferral, self, is_compose, *inputs)
            if result is not None:
                return result
        if is_compose:
            return call(self, *inputs, **named)
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


def wrap_result(image: Any, result: Any) -> Any:
    """Return the result of a transform on pixels. A tensor computed from an image becomes a LazyTensor."""
    return wrap_values(result) if isinstance(image, (Image.Image, np.ndarray)) else result


def apply_undecoded(deferral: Deferral, transform: Any, is_compose: bool, image: Any, *others: Any) -> Any:
    """Apply a transform to an undecoded image. Return None if it, or for a Compose, a part of it, needs pixels.

    ``others``: inputs of the types in ``_LABELS``, such as a label, which v2 returns unchanged.
    """
    if isinstance(image, LazyTensor):
        transformed = find_transformed(image) if is_unshared(image) else None
    else:
        transformed = get_transformed(image)
    # On a CPU, sending decoded images does not pay off if the dataset has used the pixels.
    sends_pixels = deferral.on_gpu or pixel_uses.why is None
    if transformed is None and not (is_compose and image.mode == "RGB" and sends_pixels):
        return None
    if others and not _is_v2(transform):
        return None
    if torch.get_default_dtype() is not torch.float32:  # may change at any time
        pixel_uses.explain(f"torch's default dtype is {torch.get_default_dtype()}, but images are float32")
        return None
    start = START if transformed is None else transformed.chain
    chain = start.through(transform) if is_compose else start.then(transform)
    if chain is None:
        if isinstance(image, LazyTensor) and not is_compose and not deferral.on_gpu:
            # Its operations would be recorded, and without a GPU, the main process would do alone what workers share.
            pixel_uses.explain(f"{type(transform).__name__}: there is no rule for these arguments")
            materialize(image)
        return None
    if transformed is None and chain.state.kind == "pil":
        return None
    if why := deferral.find_obstacle(chain.partial_plan):
        if not is_compose:  # otherwise, its parts are intercepted one by one
            of_grey = " of a grey image" if chain.state.channels == 1 else ""
            pixel_uses.explain(f"{type(transform).__name__}{of_grey}: {why}")
            # Decode now, so that the transforms it calls are not intercepted either.
            _ = materialize(image) if isinstance(image, LazyTensor) else getattr(image, "im", None)
        return None
    result = image  # without steps, torchvision preserves the class and attributes
    try:
        if transformed is None:  # decoded
            transformed = TransformedImage.start(EncodedImage.from_pil(image, str(getattr(image, "filename", ""))))
        if chain.state.kind != "pil":
            result = create_lazy_output(transformed.apply(chain))
        elif chain.last.steps or not isinstance(image, Image.Image):
            like = image if isinstance(image, Image.Image) else None
            result = create_lazy_image(transformed.apply(chain), like, may_lose_info=True)
    except (ImageError, Untranslatable):  # too many pixels or too few; torchvision raises the error
        return None
    return (result, *others) if others else result


def _is_v2(transform: Any) -> bool:
    """Return whether a transform and those inside it are v2, and thus accept several inputs."""
    return isinstance(transform, v2.Transform) and all(map(_is_v2, getattr(transform, "transforms", ())))


_LABELS = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor})
