"""v2's transforms take samples of any containers apart as torchvision does."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_structure
from torchvision import tv_tensors
from torchvision.transforms import v2

from ..undecoded import opened_late

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


@pytest.mark.parametrize("types", [[torch.Tensor], (torch.FloatTensor,), (torch.nn.Buffer,)], ids=str)
def test_leaves_are_chosen_by_the_same_checks(types: Any) -> None:
    transform = type("Negate", (NegateLarge,), {"_transformed_types": types})()
    leaves = torch.ones(2), torch.ones(2, dtype=torch.int64), torch.nn.Buffer(torch.ones(2))
    stock = [transform(each).tolist() for each in leaves]
    with opened_late():
        assert [transform(each).tolist() for each in leaves] == stock


def test_the_hooks_may_end_within_a_transform() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(opened_late())
        assert v2.Lambda(lambda _: stack.close())({"x": [1, torch.ones(1)]}) == {"x": [None, None]}
