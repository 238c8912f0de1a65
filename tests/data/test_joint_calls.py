"""v2's transforms of samples with boxes give what they give without the hooks, whatever the sample is made of."""

from __future__ import annotations

import itertools
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten
from torchvision import tv_tensors
from torchvision.transforms import v2

from ..undecoded import opened_late

EDGES = [0.0, -0.0, -1e-7, 0.5, 1.0, 1.0000001, 20.0, 21.0, 29.999998, 30.0, 30.000002, 40.5, np.nan, np.inf]
Pair = namedtuple("Pair", ("first", "second"))


def boxes_of(values: Any, format: str = "XYXY", dtype: torch.dtype = torch.float32) -> Any:
    return tv_tensors.BoundingBoxes(values.to(dtype), format=format, canvas_size=(20, 30))  # type: ignore[call-overload]


@pytest.mark.parametrize("format, dtype", [("XYXY", torch.float32), ("XYXY", torch.float64), ("XYWH", torch.float32)])
@pytest.mark.parametrize("transform", [v2.SanitizeBoundingBoxes(), v2.SanitizeBoundingBoxes(1.1, 10.1)])
def test_sanitizing_keeps_the_same_boxes(format: str, dtype: torch.dtype, transform: Any) -> None:
    values = torch.tensor([*itertools.product(EDGES, repeat=4)])
    for number in (len(values), 0):
        sample = {"boxes": boxes_of(values[:number], format, dtype), "labels": torch.arange(number)}
        stock = transform(sample)
        with opened_late():
            ours = transform(sample)
        assert torch.equal(ours["labels"], stock["labels"]) and bool(len(stock["labels"])) == bool(number)
        np.testing.assert_array_equal(ours["boxes"], stock["boxes"])
        assert type(ours["boxes"]) is tv_tensors.BoundingBoxes and ours["boxes"].canvas_size == (20, 30)


@pytest.mark.parametrize("wrap", [list, tuple, lambda parts: Pair(*parts), lambda parts: OrderedDict(enumerate(parts))])
def test_samples_keep_their_structure(wrap: Any) -> None:
    boxes = boxes_of(torch.tensor([[1.0, 2.0, 11.0, 12.0]]))
    sample = wrap([{"boxes": boxes, 7: [], "none": None, "more": ({}, "text")}, wrap([torch.ones(3), 2.5])])
    flip = v2.RandomHorizontalFlip(1.0)
    stock, structure = tree_flatten(flip(sample))
    with opened_late():
        ours, ours_structure = tree_flatten(flip(sample))
    assert ours_structure == structure and list(map(type, ours)) == list(map(type, stock)) and "text" in ours
    assert all(np.array_equal(one, each) for one, each in zip(ours, stock))
