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
    changes = FileChanges(str(paths[0].parent))
    assert changes.are_unchanged(map(str, paths))
    change(paths[1])
    assert not changes.are_unchanged(map(str, paths))


def test_folders_and_links_that_are_put_in_the_place_of_others_are_seen(tmp_path: Path) -> None:
    """Their files may be older than the look at them began."""
    for version in ("old", "new"):
        for name in ("set/class", "linked"):
            (tmp_path / version / name).mkdir(parents=True)
            (tmp_path / version / name / "a").write_bytes(version.encode())
    (tmp_path / "old/set/link").symlink_to(tmp_path / "old/linked")
    (tmp_path / "now").symlink_to(tmp_path / "old")
    time.sleep(2 * TICK_NS / 1e9)

    def swapped(one: Path, other: Path) -> None:
        one.rename(tmp_path / "aside")
        other.rename(one)

    steps: list[tuple[str, Callable[[], object]]] = [
        ("class/a", lambda: swapped(tmp_path / "old/set/class", tmp_path / "new/set/class")),
        (
            "link/a",
            lambda: [
                (tmp_path / "old/set/link").unlink(),
                (tmp_path / "old/set/link").symlink_to(tmp_path / "new/linked"),
            ],
        ),
        ("class/a", lambda: [(tmp_path / "now").unlink(), (tmp_path / "now").symlink_to(tmp_path / "new")]),
    ]
    for file, step in steps:
        time.sleep(2 * TICK_NS / 1e9)
        (tmp_path / "new/set/class").mkdir(exist_ok=True)
        (tmp_path / "new/set/class/a").touch()
        time.sleep(2 * TICK_NS / 1e9)
        changes = FileChanges(str(tmp_path / "now/set"))
        path = str(tmp_path / "now/set" / file)
        assert changes.are_unchanged([path])
        step()
        assert not changes.are_unchanged([path])


def test_reading_is_no_change(paths: list[Path]) -> None:
    changes = FileChanges(str(paths[0].parent))
    for path in paths:
        path.read_bytes()
    assert changes.are_unchanged(map(str, paths))


def test_a_file_that_is_gone_is_an_error(paths: list[Path]) -> None:
    changes = FileChanges(str(paths[0].parent))
    paths[2].unlink()
    with pytest.raises(FileNotFoundError):
        changes.are_unchanged(map(str, paths))


def test_nothing_is_known_of_other_file_systems(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_local(str(paths[0])) and not is_local("/proc/self/status") and not is_local(str(paths[0]) + ".not")
    changes = FileChanges(str(paths[0].parent))
    monkeypatch.setattr(file_changes, "LOCAL", {})
    assert not changes.are_unchanged(map(str, paths))
