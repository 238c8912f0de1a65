"""Chains of transform calls: which settings distinguish them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from proxyloader.transforms import chain
from proxyloader.transforms.chain import START, Chain

from ..plans import plan_for

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
        assert max(len(chain._next), len(chain._through)) <= 3
