"""Draws of our own: torchvision's numbers, by torch and from its state, and the generator is left where it would be."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torchvision import transforms as v1
from torchvision.transforms import v2

from proxyloader.transforms import random_numbers
from proxyloader.transforms.chain import START
from proxyloader.transforms.plan import Version
from proxyloader.transforms.random_numbers import (
    Numbers,
    NumbersFromState,
    draws_alike,
    how_torch_draws,
    in_thread,
    resized_crop_box,
)

from ..compare import drawn_alike
from ..plans import draw, translation_of
from ..undecoded import opened_late

KINDS: list[tuple[Callable[[Numbers], Any], Callable[[], Any]]] = [
    (lambda numbers: numbers.uniform(0.08, 1.0), lambda: torch.empty(1).uniform_(0.08, 1.0).item()),
    (lambda numbers: numbers.uniform(-3, 1e6), lambda: torch.empty(1).uniform_(-3, 1e6).item()),
    (lambda numbers: numbers.uniform(0.5, 0.5), lambda: torch.empty(1).uniform_(0.5, 0.5).item()),
    (lambda numbers: numbers.uniform(1, 1 + 2**-23), lambda: torch.empty(1).uniform_(1, 1 + 2**-23).item()),
    (lambda numbers: numbers.fraction(), lambda: torch.rand(1).item()),
    (lambda numbers: numbers.integer(1), lambda: torch.randint(0, 1, (1,)).item()),
    (lambda numbers: numbers.integer(376), lambda: torch.randint(0, 376, (1,)).item()),
    (lambda numbers: numbers.integer(2**27), lambda: torch.randint(0, 2**27, (1,)).item()),
    (lambda numbers: numbers.permutation(4), lambda: torch.randperm(4).tolist()),
]
"""The same draw, from a source and by torch."""


def assert_alike(kinds: Sequence[int], seed: int, skipped: int = 0) -> None:
    torch.manual_seed(seed)
    torch.rand(skipped)
    before = torch.get_rng_state()
    wanted = [KINDS[kind][1]() for kind in kinds]
    after = torch.get_rng_state()
    for source in (Numbers(), NumbersFromState(*how_torch_draws() or ())):
        torch.set_rng_state(before)
        with source as state:
            assert torch.equal(state, before)
            assert [KINDS[kind][0](source) for kind in kinds] == wanted
        assert torch.equal(torch.get_rng_state(), after) and torch.equal(state, before)


@given(kinds=st.lists(st.sampled_from(range(len(KINDS))), max_size=40), seed=st.integers(0, 2**32))
def test_any_order_of_draws_gives_torchs_numbers_and_leaves_its_state(kinds: list[int], seed: int) -> None:
    assert_alike(kinds, seed)


@pytest.mark.parametrize(
    ("count", "skipped"),
    [
        *((count, 0) for count in (0, 1, 3000)),
        *((640, skipped) for skipped in (*range(0, 700, 97), 623, 624, 625)),  # the generator makes 624 at a time
    ],
)
def test_there_are_as_many_as_one_draws_from_anywhere_in_the_generators_block(count: int, skipped: int) -> None:
    assert_alike([k % len(KINDS) for k in range(count)], 8, skipped)


def test_normal_numbers_go_on_after_the_draws() -> None:
    torch.manual_seed(3)
    wanted = torch.randn(1).item(), torch.rand(1).item(), torch.randn(1).item()
    torch.manual_seed(3)
    first = torch.randn(1).item()
    with NumbersFromState(*how_torch_draws() or ()) as _:
        second = in_thread.numbers.fraction()
    assert (first, second, torch.randn(1).item()) == wanted


@pytest.mark.parametrize("source", [Numbers(), NumbersFromState(True, True)], ids=["torch", "state"])
def test_what_is_no_range_is_torchs_error(source: Numbers) -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="range"), source:
        in_thread.numbers.uniform(1.0, 0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_come_from_the_state_on_any_default_device() -> None:
    how_torch_draws.cache_clear()
    with torch.device("meta"):
        assert how_torch_draws() is not None, "torch draws one by one, and nothing is gained"
        with NumbersFromState(*how_torch_draws() or ()) as _:
            assert 0 <= in_thread.numbers.uniform(0.0, 1.0) <= 1 and 0 <= in_thread.numbers.integer(9) < 9


def test_torch_draws_while_the_dataset_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {each.name for each in threading.enumerate()}  # that other tests have left
    monkeypatch.setattr(random_numbers, "OWN_THREADS", random_numbers.OWN_THREADS | others)
    with opened_late():
        assert type(in_thread.fastest) is NumbersFromState
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        sources = [type(in_thread.fastest) for _ in range(2)]
        done.set()
        thread.join()
        assert [*sources, type(in_thread.fastest)] == [Numbers, Numbers, NumbersFromState]


@pytest.mark.parametrize("version", [v1, v2])
@pytest.mark.parametrize("size", [(375, 500), (8, 900), (1, 1)])
def test_transforms_draw_the_same_from_the_state(version: Any, size: tuple[int, int]) -> None:
    flips = version.RandomHorizontalFlip(), version.RandomApply([version.RandomVerticalFlip(0.3)])
    colors = version.ColorJitter(0.4, 0.3, 0.2, 0.1), version.RandomGrayscale(0.2), version.RandomSolarize(128, 0.7)
    drawn = version.RandAugment(), version.AutoAugment(), version.TrivialAugmentWide(), version.AugMix()
    parts = [version.RandomResizedCrop(32), *flips, *colors, *drawn, v2.RandomPhotometricDistort()]
    translation = translation_of(version.Compose([*parts, version.GaussianBlur(3), v2.ToImage()]))
    assert translation.draws == "numbers"
    torch.manual_seed(5)
    wanted = [draw(translation, *size) for _ in range(100)]
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with NumbersFromState(*how_torch_draws() or ()) as _:
        assert [draw(translation, *size) for _ in range(100)] == wanted
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("part", [v1.RandomCrop(20), v1.RandomApply([v1.RandomCrop(20)])])
def test_what_draws_by_itself_is_known(part: torch.nn.Module) -> None:
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
    assert draws_alike(), "torchvision draws, and nothing is gained"
    assert torch.equal(torch.get_rng_state(), state), "the comparison left the generator in another state"
    for height, width in SIZES:
        stock = functools.partial(of_torchvision, version, scale, ratio, height, width)
        draws = drawn_alike(stock, functools.partial(resized_crop_box, scale, ratio, height, width), 50)
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
    assert not draws_alike()
    assert START.then(v1.RandomResizedCrop(37)) is None  # so torchvision's code runs
