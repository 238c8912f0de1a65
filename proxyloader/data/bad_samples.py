"""Samples that could not be read: which errors count as that, and the list that a loader keeps."""

from __future__ import annotations

import errno
import logging
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from PIL import Image, ImageFile, UnidentifiedImageError

from ..errors import ImageError

log = logging.getLogger(__name__)

OnError = Literal["raise", "skip", "replace"]
ON_ERROR: tuple[OnError, ...] = ("raise", "skip", "replace")

FILE_ERRNOS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EILSEQ,
        errno.EINVAL,
        errno.EFBIG,
    }
)
"""Error numbers that blame the file: its path, its permissions, or what it is. A sample is never left out because of
any other number, as the disk, the network or the process may be at fault."""

MAX_LOG_LINES = 20


class MissingImageError(ImageError, FileNotFoundError):
    """There is no file of this path."""


class ForeignImageError(ImageError, UnidentifiedImageError):
    """A file that is empty, or in no format that Pillow knows."""


class LargeImageError(ImageError, Image.DecompressionBombError):
    """An image that has too many pixels."""


class PermissionImageError(ImageError, PermissionError):
    """This file may not be read."""


class DirectoryImageError(ImageError, IsADirectoryError):
    """This path is that of a directory."""


class PathImageError(ImageError, NotADirectoryError):
    """A part of this path is no directory."""


class TimeoutImageError(ImageError, TimeoutError):
    """The file system did not answer."""


class BusyImageError(ImageError, BlockingIOError):
    """The file is not available now."""


_BY_CAUSE: dict[type[OSError], type[ImageError]] = {
    FileNotFoundError: MissingImageError,
    PermissionError: PermissionImageError,
    IsADirectoryError: DirectoryImageError,
    NotADirectoryError: PathImageError,
    TimeoutError: TimeoutImageError,
    BlockingIOError: BusyImageError,
}


def get_image_error_class(error: OSError) -> type[ImageError]:
    """Return the class of image errors that ``except PermissionError`` and the like catch, as they catch ``error``."""
    return _BY_CAUSE.get(type(error), ImageError)


class UndecodableError(RuntimeError):
    """torchvision's RuntimeError for content that it cannot decode."""


def is_sample_fault(error: BaseException) -> bool:
    """Return whether the error is caused by the sample itself, so that another sample can replace it."""
    if isinstance(error, ImageError):
        return error.code != "machine"
    if isinstance(error, (UnidentifiedImageError, Image.DecompressionBombError)):
        return True
    if isinstance(error, OSError):
        if error.errno is not None:
            return not is_system_fault(error)
        of_path = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
        return isinstance(error, of_path) or _is_of_pillow(error)
    if isinstance(error, RuntimeError):
        return isinstance(error, UndecodableError) or _is_of_torchvision_io(error)
    return isinstance(error, SyntaxError) and _is_of_pillow(error)  # Pillow's for broken PNGs


def is_system_fault(error: OSError) -> bool:
    """Return whether an error of ``open`` or ``read`` may be the fault of the disk, the network or the process."""
    return error.errno is not None and error.errno not in FILE_ERRNOS


def _is_of_pillow(error: BaseException) -> bool:
    """Return whether code of Pillow's has raised it, and not a file object that Pillow reads from."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("PIL.")


def _is_of_torchvision_io(error: RuntimeError) -> bool:
    """Return whether ``torchvision.io`` has raised it about the file. Its errors have no class of their own."""
    names = [
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == "torchvision.io.image"
    ]
    if not names:
        return False
    if (number := re.search(r"\[Errno (\d+)\]", str(error))) is not None:
        return int(number[1]) in FILE_ERRNOS
    if names[-1] == "read_file":  # it does not say why a file cannot be opened or mapped
        return "non empty file" in str(error)
    return "allocate memory" not in str(error)


def _file_of(error: BaseException) -> str:
    """Return the path of the file that the error names, or that Pillow read when it was raised; "" if there is none."""
    read: Any = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        image = frame.f_locals.get("self")
        if isinstance(image, ImageFile.ImageFile):
            read = image.filename  # the last one: Pillow may read another image for it
        elif frame.f_code is getattr(Image.open, "__code__", None):  # it knows no format for the file
            read = frame.f_locals.get("filename", "")
    return str(getattr(error, "filename", None) or read)


@dataclass(frozen=True)
class UnreadableSample:
    """One sample that could not be read.

    Attributes:
        index: index in the dataset; None for an IterableDataset.
        path: path of the file; "" if there is none.
        reason: what was wrong with the sample.
    """

    index: Any
    path: str
    reason: str

    @classmethod
    def of(cls, index: Any, error: BaseException) -> UnreadableSample:
        """Create one from an exception that the dataset raised."""
        if isinstance(error, ImageError):
            return cls(index, error.path, error.reason)
        return cls(index, _file_of(error), f"{type(error).__name__}: {error}")

    def error(self, message: str, code: str = "none-readable") -> ImageError:
        """Return an error about this sample."""
        return ImageError(message, code=code, index=self.index, path=self.path, reason=self.reason)


class UnreadableSamples(Sequence[UnreadableSample]):
    """``DataLoader.errors``: each sample that could not be read, once, in the order of first occurrence.

    Attributes:
        total: number of failed reads in all epochs.
    """

    def __init__(self) -> None:
        self.total = 0
        self._seen: dict[tuple[Any, str], UnreadableSample] = {}

    def __repr__(self) -> str:
        return f"UnreadableSamples({list(self._seen.values())}, total={self.total})"

    def __len__(self) -> int:
        return len(self._seen)

    @overload
    def __getitem__(self, at: int) -> UnreadableSample: ...
    @overload
    def __getitem__(self, at: slice) -> list[UnreadableSample]: ...
    def __getitem__(self, at: int | slice) -> UnreadableSample | list[UnreadableSample]:
        return list(self._seen.values())[at]

    def add(self, samples: Iterable[UnreadableSample], on_error: OnError) -> None:
        """Add samples. New ones are logged unless ``on_error`` is "raise"."""
        for sample in samples:
            self.total += 1
            key = repr(sample.index), sample.path
            if key in self._seen:
                continue
            self._seen[key] = sample
            if on_error != "raise" and len(self._seen) <= MAX_LOG_LINES:
                done = "left out" if on_error == "skip" else "replaced by the next that can be read"
                path = f"{sample.path}: " if sample.path else ""
                log.warning("dataset[%s] is %s: %s%s", sample.index, done, path, sample.reason)
                if len(self._seen) == MAX_LOG_LINES:
                    log.warning("further ones stand in loader.errors only")
