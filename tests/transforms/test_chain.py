"""Plans are plain data, equal where transforms do the same; chains of calls, and which settings distinguish them."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import models
from torchvision.transforms import InterpolationMode, transforms as v1, v2

from proxyloader.transforms import chain
from proxyloader.transforms.chain import START, Chain
from proxyloader.transforms.plan import ImageState, Plan

from ..plans import plan_for

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PRESET = models.ResNet50_Weights.IMAGENET1K_V2.transforms()
CROP = v1.Compose([v1.CenterCrop(9), v1.ToTensor()])


def training(version: Any, *, size: int = 32, p: float = 0.5, scale: Any = (0.08, 1.0), std: Any = STD) -> Any:
    crop, flip = version.RandomResizedCrop(size, scale=scale), version.RandomHorizontalFlip(p)
    return version.Compose([crop, flip, v1.ToTensor(), version.Normalize(MEAN, std)])


DIFFERENT = {
    "v1": training(v1),
    "std": training(v1, std=[0.229, 0.224, 0.226]),
    "without normalisation": v1.Compose(training(v1).transforms[:3]),
    "without a flip": v1.Compose([training(v1).transforms[k] for k in (0, 2, 3)]),
    "another order": v1.Compose([training(v1).transforms[k] for k in (1, 0, 2, 3)]),
    "vertical": v1.Compose([v1.RandomVerticalFlip(), v1.ToTensor()]),
    "horizontal": v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()]),
    "random crop with another fill": v1.Compose([v1.RandomCrop(20, padding=1, fill=1), v1.ToTensor()]),
    "resize": v1.Compose([v1.Resize(20), v1.ToTensor()]),
    "resize, which DALI can do": v1.Compose([v1.Resize(200), v1.ToTensor()]),
    "resize, bicubic": v1.Compose([v1.Resize(20, InterpolationMode.BICUBIC), v1.ToTensor()]),
    "resize of a tensor without antialias": v1.Compose([v1.ToTensor(), v1.Resize(20, antialias=False)]),
    "centre crop": v1.Compose([v1.CenterCrop(20), v1.ToTensor()]),
    "bytes": v1.PILToTensor(),
    "floats": v1.ToTensor(),
    "floats to 255": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)]),
    "grey": v1.Compose([v1.Grayscale(), v1.PILToTensor()]),
    "grey in three channels": v1.Compose([v1.Grayscale(3), v1.PILToTensor()]),
    "grey by torch": v1.Compose([v1.PILToTensor(), v1.Grayscale()]),
    "a preset": PRESET,
}


class TestEquality:
    @pytest.mark.parametrize("transform", DIFFERENT.values(), ids=DIFFERENT)
    def test_a_transform_gives_equal_plans_each_time_and_through_pickle(self, transform: Any) -> None:
        first = plan_for(transform)
        assert first.key.startswith("plan-") and len(first.key) == len("plan-") + 16
        for other in plan_for(transform), pickle.loads(pickle.dumps(first)), Plan(first.steps, first.output):
            assert (other, hash(other), other.key) == (first, hash(first), first.key)

    def test_different_transforms_have_different_plans_and_keys(self) -> None:
        plans = {name: plan_for(transform) for name, transform in DIFFERENT.items()}
        for (name, plan), (other_name, other) in itertools.combinations(plans.items(), 2):
            assert plan != other, (name, other_name)
            assert plan.key != other.key, (name, other_name)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (training(v1), training(v2, size=33, p=0.25, scale=(0.09, 1.0))),
            (v1.Compose([v1.Resize([20]), v1.PILToTensor()]), v2.Compose([v2.Resize(20), v2.ToImage()])),
            (v1.Compose([v1.Pad(2, fill=7), v1.PILToTensor()]), v2.Compose([v2.Pad([2, 2], fill=(7,)), v2.ToImage()])),
            (v1.ToTensor(), v1.Compose([v1.Compose([v1.ToTensor()])])),
            (CROP, v2.Compose([v2.CenterCrop(9), v1.ToTensor()])),
            (CROP, v1.Compose([v1.Compose([v2.Compose([v1.CenterCrop(9)])]), v2.Compose([v1.ToTensor()])])),
            (CROP, v1.Compose([v1.Compose([]), v1.CenterCrop(9), v1.Compose([v1.ToTensor(), v1.Compose([])])])),
            (PRESET, v1.Compose([PRESET])),
            (v1.ToTensor(), v1.Compose([v2.PILToTensor(), v1.ConvertImageDtype(torch.float32)])),
        ],
        ids=["other draws", "resize", "pad", "in a Compose", "v1 and v2", "nested"]
        + ["empty ones inside", "preset", "to float"],
    )
    def test_equivalent_transforms_share_a_plan(self, one: Any, other: Any) -> None:
        plan, same = plan_for(one), plan_for(other)
        assert (plan, hash(plan), plan.key) == (same, hash(same), same.key)


@pytest.mark.parametrize(
    ("transform", "output"),
    [
        (v1.PILToTensor(), ImageState("tensor")),
        (v1.ToTensor(), ImageState("tensor", "float32")),
        (v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)]), ImageState("tensor", "float32")),
        (v2.Compose([v1.Grayscale(), v1.Resize((2, 3)), v2.ToImage()]), ImageState("tensor", "uint8", 1)),
        (v2.Compose([v1.RandomApply([v1.Grayscale(3)]), v2.ToImage()]), ImageState("tensor")),
    ],
)
def test_a_plan_describes_the_output(transform: Any, output: ImageState) -> None:
    assert plan_for(transform).output == output


# --- chains ----------------------------------------------------------------------------------------------------------

MADE = {
    "crop": lambda: v1.RandomCrop(32),
    "v2 crop": lambda: v2.RandomResizedCrop(32, scale=[0.5, 1.0]),
    "normalize": lambda: v1.Normalize([0.5] * 3, [0.2] * 3),
    "choice": lambda: v1.RandomApply([v1.RandomHorizontalFlip(), v1.Grayscale(3)]),
}


@pytest.mark.parametrize("name", MADE)
def test_equal_transforms_share_a_chain(name: str) -> None:
    start = START.then(v1.ToTensor()) if name == "normalize" else START
    assert start is not None
    found = start.then(MADE[name]())
    assert found is not None and all(start.then(MADE[name]()) is found for _ in range(3))


def test_a_changed_transform_starts_another_chain_and_functions_are_distinguished() -> None:
    crop, held = v1.RandomCrop(32), v1.RandomHorizontalFlip(0.5)
    container = v1.RandomApply([v1.Compose([held])], p=0.5)
    first, both = START.then(crop), START.then(container)
    crop.size, held.p = (40, 40), 0.25
    assert START.then(crop) is not first and START.then(crop) is START.then(v1.RandomCrop(40))
    assert START.then(container) is not both
    one, other = (v1.RandomApply([lambda image: image.rotate(10)]) for _ in range(2))
    assert chain.settings_of(one) != chain.settings_of(other)
    assert chain.settings_of(one) == chain.settings_of(one)
    assert START.then(one) is None


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "in a list": lambda parts: parts["normalize"].mean.__setitem__(0, 0.25),
    "in a tensor": lambda parts: parts["tensor"].std.fill_(0.25),
    "another inside": lambda parts: parts["modules"].transforms.__setitem__(0, v1.RandomVerticalFlip()),
    "another attribute": lambda parts: setattr(parts["crop"], "size", (40, 40)),
    "another part": lambda parts: parts["compose"].transforms.__setitem__(1, v1.RandomHorizontalFlip(0.25)),
    "a tensor in place of a list": lambda parts: setattr(parts["normalize"], "mean", torch.full((3,), 0.25)),
    "an array in place of a tensor": lambda parts: setattr(parts["tensor"], "std", np.full(3, 0.25)),
    "a hook": lambda parts: parts["crop"].register_forward_hook(lambda module, given, made: made),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_compose_starts_another_chain(change: str) -> None:
    parts = {
        "crop": v1.RandomCrop(32),
        "modules": v1.RandomApply(torch.nn.ModuleList([v1.RandomHorizontalFlip()])),
        "to tensor": v1.ToTensor(),
        "normalize": v1.Normalize([0.5] * 3, [0.2] * 3),
        "tensor": v1.Normalize(torch.full((3,), 0.5), torch.full((3,), 0.2)),
    }
    compose = v1.Compose([*parts.values()])
    start = Chain((), START.state, START.last)
    before = start.through(compose)
    assert before is not None and len(before.transforms) == len(parts)
    assert start.through(compose) is before
    CHANGES[change]({**parts, "compose": compose})
    changed = start.through(compose)
    if change == "a hook":
        assert changed is None
    else:
        assert changed is not None and changed is not before
        assert changed.plan.key == plan_for(compose).key


def test_the_number_of_chains_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MAX_CHAINS", 3)
    for size in range(10, 20):
        found = START.then(v1.RandomCrop(size))
        assert found is not None and found is START.then(v1.RandomCrop(size))
        assert found.then(v1.CenterCrop(size - 1)) is not None
        whole = START.through(v1.Compose([v1.RandomCrop(size)]))
        assert whole is not None and whole.steps == found.steps
        assert max(len(chain._next), len(chain._along)) <= 3
