"""The presets of torchvision's training reference, by kernels."""

from __future__ import annotations

import pytest

from ..compare import CLOSE, EXACT, assert_alike, lossless
from ..reference_presets import PRESETS, Preset


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_a_preset_is_as_torchvisions(preset: Preset) -> None:
    assert_alike(preset.transforms, "cpu", lossless(), bound=CLOSE if preset.backend == "tensor" else EXACT, times=2)
