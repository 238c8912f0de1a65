"""What is left to Pillow, if it is newer than the tests and not what the kernels reproduce."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from proxyloader.kernels import operations, pillow_check
from proxyloader.kernels.operations import find_obstacle
from proxyloader.kernels.pillow_check import differing_steps, find_differences, is_new
from proxyloader.transforms.resize import pillow_resizes_height_first

from ..plans import plan_for
from .emulation import run, where

RESIZE = plan_for(v2.Compose([v2.RandomApply([v2.Resize((30, 40))]), v2.PILToTensor()]))
JITTER = plan_for(v2.Compose([v2.ColorJitter(0.5, 0.5, 0.5, 0.1), v2.PILToTensor()]))

OTHERS = """object Adjustment Warp OneOf Mixture Crop Flip IndexSelect ChannelOrder Blur Erase ToTensor
            ToFloat Normalize Transpose Table ToPIL"""
"""Steps that move pixels, map levels by a table, or have torch's arithmetic."""

SUBCLASSES = "Affine Perspective Brightness Contrast Saturation Sharpness Hue Autocontrast Equalize"
"""Warps and adjustments. The other adjustments map levels by a table."""


@pytest.fixture
def reversed_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def reverse(*sizes: Any) -> Any:
        return ~np.asarray(pillow_resizes_height_first(*sizes))

    monkeypatch.setattr(operations.resize, "pillow_resizes_height_first", reverse)


@pytest.fixture
def new_pillow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The installed one, newer than the tests, and an empty cache."""
    monkeypatch.setattr(pillow_check, "NEWEST_TESTED", (1, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if where["device"] == "cpu":
        monkeypatch.setattr(pillow_check, "get_launcher", lambda *_, **__: "emulated")
        monkeypatch.setattr(pillow_check, "_run_on_gpu", lambda _, images, programs: run(images, programs))
    pillow_check.differing_steps.cache_clear()
    yield
    pillow_check.differing_steps.cache_clear()


def test_the_installed_pillow_does_not_differ() -> None:
    assert find_differences(run) == set()


def test_every_step_with_the_arithmetic_of_pillow_is_compared() -> None:
    def run_badly(*arguments: Any) -> list[torch.Tensor]:
        return [output ^ 1 for output in run(*arguments)]

    kinds = {kind.__name__ for kind in operations.add_step.registry} - {*OTHERS.split()}
    assert find_differences(run_badly) == kinds | {*SUBCLASSES.split()}


@pytest.mark.usefixtures("reversed_passes")
def test_another_order_of_passes_is_found() -> None:
    assert find_differences(run) == {"Resize", "ResizeBox"}


@pytest.mark.usefixtures("new_pillow", "reversed_passes")
def test_only_plans_with_a_step_that_differs_are_left_to_pillow(caplog: pytest.LogCaptureFixture) -> None:
    assert is_new()
    assert find_obstacle(RESIZE, True, differing_steps(0)).endswith("differs from the kernels in Resize")
    assert find_obstacle(JITTER, True, differing_steps(0)) == ""
    (line,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert line.getMessage().startswith("the kernels leave out Resize, ResizeBox, which Pillow ")


@pytest.mark.usefixtures("new_pillow", "reversed_passes")
def test_the_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = differing_steps(0)
    pillow_check.differing_steps.cache_clear()
    monkeypatch.delattr(pillow_check, "find_differences")
    assert found and differing_steps(0) == found
