"""Verdicts are kept by content, in a file that many processes write and that any of them may leave at any moment."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxyloader.data import jpeg_verdicts
from proxyloader.data.jpeg_verdicts import BUCKET, BUCKETS, VerdictFile, fingerprint_of

from ..limits import WAIT_S


def content(number: int) -> bytes:
    return b"%d" % number * 50


def fingerprint(number: int) -> int:
    return fingerprint_of(content(number))


def is_sound(number: int) -> bool:
    return number % 3 > 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "verdicts"


def test_verdicts_are_found_again_by_what_a_file_holds(path: Path) -> None:
    first = VerdictFile(path)
    assert first.is_sound(fingerprint(1)) is None
    for number in range(1000):
        first.note(fingerprint(number), is_sound(number))
    for verdicts in (first, VerdictFile(path), pickle.loads(pickle.dumps(first))):
        assert [verdicts.is_sound(fingerprint(number)) for number in range(1000)] == [is_sound(k) for k in range(1000)]
        assert [verdicts.is_sound(fingerprint(number)) for number in range(1000, 2000)] == [None] * 1000


def test_a_later_verdict_replaces_the_first(path: Path) -> None:
    verdicts = VerdictFile(path)
    for each in (True, False, True):
        verdicts.note(fingerprint_of(b"a"), each)
        assert verdicts.is_sound(fingerprint_of(b"a")) is each


def test_two_files_with_one_checksum_have_verdicts_of_their_own(path: Path) -> None:
    one, other = next(
        (a, b) for seen in [{}] for k in range(1_000_000) for b in [content(k)] for a in [_same_crc(seen, b)] if a
    )
    assert zlib.crc32(one) == zlib.crc32(other)
    verdicts = VerdictFile(path)
    verdicts.note(fingerprint_of(one), True)
    assert verdicts.is_sound(fingerprint_of(other)) is None
    verdicts.note(fingerprint_of(other), False)
    assert verdicts.is_sound(fingerprint_of(one)) is True and verdicts.is_sound(fingerprint_of(other)) is False


def _same_crc(seen: dict[int, bytes], data: bytes) -> bytes | None:
    before = seen.get(zlib.crc32(data))
    seen[zlib.crc32(data)] = data
    return before


def test_a_full_file_keeps_its_size_and_the_latest_verdicts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg_verdicts, "BUCKETS", 4)
    verdicts = VerdictFile(path)
    for number in range(500):
        verdicts.note(fingerprint(number), is_sound(number))
        assert verdicts.is_sound(fingerprint(number)) is is_sound(number)
    found = {number: verdicts.is_sound(fingerprint(number)) for number in range(500)}
    known = {number: each for number, each in found.items() if each is not None}
    assert path.stat().st_size <= 4 * BUCKET.size and 16 <= len(known) <= 32
    assert all(each is is_sound(number) for number, each in known.items())


def test_it_is_never_larger_than_is_promised() -> None:
    assert BUCKETS * BUCKET.size == 32 << 20


@pytest.mark.parametrize("damage", [b"", b"x", b"\xff" * 1000], ids=["empty", "a byte", "other bytes"])
def test_a_file_with_other_content_has_no_verdict(path: Path, damage: bytes) -> None:
    path.write_bytes(damage)
    verdicts = VerdictFile(path)
    assert [verdicts.is_sound(fingerprint(number)) for number in range(100)] == [None] * 100
    verdicts.note(fingerprint_of(b"a"), True)
    assert verdicts.is_sound(fingerprint_of(b"a")) is True


def test_a_file_that_cannot_be_written_gives_what_it_has(path: Path) -> None:
    VerdictFile(path).note(fingerprint_of(b"a"), True)
    verdicts = VerdictFile(path)
    read_only = os.open(path, os.O_RDONLY)
    os.dup2(read_only, verdicts._fd)
    os.close(read_only)
    verdicts.note(fingerprint_of(b"b"), True)
    assert verdicts.is_sound(fingerprint_of(b"a")) is True and verdicts.is_sound(fingerprint_of(b"b")) is None


def write_for_ever(path: Path, first: int) -> None:
    verdicts = VerdictFile(path)
    for number in range(first, 1 << 60):
        verdicts.note(fingerprint(number), is_sound(number))


@pytest.mark.parametrize("rounds", [8, pytest.param(50, marks=pytest.mark.exhaustive)])  # the same, more often
def test_writers_that_are_killed_leave_no_wrong_verdict(
    path: Path, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jpeg_verdicts, "BUCKETS", 512)  # writers often meet in a bucket
    rng, context = random.Random(0), multiprocessing.get_context("fork")
    verdicts = VerdictFile(path)
    for _ in range(rounds):
        writers = [context.Process(target=write_for_ever, args=(path, first)) for first in (0, 0, 1_000_000, 2_000_000)]
        for writer in writers:
            writer.start()
        time.sleep(rng.uniform(0.001, 0.03))
        for writer in writers:
            os.kill(writer.pid or 0, signal.SIGKILL)
        for writer in writers:
            writer.join(WAIT_S)
        for first in (0, 1_000_000, 2_000_000):
            found = [(k, verdicts.is_sound(fingerprint(k))) for k in range(first, first + 200)]
            assert [(k, each) for k, each in found if each is not None and each is not is_sound(k)] == []
    assert any(verdicts.is_sound(fingerprint(k)) is not None for k in range(200))


def test_threads_may_write_at_once(path: Path) -> None:
    verdicts = VerdictFile(path)

    def write(first: int) -> None:
        for number in range(first, first + 500):
            verdicts.note(fingerprint(number), is_sound(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, (0, 250, 500, 750)))
    found = [verdicts.is_sound(fingerprint(number)) for number in range(1250)]
    assert all(each in (None, is_sound(number)) for number, each in enumerate(found))
    assert found.count(None) <= 12  # two threads that write to one bucket lose a verdict at most
