"""Draws of our own: torchvision's boxes, and what torchvision leaves of the generator; else torchvision draws."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader.transforms import fast_params
from proxyloader.transforms.fast_params import resized_crop_box
from proxyloader.transforms.params import Version

from ..compare import drawn_alike

both_versions = pytest.mark.parametrize("version", ["v1", "v2"])
SIZES = [(375, 500), (500, 375), (64, 64), (3, 2000), (2000, 3), (1, 1), (17, 5)]
"""(height, width)"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was compared, before and after."""
    fast_params._sampler.cache_clear()
    fast_params._matches_torchvision.cache_clear()
    yield
    fast_params._sampler.cache_clear()
    fast_params._matches_torchvision.cache_clear()


def of_torchvision(version: Version, scale: Any, ratio: Any, height: int, width: int) -> tuple[int, ...]:
    image = torch.empty(3, height, width)
    if version == "v1":
        return tuple(v1.RandomResizedCrop.get_params(image, scale, ratio))
    drawn = v2.RandomResizedCrop(8, scale, ratio).make_params([image])
    return drawn["top"], drawn["left"], drawn["height"], drawn["width"]


@both_versions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        *(((0.08, 1.0), (3 / 4, 4 / 3)), ((0.2, 1), (0.5, 2)), ((0.2, 0.21), (1.0, 1.0)), ((0.9, 1.0), (0.1, 0.5))),
        *(((1.0, 4.0), (1.5, 9.0)), ((2.0, 3.0), (3 / 4, 4 / 3))),
    ],
)
def test_the_boxes_are_torchvisions(version: Version, dtype: torch.dtype, scale: Any, ratio: Any) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    state = torch.get_rng_state()
    try:
        box_of = resized_crop_box(scale, ratio, version)
        assert box_of.func is fast_params._fast_box, "torchvision draws, and nothing is gained"  # type: ignore[attr-defined]
        assert torch.equal(torch.get_rng_state(), state), "the comparison left the generator in another state"
        for height, width in SIZES:
            stock = functools.partial(of_torchvision, version, scale, ratio, height, width)
            draws = drawn_alike(stock, functools.partial(box_of, height, width), 50)
            assert all(found == wanted for wanted, found in draws)
    finally:
        torch.set_default_dtype(before)


def other_boxes(image: torch.Tensor, scale: list[float], ratio: list[float]) -> tuple[int, int, int, int]:
    return (0, 0, 1, 1)


theirs = v1.RandomResizedCrop.get_params


def other_draws(image: torch.Tensor, scale: list[float], ratio: list[float]) -> Any:
    box = theirs(image, scale, ratio)
    torch.rand(1)
    return box


@pytest.mark.parametrize("get_params", [other_boxes, other_draws])
def test_a_torchvision_that_draws_otherwise_draws(get_params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1.RandomResizedCrop, "get_params", staticmethod(get_params))
    box_of = resized_crop_box((0.08, 1.0), (3 / 4, 4 / 3), "v1")
    image = torch.empty(3, 40, 50)
    draws = drawn_alike(lambda: get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]), lambda: box_of(40, 50), 3)
    assert all(found == wanted for wanted, found in draws)
