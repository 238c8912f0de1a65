"""Where the tools keep photographs, and whether their results can be written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from proxyloader.tools import files
from proxyloader.tools.files import check_can_be_written, photograph_folder, writable_cache_folder


def test_the_cache_is_a_folder_in_the_home_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert writable_cache_folder() == tmp_path / "home" / ".cache" / "proxyloader"
    now = photograph_folder("demo", 16)
    monkeypatch.setattr(files, "FORMAT", files.FORMAT - 1)
    assert now.parent == photograph_folder("demo", 16).parent == writable_cache_folder()
    assert now != photograph_folder("demo", 16)


@pytest.mark.parametrize("blocked", ["cache", "cache/proxyloader"])
def test_the_cache_is_a_temporary_folder_where_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / blocked).write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = writable_cache_folder()
    assert folder.parent == tmp_path and folder.name.startswith("proxyloader-")


def test_a_check_leaves_no_file_and_no_other_content(tmp_path: Path) -> None:
    check_can_be_written(tmp_path / "new.png")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old.png").write_text("content")
    check_can_be_written(tmp_path / "old.png")
    assert (tmp_path / "old.png").read_text() == "content"
    with pytest.raises(IsADirectoryError):
        check_can_be_written(tmp_path)
