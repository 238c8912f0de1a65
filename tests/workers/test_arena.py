"""Slots are lent once and come back once. Their way to another process is that of test_scan_checks.py."""

from __future__ import annotations

from proxyloader.workers.arena import Arena


class Reads:
    """A reader that finishes when told to, or, unless it was abandoned, when waited for."""

    def __init__(self, is_abandoned: bool = False) -> None:
        self.finished, self.is_abandoned = False, is_abandoned

    def inputs_released(self) -> bool:
        return self.finished

    def wait_until_read(self) -> None:
        self.finished = not self.is_abandoned


def test_every_slot_is_lent_once_is_whole_pages_and_has_a_byte() -> None:
    arena = Arena(3, 100)
    assert sorted(filter(lambda slot: slot is not None, (arena.acquire() for _ in range(3)))) == [0, 1, 2]
    assert arena.acquire() is None
    arena.release(1)
    assert (arena.acquire(), arena.acquire()) == (1, None)
    arena = Arena(2, 5000)
    assert len(arena.memory(0, 1)) == len(arena.memory(1, 5000)) == 8192
    arena.memory(0, 1)[:] = 1
    arena.memory(1, 1)[:] = 2
    assert set(arena.memory(0, 1)) == {1} and set(arena.memory(1, 1)) == {2}
    arena = Arena(10_000, 1)
    arena.mark_ready(9_999)
    assert arena.is_ready(9_999) and not arena.is_ready(9_998)


def test_a_slot_grows_to_what_a_batch_needs_and_keeps_what_was_written() -> None:
    arena = Arena(2, 1)
    small = arena.memory(0, 10)
    small[:10] = 7
    large = arena.memory(0, 50_000_000)
    assert len(large) >= 50_000_000 and set(large[:10]) == {7}
    large[-1] = small[11] = 9
    assert large[11] == 9 and arena.memory(0, 10)[-1] == 9
    for size_bytes in (10, 70_000, 300_000, 5_000_000, 20):
        before = bytes(arena.memory(1, 1)[:10])
        memory = arena.memory_to_write(1, size_bytes)
        assert len(memory) >= size_bytes and bytes(memory[:10]) == before
        memory[:size_bytes] = size_bytes % 251
        assert (arena.memory(1, size_bytes)[:size_bytes] == size_bytes % 251).all()


def test_a_slot_that_is_still_read_is_lent_when_no_other_is_free_and_its_reader_was_waited_for() -> None:
    arena, readers = Arena(2, 1), [Reads(), Reads()]
    arena.release(arena.acquire(), readers[:1])
    assert arena.acquire() == 1 and not readers[0].finished
    arena.release(1, readers[1:])
    assert arena.acquire() == 0
    assert [reader.finished for reader in readers] == [True, False]
    readers[1].finished = True
    assert arena.acquire() == 1
    arena = Arena(1, 1)
    arena.release(arena.acquire(), [Reads(is_abandoned=True)])
    assert arena.acquire() is None


def test_ready_is_per_loan() -> None:
    arena = Arena(2, 1)
    slot = arena.acquire()
    assert slot is not None and not arena.is_ready(slot)
    arena.mark_ready(slot)
    assert arena.is_ready(slot)
    arena.release(slot)
    lent = [arena.acquire(), arena.acquire()]
    assert not any(arena.is_ready(slot) for slot in lent if slot is not None)
