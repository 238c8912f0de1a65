"""Cache folder and output files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..make_dataset import FORMAT


def writable_cache_folder() -> Path:
    """Return ``proxyloader`` in ``XDG_CACHE_HOME`` or ``~/.cache``, or a new temporary folder if it is not writable."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxyloader"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return Path(tempfile.mkdtemp(prefix="proxyloader-"))
    return folder


def photograph_folder(command: str, images: int) -> Path:
    """Return the cache folder for the synthetic photographs of a command, in the current format."""
    return writable_cache_folder() / f"{command}-v{FORMAT}-{images}"


def check_can_be_written(file: Path) -> None:
    """Raise OSError if a file cannot be written, before starting the work. Does not change an existing file."""
    existed = file.exists()
    file.open("a").close()
    if not existed:
        file.unlink()
