"""Requests lend slots, and an epoch can be taken up anywhere: the same indices as those that were left."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from proxyloader.data.sharded_sampler import ShardedSampler
from proxyloader.workers.arena import Arena
from proxyloader.workers.loader_state import LoaderState
from proxyloader.workers.request_sampler import BatchRequest, RequestSampler


def requests_for(sampler: Any, arena: Arena | None = None, seed: int | None = None, batched: bool = True) -> Any:
    return RequestSampler(sampler, batched, arena, seed)


def indices(requests: RequestSampler, progress: LoaderState, at_most: int | None = None) -> list[Any]:
    """Walk through what is left, as a loop does, or through the first few batches of it."""
    requests.begin(progress)
    found: list[Any] = []
    for request in requests:
        if at_most is not None and len(found) == at_most:
            break
        requests.answered(request.number)
        requests.handed_out(request, progress)
        found.append(request.indices)
    return found


def test_a_sampler_lends_a_slot_with_each_request_those_unanswered_to_the_next_epoch() -> None:
    requests = requests_for([[1, 2], [3], [4]], Arena(2, 1))
    found = list(requests)
    assert found == [BatchRequest(k, 0, i, True, s, 1) for k, (i, s) in enumerate([([1, 2], 0), ([3], 1), ([4], None)])]
    arena = Arena(2, 1)
    requests = requests_for([[1], [2], [3]], arena)
    first = next(iter(requests))
    requests.answered(first.number)
    arena.give_back(first.slot)
    for _ in range(2):
        assert [request.slot for request in requests] == [1, 0, None]


@pytest.mark.parametrize(("in_order", "ready"), [(True, False), (False, True)])
def test_in_order_only_the_oldest_batch_counts_as_ready(in_order: bool, ready: bool) -> None:
    arena = Arena(3, 1)
    requests = requests_for([[1], [2], [3]], arena)
    list(requests)
    assert not requests.has_ready_batch(in_order)
    arena.mark_ready(1)
    assert requests.has_ready_batch(in_order) is ready
    arena.mark_ready(0)
    assert requests.has_ready_batch(in_order)


def through_a_checkpoint(progress: LoaderState, seed: int | None) -> LoaderState:
    return LoaderState.from_state_dict(pickle.loads(pickle.dumps(progress.state_dict(seed, 20))), seed, 20)


class OwnBatchSampler(BatchSampler): ...


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(23)),
    "shuffled": lambda: RandomSampler(range(23)),
    "with replacement": lambda: RandomSampler(range(23), replacement=True, num_samples=50),
    "weighted": lambda: WeightedRandomSampler([1.0] * 23, 31),
    "a random subset": lambda: SubsetRandomSampler(range(3, 20)),
    "of a generator": lambda: RandomSampler(range(23), generator=torch.Generator().manual_seed(5)),
    "dealt out": lambda: DistributedSampler(range(47), num_replicas=2, rank=1),
    "a list": lambda: list(range(0, 40, 2)),
}


@pytest.mark.parametrize("seed", [None, 3], ids=["", "seed"])
@pytest.mark.parametrize("kind", [BatchSampler, OwnBatchSampler, None], ids=["batches", "own class", "no batches"])
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS.keys())
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_after_a_checkpoint_exactly_the_indices_that_were_left_come(
    make: Any, kind: Any, stop: int, seed: int | None
) -> None:
    def made() -> RequestSampler:
        sampler = make() if kind is None else kind(make(), 4, False)
        return RequestSampler(sampler, kind is not None, None, seed)

    torch.manual_seed(1)
    whole = indices(made(), LoaderState())
    torch.manual_seed(1)
    progress = LoaderState()
    begun = indices(made(), progress, stop)
    torch.manual_seed(77)  # another process
    resumed = through_a_checkpoint(progress, seed)
    assert (resumed.epoch, resumed.batches) == (0, stop)
    left = indices(made(), resumed)
    assert begun + left == whole
    assert resumed.batches == len(whole)


@given(
    samples=st.integers(1, 200),
    before=st.integers(1, 16),
    after=st.integers(1, 16),
    batch=st.integers(1, 7),
    new_batch=st.integers(1, 7),
    steps=st.integers(0, 5),
    drop_last=st.booleans(),
)
@settings(max_examples=200)
def test_with_another_number_of_processes_they_share_what_was_left(
    samples: int, before: int, after: int, batch: int, new_batch: int, steps: int, drop_last: bool
) -> None:
    def sampler(ranks: int, rank: int, batch: int) -> RequestSampler:
        dealt = DistributedSampler(range(samples), ranks, rank, shuffle=True, seed=1, drop_last=drop_last)
        return RequestSampler(BatchSampler(dealt, batch, False), True, None, None)

    done: list[int] = []
    for rank in range(before):
        progress = LoaderState()
        done += itertools.chain(*indices(sampler(before, rank, batch), progress, steps))
    each = [
        indices(sampler(after, rank, new_batch), through_a_checkpoint(copy.deepcopy(progress), None))
        for rank in range(after)
    ]
    assert len({len(batches) for batches in each}) == 1  # in step
    left = [*itertools.chain(*itertools.chain(*each))]
    if drop_last:
        assert len({*done, *left}) == len(done) + len(left) and samples - len(done) - len(left) < before + 2 * after
    else:
        assert {*done, *left} == set(range(samples)) and len(done) + len(left) - samples < before + 2 * after


class Stateful:
    """A sampler that says where it is, as those of torchdata do, and goes on from there."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatefulIterator(Stateful):
    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at > 10:
            raise StopIteration
        return self.at - 1


class OfStatefulIterators:
    def __iter__(self) -> Iterator[int]:
        return StatefulIterator()


@pytest.mark.parametrize("kind", [Stateful, OfStatefulIterators], ids=["sampler", "iterator"])
@pytest.mark.parametrize("batched", [True, False], ids=["batches", "no batches"])
def test_a_sampler_or_iterator_with_a_state_goes_on_from_that_of_the_last_batch(kind: Any, batched: bool) -> None:
    def made() -> RequestSampler:
        return RequestSampler(BatchSampler(kind(), 4, False) if batched else kind(), batched)

    whole = indices(made(), LoaderState())
    requests, progress = made(), LoaderState()
    requests.begin(progress)
    drawn = list(itertools.islice(requests, 2))  # the second is on its way to a worker
    requests.answered(drawn[0].number)
    requests.handed_out(drawn[0], progress)
    assert indices(made(), through_a_checkpoint(progress, None)) == whole[1:]


class IndexByIndex:
    """A sampler that is its own iterator, and begins anew when it is asked for one."""

    indices: Sequence[Any] = range(10)

    def __iter__(self) -> Iterator[Any]:
        self.left = list(self.indices)
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


WHOLE = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class OnceAsked(IndexByIndex):
    """A batch sampler of this kind."""

    indices = WHOLE


def test_a_batch_sampler_that_is_its_own_iterator_is_asked_for_one_once() -> None:
    assert indices(RequestSampler(IndexByIndex(), False), LoaderState()) == list(range(10))
    for made in (OnceAsked, lambda: BatchSampler(IndexByIndex(), 4, False)):
        assert indices(RequestSampler(made(), True), LoaderState()) == WHOLE
        progress = LoaderState()
        indices(RequestSampler(made(), True), progress, 1)
        assert indices(RequestSampler(made(), True), through_a_checkpoint(progress, None)) == WHOLE[1:]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "must be the result of DataLoader.state_dict, got NoneType"),
        ({"epoch": 3}, r"got dict with the keys \['epoch'\]"),
        (LoaderState().state_dict(None, 20) | {"version": 99}, "must have version 3, got version 99"),
        (LoaderState().state_dict(4, 20), "saved with seed=4, but this loader has seed=3"),
        (LoaderState().state_dict(3, 30), "with a dataset of 30 samples, but this one has 20. .*loader.set_epoch"),
        (LoaderState(batches=2).state_dict(3, 20, "shuffled"), "with shuffled order, but this loader's is unshuffled"),
    ],
)
def test_what_is_no_state_of_such_a_loader_is_refused(state: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderState.from_state_dict(state, 3, 20, "unshuffled")


def test_between_epochs_a_state_goes_on_in_another_order() -> None:
    state = LoaderState(3).state_dict(3, 20, "shuffled")
    assert LoaderState.from_state_dict(state, 3, 20, "unshuffled") == LoaderState(3)


def test_a_state_from_before_the_first_batch_holds_the_order_that_was_drawn() -> None:
    torch.manual_seed(1)
    requests, progress = requests_for(BatchSampler(RandomSampler(range(20)), 3, False)), LoaderState()
    requests.begin(progress)
    ahead = [request.indices for request in requests]  # as workers are asked for before the loop has had one
    assert progress.batches == 0
    resumed = through_a_checkpoint(progress, None)
    assert indices(requests_for(BatchSampler(RandomSampler(range(20)), 3, False)), resumed) == ahead


def test_a_state_of_one_process_is_taken_up_by_several() -> None:
    progress = LoaderState()
    done = indices(requests_for(BatchSampler(SequentialSampler(range(24)), 4, False)), progress, 2)
    left: list[int] = []
    for rank in range(2):
        dealt = DistributedSampler(range(24), 2, rank, shuffle=False)
        resumed = through_a_checkpoint(copy.deepcopy(progress), None)
        left += itertools.chain(*indices(requests_for(BatchSampler(dealt, 4, False)), resumed))
    assert sorted([*itertools.chain(*done), *left]) == list(range(24))


def test_the_start_of_an_epoch_is_taken_up_without_what_was_noted_of_another_kind_of_sampler() -> None:
    sharded = ShardedSampler(range(20), 2, 1, shuffle=True)
    progress = LoaderState(3)
    indices(requests_for(BatchSampler(sharded, 4, False)), progress, 0)  # which has drawn its order
    assert progress.sampler_state == {"epoch": 3, "dealt": sharded.shard_spec, "taken": []}
    assert progress.random_states
    assert progress.resume_for(sharded) is progress
    assert progress.resume_for(None) == progress.resume_for(ShardedSampler(range(20), 3, 1)) == LoaderState(3)
    fresh = requests_for(BatchSampler(Stateful(), 4, False))  # type: ignore[arg-type]
    assert indices(fresh, progress.resume_for(None)) == WHOLE


def test_batches_that_a_sampler_makes_as_it_goes_become_lists() -> None:
    found = indices(requests_for([(k for k in range(2)), (5, 6)]), LoaderState())
    assert found == [[0, 1], (5, 6)]
