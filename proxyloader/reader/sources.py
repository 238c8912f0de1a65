"""Sources of a pipeline's encoded images: one of DALI's readers, by name, or workers. Main process.

A source is called in a pipeline function, and adds a reader or an input to the graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import numpy as np

from ..dali.api import fn, tfrecord, types
from ..data.distributed import Auto, World

READER_NAME = "Reader"
"""Name of the reader by which DALI's iterators count samples."""

Root = Union[str, "os.PathLike[str]", Sequence[Union[str, "os.PathLike[str]"]]]
"""One path, or several."""

DIGITS = 18
"""Maximum number of digits of a label. Every number of 18 digits fits in 64 bits."""

FEATURES = ("image/encoded", "image/class/label")
"""Default features of a record: image and label."""

LISTS = {"file_list", "files"}
"""Arguments of readers that name the data in place of ``root``."""


def from_workers() -> tuple[Any, ...]:
    """Return the input of a ``ProxyServer``: encoded images, (bytes,) uint8 each. Labels stay with the workers."""
    return (fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8),)


@dataclass(frozen=True)
class Reader:
    """Description of one of DALI's readers. Calling it adds the reader to the current pipeline.

    Attributes:
        root: the data: a folder of class folders (file), one or several files (tfrecord, webdataset), an LMDB folder
            (caffe2), or a folder of arrays (numpy). None: ``options`` has ``file_list`` or ``files``.
        kind: name of the reader in ``nvidia.dali.fn.readers``, a key of READERS.
        random_shuffle, num_shards, shard_id, pad_last_batch, stick_to_shard: as in DALI's readers.
        options: further arguments of the reader, such as ``initial_fill`` or ``read_ahead``.
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
        """Check what can be read. DALI's own errors do not explain this."""
        if self.kind not in READERS:
            raise ValueError(f"reader is one of {', '.join(READERS)}, got {self.kind!r}")
        World(self.num_shards, self.shard_id)
        if self.root is None and not LISTS & self.options.keys():
            raise ValueError(
                f"root is None, and reader_options say nothing to read either: {' or '.join(sorted(LISTS))}"
            )
        for path in self.paths:
            if not os.path.exists(path):
                raise FileNotFoundError(f"there is nothing at {path!r}, which the {self.kind} reader is to read")
            if self.kind in ("tfrecord", "webdataset") and os.path.isdir(path):
                raise IsADirectoryError(
                    f"{path!r} is a folder; the {self.kind} reader reads files: give one, or a list of them"
                )
        if self.kind == "file" and self.root is not None:
            _check_class_folders(self.path)
        if listed := self.options.get("file_list"):
            _check_list(listed)

    @property
    def paths(self) -> list[str]:
        if self.root is None:
            return []
        several = [self.root] if isinstance(self.root, (str, os.PathLike)) else self.root
        if not isinstance(several, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in several):
            raise TypeError(f"root is a path or several, got {self.root!r}")
        return [os.fspath(path) for path in several]

    @property
    def path(self) -> str:
        if len(self.paths) != 1:
            raise ValueError(f"the {self.kind} reader reads one folder, got {self.root!r}")
        return self.paths[0]

    def __call__(self) -> tuple[Any, ...]:
        """Add the reader to the pipeline that is being built.

        Returns:
            The encoded images, (bytes,) uint8 each, and their labels, (1,) each, int64 for tfrecord and webdataset, and
            int32 for file and caffe2. For numpy only the arrays.
        """
        own = ("random_shuffle", "num_shards", "shard_id", "pad_last_batch", "stick_to_shard")
        how = {"name": READER_NAME, **{name: getattr(self, name) for name in own}, **self.options}
        try:
            read = READERS[self.kind](self, how)
        except KeyError as error:  # DALI's error names the argument
            raise TypeError(f"nvidia.dali.fn.readers.{self.kind} does not take that: {error.args[0]}") from error
        return tuple(read) if isinstance(read, (tuple, list)) else (read,)


def world_of(num_shards: int | Auto | None, shard_id: int | Auto | None) -> World:
    """Return the processes that share the data. The arguments are those of ``FileReaderLoader``."""
    if num_shards is None:
        if shard_id is not None:
            raise ValueError(f"shard_id={shard_id!r} needs num_shards, the number of processes, or 'auto'")
        return World(1, 0)
    world = World.of(num_shards, "auto" if shard_id is None else shard_id)
    world.check_processes()
    return world


def _check_list(path: str) -> None:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"reader_options has file_list={path!r}, and there is no such file")
    with open(path, "rb") as lines:
        if not any(map(bytes.strip, lines)):
            raise ValueError(f"reader_options has file_list={path!r}, which lists nothing: a path and a label a line")


def _check_class_folders(root: str) -> None:
    """Check that a root has a file in a class folder."""
    if not os.path.isdir(root):
        raise FileNotFoundError(f"root {root!r} is a file; the file reader wants a folder: root/class/image.jpg")
    if any(folder.is_dir() and any(file.is_file() for file in folder.iterdir()) for folder in Path(root).iterdir()):
        return
    raise FileNotFoundError(
        f"root {root!r} has no folder with a file in it; the file reader wants one for each class: root/class/image.jpg"
    )


def _files(reader: Reader, how: dict[str, Any]) -> Any:
    """Read class folders in the order of their names, as ``ImageFolder``, or the files named in ``options``."""
    if reader.root is not None:
        how["file_root"] = reader.path
    if how.get("labels") is not None:
        how["labels"] = [_checked_label(label) for label in np.ravel(np.asarray(how["labels"], dtype=object))]
    return fn.readers.file(**how)


def _checked_label(label: Any) -> int:
    """Return a label as int, if DALI's file reader keeps it. It accepts any number, and changes some of them."""
    try:
        number = int(label)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number != label:
        raise ValueError(f"reader_options has the label {label!r}, and labels are whole numbers")
    if not -(2**31) <= number < 2**31:
        raise ValueError(
            f"reader_options has the label {number}, and DALI's file reader keeps 32 bits of it. Number the classes "
            "from 0, or use another reader (tfrecord, webdataset)"
        )
    return number


def _tfrecord(reader: Reader, how: dict[str, Any]) -> Any:
    """Read files with an index next to each, made by ``tfrecord2idx a.tfrecord a.tfrecord.idx``."""
    image, *label = how.pop("features", FEATURES)
    index_path = how.pop("index_path", [f"{path}.idx" for path in reader.paths])
    index_path = [index_path] if isinstance(index_path, (str, os.PathLike)) else list(index_path)
    if len(index_path) != len(reader.paths) or len(label) > 1:
        raise ValueError(
            f"the tfrecord reader takes an index for each of {len(reader.paths)} files and the names of two features, "
            f"image and label, or of the image alone; got index_path={index_path!r} and {1 + len(label)} names"
        )
    missing = [path for path in index_path if not os.path.exists(path)]
    if missing:
        data = reader.paths[index_path.index(missing[0])]
        raise FileNotFoundError(
            f"there is no index {missing[0]!r} of {data!r}. DALI's own command makes it: "
            f"tfrecord2idx {data} {missing[0]}; or say where it is: reader_options={{'index_path': [...]}}"
        )
    features = {image: tfrecord.FixedLenFeature([], tfrecord.string, "")}
    features |= {name: tfrecord.FixedLenFeature([1], tfrecord.int64, -1) for name in label}
    read: Any = fn.readers.tfrecord(path=reader.paths, index_path=index_path, features=features, **how)
    return read[image], *(read[name] for name in label)


def _webdataset(reader: Reader, how: dict[str, Any]) -> Any:
    """Read tar files with samples such as 0001.jpg and 0001.cls, a label in digits. Other parts stay bytes."""
    ext = how.pop("ext", ["jpg;jpeg;png", "cls"])
    ext = [ext] if isinstance(ext, str) else list(ext)
    read: Any = fn.readers.webdataset(paths=reader.paths, ext=ext, **{"missing_component_behavior": "error", **how})
    parts = read if isinstance(read, (tuple, list)) else [read]
    return [class_number(part) if "cls" in kinds.split(";") else part for kinds, part in zip(ext, parts)]


def class_number(written: Any) -> Any:
    """Return the number, (1,) int64, of a text in digits, (bytes,) uint8, which may end with white space.

    DALI has no operator that raises an error. So for any other text, a slice beyond its end is taken, which fails.
    ``arguments.what_failed`` recognizes that error by the name of this function.
    """
    count = _sum(written > 32)  # white space comes behind it
    first = fn.slice(written, start=[0], shape=count, axes=[0])
    is_number = (count > 0) & (_sum((first >= 48) & (first <= 57)) == count)
    count = count + 2**20 * fn.cast(is_number == 0, dtype=types.INT32)  # more bytes than any label has
    digits = fn.cast(fn.slice(written, start=[0], shape=count, axes=[0]), dtype=types.INT64) - 48
    lower = fn.cast(types.Constant(10 ** np.arange(DIGITS // 2 - 1, -1, -1, dtype=np.int32)), dtype=types.INT64)
    powers = fn.cat(lower * 10 ** (DIGITS // 2), lower)  # constants of DALI have 32 bits
    worth = fn.slice(powers, start=DIGITS - count, shape=count, axes=[0])
    return fn.cast(fn.reshape(fn.reductions.sum(digits * worth), shape=[1]), dtype=types.INT64)


def _sum(flags: Any) -> Any:
    """Return the number of true elements, (1,) int32."""
    return fn.reshape(fn.reductions.sum(fn.cast(flags, dtype=types.INT32), dtype=types.INT32), shape=[1])


def _numpy(reader: Reader, how: dict[str, Any]) -> Any:
    """Read all ``*.npy`` files of a folder, in the order of their names."""
    pattern = how.get("file_filter", "*.npy")
    if not any(Path(reader.path).glob(pattern)):
        raise FileNotFoundError(f"root {reader.path!r} has no file {pattern}")
    return fn.readers.numpy(file_root=reader.path, **how)


READERS: dict[str, Callable[[Reader, dict[str, Any]], Any]] = {
    "file": _files,
    "tfrecord": _tfrecord,
    "webdataset": _webdataset,
    "caffe2": lambda reader, how: fn.readers.caffe2(path=reader.paths, **how),
    "numpy": _numpy,
}
"""Functions that add a reader to the graph, by the name of the reader in ``nvidia.dali.fn.readers``."""
