"""Jpeg verdicts: what strict checks of scans found, in a file that all processes of a user share.

NOTE [ Verdict file ]
A strict check reads a whole JPEG, so its result is kept, for other processes and later runs. A JPEG is known by a
fingerprint of its bytes. So it does not matter where the bytes come from, such as a folder, a tar file or a record, and
a file that has changed is checked again.

The file is a hash table. A bucket has eight words of 64 bits, and a word holds a fingerprint and a verdict. A word is
written by one system call and means something by itself. Therefore processes write without a lock, and a process that
is killed at any moment leaves a file that can be read. If two processes write to the same word, one verdict is lost,
and that JPEG is checked again. In a full bucket a new verdict replaces an old one, so the file does not grow further.
"""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
import zlib
from pathlib import Path
from typing import Any

from .._cache_folder import cache_folder, cache_path

FILE_NAME = "jpeg_verdicts-1"
"""The number changes with the format of the file, and with the meaning of a verdict."""

BUCKETS = 1 << 19
BUCKET = struct.Struct("<8Q")
WORD = struct.Struct("<Q")
SOUND, DAMAGED = 1, 2
VERDICT_BITS = 3


class VerdictFile:
    """Verdicts by the content of a JPEG, for about four million files in at most 32 MiB.

    OSError: the file cannot be created or opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._fd).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return VerdictFile, (self._path,)

    @classmethod
    def of_user(cls, create: bool) -> VerdictFile | None:
        """Open the file in the user's cache folder; None if it cannot be used, or is missing and not to be created."""
        with contextlib.suppress(OSError):
            path = (cache_folder() if create else cache_path()) / FILE_NAME
            if create or path.exists():
                return cls(path)
        return None

    def is_sound(self, fingerprint: int) -> bool | None:
        """Return the verdict on a JPEG; None if there is none."""
        for word in self._bucket(fingerprint):
            if word | VERDICT_BITS == fingerprint | VERDICT_BITS and word & VERDICT_BITS in (SOUND, DAMAGED):
                return word & VERDICT_BITS == SOUND
        return None

    def note(self, fingerprint: int, is_sound: bool) -> None:
        """Write a verdict. It is not written if the file cannot be written, as on a full disk."""
        words = self._bucket(fingerprint)
        places = [k for k, word in enumerate(words) if word in (0, fingerprint | SOUND, fingerprint | DAMAGED)]
        place = places[0] if places else (fingerprint >> 2) % len(words)
        word = fingerprint | (SOUND if is_sound else DAMAGED)
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, WORD.pack(word), _offset(fingerprint) + place * WORD.size)

    def _bucket(self, fingerprint: int) -> tuple[int, ...]:
        try:
            found = os.pread(self._fd, BUCKET.size, _offset(fingerprint))
        except OSError:
            found = b""
        words: tuple[int, ...] = BUCKET.unpack(found.ljust(BUCKET.size, b"\0"))
        return words


def fingerprint_of(data: bytes) -> int:
    """Return what a JPEG is known by: 64 bits, of which the last two are 0."""
    # Two checksums, as one of 32 bits would be the same for some pairs of files in a data set of a million.
    return (zlib.adler32(data) << 32 | zlib.crc32(data)) & ~VERDICT_BITS


def _offset(fingerprint: int) -> int:
    return (fingerprint >> 2) % BUCKETS * BUCKET.size
