"""timm's transforms: crops, conversions, erasing, automatic augmentation. The registry imports it when first needed.

timm's own code draws random parameters, mostly from Python's generator. That of automatic augmentation and erasing runs
on a stand-in for the image, which records the calls.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from timm.data import auto_augment, random_erasing, transforms

from . import color
from .augment import Erase, PillowBlur, to_hwc
from .auto_augment import Blend, BranchParams, Mixture, put_chain
from .geometry import Box, as_fill, as_pair, cropping
from .plan import ImageState, OneOf, ParamRow, Size, Step, Translation, Untranslatable, in_sequence
from .random_numbers import meta_image
from .registry import rule
from .resize import Target, interpolation_value, resize_step, resizing
from .type_conversion import to_tensor
from .warp import Affine, rotation


@rule(transforms.RandomResizedCropAndInterpolation)
def random_resized_crop(transform: Any, state: ImageState) -> Translation:
    if state.kind != "pil":
        raise Untranslatable
    scale, ratio = tuple(map(float, transform.scale)), tuple(map(float, transform.ratio))
    target, modes = Target(as_pair(transform.size)), transform.interpolation
    is_drawn = isinstance(modes, (tuple, list))
    steps = [resize_step(mode, True, state, "v1") for mode in (modes if is_drawn else [modes])]
    resizes = [resizing(target, step, is_crop=True) for step in steps]

    def box(height: int, width: int) -> Box:
        drawn: Box = transforms.RandomResizedCropAndInterpolation.get_params(meta_image(height, width), scale, ratio)
        if min(drawn[2:]) <= 0:  # Pillow also rejects empty images, with another message
            raise Untranslatable
        return drawn

    choice = OneOf(tuple(each.steps for each in resizes))

    def sample(size: Size, row: ParamRow) -> Size:
        chosen = random.choice(range(len(resizes)))
        return choice.take(chosen, resizes[chosen].sample, size, row)

    resized = Translation((choice,), sample, "any") if is_drawn else resizes[0]
    return in_sequence([cropping(box, inside=True, draws="any"), resized])


rule(transforms.MaybeToTensor, transforms.MaybePILToTensor)(to_tensor)


# --- erasing ----------------------------------------------------------------------------------------------------------


class _BoxRecorder(list[tuple[Box, torch.Tensor]]):
    """Stand-in for an image that records the boxes and values of timm's erasing code."""

    def __setitem__(self, where: Any, value: Any) -> None:
        top, left, bottom, right = where[1].start, where[2].start, where[1].stop, where[2].stop
        if top < bottom and left < right:
            self.append(((top, left, bottom - top, right - left), value))


@rule(random_erasing.RandomErasing)
def erase_at_random(transform: Any, state: ImageState) -> Translation:
    """Translate RandomErasing to no box, or a second branch that erases the maximum number of boxes."""
    mode, channels = transform.mode, state.channels
    is_noise_of_levels = mode in ("rand", "pixel") and state.dtype != "float32"
    if state.kind == "pil" or str(transform.device) != "cpu" or is_noise_of_levels:
        raise Untranslatable
    most, erase = int(transform.max_count), Erase(channels, mode == "pixel")
    choice = OneOf(((), (erase,) * most))

    def sample(size: Size, row: ParamRow) -> Size:
        erased = _BoxRecorder()
        transform._erase(erased, channels, *size, torch.float32)
        numbers: list[float] = []
        unused = [((0, 0, 0, 0), torch.zeros((channels, 1, 1)))] * (most - len(erased))
        for box, value in [*erased, *unused] if erased else []:
            numbers.extend(box)
            numbers.extend([row.attach(to_hwc(value))] if mode == "pixel" else value.reshape(-1).tolist())
        choice.put(int(bool(numbers)), row, *numbers)
        return size

    return Translation((choice,), sample, "any")


# --- automatic augmentation -------------------------------------------------------------------------------------------

NAMES = "brightness", "contrast", "equalize", "invert", "posterize", "sharpness", "solarize", "solarize_add"
COLORS: dict[Any, Step] = {
    auto_augment.auto_contrast: color.Adjustment("autocontrast"),
    auto_augment.color: color.Adjustment("saturation"),
    auto_augment.desaturate: color.Adjustment("saturation"),
    **{getattr(auto_augment, name): color.Adjustment(name) for name in NAMES},
}
"""timm's functions without random numbers of their own, and the equivalent steps."""

BLURS = (auto_augment.gaussian_blur, auto_augment.gaussian_blur_rand)
WARP_NAMES = "rotate", "shear_x", "shear_y", "translate_x_abs", "translate_x_rel", "translate_y_abs", "translate_y_rel"
WARPS = {getattr(auto_augment, name) for name in WARP_NAMES}
"""timm's functions that draw an interpolation. The BLURS draw a radius."""


def _warp(resample: Any, fill: Sequence[float]) -> Affine:
    mode = interpolation_value(resample)
    if mode in ("nearest", "bilinear", "bicubic"):
        return Affine(mode, tuple(fill))  # type: ignore[arg-type]
    raise Untranslatable


class _Recorder:
    """Stand-in for a PIL image that records the operations of timm's functions as branches of a choice."""

    def __init__(self, size: Size, choice: OneOf) -> None:
        self._size, self.size, self._choice = size, size[::-1], choice
        self.calls: list[BranchParams] = []

    def transform(self, _: Any, __: Any, matrix: Sequence[float], resample: Any, fillcolor: Any) -> _Recorder:
        return self.record(_warp(resample, fillcolor), (*self._size, *matrix))

    def rotate(self, degrees: float, resample: Any, fillcolor: Any) -> _Recorder:
        warp = _warp(resample, fillcolor)
        return self.record(warp, rotation(self._size, degrees, warp))

    def filter(self, blur: Any) -> _Recorder:
        return self.record(PillowBlur(True), (blur.radius, blur.radius))

    def record(self, step: Step, numbers: Sequence[float]) -> _Recorder:
        self.calls.append((self._choice.branches.index((step,)), numbers))
        return self


def _recorded(function: Any) -> Any:
    """Return a function that records a call of one of timm's functions instead of running it."""
    if function not in COLORS:
        return function

    def record(image: _Recorder, *numbers: float, **_: Any) -> _Recorder:
        if function is auto_augment.desaturate:
            numbers = (min(1.0, max(0.0, 1.0 - numbers[0])),)
        is_identity = function is auto_augment.posterize and numbers[0] >= 8
        return image if is_identity else image.record(COLORS[function], numbers)

    return record


def _prepare(operations: Iterable[Any], state: ImageState) -> tuple[list[Any], list[Step]]:
    """Return copies of timm's operations that record what they do, and the equivalent steps."""
    made: list[Any] = []
    steps: list[Step] = []
    if state.kind != "pil" or state.channels != 3:
        raise Untranslatable
    for each in operations:
        if type(each) is not auto_augment.AugmentOp or each.aug_fn not in {*COLORS, *BLURS, *WARPS}:
            raise Untranslatable
        fill, resample = as_fill(each.kwargs["fillcolor"], state), each.kwargs["resample"]
        if each.aug_fn in WARPS:
            steps += [_warp(mode, fill) for mode in (resample if isinstance(resample, (tuple, list)) else (resample,))]
        else:
            steps.append(COLORS.get(each.aug_fn, PillowBlur(True)))
        operation = copy.copy(each)
        operation.aug_fn, operation.kwargs = _recorded(each.aug_fn), {**each.kwargs, "fillcolor": fill}
        made.append(operation)
    return made, steps


def _one_of(steps: Iterable[Step]) -> OneOf:
    """Return a choice between no step and each of the steps."""
    return OneOf(((), *((step,) for step in dict.fromkeys(steps))))


def _automatic(apply: Callable[[Any], Any], steps: Iterable[Step], layers: int) -> Translation:
    """Return the translation of consecutive operations. ``layers``: their maximum number for one image."""
    choice = _one_of(steps)

    def sample(size: Size, row: ParamRow) -> Size:
        image = _Recorder(size, choice)
        apply(image)
        put_chain(choice, image.calls, layers, row)
        return size

    return Translation((choice,) * layers, sample, "any")


@rule(auto_augment.AutoAugment)
def auto_augment_policy(transform: Any, state: ImageState) -> Translation:
    prepared = [_prepare(operations, state) for operations in transform.policy]
    policy = auto_augment.AutoAugment([made for made, _ in prepared])
    layers = max(len(made) for made in policy.policy)
    return _automatic(policy, [step for _, steps in prepared for step in steps], layers)


@rule(auto_augment.RandAugment)
def rand_augment(transform: Any, state: ImageState) -> Translation:
    made, steps = _prepare(transform.ops, state)
    layers = int(transform.num_layers)
    return _automatic(auto_augment.RandAugment(made, layers, transform.choice_weights), steps, layers)


@rule(auto_augment.AugMixAugment)
def aug_mix(transform: Any, state: ImageState) -> Translation:
    if transform.blended:
        raise Untranslatable
    made, steps = _prepare(transform.ops, state)
    # A depth of zero or less is a random number from 1 to 3 for each chain.
    choice, alpha, width, depth = _one_of(steps), transform.alpha, int(transform.width), int(transform.depth)
    most = depth if depth > 0 else 3

    def sample(size: Size, row: ParamRow) -> Size:
        weights = np.float32(np.random.dirichlet([alpha] * width))
        row.extend([float(np.float32(np.random.beta(alpha, alpha))), 0.0, *weights.tolist()])
        for _ in range(width):
            image = _Recorder(size, choice)
            for operation in np.random.choice(made, depth if depth > 0 else np.random.randint(1, 4), replace=True):
                operation(image)
            put_chain(choice, image.calls, most, row)
        return size

    blend = Blend((Mixture(((choice,) * most,) * width),))
    return Translation((blend,), sample, "any")
