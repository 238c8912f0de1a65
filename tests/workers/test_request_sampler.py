"""Resuming an epoch: the remaining indices are those of the interrupted one."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from proxyloader.workers.arena import Arena
from proxyloader.workers.loader_state import LoaderState
from proxyloader.workers.request_sampler import RequestSampler

from ..integration.test_reproduction import Counter


def indices(requests: RequestSampler, progress: LoaderState, at_most: int | None = None) -> list[Any]:
    """Iterate over the remaining batches like a training loop, or over the first ``at_most`` of them."""
    requests.loader_state = progress
    found: list[Any] = []
    for request in requests:
        if at_most is not None and len(found) == at_most:
            break
        requests.pending.pop(request.number)
        requests.record_return(request, progress)
        found.append(request.indices)
    return found


def saved_by(seed: int | None, dataset_length: int = 20, order: str = "") -> dict[str, Any]:
    return {"seed": seed, "dataset_length": dataset_length, "order": order, "num_workers": None}


def through_a_checkpoint(progress: LoaderState, seed: int | None) -> LoaderState:
    fingerprint = saved_by(seed)
    return LoaderState.from_state_dict(pickle.loads(pickle.dumps(progress.state_dict(fingerprint))), fingerprint)


def test_slots_of_unanswered_requests_are_lent_in_the_next_epoch() -> None:
    arena = Arena(2)
    requests = RequestSampler([[1], [2], [3]], True, arena)
    first = next(iter(requests))
    requests.pending.pop(first.number)
    arena.release(first.slot)
    for _ in range(2):
        assert [request.slot for request in requests] == [1, 0, None]


@given(
    samples=st.integers(1, 200),
    ranks=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    after=st.integers(1, 16),
    batch=st.integers(1, 7),
    new_batch=st.integers(1, 7),
    steps=st.integers(0, 5),
    drop_last=st.booleans(),
)
@settings(max_examples=200)
def test_another_number_of_processes_shares_the_remaining_samples(
    samples: int, ranks: list[int], after: int, batch: int, new_batch: int, steps: int, drop_last: bool
) -> None:
    def sampler(ranks: int, rank: int, batch: int) -> RequestSampler:
        dealt = DistributedSampler(range(samples), ranks, rank, shuffle=True, seed=1, drop_last=drop_last)
        return RequestSampler(BatchSampler(dealt, batch, False), True, None, None)

    done, progress = list[int](), LoaderState()
    for before in ranks:
        for rank, progress in enumerate([through_a_checkpoint(progress, None) for _ in range(before)]):
            done += itertools.chain(*indices(sampler(before, rank, batch), progress, steps))
    each = [
        indices(sampler(after, rank, new_batch), through_a_checkpoint(copy.deepcopy(progress), None))
        for rank in range(after)
    ]
    assert len({len(batches) for batches in each}) == 1  # in step
    left, most = [*itertools.chain(*itertools.chain(*each))], 2 * sum(ranks, after) - ranks[0]
    if drop_last:
        assert len({*done, *left}) == len(done) + len(left) and samples - len(done) - len(left) < most
    else:
        assert {*done, *left} == set(range(samples)) and len(done) + len(left) - samples < most


class Stateful:
    """A sampler with a state, like those of torchdata."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            yield self.at - 1
        self.at = 0

    state_dict = Counter.state_dict
    load_state_dict = Counter.load_state_dict


class OfStatefulIterators:
    def __iter__(self) -> Iterator[int]:
        return Counter(list(range(10)))


@pytest.mark.parametrize("kind", [Stateful, OfStatefulIterators], ids=["sampler", "iterator"])
@pytest.mark.parametrize("batched", [True, False], ids=["batches", "no batches"])
def test_a_stateful_sampler_or_iterator_resumes_after_the_last_batch(kind: Any, batched: bool) -> None:
    def made() -> RequestSampler:
        return RequestSampler(BatchSampler(kind(), 4, False) if batched else kind(), batched)

    whole = indices(made(), LoaderState())
    requests, progress = made(), LoaderState()
    requests.loader_state = progress
    drawn = list(itertools.islice(requests, 2))  # the second is on its way to a worker
    requests.pending.pop(drawn[0].number)
    requests.record_return(drawn[0], progress)
    assert indices(made(), through_a_checkpoint(progress, None)) == whole[1:]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "must be the result of DataLoader.state_dict, got NoneType"),
        ({"epoch": 3}, r"got dict with the keys \['epoch'\]"),
        (LoaderState().state_dict(saved_by(None)) | {"version": 99}, "must have version 4, got version 99"),
        (LoaderState().state_dict(saved_by(4)), "saved with seed=4, but this loader has seed=3"),
        (LoaderState().state_dict(saved_by(3, 30)), "dataset of 30 samples, but this one has 20. .*loader.set_epoch"),
        (
            LoaderState(batches=2).state_dict(saved_by(3, 20, "shuffled")),
            "with shuffled order, but this loader's is un",
        ),
    ],
)
def test_an_invalid_state_is_refused(state: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderState.from_state_dict(state, saved_by(3, 20, "unshuffled"))
    between_epochs = LoaderState(3).state_dict(saved_by(3, 20, "shuffled"))
    assert LoaderState.from_state_dict(between_epochs, saved_by(3, 20, "unshuffled")) == LoaderState(3)


def test_a_sampler_of_another_length_is_refused_in_mid_epoch() -> None:
    progress = LoaderState()
    indices(RequestSampler(BatchSampler(range(0, 8, 2), 2, False), True), progress, 1)
    with pytest.raises(ValueError, match="a sampler of length 4, but this one has length 8"):
        indices(RequestSampler(BatchSampler(range(8), 2, False), True), through_a_checkpoint(progress, None))


def test_batches_from_a_generator_become_lists() -> None:
    found = indices(RequestSampler([(k for k in range(2)), (5, 6)], True), LoaderState())
    assert found == [[0, 1], (5, 6)]
