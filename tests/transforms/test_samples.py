"""v2's transforms take samples of any containers apart as torchvision does."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves, tree_structure
from torchvision import tv_tensors
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from ..undecoded import image_calls_in, opened_late

Pair = namedtuple("Pair", "boxes rest")


class NegateLarge(v2.Transform):
    """Transforms tensors by their values, which types do not tell."""

    _transformed_types = (lambda each: isinstance(each, torch.Tensor) and float(each.sum()) > 9,)

    def transform(self, inpt: Any, params: Any) -> Any:
        return -inpt


def sample(kind: Any) -> Any:
    boxes = tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(8, 9))  # type: ignore[call-overload]
    rest = {"b": [torch.ones(3), torch.full((3,), 9.0)], "a": (None, "text", 1.5), "": {}}
    return Image.new("RGB", (9, 8)), kind({"boxes": boxes, "rest": rest})


CONTAINERS = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda target: defaultdict(list, target),
    "deque": lambda target: deque(target.values()),
    "namedtuple in a list": lambda target: [[Pair(*target.values())], ()],
    "leaves": lambda target: [target, (torch.Size([2, 3]), range(2))],
}


@pytest.mark.parametrize("kind", CONTAINERS.values(), ids=CONTAINERS)
def test_samples_have_the_same_leaves_in_the_same_places(kind: Any) -> None:
    compose = v2.Compose([v2.RandomHorizontalFlip(1.0), NegateLarge(), v2.ToImage(), v2.ToPureTensor(), NegateLarge()])
    stock = compose(*sample(kind))
    with opened_late():
        ours = compose(*(given := sample(kind)))
    assert tree_structure(ours) == tree_structure(stock) and type(ours[1]) is type(stock[1])
    assert repr(ours) == repr(stock)
    assert ours[1] is not given[1]


def shown(leaf: Any) -> Any:
    return leaf.__class__, leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf


TARGETS = {
    **{name: make(sample(dict)[1]) for name, make in CONTAINERS.items()},
    "masks and points": [tv_tensors.Mask(torch.ones(1, 8, 9)), b"x", {"points": torch.ones(2, dtype=torch.float64)}],
    "an array": {"depth": np.full((8, 9, 3), 7, np.uint8)},
    "a second image": (Image.new("RGB", (9, 8), "red"),),
    "a tensor of an image": {"other": tv_tensors.Image(torch.full((3, 8, 9), 9, dtype=torch.uint8))},
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_conversions_of_an_image_do_to_its_target_what_they_do_in_stock(target: Any, photos: Path) -> None:
    parts = v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)
    path = str(next(photos.rglob("*.jpg")))
    for transform in (v2.Compose(parts), v2.Compose([v2.RandomHorizontalFlip(0.0), *parts]), v2.ToImage()):
        stock = transform(pil_loader(path), target)
        with opened_late():
            image, ours = transform(pil_loader(path), target)
            assert image_calls_in(image)
            assert tree_structure(ours) == tree_structure(stock[1]) and ours is not target
            assert [*map(shown, tree_leaves(ours))] == [*map(shown, tree_leaves(stock[1]))]
        assert (image.shape, image.dtype, image.__class__) == (stock[0].shape, stock[0].dtype, tv_tensors.Image)


class Checked(v2.RandomHorizontalFlip):
    """Refuses samples before it draws."""

    def check_inputs(self, flat_inputs: list[Any]) -> None:
        if len(flat_inputs) > 1:
            raise TypeError("too many")


class Failing(v2.RandomHorizontalFlip):
    def transform(self, inpt: Any, params: Any) -> Any:
        raise ValueError("mine")


@pytest.mark.parametrize("transform", [*map(v2.RandomVerticalFlip, (0, 0.5, 0.3, 1)), Checked(0.5), Failing(0.7)])
def test_random_transforms_of_samples_draw_as_stock(transform: Any) -> None:
    def outcomes() -> list[Any]:
        torch.manual_seed(1)
        found = []
        for given in [sample(dict), (torch.ones(3, 2, 2),)] * 9:
            try:
                found.append(transform(*given)[-1])  # the target, or the last of three channels
            except (TypeError, ValueError) as error:
                found.append(error)
        return [*found, torch.rand(1)]

    stock = outcomes()
    with opened_late():
        assert repr(outcomes()) == repr(stock)


def test_the_hooks_may_end_within_a_transform() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(opened_late())
        assert v2.Lambda(lambda _: stack.close())({"x": [1, torch.ones(1)]}) == {"x": [None, None]}
