"""Find the file that made DALI's reader or decoder fail. Main process."""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ..data.encoded_image import EncodedImage
from ..errors import ImageError
from .sources import FEATURES, Reader

LOOK_S = 5.0
"""Limit of the time for listing and checking files, in seconds."""

ENDINGS = ["jpg", "jpeg", "png", "bmp", "tif", "tiff", "pnm", "ppm", "pgm", "pbm", "jp2", "webp", "flac", "ogg", "wav"]
"""Extensions of the files that the reader lists by default."""

_DECODES = re.compile(r"nvidia\.dali\.\w+\.(experimental\.)?(decoders\.image|peek_image_shape)", re.IGNORECASE)
_READS = re.compile(r"File mapping failed: (.+)")


def find_bad_file(error: Exception, source: Reader, batch: range) -> str:
    """Return one or two sentences about a file that made DALI fail, with the reason of ``EncodedImage.open``, or "".

    Args:
        error: DALI's error.
        source: the reader.
        batch: indices of the samples that were read, in the order of the reader's list. Ignored if it shuffles.
    """
    read, until_s = _READS.search(str(error)), time.monotonic() + LOOK_S
    if read is not None:
        return _why_unreadable(read[1].strip())  # "" if Pillow can read it
    if not is_of_an_image(error):
        return ""
    if source.kind == "tfrecord":
        image, *_ = source.options.get("features", FEATURES)
        named = "reader_options={'features': ...} names it"
        return f"Does each record have a feature {image!r}, and is that an image? {named}"
    if source.kind != "file":
        return ""
    with suppress(OSError, ValueError):  # for example, files may have been deleted meanwhile
        for number, path in enumerate(_paths(source)):
            if time.monotonic() > until_s:
                break
            why = _why_unreadable(path) if source.random_shuffle or number in batch else ""
            if why:
                return f"{'In this batch or another: ' * source.random_shuffle}{why}"
    return ""


def is_of_an_image(error: Exception) -> bool:
    """Return whether DALI failed to decode an image."""
    return _DECODES.search(str(error)) is not None


def _why_unreadable(path: str) -> str:
    try:
        EncodedImage.open(path)
    except ImageError as error:
        return str(error)
    return ""


def _paths(source: Reader) -> Iterator[str]:
    """Yield the paths of the reader's files, in the order of its list."""
    options = source.options
    root = source.paths[0] if source.paths else os.fspath(options.get("file_root") or "")
    if options.get("files"):
        for path in _several(options["files"]):
            yield os.path.join(root, path)
    elif options.get("file_list"):
        root = root or os.path.dirname(options["file_list"])
        with open(options["file_list"], encoding="utf-8", errors="surrogateescape") as lines:
            for line in filter(str.strip, lines):
                yield os.path.join(root, line.rsplit(maxsplit=1)[0])
    else:
        flags = 0 if options.get("case_sensitive_filter") else re.IGNORECASE
        filters = options.get("file_filters") or [f"*.{ending}" for ending in ENDINGS]
        for folder in _matching(root, options.get("dir_filters") or "*", flags, folders=True):
            yield from _matching(folder, filters, flags, folders=False)


def _several(names: Any) -> list[str]:
    return [os.fspath(name) for name in ([names] if isinstance(names, (str, os.PathLike)) else names)]


def _matching(root: str, globs: Any, flags: int, *, folders: bool) -> list[str]:
    """Return the paths of the files, or of the folders, in a folder whose names match, sorted by name."""
    pattern = re.compile("|".join(map(fnmatch.translate, _several(globs))), flags)
    names = [each.name for each in os.scandir(root) if pattern.match(each.name) and each.is_dir() is folders]
    return [os.path.join(root, name) for name in sorted(names)]
