"""RandomApply, RandomChoice and RandomOrder: every image goes the way that torchvision sends it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.transforms import transforms as v1

from ..compare import CLOSE, EXACT, assert_alike, both_versions, composed, kinds_of_levels, lossless, run
from ..plans import has_plan

SOME = ("landscape", "portrait", "small", "tiny", "one pixel high", "4:2:2")


@both_versions
@pytest.mark.parametrize("p", [0, 0.5, 1])
def test_random_apply(version: Any, p: float, device: str) -> None:
    inner = [version.ColorJitter(0.5, 0.5), version.RandomHorizontalFlip(), version.RandomInvert(0.7)]
    assert_alike(composed("pil", version.RandomApply(inner, p)), device, lossless(*SOME), times=3)
    module_list = torch.nn.ModuleList([version.RandomInvert(1.0), version.RandomVerticalFlip(1.0)])
    assert_alike(composed("pil", version.RandomApply(module_list, p)), device, lossless(*SOME), times=3)


@both_versions
def test_random_apply_of_what_changes_the_size(version: Any, device: str) -> None:
    inner = [version.RandomCrop((20, 30), pad_if_needed=True), version.Pad(3)]
    transform = composed("pil", version.RandomApply(inner, 0.5), version.RandomHorizontalFlip(), version.Pad(2))
    outputs = run(transform, device, lossless("landscape"), times=12)
    assert {tuple(each.shape) for each in outputs.ours} == {(3, 30, 40), (3, 124, 164)}
    assert_alike(transform, device, lossless(*SOME), times=3)


@both_versions
@pytest.mark.parametrize("p", [None, [1, 0, 2, 1, 5]], ids=["evenly", "by p"])
def test_random_choice(version: Any, p: Any, device: str) -> None:
    branches = [
        version.RandomInvert(1.0),
        version.ColorJitter((2, 2)),
        version.RandomCrop((9, 11), pad_if_needed=True),
        version.Compose([version.RandomHorizontalFlip(), version.RandomSolarize(99)]),
        version.Pad(0),
    ]
    transform = composed("pil", version.RandomChoice(branches, p), version.Pad(1))
    assert_alike(transform, device, lossless(*SOME), times=4)


@both_versions
def test_random_order(version: Any, device: str) -> None:
    steps = [version.RandomInvert(0.5), version.ColorJitter((1.7, 1.7)), version.Pad(3), version.CenterCrop(8)]
    transform = composed("pil", version.RandomOrder(steps))
    outputs = run(transform, device, lossless("landscape"), times=12)
    assert {tuple(each.shape) for each in outputs.ours} == {(3, 8, 8), (3, 14, 14)}
    assert_alike(transform, device, lossless(*SOME), times=4)


@both_versions
@kinds_of_levels
def test_containers_in_containers(version: Any, kind: str, device: str) -> None:
    flips = version.RandomOrder([version.RandomHorizontalFlip(), version.Pad((2, 0, 0, 1)), version.RandomInvert()])
    maybe = version.RandomApply([flips, version.ColorJitter(0.4)], 0.7)
    choice = version.RandomChoice([maybe, version.Compose([maybe, version.RandomGrayscale(0.5)]), flips])
    transform = composed(kind, version.RandomApply([choice, version.RandomVerticalFlip()], 0.9))
    assert_alike(transform, device, lossless(*SOME), bound=CLOSE if kind == "uint8" else EXACT, times=4)


def test_one_transform_without_a_plan_leaves_them_all_to_torchvision() -> None:
    assert not has_plan(composed("pil", v1.RandomChoice([v1.Pad(1), v1.Pad(1, padding_mode="edge")])))
