"""RandomApply, RandomChoice and RandomOrder: every image goes the way that torchvision sends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchvision.transforms import transforms as v1

from ..compare import CLOSE, EXACT, assert_alike, both_versions, composed, kinds_of_levels, lossless, run
from ..plans import has_plan

SOME = ("landscape", "portrait", "small", "tiny", "one pixel high", "4:2:2")


CONTAINERS: dict[str, Callable[[Any], list[Any]]] = {
    **{f"apply, {p}": lambda v, p=p: [v.RandomApply([v.ColorJitter(0.5, 0.5), v.RandomHorizontalFlip()], p)]
       for p in (0, 0.5, 1)},
    **{f"apply of modules, {p}": lambda v, p=p: [v.RandomApply(torch.nn.ModuleList([v.RandomInvert(1.0)]), p)]
       for p in (0, 0.5, 1)},
    "apply of what changes the size": lambda v: [
        v.RandomApply([v.RandomCrop((20, 30), pad_if_needed=True), v.Pad(3)], 0.5), v.RandomHorizontalFlip(), v.Pad(2)],
    **{f"choice by {p}": lambda v, p=p: [v.RandomChoice([
        v.RandomInvert(1.0), v.ColorJitter((2, 2)), v.RandomCrop((9, 11), pad_if_needed=True),
        v.Compose([v.RandomHorizontalFlip(), v.RandomSolarize(99)]), v.Pad(0)], p), v.Pad(1)]
       for p in (None, [1, 0, 2, 1, 5])},
    "order": lambda v: [v.RandomOrder([
        v.RandomInvert(0.5), v.ColorJitter((1.7, 1.7)), v.Pad(3), v.CenterCrop(8)])],
}  # fmt: skip
SIZES = {"apply of what changes the size": {(30, 40), (124, 164)}, "order": {(8, 8), (14, 14)}}


@both_versions
@pytest.mark.parametrize("name", CONTAINERS)
def test_pixels(version: Any, name: str, device: str) -> None:
    transform = composed("pil", *CONTAINERS[name](version))
    assert_alike(transform, device, lossless(*SOME), times=4)
    if name in SIZES:
        outputs = run(transform, device, lossless("landscape"), times=12)
        assert {tuple(each.shape[1:]) for each in outputs.ours} == SIZES[name]


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
