"""Files of the tools: photographs and pictures in the user's cache folder, and results that can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .synthetic.dataset import FORMAT


def cache_folder() -> Path:
    """Return the user's cache folder for this package, or a new temporary folder if that cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxyloader"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return Path(tempfile.mkdtemp(prefix="proxyloader-"))
    return folder


def photographs_of(verb: str, images: int) -> Path:
    """Return the folder in the cache for photographs that a verb makes once and keeps. Its name has the format of
    ``make_dataset``, so those of an earlier format are left alone."""
    return cache_folder() / f"{verb}-v{FORMAT}-{images}"


def check_can_be_written(file: Path) -> None:
    """Raise OSError before long work if its result cannot be written. A file that is there keeps its content."""
    was_there = file.exists()
    file.open("a").close()
    if not was_there:
        file.unlink()
