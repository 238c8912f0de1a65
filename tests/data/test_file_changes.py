"""Changes of files are seen, whatever was done to them, and only where a file system tells of them at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proxyloader.data import file_changes
from proxyloader.data.file_changes import TICK_NS, FileChanges, is_local


def written(path: Path) -> None:
    path.write_bytes(b"other")


def written_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")


def written_with_its_times(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    other.replace(path)


def cut(path: Path) -> None:
    os.truncate(path, 1)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in "abc"]
    for path in found:
        path.write_bytes(b"content")
    time.sleep(2 * TICK_NS / 1e9)
    return found


@pytest.mark.parametrize("change", [written, written_in_place, written_with_its_times, replaced, cut])
def test_a_change_is_seen(paths: list[Path], change: Callable[[Path], None]) -> None:
    changes = FileChanges()
    assert changes.are_unchanged(map(str, paths))
    change(paths[1])
    assert not changes.are_unchanged(map(str, paths))


def test_reading_is_no_change(paths: list[Path]) -> None:
    changes = FileChanges()
    for path in paths:
        path.read_bytes()
    assert changes.are_unchanged(map(str, paths))


def test_a_file_that_is_gone_is_an_error(paths: list[Path]) -> None:
    changes = FileChanges()
    paths[2].unlink()
    with pytest.raises(FileNotFoundError):
        changes.are_unchanged(map(str, paths))


def test_nothing_is_known_of_other_file_systems(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_local(str(paths[0])) and not is_local("/proc/self/status") and not is_local(str(paths[0]) + ".not")
    changes = FileChanges()
    monkeypatch.setattr(file_changes, "LOCAL", {})
    assert not changes.are_unchanged(map(str, paths))
