"""RemoteImageFolder: an ImageFolder in an object store, whose files are fetched concurrently for each batch."""

import errno
import importlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image
from torchvision.datasets import DatasetFolder, VisionDataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from .._validation import check_int
from ..errors import ImageError
from .bad_samples import MissingImageError
from .encoded_image import SYSTEM_ADVICE, EncodedImage, make_error
from .lazy_image import create_lazy_image

FIRST_PAUSE_S = 0.1  # before the first retry. It doubles with each retry
PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError)

_obstore_process: int | None = None  # that used obstore, which has one runtime per process


class RemoteImageFolder(DatasetFolder):  # type: ignore[misc]
    """``torchvision.datasets.ImageFolder`` at a URL that fsspec supports: "s3://", "gs://", "hf://" and others.

    Samples, classes and labels are those of ``ImageFolder`` for the same files. The files of a batch are fetched
    concurrently, also with torch's DataLoader.

    Args:
        root: URL of a folder with one folder per class.
        transform, target_transform: as in ``ImageFolder``.
        storage_options: arguments of the fsspec file system, such as ``{"anon": True}``.
        connections: maximum number of files that a process fetches concurrently.
        retries: number of retries for a failed request, after pauses of 0.1, 0.2, 0.4 seconds and so on. Then the batch
            raises an error, regardless of the loader's ``on_error``. Missing files are not retried, and may be skipped.
        cache_dir: local folder in which fetched files are cached, which processes may share; None: no cache.
        cache_bytes: maximum size of that folder, in bytes. The oldest files are removed first.

    Attributes:
        classes, class_to_idx, samples, imgs, targets: as in ``ImageFolder``, with URLs instead of paths.

    Raises:
        FileNotFoundError: there is no class folder, or one without images.
        ImportError: fsspec, the package for the protocol or, for ``cache_dir``, diskcache is not installed.
        RuntimeError: obstore opens the URL, but was used before this process was forked.
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
        VisionDataset.__init__(self, root, transform=transform, target_transform=target_transform)
        check_int("connections", connections, 1)
        check_int("retries", retries, 0)
        check_int("cache_bytes", cache_bytes, 1)
        self._storage_options, self._connections, self._retries = storage_options or {}, connections, retries
        self._cache = None
        if cache_dir is not None:  # can be pickled and forked
            self._cache = _import("diskcache", "cache_dir").Cache(os.fspath(cache_dir), size_limit=cache_bytes)
        self._threads: tuple[int, ThreadPoolExecutor] | None = None
        self._fetched: dict[str, bytes | Exception] = {}
        _check_process(root)
        system = self._open_filesystem()
        prefix = system._strip_protocol(root).rstrip("/") + "/"
        found = {path.removeprefix(prefix): (path, info) for path, info in system.find(prefix, detail=True).items()}
        names = sorted(name for name in found if "/" in name)
        self.classes = sorted({name.split("/")[0] for name in names})
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        names = [name for name in names if name.lower().endswith(IMG_EXTENSIONS)]
        labels = [name.split("/")[0] for name in names]
        if missing := {*self.classes} - {*labels} or (not self.classes and {root}):
            raise FileNotFoundError(
                f"{root}: no image in {', '.join(sorted(missing))}. Images must be in one folder per class, such as "
                f"{root.rstrip('/')}/class/image.jpg, and end in {', '.join(IMG_EXTENSIONS)}"
            )
        self.targets = [self.class_to_idx[label] for label in labels]
        self._versions: dict[str, tuple[str, int, str]] = {}  # by URL
        for path, info in map(found.__getitem__, names):
            version = str(info.get("ETag") or info.get("mtime") or "")
            self._versions[str(system.unstrip_protocol(path))] = path, int(info["size"]), version
        self.samples = self.imgs = list(zip(self._versions, self.targets))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_threads": None}

    def loader(self, url: str) -> Image.Image:
        """Return an image. ImageError: the file cannot be fetched or decoded."""
        if url not in self._fetched:
            self._fetched = {url: self._fetch(url)}
        data = self._fetched[url]
        if isinstance(data, PERMANENT_ERRORS):
            is_missing, reason = isinstance(data, FileNotFoundError), f"cannot be read: {data}"
            kind, number = (MissingImageError, errno.ENOENT) if is_missing else (ImageError, data.errno)
            raise make_error(url, reason, "unreadable", errno=number, kind=kind) from data
        if isinstance(data, Exception):
            reason = f"cannot be fetched: {data or type(data).__name__}"
            raise make_error(url, reason, "machine", SYSTEM_ADVICE, errno.ETIMEDOUT) from data
        return create_lazy_image(EncodedImage.from_bytes(data, url))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        self.fetch_ahead(indices)
        return [self[index] for index in indices]

    def fetch_ahead(self, indices: Sequence[int]) -> None:
        """Fetch the files of the next samples concurrently."""
        process = os.getpid()
        if self._threads is None or self._threads[0] != process:  # threads do not survive a fork
            self._threads = process, ThreadPoolExecutor(self._connections, "proxyloader-fetch")
        urls = [self.samples[index][0] for index in indices]
        self._fetched = dict(zip(urls, self._threads[1].map(self._fetch, urls)))

    def _fetch(self, url: str) -> bytes | Exception:
        """Return the content of a file, or the error of the last attempt."""
        _check_process(self.root)
        version = self._versions[url]
        fetched = None if self._cache is None else self._cache.get(version)
        if fetched is None:
            fetched = self._download(version[0])
            if self._cache is not None and isinstance(fetched, bytes):
                self._cache.set(version, fetched)
        return fetched

    def _download(self, path: str) -> bytes | Exception:
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                return bytes(self._open_filesystem().cat_file(path))
            except PERMANENT_ERRORS as error:
                return error.with_traceback(None)
            except Exception as error:  # depends on the file system
                last_error = error.with_traceback(None)
        return last_error

    def _open_filesystem(self) -> Any:
        # fsspec caches one instance per process, and per thread if it is not asynchronous.
        options = self._storage_options
        if _get_package(self.root) == "s3fs":  # opens only ten connections by default
            config = {"max_pool_connections": self._connections} | (options.get("config_kwargs") or {})
            options = options | {"config_kwargs": config}
        return _import("fsspec.core", "RemoteImageFolder").url_to_fs(self.root, **options)[0]


def _get_package(url: str) -> str:
    """Return the name of the package that implements the file system of a URL, or ""."""
    core = _import("fsspec.core", "RemoteImageFolder")
    try:
        return str(core.get_filesystem_class(core.split_protocol(url)[0]).__module__).split(".")[0]
    except (ImportError, ValueError):  # fsspec raises it again with advice when it opens the URL
        return ""


def _check_process(root: str) -> None:
    """Raise an error in a process that was forked after obstore was used, where obstore would hang."""
    global _obstore_process
    if _get_package(root) != "obstore":
        return
    _obstore_process = _obstore_process or os.getpid()
    if _obstore_process != os.getpid():
        raise RuntimeError(
            f"{root}: obstore does not work in this worker, which was forked after obstore was used. Pass "
            "multiprocessing_context='spawn' to the DataLoader, and call obstore.fsspec.register where every process "
            'imports it, above `if __name__ == "__main__":`'
        )


def _import(module: str, user: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        advice = "in a clone of proxyloader, run pip install -e '.[remote]'"
        raise ImportError(f"{user} requires {module.partition('.')[0]}: {advice}") from missing
