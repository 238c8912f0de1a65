"""RemoteImageFolder: an ImageFolder whose files are in an object store, fetched at the same time for a whole batch."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.datasets.vision import VisionDataset

from .._validation import check_int
from ..errors import ImageError
from .bad_samples import MissingImageError
from .encoded_image import REPLACE_ADVICE, SYSTEM_ADVICE, EncodedImage
from .lazy_image import PILLOW_SUPPORTS_LAZY, create_lazy_image

FIRST_PAUSE_S = 0.1
"""Pause before a file is fetched again, in seconds. Each further pause is twice as long."""

PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError)

_obstore_process: int | None = None  # obstore has one runtime a process, which all folders use
"""The process in which obstore was used, which a forked process inherits."""


class RemoteFiles:
    """Fetches files that fsspec opens, many at the same time, and keeps them in a local folder.

    The arguments are those of ``RemoteImageFolder``.
    """

    def __init__(
        self,
        root: str,
        storage_options: dict[str, Any],
        connections: int,
        retries: int,
        cache_dir: str | os.PathLike[str] | None,
        cache_bytes: int,
    ) -> None:
        self._root, self._storage_options = root, storage_options
        self._connections, self._retries = connections, retries
        self._cache_dir, self._cache_bytes = cache_dir, cache_bytes
        self._threads: tuple[int, ThreadPoolExecutor] | None = None
        self._cache: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_threads": None, "_cache": None}

    def listed(self) -> dict[str, tuple[str, int, str]]:
        """Return path, size and version of all files, by their path below the root."""
        _check_process(self._root)
        files = self._filesystem()
        root = files._strip_protocol(self._root).rstrip("/") + "/"
        found = files.find(root, detail=True)
        return {
            path.removeprefix(root): (path, int(info["size"]), str(info.get("ETag") or info.get("mtime") or ""))
            for path, info in found.items()
        }

    def get_url(self, path: str) -> str:
        return str(self._filesystem().unstrip_protocol(path))

    def fetch(self, files: Sequence[tuple[str, int, str]]) -> list[bytes | Exception]:
        """Return the content of files, or the error of each that could not be fetched.

        RuntimeError: the process was forked after obstore was used.
        """
        _check_process(self._root)
        if len(files) == 1:
            return [self._fetched(files[0])]
        process = os.getpid()
        if self._threads is None or self._threads[0] != process:  # those of another process do not run here
            self._threads = process, ThreadPoolExecutor(self._connections, "proxyloader-fetch")
        return list(self._threads[1].map(self._fetched, files))

    def _fetched(self, file: tuple[str, int, str]) -> bytes | Exception:
        cache = self._opened_cache()
        data = cache.get(file) if cache is not None else None
        if data is not None:
            return bytes(data)
        found = self._tried(file[0])
        if cache is not None and isinstance(found, bytes):
            cache.set(file, found)
        return found

    def _tried(self, path: str) -> bytes | Exception:
        pause_s, error = FIRST_PAUSE_S, None
        for left in range(self._retries, -1, -1):
            try:
                return bytes(self._filesystem().cat_file(path))
            except PERMANENT_ERRORS as missing:
                return missing.with_traceback(None)
            except Exception as failed:  # each file system raises errors of its own
                error = failed.with_traceback(None)
            if left:
                time.sleep(pause_s)
                pause_s *= 2
        assert error is not None
        return error

    def _filesystem(self) -> Any:
        # fsspec keeps one for each process, and for each thread if it is not asynchronous.
        options = self._storage_options
        if _package_that_opens(self._root) == "s3fs":
            # It opens ten connections by default, however many files are asked for.
            config = {"max_pool_connections": self._connections} | (options.get("config_kwargs") or {})
            options = options | {"config_kwargs": config}
        return _fsspec().core.url_to_fs(self._root, **options)[0]

    def _opened_cache(self) -> Any:
        if self._cache_dir is not None and self._cache is None:
            try:
                import diskcache
            except ImportError as missing:
                raise ImportError("cache_dir needs diskcache: pip install 'proxyloader[remote]'") from missing
            self._cache = diskcache.Cache(os.fspath(self._cache_dir), size_limit=self._cache_bytes)
        return self._cache


class RemoteImageFolder(VisionDataset):  # type: ignore[misc]
    """``torchvision.datasets.ImageFolder`` for a folder that fsspec opens: "s3://", "gs://", "hf://" and others.

    Samples, classes and labels are those of ``ImageFolder`` for the same files. The files of a batch are fetched at the
    same time, also by torch's DataLoader.

    Args:
        root: URL of a folder with one folder for each class.
        transform, target_transform: as in ``ImageFolder``.
        storage_options: arguments of fsspec's file system, such as ``{"anon": True}``.
        connections: maximum number of files that a process fetches at the same time.
        retries: how often a file is tried again that could not be fetched, after pauses of 0.1, 0.2, 0.4 seconds and so
            on. Then its batch raises an error, whatever ``on_error`` the loader has. A missing file is not tried again,
            and may be left out.
        cache_dir: local folder where fetched files are kept, which processes may share; None: files are not kept.
        cache_bytes: maximum size of that folder, in bytes. The files that were stored first are removed first.

    Attributes:
        classes, class_to_idx, samples, imgs, targets: as in ``ImageFolder``, with URLs in place of paths.

    Raises:
        FileNotFoundError: there is no folder of a class, or no image in one of them.
        ImportError: fsspec, the package for a protocol, or, for ``cache_dir``, diskcache is not installed.
        RuntimeError: obstore opens the URL, and was used before this process was forked.
    """

    def __init__(
        self,
        root: str,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        *,
        storage_options: dict[str, Any] | None = None,
        connections: int = 64,
        retries: int = 3,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 50 << 30,
    ) -> None:
        super().__init__(root, transform=transform, target_transform=target_transform)
        check_int("connections", connections, 1)
        check_int("retries", retries, 0)
        check_int("cache_bytes", cache_bytes, 1)
        self._files = RemoteFiles(root, storage_options or {}, connections, retries, cache_dir, cache_bytes)
        listed = {name: file for name, file in sorted(self._files.listed().items()) if "/" in name}
        self.classes = sorted({name.split("/")[0] for name in listed})
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        found = {name: file for name, file in listed.items() if name.lower().endswith(IMG_EXTENSIONS)}
        if missing := set(self.classes) - {name.split("/")[0] for name in found} or (not self.classes and {root}):
            raise FileNotFoundError(
                f"{root}: no image in {', '.join(sorted(missing))}. Images are expected in a folder for each class, as "
                f"{root.rstrip('/')}/class/image.jpg, and end in {', '.join(IMG_EXTENSIONS)}"
            )
        self._listed = list(found.values())
        self.targets = [self.class_to_idx[name.split("/")[0]] for name in found]
        self.samples = [(self._files.get_url(file[0]), target) for file, target in zip(self._listed, self.targets)]
        self.imgs = self.samples
        self._ahead: dict[int, bytes | Exception] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        """Return (image, label). ImageError: the file cannot be fetched, or not be read."""
        url, target = self.samples[index]
        if index not in self._ahead:
            self.fetch_ahead([index])
        image = _opened(self._ahead[index], url)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        self.fetch_ahead(indices)
        return [self[index] for index in indices]

    def fetch_ahead(self, indices: Sequence[int]) -> None:
        """Fetch the files of the samples that are asked for next, at the same time."""
        self._ahead = dict(zip(indices, self._files.fetch([self._listed[index] for index in indices])))


def _opened(data: bytes | Exception, url: str) -> Image.Image:
    if isinstance(data, PERMANENT_ERRORS):
        is_missing, reason = isinstance(data, FileNotFoundError), f"cannot be read: {data}"
        kind, number = (MissingImageError, errno.ENOENT) if is_missing else (ImageError, data.errno)
        raise kind(
            f"{url}: {reason}. {REPLACE_ADVICE}", code="unreadable", path=url, reason=reason, errno=number
        ) from data
    if isinstance(data, Exception):
        reason, number = f"cannot be fetched: {data or type(data).__name__}", errno.ETIMEDOUT
        raise ImageError(
            f"{url}: {reason}. {SYSTEM_ADVICE}", code="machine", path=url, reason=reason, errno=number
        ) from data
    encoded = EncodedImage.from_bytes(data, url)
    return create_lazy_image(encoded) if PILLOW_SUPPORTS_LAZY else encoded.decoded()


def _package_that_opens(url: str) -> str:
    """Return the name of the package whose file system opens a URL; "" if none does."""
    core = _fsspec().core
    try:
        return str(core.get_filesystem_class(core.split_protocol(url)[0]).__module__).split(".")[0]
    except (ImportError, ValueError):  # fsspec says the same when the URL is opened, and how to install the package
        return ""


def _check_process(root: str) -> None:
    """Raise an error where obstore would wait without end: in a process that was forked after obstore was used."""
    global _obstore_process
    if _package_that_opens(root) != "obstore":
        return
    _obstore_process = _obstore_process or os.getpid()
    if _obstore_process != os.getpid():
        raise RuntimeError(
            f"{root}: this worker was forked after obstore was used, and obstore does not work in such a process. Give "
            "the DataLoader multiprocessing_context='spawn', and call obstore.fsspec.register where each process "
            'imports the script, above `if __name__ == "__main__":`'
        )


def _fsspec() -> Any:
    try:
        import fsspec.core
    except ImportError as missing:
        raise ImportError("RemoteImageFolder needs fsspec: pip install 'proxyloader[remote]'") from missing
    return fsspec
