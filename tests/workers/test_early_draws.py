"""What an early epoch draws is what it would have drawn later, and can be undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler

from proxyloader.workers import early_draws
from proxyloader.workers.early_draws import DRAWS_ONE_SEED, MOST_SEEDS, EarlyDraws, draws_one_seed


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(40)),
        RandomSampler(range(40), num_samples=95),
        RandomSampler(range(40), replacement=True, num_samples=70),
    ],
    ids=["once", "more than once", "with replacement"],
)
def test_the_order_is_that_of_the_default_generator_which_stays_as_it_is(sampler: RandomSampler) -> None:
    torch.manual_seed(3)
    before, expected, after = torch.get_rng_state(), list(sampler), torch.get_rng_state()
    torch.set_rng_state(before)
    early = EarlyDraws()
    with early.lend_generator(sampler):
        order = iter(sampler)
        found = [next(order)]
    found += order
    assert found == expected and sampler.generator is None
    assert torch.equal(torch.get_rng_state(), before)
    assert early.accept() and torch.equal(torch.get_rng_state(), after)


def test_they_are_not_accepted_if_the_default_generator_has_moved() -> None:
    sampler, early = RandomSampler(range(40)), EarlyDraws()
    with early.lend_generator(sampler):
        list(sampler)
    torch.rand(1)
    here = torch.get_rng_state()
    assert not early.accept() and torch.equal(torch.get_rng_state(), here)


def test_without_draws_the_default_generator_may_move() -> None:
    early = EarlyDraws()
    torch.rand(1)
    here = torch.get_rng_state()
    assert early.accept() and torch.equal(torch.get_rng_state(), here)


def test_a_sampler_that_draws_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert DRAWS_ONE_SEED and draws_one_seed(), (
        "no epoch begins early without a seed, as torch's RandomSampler draws otherwise"
    )
    assert torch.equal(torch.get_rng_state(), before)

    class Other(RandomSampler):
        def __iter__(self) -> Any:
            torch.rand(1)
            return super().__iter__()

    monkeypatch.setattr(early_draws, "RandomSampler", Other)
    assert not draws_one_seed()
    monkeypatch.undo()
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert not draws_one_seed()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seeds", [1, 2, MOST_SEEDS])
def test_seeds_that_other_loaders_draw_are_found_and_expected(seeds: int) -> None:
    sampler, other = RandomSampler(range(40)), TorchDataLoader([1, 2])
    torch.manual_seed(3)
    first = EarlyDraws()
    before = torch.get_rng_state()
    for _ in range(seeds):
        list(other)
    expected, after = list(sampler), torch.get_rng_state()
    torch.set_rng_state(before)
    for _ in range(seeds):
        list(other)
    assert first.seeds_drawn_meanwhile() == seeds

    torch.set_rng_state(before)
    early = EarlyDraws(seeds)
    with early.lend_generator(sampler):
        assert list(sampler) == expected
    assert not early.accept()
    for _ in range(seeds):
        list(other)
    assert early.accept() and torch.equal(torch.get_rng_state(), after)


def test_other_draws_are_not_taken_for_seeds() -> None:
    early = EarlyDraws()
    assert early.seeds_drawn_meanwhile() is None
    torch.rand(1)
    assert early.seeds_drawn_meanwhile() is None
    for _ in range(MOST_SEEDS):
        list(TorchDataLoader([1, 2]))
    assert early.seeds_drawn_meanwhile() is None
