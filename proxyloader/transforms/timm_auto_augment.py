"""timm's automatic augmentation: AutoAugment, RandAugment, AugMix, 3-Augment.

timm's own code samples the operations and their magnitudes. It runs on a stand-in for the image, which records the
calls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from timm.data import auto_augment

from . import color
from .augment import BoxBlur
from .auto_augment import Arguments, Blend, BranchParams, Mixture, put_chain
from .geometry import as_fill
from .plan import Branch, Draws, ImageState, OneOf, Size, Step, Untranslatable
from .registry import rule
from .resize import interpolation_value
from .warp import Affine, rotation

Operation = tuple[str, float, float, Arguments]
"""Arguments of an ``AugmentOp``: its name, probability and magnitude, and its hyperparameters."""

COLORS: dict[Any, Step] = {
    auto_augment.auto_contrast: color.Autocontrast(),
    auto_augment.brightness: color.Brightness(),
    auto_augment.color: color.Saturation(),
    auto_augment.contrast: color.Contrast(),
    auto_augment.desaturate: color.Saturation(),
    auto_augment.equalize: color.Equalize(),
    auto_augment.invert: color.Invert(),
    auto_augment.posterize: color.Posterize(),
    auto_augment.sharpness: color.Sharpness(),
    auto_augment.solarize: color.Solarize(),
    auto_augment.solarize_add: color.SolarizeAdd(),
}
"""timm's functions without random numbers of their own, and the equivalent steps."""

BLURS = (auto_augment.gaussian_blur, auto_augment.gaussian_blur_rand)
WARPS = (
    auto_augment.rotate,
    auto_augment.shear_x,
    auto_augment.shear_y,
    auto_augment.translate_x_abs,
    auto_augment.translate_x_rel,
    auto_augment.translate_y_abs,
    auto_augment.translate_y_rel,
)
"""timm's functions that draw an interpolation. The BLURS draw a radius."""


def _warp(resample: Any, fill: Sequence[float]) -> Affine:
    mode = interpolation_value(resample)
    if mode in ("nearest", "bilinear", "bicubic"):
        return Affine(mode, tuple(fill))  # type: ignore[arg-type]
    raise Untranslatable


class _Recorder:
    """Stand-in for a PIL image that records the operations of timm's functions."""

    def __init__(self, size: Size) -> None:
        self._size, self.size = size, (size[1], size[0])
        self.calls: list[tuple[Step, Sequence[float]]] = []

    def transform(self, _: Any, __: Any, matrix: Sequence[float], resample: Any, fillcolor: Any) -> _Recorder:
        warp = _warp(resample, fillcolor)
        return self.record(warp, (*self._size, *matrix))

    def rotate(self, degrees: float, resample: Any, fillcolor: Any) -> _Recorder:
        warp = _warp(resample, fillcolor)
        return self.record(warp, rotation(self._size, degrees, warp))

    def filter(self, blur: Any) -> _Recorder:
        return self.record(BoxBlur(), (blur.radius,))

    def record(self, step: Step, numbers: Sequence[float]) -> _Recorder:
        self.calls.append((step, numbers))
        return self

    def chain(self, choice: OneOf) -> list[BranchParams]:
        return [(choice.branches.index((step,)), numbers) for step, numbers in self.calls]


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


def _operation(operation: Operation) -> Any:
    name, probability, magnitude, arguments = operation
    made = auto_augment.AugmentOp(name, probability, magnitude, dict(arguments))
    made.aug_fn = _recorded(made.aug_fn)
    return made


@functools.lru_cache(maxsize=64)
def _augmentation(name: str, policy: tuple[tuple[Operation, ...], ...], arguments: tuple[Any, ...]) -> Any:
    """Return an instance of timm's class with its operations, or those of each subpolicy for AutoAugment."""
    made = [[_operation(each) for each in operations] for operations in policy]
    if name == "AutoAugment":
        return auto_augment.AutoAugment(made)
    return auto_augment.RandAugment(made[0], *arguments) if name == "RandAugment" else made[0][0]


@dataclass(frozen=True)
class Automatic(Step):
    """timm's AutoAugment, RandAugment and AugmentOp: consecutive operations.

    Attributes:
        choice: the steps to choose from.
        name, policy, arguments: see ``_augmentation``.
        layers: maximum number of operations for one image.
    """

    choice: OneOf
    name: str
    policy: tuple[tuple[Operation, ...], ...]
    arguments: tuple[Any, ...]
    layers: int

    @property
    def operations(self) -> Branch:
        return (self.choice,) * self.layers

    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: list[float]) -> Size:
        image = _Recorder(size)
        _augmentation(self.name, self.policy, self.arguments)(image)
        put_chain(self.choice, image.chain(self.choice), self.layers, row)
        return size


@dataclass(frozen=True)
class AugMix(Draws[Blend]):
    """Draws of timm's AugMixAugment.

    Attributes:
        choice: the steps to choose from.
        alpha: parameter of the Dirichlet and the beta distribution.
        width: number of chains.
        depth: number of operations per chain; <= 0: a random number from 1 to 3.
    """

    choice: OneOf
    policy: tuple[Operation, ...]
    alpha: float
    width: int
    depth: int
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: list[float]) -> Size:
        weights = np.float32(np.random.dirichlet([self.alpha] * self.width))
        share = np.float32(np.random.beta(self.alpha, self.alpha))
        row.extend([float(share), 0.0, *weights.tolist()])
        operations = _augmentation("RandAugment", (self.policy,), ()).ops
        for _ in range(self.width):
            depth = self.depth if self.depth > 0 else np.random.randint(1, 4)
            image = _Recorder(size)
            for operation in np.random.choice(operations, depth, replace=True):
                operation(image)
            put_chain(self.choice, image.chain(self.choice), self.depth if self.depth > 0 else 3, row)
        return size


def _describe(operations: Iterable[Any], state: ImageState) -> tuple[tuple[Operation, ...], list[Step]]:
    """Return the arguments that create these operations, and the equivalent steps."""
    made: list[Operation] = []
    steps: list[Step] = []
    if state.kind != "pil" or state.channels != 3:
        raise Untranslatable
    for each in operations:
        if type(each) is not auto_augment.AugmentOp or each.aug_fn not in {*COLORS, *BLURS, *WARPS}:
            raise Untranslatable
        fill, resample = each.kwargs["fillcolor"], each.kwargs["resample"]
        several = isinstance(resample, (tuple, list))
        known = {
            "img_mean": as_fill(fill, state),
            "interpolation": tuple(resample) if several else resample,
            "magnitude_std": each.magnitude_std,
            "magnitude_max": each.magnitude_max,
        }
        made.append((each.name, each.prob, each.magnitude, tuple(sorted((each.hparams | known).items()))))
        if each.aug_fn in WARPS:
            steps += [_warp(mode, known["img_mean"]) for mode in (resample if several else (resample,))]
        else:
            steps.append(COLORS.get(each.aug_fn, BoxBlur()))
    return tuple(made), steps


def _one_of(steps: Iterable[Step]) -> OneOf:
    """Return a choice between no step and each of the steps."""
    return OneOf(((), *((step,) for step in dict.fromkeys(steps))))


@rule(auto_augment.AugmentOp)
def augment_op(transform: Any, state: ImageState) -> Branch:
    made, steps = _describe([transform], state)
    return (Automatic(_one_of(steps), "AugmentOp", (made,), (), 1),)


@rule(auto_augment.AutoAugment)
def auto_augment_policy(transform: Any, state: ImageState) -> Branch:
    described = [_describe(operations, state) for operations in transform.policy]
    layers = max(len(made) for made, _ in described)
    choice = _one_of(step for _, steps in described for step in steps)
    return (Automatic(choice, "AutoAugment", tuple(made for made, _ in described), (), layers),)


@rule(auto_augment.RandAugment)
def rand_augment(transform: Any, state: ImageState) -> Branch:
    made, steps = _describe(transform.ops, state)
    weights = transform.choice_weights
    arguments = int(transform.num_layers), None if weights is None else tuple(map(float, weights))
    return (Automatic(_one_of(steps), "RandAugment", (made,), arguments, arguments[0]),)


@rule(auto_augment.AugMixAugment)
def aug_mix(transform: Any, state: ImageState) -> Branch:
    if transform.blended:
        raise Untranslatable
    made, steps = _describe(transform.ops, state)
    choice, width, depth = _one_of(steps), int(transform.width), int(transform.depth)
    blend = Blend((Mixture(((choice,) * (depth if depth > 0 else 3),) * width),))
    return (AugMix(blend, choice, made, float(transform.alpha), width, depth),)
