"""Slots are lent once, come back once, and survive the way to another process."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from proxyloader.arena import Arena, Request, RequestSampler


class Reads:
    """A reader that finishes when told to, or when waited for."""

    def __init__(self) -> None:
        self.finished = False

    def was_read(self) -> bool:
        return self.finished

    def wait_until_read(self) -> None:
        self.finished = True


class Abandoned(Reads):
    """A reader that waiting does not help."""

    def wait_until_read(self) -> None:
        pass


def test_every_slot_is_lent_once_and_then_none_is_left() -> None:
    arena = Arena(3, 100)
    assert sorted(filter(lambda slot: slot is not None, (arena.lend() for _ in range(3)))) == [0, 1, 2]
    assert arena.lend() is None
    arena.give_back(1)
    assert (arena.lend(), arena.lend()) == (1, None)


def test_slots_do_not_overlap_and_are_whole_pages() -> None:
    arena = Arena(2, 5000)
    assert arena.slot_bytes == 8192
    arena.memory(0)[:] = 1
    arena.memory(1)[:] = 2
    assert set(arena.memory(0)) == {1} and set(arena.memory(1)) == {2}


def test_a_slot_that_is_still_read_is_not_lent_while_another_is_free() -> None:
    arena, reader = Arena(2, 1), Reads()
    arena.give_back(arena.lend(), reader)
    assert arena.lend() == 1 and not reader.finished
    reader.finished = True
    assert arena.lend() == 0


def test_with_no_slot_free_lending_waits_for_the_oldest_reader() -> None:
    arena, readers = Arena(2, 1), [Reads(), Reads()]
    for reader in readers:
        arena.give_back(arena.lend(), reader)
    assert arena.lend() == 0
    assert [reader.finished for reader in readers] == [True, False]


def test_a_reader_that_never_finishes_is_not_waited_for() -> None:
    arena = Arena(1, 1)
    arena.give_back(arena.lend(), Abandoned())
    assert arena.lend() is None


def test_ready_is_per_loan() -> None:
    arena = Arena(2, 1)
    slot = arena.lend()
    assert slot is not None and not arena.is_ready(slot)
    arena.mark_ready(slot)
    assert arena.is_ready(slot)
    arena.give_back(slot)
    lent = [arena.lend(), arena.lend()]
    assert not any(arena.is_ready(slot) for slot in lent if slot is not None)


def write(arena: Arena, slot: int) -> None:
    arena.memory(slot)[:5] = memoryview(b"hello")
    arena.mark_ready(slot)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_what_another_process_writes_is_seen_here(method: Any) -> None:
    arena = Arena(4, 1 << 20)
    process = multiprocessing.get_context(method).Process(target=write, args=(arena, 2))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert arena.is_ready(2) and bytes(arena.memory(2)[:5]) == b"hello"


def test_a_sampler_lends_a_slot_with_each_request_and_goes_on_without_one() -> None:
    arena = Arena(2, 1)
    requests = RequestSampler([[1, 2], [3], [4]], arena)
    found = list(requests)
    assert found == [Request(0, [1, 2], 0), Request(1, [3], 1), Request(2, [4], None)]


def test_unanswered_requests_of_an_epoch_give_their_slots_to_the_next() -> None:
    arena = Arena(2, 1)
    requests = RequestSampler([[1], [2], [3]], arena)
    first = next(iter(requests))
    requests.answered(first)
    arena.give_back(first.slot)
    assert [request.slot for request in requests] == [1, 0, None]
    assert [request.slot for request in requests] == [1, 0, None]


@pytest.mark.parametrize(("in_order", "ready"), [(True, False), (False, True)])
def test_in_order_only_the_oldest_batch_counts_as_ready(in_order: bool, ready: bool) -> None:
    arena = Arena(3, 1)
    requests = RequestSampler([[1], [2], [3]], arena)
    list(requests)
    assert not requests.has_ready_batch(in_order)
    arena.mark_ready(1)
    assert requests.has_ready_batch(in_order) is ready
    arena.mark_ready(0)
    assert requests.has_ready_batch(in_order)
