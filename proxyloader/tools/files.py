"""Files of the tools: photographs and pictures in the user's cache folder, and results that can be written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from .._cache_folder import cache_folder
from .synthetic.dataset import FORMAT


def writable_cache_folder() -> Path:
    """Return the user's cache folder for this package, or a new temporary folder if that cannot be written."""
    try:
        return cache_folder()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="proxyloader-"))


def photographs_of(purpose: str, images: int) -> Path:
    """Return the folder in the cache for photographs that a verb makes once and keeps. Its name has the format of
    ``make_dataset``, so those of an earlier format are left alone."""
    return writable_cache_folder() / f"{purpose}-v{FORMAT}-{images}"


def check_can_be_written(file: Path) -> None:
    """Raise OSError before long work if its result cannot be written. A file that is there keeps its content."""
    was_there = file.exists()
    file.open("a").close()
    if not was_there:
        file.unlink()
