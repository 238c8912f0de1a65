"""What is drawn: the operations that torchvision does, in its order, with its numbers to the last bit of float32; and
torch's generator, and Python's, go on from the same state."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as F1
import torchvision.transforms.v2.functional as F2
from PIL import Image
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from proxyloader.transforms import color, geometry, warp
from proxyloader.transforms.params import bernoulli
from proxyloader.transforms.plan import Step

from ..compare import IMAGES, Done, assert_draws_as, both_versions

COLORS = {
    "adjust_brightness": color.Brightness,
    "adjust_contrast": color.Contrast,
    "adjust_saturation": color.Saturation,
    "adjust_hue": color.Hue,
    "adjust_sharpness": color.Sharpness,
    "autocontrast": color.Autocontrast,
    "equalize": color.Equalize,
    "invert": color.Invert,
    "permute_channels": color.ChannelOrder,
    "posterize": color.Posterize,
    "solarize": color.Solarize,
}
"""torchvision's functionals, and the step that does the same."""

FLIPS = {Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM}

bilinear: Any = {"interpolation": InterpolationMode.BILINEAR}
"""What is nearest is brought to Pillow's fixed-point numbers first; ``test_warp.py`` holds that to Pillow's pixels."""


def numbers_of(kind: type[Step], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, ...]:
    values = [*args, *kwargs.values()]
    if kind is color.Hue:  # Pillow adds whole levels to a byte
        return (float(int(values[0] * 255) % 256),)
    if kind is color.Solarize:  # levels are whole
        return (float(math.ceil(values[0])),)
    if kind is color.ChannelOrder:
        return tuple(map(float, values[0]))
    return tuple(map(float, values))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Done]:
    """What torchvision does to PIL images: each operation is written down in place of being done."""
    done: list[Done] = []

    def recorder(kind: type[Step]) -> Callable[..., Any]:
        def write_down(image: Any, *args: Any, **kwargs: Any) -> Any:
            done.append((kind, numbers_of(kind, args, kwargs)))
            return image

        return write_down

    def transform(image: Image.Image, size: Any, method: Any, data: Any, *_: Any, **__: Any) -> Image.Image:
        numbers = tuple(map(float, data))
        if method == Image.Transform.AFFINE:
            done.append((warp.Affine, (float(size[1]), float(size[0]), *numbers)))
        else:
            done.append((warp.Perspective, numbers))
        return image.resize(size, Image.Resampling.NEAREST)

    transpose, call_kernel = Image.Image.transpose, v2.Transform._call_kernel

    def flip(image: Image.Image, method: Image.Transpose) -> Image.Image:
        if method in FLIPS:
            done.append((geometry.Flip, (1.0,)))
        return transpose(image, method)

    def call(self: Any, functional: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
        ours = functional.__name__ == "write_down"
        return functional(image, *args, **kwargs) if ours else call_kernel(self, functional, image, *args, **kwargs)

    for name, kind in COLORS.items():
        for module in (F1, F2):
            monkeypatch.setattr(module, name, recorder(kind), raising=False)
    monkeypatch.setattr(v2.Transform, "_call_kernel", call)
    monkeypatch.setattr(Image.Image, "transform", transform)
    monkeypatch.setattr(Image.Image, "transpose", flip)
    return done


Check = Callable[[list[Done]], bool]


def each(count: int) -> Check:
    """So many operations for every image."""
    return lambda found: len(found) == count * IMAGES


def about(count: float, off: float = 0.1) -> Check:
    return lambda found: abs(len(found) - count * IMAGES) < off * IMAGES


def kinds(least: int, most: int | None = None) -> Check:
    return lambda found: least <= len({kind for kind, _ in found}) <= (least if most is None else most)


def nested(version: Any) -> Any:
    inner = version.RandomOrder([version.RandomInvert(), version.RandomAffine(9, **bilinear)])
    middle = version.RandomApply([inner, version.ColorJitter(0.2)], 0.7)
    return version.RandomChoice([middle, version.Compose([version.RandomPosterize(3), middle])])


def in_any_order(version: Any) -> Any:
    flip, turn = version.RandomHorizontalFlip(), version.RandomRotation(20, expand=True, **bilinear)
    return version.RandomOrder([flip, version.ColorJitter(0.3, 0.3), turn])


def one_of_three(version: Any, p: Any) -> Any:
    branches = [version.ColorJitter(0.3, 0.3), version.RandomInvert(0.3), version.RandomAffine(9, **bilinear)]
    return version.RandomChoice(branches, p)


def both_or_none(version: Any, p: float) -> Any:
    return version.RandomApply([version.ColorJitter(0.3, 0.3), version.RandomRotation(9, **bilinear)], p)


DONE_OR_NOT: dict[str, tuple[Any, ...]] = {
    "RandomInvert": (),
    "RandomPosterize": (3,),
    "RandomSolarize": (99.5,),
    "RandomAdjustSharpness": (1.7,),
    "RandomAutocontrast": (),
    "RandomEqualize": (),
}
AFFINE: list[dict[str, Any]] = [
    {"degrees": 30},
    {"degrees": 0, "translate": (0.2, 0.3)},
    {"degrees": 0, "scale": (0.5, 1.7)},
    {"degrees": 0, "shear": 20},
    {"degrees": 0, "shear": (-10, 20, 5, 30)},
    {"degrees": (5, 50), "translate": (0.5, 0), "scale": (0.9, 1.1), "shear": (3, 4), "center": (3, 5)},
]
JITTER = [(0.4, 0.4, 0.4, 0.5), (0.4,), (0, 0.4), (0, 0, 0.4), (0, 0, 0, 0.4), ((0.5, 0.5), 0, (0, 3), 0)]

DRAWN: list[tuple[str, tuple[Any, ...], dict[str, Any], Check]] = [
    *(("ColorJitter", given, {}, each(sum(value != 0 for value in given))) for given in JITTER),
    *((name, given, {"p": p}, about(p)) for name, given in DONE_OR_NOT.items() for p in (0, 0.3, 1)),
    *(
        ("RandomRotation", ((-170, 180),), {"expand": expand, "center": center, **bilinear}, each(1))
        for expand, center in itertools.product((False, True), (None, (3, 5)))
    ),
    *(("RandomAffine", (), given | bilinear, each(1)) for given in AFFINE),
    *(("RandomPerspective", (scale, p), {}, about(p)) for scale, p in ((0.5, 0.5), (1.0, 1.0), (0.2, 0.1))),
    *(("AutoAugment", (policy,), bilinear, kinds(6, 99)) for policy in AutoAugmentPolicy),
    *(("RandAugment", given, bilinear, kinds(9)) for given in ((), (3, 15), (1, 30), (2, 4, 11))),
    ("RandAugment", (0,), bilinear, kinds(0)),
    *(("TrivialAugmentWide", (bins,), bilinear, kinds(9)) for bins in (31, 5)),
]
"""A class of both versions, its arguments, and what it does."""

OF_SEVERAL: list[tuple[Callable[[Any], Any], Check]] = [
    *((functools.partial(both_or_none, p=p), about(3 * p, 0.3)) for p in (0, 0.3, 1)),
    (functools.partial(one_of_three, p=None), kinds(4)),
    (functools.partial(one_of_three, p=[3, 0, 1]), kinds(3)),
    (in_any_order, kinds(4)),
    (nested, kinds(4)),
]


@both_versions
@pytest.mark.parametrize(("name", "given", "named", "is_right"), DRAWN)
def test_the_draws_of_a_class(
    version: Any, name: str, given: Any, named: Any, is_right: Check, done: list[Done]
) -> None:
    assert is_right(assert_draws_as(getattr(version, name)(*given, **named), done))


@both_versions
@pytest.mark.parametrize(("make", "is_right"), OF_SEVERAL)
def test_the_draws_of_containers(version: Any, make: Any, is_right: Check, done: list[Done]) -> None:
    assert is_right(assert_draws_as(make(version), done))


@pytest.mark.parametrize(
    ("transform", "is_right"),
    [
        *((v2.RandomPhotometricDistort(p=p), kinds(5 if p else 0)) for p in (0.0, 0.3, 1.0)),
        (v2.RandomChannelPermutation(), lambda found: len(set(found)) == 6),
    ],
)
def test_the_draws_of_what_v2_has_alone(transform: Any, is_right: Check, done: list[Done]) -> None:
    assert is_right(assert_draws_as(transform, done))


@both_versions
def test_the_draws_around_what_changes_the_size(version: Any, done: list[Done]) -> None:
    crop = version.RandomCrop((20, 30), pad_if_needed=True)
    turn = version.RandomRotation(30, expand=True, **bilinear)
    choice = version.RandomChoice([crop, turn])
    assert_draws_as(version.Compose([choice, version.RandomAffine(0, (0.5, 0.5), **bilinear)]), done, geometry.Crop)


def test_a_chance_is_compared_as_torch_does() -> None:
    """With ``p`` just the number that is drawn, and its neighbours in float64 and float32."""
    for seed in range(200):
        torch.manual_seed(seed)
        drawn = torch.rand(1).item()
        near = [math.nextafter(drawn, side) for side in (0, 1)]
        near += [float(np.nextafter(np.float32(drawn), np.float32(side))) for side in (0, 1)]
        for p in (drawn, *near, 0.0, 0.1, 0.5, 0.9, 1.0):
            torch.manual_seed(seed)
            wanted, state = bool(torch.rand(1) < p), torch.get_rng_state()
            torch.manual_seed(seed)
            assert bernoulli(p) == wanted, (seed, p)
            assert torch.equal(torch.get_rng_state(), state)
