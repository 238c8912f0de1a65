"""Classify read errors as sample faults or system faults, and collect unreadable samples."""

from __future__ import annotations

import errno
import logging
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image, ImageFile, UnidentifiedImageError

from ..errors import ImageError

log = logging.getLogger(__name__)

OnError = Literal["raise", "skip", "replace"]
ON_ERROR: tuple[OnError, ...] = ("raise", "skip", "replace")

FILE_ERRNOS = frozenset(
    getattr(errno, name)
    for name in ["ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "ELOOP", "ENAMETOOLONG", "EILSEQ", "EINVAL", "EFBIG"]
)
"""Error numbers caused by the file itself: its path, permissions or type. Other errors never skip a sample, because the
disk, the network or the process may have caused them."""

MAX_LOG_LINES = 20


class MissingImageError(ImageError, FileNotFoundError):
    """The file does not exist."""


class ForeignImageError(ImageError, UnidentifiedImageError):
    """The file is empty, or in a format unknown to Pillow."""


class LargeImageError(ImageError, Image.DecompressionBombError):
    """The image has too many pixels."""


for _cause in (PermissionError, IsADirectoryError, NotADirectoryError, TimeoutError, BlockingIOError):
    _name = _cause.__name__.replace("Error", "ImageError")
    globals()[_name] = type(_name, (ImageError, _cause), {"__module__": __name__})  # can be pickled by its name

BY_CAUSE: dict[type, type[ImageError]] = {each.__bases__[1]: each for each in ImageError.__subclasses__()}
"""Classes of errors that are also subclasses of another one, such as PermissionError, by this one."""


def is_sample_fault(error: BaseException) -> bool:
    """Return whether the sample itself causes the error, so that another sample may replace it."""
    if isinstance(error, ImageError):
        return error.code != "machine"
    if isinstance(error, (UnidentifiedImageError, Image.DecompressionBombError)):
        return True
    if isinstance(error, OSError):
        if error.errno is not None:
            return not is_system_fault(error)
        path_errors = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
        return isinstance(error, path_errors) or _is_from_pillow(error)
    if isinstance(error, RuntimeError):
        return _is_from_torchvision_io(error)
    return isinstance(error, SyntaxError) and _is_from_pillow(error)  # raised for broken PNGs


def is_system_fault(error: OSError) -> bool:
    """Return whether the disk, the network or the process may have caused an error of ``open`` or ``read``."""
    return error.errno is not None and error.errno not in FILE_ERRNOS


def _is_from_pillow(error: BaseException) -> bool:
    """Return whether Pillow's own code has raised the error, rather than a file object that it reads."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("PIL.")


def _is_from_torchvision_io(error: RuntimeError) -> bool:
    """Return whether ``torchvision.io`` has raised the error because of the file. It raises plain RuntimeErrors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [each.f_code.co_name for each in frames if each.f_globals.get("__name__") == "torchvision.io.image"]
    if not names:
        return False
    if (number := re.search(r"\[Errno (\d+)\]", str(error))) is not None:
        return int(number[1]) in FILE_ERRNOS
    if names[-1] == "read_file":  # the message lacks the cause of errors of open and mmap
        return "non empty file" in str(error)
    return "allocate memory" not in str(error)


def _find_path(error: BaseException) -> str:
    """Return the path in the error, or of the file that Pillow was reading; "" if there is none."""
    path: Any = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        image = frame.f_locals.get("self")
        if isinstance(image, ImageFile.ImageFile):
            path = image.filename or name_of(image.fp)  # the innermost one, because Pillow may open images recursively
        elif frame.f_code is getattr(Image.open, "__code__", None):  # no format was identified
            path = frame.f_locals.get("filename") or name_of(frame.f_locals.get("fp"))
    return str(getattr(error, "filename", None) or path)


def name_of(file: Any) -> str:
    """Return the name of an open file; "" if it has none."""
    name = getattr(file, "name", "")
    return name if isinstance(name, str) else ""


@dataclass(frozen=True)
class UnreadableSample:
    """A sample that cannot be read."""

    index: Any  #: in the dataset; None for an IterableDataset
    path: str  #: of the file; "" if there is none
    reason: str  #: what is wrong with the sample

    @classmethod
    def from_error(cls, index: Any, error: BaseException) -> UnreadableSample:
        if isinstance(error, ImageError):
            return cls(index, error.path, error.reason)
        return cls(index, _find_path(error), f"{type(error).__name__}: {error}")

    def error(self, message: str, code: str = "none-readable") -> ImageError:
        return ImageError(message, code=code, index=self.index, path=self.path, reason=self.reason)


class UnreadableSamples(list[UnreadableSample]):
    """``DataLoader.errors``: each unreadable sample once, in order of first occurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0  #: number of failed reads in all epochs
        self._seen: set[tuple[str, str]] = set()

    def add(self, samples: Iterable[UnreadableSample], on_error: OnError) -> None:
        """Add samples, and log new ones unless ``on_error`` is "raise"."""
        for sample in samples:
            self.total += 1
            key = repr(sample.index), sample.path
            if key in self._seen:
                continue
            self._seen.add(key)
            self.append(sample)
            if on_error != "raise" and len(self) <= MAX_LOG_LINES:
                action = "skipped" if on_error == "skip" else "replaced by the next readable sample"
                path = f"{sample.path}: " if sample.path else ""
                log.warning("dataset[%s] is %s: %s%s", sample.index, action, path, sample.reason)
                if len(self) == MAX_LOG_LINES:
                    log.warning("further unreadable samples are listed only in loader.errors")
