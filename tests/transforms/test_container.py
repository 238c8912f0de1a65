"""What draws one way of several: RandomApply, RandomChoice, RandomOrder and automatic augmentation go torchvision's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, transforms as v1, v2

from ..compare import CLOSE, EXACT, assert_alike, both_versions, composed, kinds_of_levels, lossless, many, run
from ..plans import draw, has_plan, translation_of

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


# --- automatic augmentation ------------------------------------------------------------------------------------------

AUTOMATIC: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{f"AutoAugment, {policy.value}": ("AutoAugment", (policy,)) for policy in AutoAugmentPolicy},
    "RandAugment": ("RandAugment", ()),
    "RandAugment, stronger": ("RandAugment", (3, 20, 41)),
    "RandAugment of no operation": ("RandAugment", (0,)),
    "TrivialAugmentWide": ("TrivialAugmentWide", ()),
    "TrivialAugmentWide of few magnitudes": ("TrivialAugmentWide", (5,)),
}
FILLED: Any = {"interpolation": InterpolationMode.BILINEAR, "fill": [10, 200, 30]}


@both_versions
@pytest.mark.parametrize(("name", "arguments"), AUTOMATIC.values(), ids=AUTOMATIC)
@pytest.mark.parametrize("how", [{}, FILLED, {"fill": 128}], ids=["", "filled", "grey"])
def test_pixels_of_automatic_augmentation(version: Any, name: str, arguments: Any, how: Any, device: str) -> None:
    first = [version.Grayscale()] if how.get("fill") == 128 else []
    transform = composed("pil", *first, getattr(version, name)(*arguments, **how))
    assert_alike(transform, device, lossless("portrait", "small", "tiny", "one pixel high", "4:2:2"), times=6)


def test_pixels_of_policies_of_three_operations(device: str) -> None:
    transform = v2.AutoAugment()  # that of v1 draws for two
    transform._policies = [(("Rotate", 1.0, 5), ("Equalize", 0.5, None), ("Invert", 1.0, None))]
    assert_alike(composed("pil", transform), device, lossless("portrait", "small"), times=4)


@both_versions
@pytest.mark.parametrize(
    ("name", "arguments", "own"),
    [
        ("RandAugment", {"magnitude": 31}, ""),  # out of range
        ("AugMix", {"alpha": 1}, ""),  # of a dtype that torch does not draw for
        *[(name, {}, "forward") for name in ("AutoAugment", "RandAugment", "TrivialAugmentWide")],
        ("AugMix", {}, "_sample_dirichlet"),
    ],
)
def test_what_torchvision_refuses_or_an_instance_replaces_has_no_plan(
    version: Any, name: str, arguments: Any, own: str
) -> None:
    transform = getattr(version, name)(**arguments)
    if own:
        assert has_plan(composed("pil", transform))
        setattr(transform, own, getattr(transform, own))
    assert not has_plan(composed("pil", transform))


@both_versions
def test_threads_do_not_mix_their_draws(version: Any) -> None:
    translation = translation_of(version.RandAugment(4))
    count = sum(step.num_params for step in translation.steps)

    def lengths(_: int) -> list[int]:
        return [len(draw(translation, 64, 48)) for _ in range(300)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lengths, range(3))) == [[count] * 300] * 3
    finally:
        sys.setswitchinterval(before)


AUGMIXES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "deep": dict(severity=10, mixture_width=1, chain_depth=4, alpha=0.5, all_ops=False, fill=[10.0, 20.0, 30.0]),
    "wide": dict(severity=1, mixture_width=5, chain_depth=1, alpha=3.0, fill=40),
}


@both_versions
@pytest.mark.parametrize("settings", AUGMIXES.values(), ids=AUGMIXES)
def test_pixels_of_augmix(version: Any, settings: Any, device: str, grids_round_each_product: None) -> None:
    mixed, files = version.AugMix(**settings), many("small", "portrait", times=8, of=lossless)
    assert_alike(composed("pil", mixed), device, files)
    steps = [v1.RandomHorizontalFlip(), v1.RandomApply([mixed]), v1.Grayscale(3), v1.RandomVerticalFlip()]
    assert_alike(composed("pil", *steps), device, files)
