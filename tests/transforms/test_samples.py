"""v2's transforms take samples of any containers apart as torchvision does."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_structure
from torchvision import tv_tensors
from torchvision.transforms import v2

from ..undecoded import opened_late


class Pair(NamedTuple):
    first: Any
    second: Any


class Tuple(tuple[Any, ...]):
    """A leaf."""


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
    "namedtuple": lambda target: Pair(*target.values()),
    "namedtuple in a list": lambda target: [[Pair(*target.values())], ()],
    "leaves": lambda target: [Tuple(target.values()), (torch.Size([2, 3]), range(2))],
}


@pytest.mark.parametrize("kind", CONTAINERS.values(), ids=CONTAINERS)
def test_samples_have_the_same_leaves_in_the_same_places(kind: Any) -> None:
    compose = v2.Compose([v2.RandomHorizontalFlip(1.0), NegateLarge(), v2.ToImage(), v2.ToPureTensor(), NegateLarge()])
    stock = compose(*sample(kind))
    with opened_late():
        for ours in (compose(*sample(kind)), compose(*(given := sample(kind)))):
            assert tree_structure(ours) == tree_structure(stock) and type(ours[1]) is type(stock[1])
            assert repr(ours) == repr(stock)
    assert ours[1] is not given[1]
