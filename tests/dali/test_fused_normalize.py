"""The last steps of a plan on a GPU: torchvision's numbers, from the levels, in one go."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torchvision.transforms import functional, v2
from torchvision.transforms import transforms as v1

from proxyloader.dali.fused_normalize import FusedNormalize, split
from proxyloader.transforms.registry import plan_for

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NORMALIZED = v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)])
LEVELS = torch.arange(256, dtype=torch.uint8).repeat(3, 1).reshape(3, 16, 16)


def last_steps_of(transform: Any, device: str, dtype: Any = None) -> FusedNormalize:
    plan = plan_for(transform)
    return FusedNormalize(split(plan.steps)[1], plan.output.channels, dtype, torch.device(device))


def torchvisions(levels: torch.Tensor) -> torch.Tensor:
    return functional.normalize(levels.double() / 255, MEAN, STD)


@pytest.mark.parametrize(
    ("transform", "last"),
    [
        (NORMALIZED, ["ToFloat", "Normalize"]),
        (v1.Compose([v1.CenterCrop(9), v1.ToTensor()]), ["ToFloat"]),
        (v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)]), ["ToFloat"]),
        (v1.Compose([NORMALIZED, v1.Normalize(MEAN, STD)]), ["ToFloat", "Normalize", "Normalize"]),
        (v1.Compose([v1.ToTensor(), v1.RandomErasing(), v1.Normalize(MEAN, STD)]), []),
        (v1.Compose([NORMALIZED, v1.RandomVerticalFlip()]), []),
        (v1.PILToTensor(), []),
    ],
    ids=["the usual", "to floats", "not scaled", "twice", "not only at the end", "not at the end", "levels"],
)
def test_which_they_are(transform: Any, last: list[str]) -> None:
    steps = plan_for(transform).steps
    first, found = split(steps)
    assert [type(step).__name__ for step in found] == last
    assert first + found == steps


def test_every_level_is_torchvisions(device: str) -> None:
    found = last_steps_of(NORMALIZED, device)(LEVELS.to(device))
    assert found.dtype == torch.float32 and found.device.type == device
    assert (found.cpu().double() - torchvisions(LEVELS)).abs().max() < 5e-7
    twice = last_steps_of(v1.Compose([NORMALIZED, v1.Normalize(MEAN, STD)]), device)(LEVELS.to(device))
    assert (twice.cpu().double() - functional.normalize(torchvisions(LEVELS), MEAN, STD)).abs().max() < 2e-6
    unscaled = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)])
    assert torch.equal(last_steps_of(unscaled, device)(LEVELS.to(device)).cpu(), LEVELS.float())
    scaled = last_steps_of(v1.ToTensor(), device)(LEVELS.to(device)).cpu()
    assert torch.equal((255 * scaled).round().byte(), LEVELS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_other_types_are_rounded_once_and_lie_as_before(dtype: torch.dtype, device: str) -> None:
    as_float32, last_steps = last_steps_of(NORMALIZED, device), last_steps_of(NORMALIZED, device, dtype)
    batch = torch.stack([LEVELS, LEVELS.flip(1)]).to(device)
    for images in (batch, batch.to(memory_format=torch.channels_last), batch[1], batch[0].permute(0, 2, 1)):
        found = last_steps(images)
        assert found.dtype == dtype and found.stride() == images.stride()
        assert torch.equal(found, as_float32(images).to(dtype))


def test_without_any_it_is_a_copy(device: str) -> None:
    levels = LEVELS.to(device).permute(1, 2, 0)
    for images, dtype in itertools.product((levels, levels.float()), (None, torch.float16)):
        copied = FusedNormalize((), 3, dtype, torch.device(device))(images)
        assert copied.data_ptr() != images.data_ptr() and copied.stride() == images.stride()
        assert copied.dtype == (dtype if dtype and images.is_floating_point() else images.dtype)
        assert torch.equal(copied, images.to(copied.dtype))
