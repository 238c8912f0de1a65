"""A dataset shared by several loaders: each loads its shard, with real workers, and goes on where it was."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Subset
from torchvision import transforms

from proxyloader import DataLoader, ShardedSampler, World

from ..faults import Spelled, numbers_of

SAMPLES, BATCH, SHARDS = 23, 3, 3
"""Shards of 7, 8 and 8 samples: all have three batches, of which two are full."""

ALL: Any = range(SAMPLES)

WORKERS = pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "2 workers"])
POLICIES = pytest.mark.parametrize("policy", ["fill", "partial", "drop"])


@pytest.fixture(autouse=True)
def nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def loader_of(root: Path, shard: int | None = 0, workers: int = 0, samples: int = SAMPLES, **arguments: Any) -> Any:
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers, "device": "cpu"}
    if shard is not None:
        options |= {"num_shards": World(SHARDS, shard)}
    dataset: Subset[Any] = Subset(Spelled(root), range(samples))
    return DataLoader(dataset, **options | arguments)


def numbers(batches: Iterable[Any]) -> list[list[int]]:
    return [numbers_of(batch) for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def expected(shard: int, epoch: int, samples: int = SAMPLES, **arguments: Any) -> list[list[int]]:
    """What the sampler's arithmetic says, which has tests of its own."""
    sampler = ShardedSampler(range(samples), SHARDS, shard, batch_size=BATCH, **arguments)
    return [*map(list, BatchSampler(sampler.indices(epoch), BATCH, False))]


@pytest.mark.parametrize("samples", [SAMPLES, 2], ids=["", "one shard has none"])
@WORKERS
@POLICIES
def test_each_loader_gives_its_shard(spelled_root: Path, policy: str, workers: int, samples: int, device: str) -> None:
    how: dict[str, Any] = dict(shuffle=True, last_batch_policy=policy)
    whole: list[list[int]] = [[], []]
    for shard in range(SHARDS):
        loader = loader_of(spelled_root, shard, workers, samples, device=device, seed=6, **how)
        for epoch in range(2):
            found = numbers(loader)
            assert found == expected(shard, epoch, samples, seed=6, **how) and len(loader) == len(found)
            whole[epoch] += itertools.chain(*found)
        assert loader.state_dict()["epoch"] == 2
    if policy == "partial":
        assert [sorted(each) for each in whole] == [list(range(samples))] * 2
    assert whole[0] != whole[1] or samples == 2


def test_without_num_shards_every_process_loads_everything(spelled_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for num_shards, first in ((None, 0), ("auto", SAMPLES // 2)):
        found = numbers(loader_of(spelled_root, None, num_shards=num_shards))
        assert flat(found) == list(range(first, SAMPLES))


def test_without_a_seed_the_order_is_that_of_seed_0_and_not_of_torchs_generator(spelled_root: Path) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        loader = loader_of(spelled_root, 1, shuffle=True, generator=torch.Generator().manual_seed(seed))
        assert numbers(loader) == expected(1, 0, shuffle=True)


def test_without_batches_the_samples_of_the_shard_come_one_by_one(spelled_root: Path) -> None:
    loader = loader_of(spelled_root, 1, 1, batch_size=None)
    whole = [index for _, index in loader]
    assert whole == flat(expected(1, 0)) and len(loader) == 8
    list(itertools.islice(loader, 3))
    resumed = loader_of(spelled_root, 1, batch_size=None)
    resumed.load_state_dict(loader.state_dict())
    assert [index for _, index in resumed] == whole[3:]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)], ids=["0", "2", "persistent"])
def test_set_epoch_says_which_epoch_comes_next(spelled_root: Path, workers: int, persistent: bool) -> None:
    loader = loader_of(spelled_root, 1, workers, shuffle=True, persistent_workers=persistent)
    loader.set_epoch(3)
    assert loader.state_dict()["epoch"] == 3
    assert [numbers(loader), numbers(loader)] == [expected(1, 3, shuffle=True), expected(1, 4, shuffle=True)]
    loader.sampler.set_epoch(7)
    assert numbers(loader) == expected(1, 7, shuffle=True) and loader.state_dict()["epoch"] == 8
    loader.set_epoch(0)
    iter(loader)  # begun, and given up before the first batch: an epoch all the same, as the loader counts
    assert numbers(loader) == expected(1, 1, shuffle=True)
    for _ in zip(range(1), loader):
        pass
    assert numbers(loader) == expected(1, 3, shuffle=True)
    with pytest.raises(ValueError, match="epoch must be an integer >= 0"):
        loader.set_epoch(-1)


def test_the_draws_of_samples_follow_the_epoch_that_the_sampler_was_set_to(spelled_root: Path) -> None:
    def images(by_sampler: bool) -> Any:
        crop = transforms.Compose([transforms.RandomCrop(24), transforms.ToTensor()])
        dataset = Spelled(spelled_root, transform=crop)
        loader: Any = DataLoader(dataset, 16, shuffle=True, seed=1, num_shards=World(3, 1), device="cpu")
        (loader.sampler if by_sampler else loader).set_epoch(5)
        return next(iter(loader))[0]

    assert torch.equal(images(True), images(False))


@POLICIES
@pytest.mark.parametrize("stop", [0, 1, 2])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)], ids=["0 to 2 workers", "2 to 0 workers"])
def test_a_resumed_epoch_has_exactly_the_batches_that_were_left(
    spelled_root: Path, policy: str, stop: int, before: int, after: int, tmp_path: Path
) -> None:
    how: dict[str, Any] = dict(shuffle=True, last_batch_policy=policy)
    for shard in range(SHARDS):
        begun = loader_of(spelled_root, shard, before, seed=2, **how)
        list(begun)
        whole = expected(shard, 1, seed=2, **how)
        assert numbers(itertools.islice(begun, stop)) == whole[:stop]
        torch.save(begun.state_dict(), tmp_path / "state.pt")
        resumed = loader_of(spelled_root, shard, after, seed=2, **how)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        resumed.sampler.set_epoch(resumed.state_dict()["epoch"])  # as many scripts do before each epoch
        assert [numbers(resumed), numbers(resumed)] == [whole[stop:], expected(shard, 2, seed=2, **how)]


@POLICIES
def test_the_state_of_one_process_does_for_all_that_took_as_many_steps(spelled_root: Path, policy: str) -> None:
    how: dict[str, Any] = dict(shuffle=True, last_batch_policy=policy)  # the third batch of shard 0 is a smaller one
    steps = 2 if policy == "drop" else 3
    begun = loader_of(spelled_root, 0, **how)
    assert numbers(itertools.islice(begun, steps)) == expected(0, 0, **how)
    state = pickle.dumps(begun.state_dict())
    for shard in range(1, SHARDS):
        resumed = loader_of(spelled_root, shard, **how)
        resumed.load_state_dict(pickle.loads(state))
        assert numbers(resumed) == expected(shard, 0, **how)[steps:] == []
        assert numbers(resumed) == expected(shard, 1, **how)


def test_a_resumed_epoch_may_be_stopped_and_resumed_again_also_with_smaller_batches(spelled_root: Path) -> None:
    whole, state, found = flat(expected(2, 0, shuffle=True)), None, []
    for size in (4, 2, 1, 1):
        loader = loader_of(spelled_root, 2, 1, shuffle=True, batch_size=size)
        if state is not None:
            loader.load_state_dict(state)
        found += flat(numbers(itertools.islice(loader, 1)))
        state = loader.state_dict()
    assert found == whole


def test_a_state_from_before_the_first_batch_is_the_start_of_an_epoch_for_any_loader(spelled_root: Path) -> None:
    sharded, plain = loader_of(spelled_root, 0, shuffle=True), loader_of(spelled_root, None, shuffle=True)
    batches = [iter(sharded), iter(plain)]  # which have drawn their orders
    states = [sharded.state_dict(), plain.state_dict()]
    for state in states:
        other = loader_of(spelled_root, None, num_shards=World(2, 0))
        other.load_state_dict(state)
        assert flat(numbers(other)) == list(range(11))
    plain = loader_of(spelled_root, None, sampler=DistributedSampler(ALL, 2, 0, shuffle=False))
    plain.load_state_dict(states[0])
    assert len(numbers(plain)) == 4 and len(batches) == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dict(shuffle=False), "shuffle=True, seed=0, but this loader has .*shuffle=False"),
        (dict(num_shards=None), "this loader has num_shards=None"),
        (dict(num_shards=None, shuffle=None, sampler=DistributedSampler(ALL, 2, 0)), "this loader has num_shards=None"),
    ],
    ids=["another order", "none", "a distributed sampler"],
)
def test_a_state_of_another_order_is_refused(spelled_root: Path, other: dict[str, Any], message: str) -> None:
    begun, changed = (loader_of(spelled_root, 0, **{"shuffle": True} | arguments) for arguments in ({}, other))
    list(itertools.islice(begun, 1))
    with pytest.raises(ValueError, match=message):
        changed.load_state_dict(begun.state_dict())
    list(itertools.islice(changed, 1))
    with pytest.raises(ValueError, match=r"order of the samples differs.*loader.set_epoch\(state\['epoch'\]\)"):
        begun.load_state_dict(changed.state_dict())
    assert numbers(begun) == expected(0, 1, shuffle=True)  # a state that was refused changed nothing


@pytest.mark.parametrize("batch_size", [BATCH, None], ids=["batches", "single samples"])
def test_another_number_of_processes_goes_on_with_the_rest(spelled_root: Path, batch_size: int | None) -> None:
    once: list[int] = []
    state: Any = None
    for shards, steps in ((3, 2), (2, 1), (5, None)):
        how: dict[str, Any] = dict(shuffle=True, batch_size=batch_size, seed=2)
        loaders = [loader_of(spelled_root, None, num_shards=World(shards, k), **how) for k in range(shards)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
            assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        for loader in loaders:
            found = itertools.islice(loader, steps)
            once += flat(numbers(found)) if batch_size else [index for _, index in found]
        state = loaders[0].state_dict()
    assert sorted(once) == list(range(SAMPLES))
    following = [loader_of(spelled_root, None, num_shards=World(2, k), shuffle=True, seed=2) for k in range(2)]
    for loader in following:
        loader.load_state_dict(state)
    assert sorted(flat(each for loader in following for each in numbers(loader))) == list(range(SAMPLES))


@WORKERS
def test_a_sharded_sampler_of_ones_own_follows_the_loaders_epochs_and_states(spelled_root: Path, workers: int) -> None:
    def loader(whole_batches: bool) -> Any:
        sampler = ShardedSampler(range(SAMPLES), SHARDS, 2, shuffle=True, last_batch_policy="fill", batch_size=BATCH)
        if whole_batches:
            batches = BatchSampler(sampler, BATCH, False)
            return loader_of(spelled_root, None, workers, batch_size=1, batch_sampler=batches)
        return loader_of(spelled_root, None, workers, sampler=sampler)

    whole = [expected(2, epoch, shuffle=True, last_batch_policy="fill") for epoch in range(3)]
    for begun, resumed in ((loader(False), loader(True)), (loader(True), loader(False))):
        assert numbers(begun) == whole[0]
        list(itertools.islice(begun, 1))
        resumed.load_state_dict(begun.state_dict())
        assert [numbers(resumed), numbers(resumed)] == [whole[1][1:], whole[2]]
        resumed.set_epoch(0)
        assert numbers(resumed) == whole[0]


def test_a_copy_of_a_loader_has_epochs_of_its_own(spelled_root: Path) -> None:
    loader = loader_of(spelled_root, 1, shuffle=True)
    numbers(loader)
    for copied in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert numbers(copied) == expected(1, 1, shuffle=True)
    assert numbers(loader) == expected(1, 1, shuffle=True)
