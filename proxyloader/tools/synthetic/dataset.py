"""A synthetic data set: an ImageFolder tree of JPEGs with the look and the file size of photographs.

It needs numpy and Pillow, but neither torch nor DALI.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..._cores import usable_cores
from ..processes import ProgressBar, in_processes
from .photograph import photograph

MANIFEST = "dataset.json"
UNFINISHED = "dataset.json.part"
FORMAT = 2  # raised when the same arguments begin to give other files
SMALLEST_SIDE_PX = 8
JPEG_QUALITY = 93

_SHAPES, _SCANS = 1, 2  # streams of random numbers beside those of photograph
_PIXELS_PER_PROCESS = 24_000_000  # fewer are written before another process has started
_LEAST_PIXELS = 180_000  # of an image: smaller ones take as long

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Recipe:
    """The parameters that determine the content of a data set."""

    images: int
    size: tuple[int, int]
    classes: int
    seed: int
    progressive: float

    def __post_init__(self) -> None:
        for name in ("images", "classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: there must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be 0 or more")
        if len(self.size) != 2 or min(self.size) < SMALLEST_SIDE_PX:
            raise ValueError(f"size={self.size}: must be (width, height), each at least {SMALLEST_SIDE_PX} px")
        if not 0 <= self.progressive <= 1:
            raise ValueError(f"progressive={self.progressive}: must be a share from 0 to 1")

    def manifest(self) -> dict[str, Any]:
        made_with = {**asdict(self), "size": list(self.size)}
        if not self.progressive:
            del made_with["progressive"]  # as in data sets that were made before it was known
        return {"made_by": "proxyloader.make_dataset", "format": FORMAT, **made_with}

    def path(self, number: int) -> str:
        """Return the path of a photograph in the data set. Labels are assigned round robin."""
        return f"class_{number % self.classes:03d}/img_{number:06d}.jpg"

    def content(self, number: int) -> bytes:
        file = io.BytesIO()
        image = photograph(number, size=self._size(number), classes=self.classes, seed=self.seed)
        is_progressive = np.random.default_rng((self.seed, number, _SCANS)).random() < self.progressive
        image.save(file, "JPEG", quality=JPEG_QUALITY, subsampling="4:2:0", progressive=is_progressive)
        return file.getvalue()

    def _size(self, number: int) -> tuple[int, int]:
        """Return the size of a photograph. Six in ten have the nominal size, others a similar size or another shape."""
        rng = np.random.default_rng((self.seed, number, _SHAPES))
        (width, height), kind = self.size, rng.random()
        if kind < 0.6:
            return width, height
        if kind < 0.75:
            return height, width
        if kind < 0.85:
            return (width + height) // 2, (width + height) // 2
        width, height = (max(SMALLEST_SIDE_PX, round(side * rng.uniform(0.9, 1.1))) for side in self.size)
        return width, height


def make_dataset(
    root: str | os.PathLike[str],
    *,
    images: int = 1024,
    size: tuple[int, int] = (500, 375),
    classes: int = 10,
    seed: int = 0,
    progressive: float = 0.0,
    processes: int | None = None,
    progress: bool = True,
) -> Path:
    """Write a data set for ``torchvision.datasets.ImageFolder``: ``root/class_000/img_000000.jpg`` and so on.

    If the same data set exists already, nothing is written. An interrupted data set is completed. On one machine, with
    one version of numpy and of Pillow, the same arguments give the same bytes for any number of processes. A larger
    ``images`` begins with the same files. A network learns the classes in a few epochs.

    With several processes, a script that calls this needs ``if __name__ == "__main__":``, as for ``multiprocessing``.

    Args:
        root: folder of the data set. It is created if it does not exist.
        images: number of photographs: JPEG, 4:2:0, about 105 KB each at the default size. Labels are assigned round
            robin.
        size: (width, height) of most photographs, in pixels. Others are upright, square, or a little larger or smaller.
        classes: number of classes. Only the first ``images`` classes get a folder.
        seed: seed of all random numbers, at least 0.
        progressive: share of the photographs that are progressive JPEGs, 0 to 1. On the web it is about 0.2.
        processes: number of processes. None: one for each usable core, or fewer for a small data set. With 1, the
            calling process writes the files.
        progress: whether to show a progress bar, if stderr is a terminal.

    Returns:
        ``root``, as a Path.

    Raises:
        ValueError: an argument is out of its range.
        FileExistsError: ``root`` holds something else, or a data set made with other arguments.
    """
    recipe = _Recipe(images, size, classes, seed, progressive)
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes}: there must be at least 1, or None to choose by the number of cores")
    root = Path(root)
    if _is_made(root, recipe):
        log.info("%s: already made, used as it is", root)
        return root
    manifest = json.dumps(recipe.manifest(), indent=2).encode() + b"\n"
    root.mkdir(parents=True, exist_ok=True)
    _write(root / UNFINISHED, manifest)
    _write_pictures(root, recipe, processes, progress)
    _write(root / MANIFEST, manifest)
    (root / UNFINISHED).unlink(missing_ok=True)
    log.info("%s: made", root)
    return root


def _is_made(root: Path, recipe: _Recipe) -> bool:
    """Return whether the data set is complete. Raise FileExistsError if ``root`` holds something else."""
    asked = recipe.manifest()
    if root.exists() and not root.is_dir():
        raise FileExistsError(f"{root}: is a file, and the data set needs a folder. Give another one")
    for name, kind in ((MANIFEST, "a data set"), (UNFINISHED, "an unfinished data set")):
        found = _read_manifest(root / name)
        if found == asked:
            return name == MANIFEST
        if found.get("made_by") == asked["made_by"]:
            differ = [key for key in asked if found.get(key) != asked[key]]
            theirs, ours = (", ".join(f"{key}={side.get(key)}" for key in differ) for side in (found, asked))
            advice = f"Ask for {theirs}, give another folder, or delete this one"
            raise FileExistsError(f"{root}: holds {kind} with {theirs}, and {ours} is asked for. {advice}")
    # Another process that has just begun here may have written its first temporary file.
    entries = root.iterdir() if root.exists() else ()
    names = sorted(path.name for path in entries if not path.name.startswith(UNFINISHED))
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise FileExistsError(f"{root}: holds files that make_dataset did not write ({shown}). Give another folder")
    return False


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of a manifest, or {} if there is none, or the file is of another program."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_pictures(root: Path, recipe: _Recipe, processes: int | None, progress: bool) -> None:
    numbers = range(recipe.images)
    for number in numbers[: recipe.classes]:  # a class without a photograph has no folder: ImageFolder refuses these
        (root / recipe.path(number)).parent.mkdir(exist_ok=True)
    pixels = recipe.images * max(math.prod(recipe.size), _LEAST_PIXELS)
    processes = processes or min(usable_cores(), math.ceil(pixels / _PIXELS_PER_PROCESS))
    write = partial(_write_picture, root, recipe)
    # disable=None: quiet where stderr is no terminal
    with ProgressBar(total=recipe.images, desc=root.name, unit="image", disable=None if progress else True) as bar:
        for _ in in_processes(str(root), write, numbers, processes, chunk_size=8):
            bar.update()


def _write_picture(root: Path, recipe: _Recipe, number: int) -> None:
    path = root / recipe.path(number)
    if not path.exists():
        _write(path, recipe.content(number))


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically. So every existing file is complete, and an interrupted data set can be completed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
