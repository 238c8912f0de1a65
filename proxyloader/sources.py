"""Where the encoded images of a pipeline come from: one of DALI's readers, by name, or workers. Main process.

A source is called inside a pipeline function, and adds what reads to the graph that is being built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import numpy as np

from ._dali import fn, tfrecord, types
from .world import World

READER_NAME = "Reader"
"""What DALI's iterators are told to count samples by."""

Root = Union[str, "os.PathLike[str]", Sequence[Union[str, "os.PathLike[str]"]]]
"""One path, or several."""

DIGITS = 10
"""Most that a label written in digits has; 32 bits hold no more."""


def from_workers() -> tuple[Any, ...]:
    """The images that a ``ProxyServer`` is given: (bytes,) uint8 each. Labels stay with the workers."""
    return (fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8),)


@dataclass(frozen=True)
class Reader:
    """One of DALI's readers, described.

    Attributes:
        root: what is read: a folder of class folders (file), files (tfrecord, webdataset), an LMDB folder (caffe,
            caffe2), or a folder of arrays (numpy).
        kind: its name in ``nvidia.dali.fn.readers``, one of READERS.
        random_shuffle, num_shards, shard_id, pad_last_batch, stick_to_shard: as DALI's readers take them.
        options: more of their arguments, such as ``initial_fill`` or ``read_ahead``.

    Raises:
        FileNotFoundError: a path is not there, or nothing can be read there.
        ValueError: there is no such reader or shard.
    """

    root: Root | None
    kind: str = "file"
    random_shuffle: bool = False
    num_shards: int = 1
    shard_id: int = 0
    pad_last_batch: bool = False
    stick_to_shard: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in READERS:
            raise ValueError(f"reader is one of {', '.join(READERS)}, got {self.kind!r}")
        World(self.num_shards, self.shard_id)
        for path in self.paths:
            if not os.path.exists(path):
                raise FileNotFoundError(f"there is nothing at {path!r}, which the {self.kind} reader is to read")
        if self.kind == "file" and self.root is not None:
            _check_class_folders(self.path)

    @property
    def paths(self) -> list[str]:
        if self.root is None:
            return []
        several = [self.root] if isinstance(self.root, (str, os.PathLike)) else self.root
        return [os.fspath(path) for path in several]

    @property
    def path(self) -> str:
        if len(self.paths) != 1:
            raise ValueError(f"the {self.kind} reader reads one folder, got {self.root!r}")
        return self.paths[0]

    def __call__(self) -> tuple[Any, ...]:
        """Add the reader to the pipeline that is being built.

        Returns:
            The encoded images, (bytes,) uint8 each, and their labels, (1,) int32 each. Of numpy: the arrays alone.
        """
        how = {
            "name": READER_NAME,
            "random_shuffle": self.random_shuffle,
            "num_shards": self.num_shards,
            "shard_id": self.shard_id,
            "pad_last_batch": self.pad_last_batch,
            "stick_to_shard": self.stick_to_shard,
            **self.options,
        }
        return READERS[self.kind](self, how)


def _check_class_folders(root: str) -> None:
    """A root without a file in a folder, which DALI's file reader says little about."""
    if not os.path.isdir(root):
        raise FileNotFoundError(f"root {root!r} is a file; the file reader wants a folder: root/class/image.jpg")
    if any(folder.is_dir() and any(file.is_file() for file in folder.iterdir()) for folder in Path(root).iterdir()):
        return
    raise FileNotFoundError(
        f"root {root!r} has no folder with a file in it; the file reader wants one for each class: root/class/image.jpg"
    )


def _files(reader: Reader, how: dict[str, Any]) -> tuple[Any, ...]:
    """Class folders in the order of their names, as of ``ImageFolder``; or what ``options`` say."""
    if reader.root is not None:
        how["file_root"] = reader.path
    return tuple(fn.readers.file(**how))


def _tfrecord(reader: Reader, how: dict[str, Any]) -> tuple[Any, ...]:
    """Each file has its index beside it, as ``tfrecord2idx a.tfrecord a.tfrecord.idx`` makes it."""
    image, label = how.pop("features", ("image/encoded", "image/class/label"))
    index_path = how.pop("index_path", [f"{path}.idx" for path in reader.paths])
    missing = [path for path in index_path if not os.path.exists(path)]
    if missing:
        data = reader.paths[index_path.index(missing[0])]
        raise FileNotFoundError(
            f"there is no index {missing[0]!r} of {data!r}. DALI's own command makes it: "
            f"tfrecord2idx {data} {missing[0]}; or say where it is: reader_options={{'index_path': [...]}}"
        )
    features = {
        image: tfrecord.FixedLenFeature([], tfrecord.string, ""),
        label: tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
    }
    read: Any = fn.readers.tfrecord(path=reader.paths, index_path=index_path, features=features, **how)
    return read[image], fn.cast(read[label], dtype=types.INT32)


def _webdataset(reader: Reader, how: dict[str, Any]) -> tuple[Any, ...]:
    """tar files of pairs such as 0001.jpg and 0001.cls, the label in digits."""
    ext = how.pop("ext", ["jpg;jpeg;png", "cls"])
    read: Any = fn.readers.webdataset(paths=reader.paths, ext=ext, **how)
    encoded, written, *others = read
    return encoded, _number(written), *others


def _number(written: Any) -> Any:
    """The number, (1,) int32, that a text (bytes,) uint8 begins with."""
    is_digit = (written >= 48) & (written <= 57)
    count = fn.reshape(fn.reductions.sum(fn.cast(is_digit, dtype=types.INT32), dtype=types.INT32), shape=[1])
    digits = fn.cast(fn.slice(written, start=[0], shape=count, axes=[0]), dtype=types.INT64) - 48
    powers = types.Constant(10 ** np.arange(DIGITS - 1, -1, -1, dtype=np.int64))
    worth = fn.slice(powers, start=DIGITS - count, shape=count, axes=[0])
    return fn.cast(fn.reshape(fn.reductions.sum(digits * worth), shape=[1]), dtype=types.INT32)


def _caffe(reader: Reader, how: dict[str, Any]) -> tuple[Any, ...]:
    read: Any = fn.readers.caffe(path=reader.paths, **how)
    return tuple(read)


def _caffe2(reader: Reader, how: dict[str, Any]) -> tuple[Any, ...]:
    read: Any = fn.readers.caffe2(path=reader.paths, **how)
    return tuple(read)


def _numpy(reader: Reader, how: dict[str, Any]) -> tuple[Any, ...]:
    """All ``*.npy`` of a folder, in the order of their names."""
    if not any(Path(reader.path).glob(how.get("file_filter", "*.npy"))):
        raise FileNotFoundError(f"root {reader.path!r} has no file {how.get('file_filter', '*.npy')}")
    return (fn.readers.numpy(file_root=reader.path, **how),)


READERS: dict[str, Callable[[Reader, dict[str, Any]], tuple[Any, ...]]] = {
    "file": _files,
    "tfrecord": _tfrecord,
    "webdataset": _webdataset,
    "caffe": _caffe,
    "caffe2": _caffe2,
    "numpy": _numpy,
}
"""By their names in ``nvidia.dali.fn.readers``."""
