"""The user's cache folder for this package."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder, ``proxyloader`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Create it if it is missing.

    Raises:
        OSError: it cannot be written, or there is no home folder.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxyloader"
    except RuntimeError as error:
        raise FileNotFoundError("there is no home folder, and XDG_CACHE_HOME is not set") from error
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return folder
