"""Draws of our own: torchvision's numbers, one by one and ahead, and torch's generator is left where it would be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader.transforms.plan import Version
from proxyloader.transforms.random_numbers import BLOCK, NumbersAhead, drawing_ahead, draws_alike, resized_crop_box

from ..compare import drawn_alike
from ..plans import draw, translation_of

KINDS: list[tuple[Callable[[NumbersAhead], float], Callable[[], float]]] = [
    (lambda ahead: ahead.uniform(0.08, 1.0), lambda: torch.empty(1).uniform_(0.08, 1.0).item()),
    (lambda ahead: ahead.uniform(0.0, 1.0), lambda: torch.rand(1).item()),
    (lambda ahead: ahead.uniform(-0.29, 0.29, exp=True), lambda: torch.empty(1).uniform_(-0.29, 0.29).exp_().item()),
    (lambda ahead: ahead.integer(1), lambda: torch.randint(0, 1, (1,)).item()),
    (lambda ahead: ahead.integer(376), lambda: torch.randint(0, 376, (1,)).item()),
    (lambda ahead: ahead.integer(2**27), lambda: torch.randint(0, 2**27, (1,)).item()),
]
"""The same draw, ahead and by torch."""


def assert_alike_ahead(kinds: Sequence[int], seed: int, skipped: int = 0) -> None:
    torch.manual_seed(seed)
    torch.rand(skipped)
    before = torch.get_rng_state()
    wanted = [KINDS[kind][1]() for kind in kinds]
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    ahead = NumbersAhead(torch.default_generator)
    assert [KINDS[kind][0](ahead) for kind in kinds] == wanted
    ahead.end()
    assert torch.equal(torch.get_rng_state(), after)


@given(kinds=st.lists(st.sampled_from(range(len(KINDS))), max_size=40), seed=st.integers(0, 2**32))
def test_any_order_of_draws_gives_torchs_numbers_and_leaves_its_state(kinds: list[int], seed: int) -> None:
    assert_alike_ahead(kinds, seed)


@pytest.mark.parametrize(
    ("count", "skipped"),
    [
        *((count, 0) for count in (0, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)),
        *((640, skipped) for skipped in range(0, 700, 97)),  # the generator makes 624 at a time
    ],
)
def test_there_are_as_many_as_one_draws_from_anywhere_in_the_generators_block(count: int, skipped: int) -> None:
    assert_alike_ahead([k % len(KINDS) for k in range(count)], 8, skipped)


def test_numbers_are_drawn_ahead_on_any_default_device() -> None:
    draws_alike.cache_clear()
    with torch.device("meta"):
        assert draws_alike(), "numbers are drawn one by one, and nothing is gained"
        ahead = NumbersAhead(torch.default_generator)
        assert 0 <= ahead.uniform(0.0, 1.0) <= 1 and 0 <= ahead.integer(9) < 9
        ahead.end()


@pytest.mark.parametrize("version", [v1, v2])
@pytest.mark.parametrize("size", [(375, 500), (8, 900), (1, 1)])
def test_transforms_draw_the_same_ahead(version: Any, size: tuple[int, int]) -> None:
    flips = version.RandomHorizontalFlip(), version.RandomApply([version.RandomVerticalFlip(0.3)])
    parts = [version.RandomResizedCrop(32), *flips, version.CenterCrop(30), v2.ToImage()]
    translation = translation_of(version.Compose(parts))
    assert translation.draws == "ahead"
    torch.manual_seed(5)
    wanted = [draw(translation, *size) for _ in range(300)]
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with drawing_ahead():
        assert [draw(translation, *size) for _ in range(300)] == wanted
    assert torch.equal(torch.get_rng_state(), after)


JITTER = v1.ColorJitter(0.4)


@pytest.mark.parametrize(
    "part", [v1.RandomCrop(20), JITTER, v2.RandAugment(), v1.RandomApply([JITTER]), v1.GaussianBlur(3)]
)
def test_what_draws_by_itself_is_not_drawn_ahead(part: torch.nn.Module) -> None:
    assert translation_of(v1.Compose([v1.RandomHorizontalFlip(), part, v1.ToTensor()])).draws == "torch"
    assert translation_of(v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), v1.RandomErasing()])).draws == "torch"


# --- boxes of RandomResizedCrop ---------------------------------------------------------------------------------------


SIZES = [(375, 500), (500, 375), (64, 64), (3, 2000), (2000, 3), (1, 1), (17, 5)]
"""(height, width)"""


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was compared, before and after."""
    draws_alike.cache_clear()
    yield
    draws_alike.cache_clear()


def of_torchvision(version: Version, scale: Any, ratio: Any, height: int, width: int) -> tuple[int, ...]:
    image = torch.empty(3, height, width)
    if version == "v1":
        return tuple(v1.RandomResizedCrop.get_params(image, scale, ratio))
    drawn = v2.RandomResizedCrop(8, scale, ratio).make_params([image])
    return drawn["top"], drawn["left"], drawn["height"], drawn["width"]


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        *(((0.08, 1.0), (3 / 4, 4 / 3)), ((0.2, 1), (0.5, 2)), ((0.2, 0.21), (1.0, 1.0)), ((0.9, 1.0), (0.1, 0.5))),
        *(((1.0, 4.0), (1.5, 9.0)), ((2.0, 3.0), (3 / 4, 4 / 3))),
    ],
)
def test_the_boxes_are_torchvisions(version: Version, scale: Any, ratio: Any, forgotten: None) -> None:
    state = torch.get_rng_state()
    box_of, ahead = resized_crop_box(scale, ratio)
    assert ahead, "torchvision draws, and nothing is gained"
    assert torch.equal(torch.get_rng_state(), state), "the comparison left the generator in another state"
    for height, width in SIZES:
        stock = functools.partial(of_torchvision, version, scale, ratio, height, width)
        draws = drawn_alike(stock, functools.partial(box_of, height, width), 50)
        assert all(found == wanted for wanted, found in draws)


theirs = v1.RandomResizedCrop.get_params


def other_draws(image: torch.Tensor, scale: list[float], ratio: list[float]) -> Any:
    box = theirs(image, scale, ratio)
    torch.rand(1)
    return box


@pytest.mark.parametrize("get_params", [lambda *_: (0, 0, 1, 1), other_draws], ids=["other_boxes", "other_draws"])
def test_a_torchvision_that_draws_otherwise_draws(
    get_params: Any, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    monkeypatch.setattr(v1.RandomResizedCrop, "get_params", staticmethod(get_params))
    box_of, _ = resized_crop_box((0.08, 1.0), (3 / 4, 4 / 3))
    image = torch.empty(3, 40, 50)
    draws = drawn_alike(lambda: get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]), lambda: box_of(40, 50), 3)
    assert all(found == wanted for wanted, found in draws)
