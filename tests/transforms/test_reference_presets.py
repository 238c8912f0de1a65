"""The presets of torchvision's training reference, in DALI."""

from __future__ import annotations

import pytest
from torchvision.transforms import InterpolationMode

from ..compare import BICUBIC, BILINEAR, Bound, assert_alike, lossless
from ..reference_presets import PRESETS, Preset, Train

AUGMENTED = Bound(0.5, 20, 255)
"""The resize is a level off here and there, and so is equalisation. Solarising, posterising and contrast behind them
make more of such pixels."""


def bound_of(preset: Preset) -> Bound:
    if isinstance(preset, Train) and preset.auto_augment:
        return AUGMENTED
    return BICUBIC if preset.interpolation is InterpolationMode.BICUBIC else BILINEAR


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_a_preset_is_as_torchvisions(preset: Preset) -> None:
    assert_alike(preset, "cpu", lossless(), bound=bound_of(preset), times=2)
