"""The presets of torchvision's training reference, in DALI."""

from __future__ import annotations

import itertools

import pytest
from torchvision.transforms import InterpolationMode

from proxyloader import UnsupportedTransformError, compile_transforms

from ..compare import BICUBIC, BILINEAR, Bound, assert_alike, lossless
from ..outcomes import raises
from ..reference_presets import AUGMENTED_AND_ERASED, AUTO_AUGMENT, PRESETS, Preset, Train

AUGMENTED = Bound(0.5, 20, 255)
"""The resize is a level off here and there, and so is equalisation. Solarising, posterising and contrast behind them
make more of such pixels."""


def bound_of(preset: Preset) -> Bound:
    if isinstance(preset, Train) and preset.auto_augment:
        return AUGMENTED
    return BICUBIC if preset.interpolation is InterpolationMode.BICUBIC else BILINEAR


def test_every_value_of_auto_augment_is_held_in_every_version_backend_and_beside_erasing() -> None:
    held = {(each.auto_augment, each.use_v2) for each in PRESETS if isinstance(each, Train)}
    assert held >= set(itertools.product(AUTO_AUGMENT, [False, True]))
    held = {(each.auto_augment, each.backend == "pil") for each in PRESETS if isinstance(each, Train)}
    assert held >= set(itertools.product(AUTO_AUGMENT, [False, True]))
    assert {each.auto_augment for each in AUGMENTED_AND_ERASED} == set(AUTO_AUGMENT)


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_a_preset_is_as_torchvisions(preset: Preset) -> None:
    assert_alike(preset, "cpu", lossless(), bound=bound_of(preset), times=2)


@pytest.mark.parametrize("auto_augment", AUTO_AUGMENT)
def test_bicubic_warps_are_refused(auto_augment: str) -> None:
    preset = Train(auto_augment=auto_augment, interpolation=InterpolationMode.BICUBIC)
    with raises(UnsupportedTransformError, code="unsupported-argument", argument="interpolation") as caught:
        compile_transforms(preset)
    assert caught.value.position.endswith(".transforms[2]")
