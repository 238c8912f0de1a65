"""Which file is to blame where DALI's file reader fails, or what decodes behind it: DALI does not say. Main process."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from .errors import ImageError
from .sample import EncodedImage
from .sources import Reader

LOOK_S = 5.0
"""Longest time that files are looked at."""

IMAGES = ("*.jpg", "*.jpeg", "*.png", "*.bmp", "*.tif", "*.tiff", "*.pnm", "*.ppm", "*.pgm", "*.pbm", "*.jp2", "*.webp")
"""What the reader takes for images, where nothing else is said."""

_OF_A_FILE = re.compile(r"operator `nvidia\.dali\.(fn|ops)\.(readers|decoders|experimental\.decoders)\.", re.IGNORECASE)


def to_blame(error: Exception, source: Reader, at: int) -> str:
    """A file that cannot be read, and why, as ``EncodedImage.open`` says it.

    Args:
        error: DALI's.
        source: what was read.
        at: number of the sample that the reader has come to, as far as that is known: the search begins there.

    Returns:
        One sentence or two; "" where the error is about something else, the source is no folder of files, or none was
        found in ``LOOK_S``.
    """
    if source.kind != "file" or not _OF_A_FILE.search(str(error)):
        return ""
    until_s = time.monotonic() + LOOK_S
    paths = list(_paths(source))
    for path in (*paths[at:], *paths[:at]):
        if time.monotonic() > until_s:
            break
        try:
            EncodedImage.open(path, max_pixels=sys.maxsize)  # DALI has no limit
        except ImageError as blamed:
            return str(blamed)
    return ""


def _paths(source: Reader) -> Iterator[str]:
    """In the order of the reader's own list."""
    options, root = source.options, source.paths[0] if source.paths else ""
    if options.get("files"):
        yield from (os.path.join(root, path) for path in options["files"])
    elif options.get("file_list"):
        root = root or os.path.dirname(options["file_list"])
        with open(options["file_list"]) as lines:
            yield from (os.path.join(root, line.rsplit(maxsplit=1)[0]) for line in lines if line.strip())
    else:
        written = str if options.get("case_sensitive_filter") else str.lower

        def chosen(names: Iterable[str], filters: Iterable[str]) -> list[str]:
            return [
                name for name in sorted(names) if any(fnmatchcase(written(name), written(each)) for each in filters)
            ]

        folders = chosen((each.name for each in os.scandir(root) if each.is_dir()), options.get("dir_filters") or "*")
        for folder in folders:
            for name in chosen(os.listdir(os.path.join(root, folder)), options.get("file_filters") or IMAGES):
                yield os.path.join(root, folder, name)
