"""Whether files have changed since a moment. Main process."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterable

LOCAL = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
}
"""File systems, by their number in ``linux/magic.h``, whose times are those of this machine's clock. Others may show a
change late, or in the time of another machine, and take long to be asked."""

TICK_NS = 100_000_000
"""More than the time in which a file system gives all changes the same time."""

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def is_local(path: str) -> bool:
    """Return whether the file system of a file is one of ``LOCAL``."""
    answer = ctypes.create_string_buffer(256)  # ``struct statfs``, which begins with the number
    if _libc is None or _libc.statfs(os.fsencode(path), answer):
        return False
    return int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) in LOCAL


class FileChanges:
    """Looks for changes of the files below a folder since it was made. OSError: the folder is not there."""

    def __init__(self, root: str) -> None:
        self._since_ns, self._root = time.time_ns() - TICK_NS, root
        self._identity = _identity(root)

    def are_unchanged(self, paths: Iterable[str]) -> bool:
        """Return whether it is known that no file has changed. This takes some µs for each file. OSError: one is gone.

        Whatever changes the content of a file, or puts another one in its place, sets the time of its last change of
        state (``st_ctime``), or that of a folder that it is in. If a folder above ``root`` was moved, ``root`` is
        another one.
        """
        stat, dirname, since_ns = os.stat, os.path.dirname, self._since_ns
        devices: set[int] = set()
        folders: set[str] = set()
        for path in paths:
            found = stat(path)
            if found.st_ctime_ns >= since_ns:
                return False
            if found.st_dev not in devices:
                if not is_local(path):
                    return False
                devices.add(found.st_dev)
            folders.add(dirname(path))
        return _identity(self._root) == self._identity and not any(map(self._has_changed, folders))

    def _has_changed(self, folder: str) -> bool:
        """Return whether a folder, or one that it is in below ``root``, has changed or was put in another's place."""
        while len(folder) > len(self._root):
            times_ns = os.stat(folder).st_ctime_ns, os.lstat(folder).st_ctime_ns  # it may be a link
            if max(times_ns) >= self._since_ns:
                return True
            folder = os.path.dirname(folder)
        return False


def _identity(folder: str) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino
