"""The user's cache folder for this package."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_path() -> Path:
    """Return the path of the folder: ``proxyloader`` in ``XDG_CACHE_HOME`` or ``~/.cache``. It may be missing.

    Raises:
        OSError: there is no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxyloader"
    except RuntimeError as error:
        raise FileNotFoundError("there is no home folder, and XDG_CACHE_HOME is not set") from error


def cache_folder() -> Path:
    """Return the folder. Create it if it is missing.

    Raises:
        OSError: it cannot be written.
    """
    folder = cache_path()
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return folder
