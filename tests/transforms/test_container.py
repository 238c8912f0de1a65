"""RandomApply, RandomChoice and RandomOrder: every image goes the way that torchvision sends it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.transforms import transforms as v1

from proxyloader import UnsupportedTransformError
from proxyloader.transforms.registry import plan_for

from ..compare import CLOSE, EXACT, Bound, assert_alike, both_versions, composed, kinds_of_levels, lossless, run
from ..outcomes import raises

SOME = ("landscape", "portrait", "small", "tiny", "one pixel high", "4:2:2")


def bound_of(kind: str) -> Bound:
    return CLOSE if kind == "uint8" else EXACT


class TestRandomApply:
    @both_versions
    @kinds_of_levels
    @pytest.mark.parametrize("p", [0, 0.5, 1])
    def test_does_all_or_nothing(self, version: Any, kind: str, p: float, device: str) -> None:
        inner = [version.ColorJitter(0.5, 0.5), version.RandomHorizontalFlip(), version.RandomInvert(0.7)]
        transform = composed(kind, version.RandomApply(inner, p))
        assert_alike(transform, device, lossless(*SOME), bound=bound_of(kind), times=3)

    @both_versions
    @kinds_of_levels
    def test_of_what_changes_the_size(self, version: Any, kind: str, device: str) -> None:
        inner = [version.RandomCrop((20, 30), pad_if_needed=True), version.Pad(3)]
        transform = composed(kind, version.RandomApply(inner, 0.5), version.RandomHorizontalFlip(), version.Pad(2))
        outputs = run(transform, device, lossless("landscape"), times=12)
        assert {tuple(each.shape) for each in outputs.ours} == {(3, 30, 40), (3, 124, 164)}
        assert_alike(transform, device, lossless(*SOME), times=3)

    @both_versions
    def test_of_modules_in_a_list_of_torchs_and_at_the_start(self, version: Any, device: str) -> None:
        inner = torch.nn.ModuleList([version.RandomInvert(1.0), version.RandomVerticalFlip(1.0)])
        assert_alike(composed("pil", version.RandomApply(inner, 0.5)), device, lossless(*SOME), times=3)
        crops = [version.RandomResizedCrop(24), version.RandomHorizontalFlip()]
        transform = composed("pil", version.RandomApply(crops, 0.5), version.Resize((24, 24)))
        assert_alike(transform, device, lossless(*SOME), times=3)


class TestRandomChoice:
    @both_versions
    @kinds_of_levels
    @pytest.mark.parametrize("p", [None, [1, 0, 2, 1, 5]], ids=["evenly", "by p"])
    def test_takes_one(self, version: Any, kind: str, p: Any, device: str) -> None:
        branches = [
            version.RandomInvert(1.0),
            version.ColorJitter((2, 2)),
            version.RandomCrop((9, 11), pad_if_needed=True),
            version.Compose([version.RandomHorizontalFlip(), version.RandomSolarize(99)]),
            version.Pad(0),
        ]
        transform = composed(kind, version.RandomChoice(branches, p), version.Pad(1))
        assert_alike(transform, device, lossless(*SOME), bound=bound_of(kind), times=4)

    @both_versions
    @pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 13])
    def test_among_any_number(self, version: Any, count: int, device: str) -> None:
        branches = [version.Pad((k, 0, 0, 0), fill=10 * k) for k in range(count)]
        transform = composed("pil", version.RandomChoice(branches))
        outputs = run(transform, device, lossless("tiny"), times=60)
        assert {each.shape[2] for each in outputs.ours} == {9 + k for k in range(count)}
        assert all(torch.equal(a, b) for a, b in zip(outputs.stock, outputs.ours)) or device == "cuda"


class TestRandomOrder:
    @both_versions
    @kinds_of_levels
    def test_does_all_in_its_order(self, version: Any, kind: str, device: str) -> None:
        steps = [
            version.RandomInvert(0.5),
            version.ColorJitter((1.7, 1.7)),
            version.Pad((0, 1, 2, 3), fill=99),
            version.RandomHorizontalFlip(),
        ]
        transform = composed(kind, version.RandomOrder(steps))
        assert_alike(transform, device, lossless(*SOME), times=4)

    @both_versions
    def test_of_sizes_that_depend_on_the_order(self, version: Any, device: str) -> None:
        transform = composed("pil", version.RandomOrder([version.Pad(3), version.CenterCrop(8)]))
        outputs = run(transform, device, lossless("landscape"), times=12)
        assert {tuple(each.shape) for each in outputs.ours} == {(3, 8, 8), (3, 14, 14)}
        assert_alike(transform, device, lossless(*SOME), times=2)


class TestNested:
    @both_versions
    @kinds_of_levels
    def test_containers_in_containers(self, version: Any, kind: str, device: str) -> None:
        flips = version.RandomOrder([version.RandomHorizontalFlip(), version.Pad((2, 0, 0, 1)), version.RandomInvert()])
        maybe = version.RandomApply([flips, version.ColorJitter(0.4)], 0.7)
        choice = version.RandomChoice([maybe, version.Compose([maybe, version.RandomGrayscale(0.5)]), flips])
        transform = composed(kind, version.RandomApply([choice, version.RandomVerticalFlip()], 0.9))
        assert_alike(transform, device, lossless(*SOME), bound=bound_of(kind), times=4)


def test_a_refusal_names_the_transform_inside() -> None:
    inner = v1.RandomChoice([v1.Pad(1), v1.Pad(1, padding_mode="edge")])
    where = {"position": "transform.transforms[0].transforms[1]", "transform": "Pad"}
    with raises(UnsupportedTransformError, argument="padding_mode", **where):
        plan_for(composed("pil", inner))
