"""``proxyloader verify``: read a data set, and list the image files that are damaged, truncated or of another kind."""

from __future__ import annotations

import io
import os
import shutil
import stat
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, UnidentifiedImageError
from rich.console import Console
from rich.table import Table

from .._cores import usable_cores
from ..data.bad_samples import is_system_fault
from ..data.encoded_image import SYSTEM_ADVICE
from ..data.jpeg import find_damage, read_jpeg_header, read_scans
from .files import check_can_be_written
from .processes import ProgressBar, in_processes

Kind = Literal["sound", "damaged", "truncated", "clipped", "foreign", "unreadable"]

MEANINGS: dict[Kind, str] = {
    "sound": "read to the end without a warning",
    "damaged": "Pillow decodes it, but a part of the picture is wrong or grey",
    "truncated": "the end is missing, or Pillow cannot decode it",
    "clipped": 'convert("RGB") makes its values above 255 white',
    "foreign": "not an image, or of another format than its name says",
    "unreadable": "the system cannot read it",
}

FILES_PER_TASK = 32
JPEG_FORMATS = {"JPEG", "MPO"}
"""Pillow's name for a JPEG of several pictures, as some cameras write, is MPO."""

APPLE_DOUBLE = b"\0\5\x16\7"
"""Start of the files named "._name.jpg" in which macOS keeps metadata on other file systems."""


@dataclass(frozen=True)
class Finding:
    """What was found of one file. ``reason`` is "" for a sound file."""

    path: str
    kind: Kind
    reason: str = ""


def verify(
    folder: Path, *, processes: int | None = None, sound: Path | None = None, copy: Path | None = None
) -> list[Finding]:
    """Read all image files of a folder to their ends. Print the bad ones and a table, and return the bad ones.

    The files are those with the suffixes that ``ImageFolder`` reads, in all folders below.

    Args:
        folder: root of the data set.
        processes: number of processes that read. None: one for each usable core.
        sound: file to write the paths of the sound files to, one in a line.
        copy: folder for a copy of the data set without the bad files. It has hard links where that is possible.

    Raises:
        ValueError: the folder has no image files, or ``copy`` is in it.
        OSError: the folder cannot be read, or a result cannot be written.
    """
    if copy is not None and copy.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{copy}: it is in {folder}, of which it is to be a copy. Give a folder outside of it")
    if copy is not None and copy.exists() and any(copy.iterdir()):
        raise FileExistsError(f"{copy}: it is not empty. Give a new or an empty folder")
    if sound is not None:
        check_can_be_written(sound)
    paths, console, bad = image_files(folder), Console(soft_wrap=True), list[Finding]()
    with ProgressBar(total=len(paths), desc=folder.name, unit="image", disable=None) as bar:
        for finding in in_processes(str(folder), look_at, paths, processes or usable_cores(), FILES_PER_TASK):
            bar.update()
            if finding.kind != "sound":
                bad.append(finding)
                with bar.external_write_mode():
                    console.print(f"{finding.path}: {finding.kind}: {finding.reason}", markup=False, highlight=False)
    wrong = {finding.path for finding in bad}
    sound_paths = [path for path in paths if path not in wrong]
    if sound is not None:
        sound.write_text("".join(f"{path}\n" for path in sound_paths))
    if copy is not None:
        for path in sound_paths:
            _link(Path(path), copy / Path(path).relative_to(folder))
    console.print(_table(len(sound_paths), bad))
    return bad


def image_files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder that have a suffix which ``ImageFolder`` reads, in order."""
    from torchvision.datasets.folder import IMG_EXTENSIONS  # not in the processes that read, as it imports torch

    found: list[str] = []
    for root, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        folders.sort()
        found += [os.path.join(root, name) for name in sorted(names) if name.lower().endswith(IMG_EXTENSIONS)]
    if not found:
        raise ValueError(f"{folder}: it has no file with the suffix of an image, such as .jpg or .png")
    return found


def look_at(path: str) -> Finding:
    """Read one file to its end, and return what it is."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Finding(path, "unreadable", "it is not a regular file")
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        advice = f". {SYSTEM_ADVICE}" if is_system_fault(error) else ""
        return Finding(path, "unreadable", f"{error.strerror or error}{advice}")
    if not data:
        return Finding(path, "truncated", "it is empty")
    if data.startswith(APPLE_DOUBLE):
        return Finding(path, "foreign", "macOS metadata of another file (AppleDouble), not an image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about large pictures and old formats
        try:
            with Image.open(io.BytesIO(data)) as image:
                named, found = Image.registered_extensions()[Path(path).suffix.lower()], str(image.format)
                if named != found and not {named, found} <= JPEG_FORMATS:
                    return Finding(path, "foreign", f"its name says {named}, and it is {found}")
                damage = _damage_of_jpeg(data) if found in JPEG_FORMATS else None
                if damage != "":
                    image.load()
                if image.mode[0] in "IF" and not 0 <= image.getextrema()[0] <= image.getextrema()[1] <= 255:
                    low, high = image.getextrema()
                    reason = f'values from {low} to {high} in mode {image.mode!r}, which convert("RGB") clips to 0..255'
                    return Finding(path, "clipped", reason)
        except UnidentifiedImageError:
            return Finding(path, "foreign", f"{len(data)} bytes in no image format that Pillow knows")
        except MemoryError:
            raise
        except Exception as error:  # each format raises its own exceptions
            return Finding(path, "truncated", f"Pillow cannot decode it: {error}")
    return Finding(path, "damaged", damage) if damage else Finding(path, "sound")


def _damage_of_jpeg(data: bytes) -> str | None:
    """Return what is wrong with a JPEG; "" if nothing is, and None if Pillow must tell."""
    header = read_jpeg_header(data)
    if header is None or not header.matches_pillow:
        return None
    scans = read_scans(data, header)
    return "a marker is misplaced, or a scan is missing" if scans is None else find_damage(data[: scans.end])


def _raise(error: OSError) -> None:
    raise error


def _link(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file.resolve(), to)  # not to a symbolic link, which may be relative
    except OSError:  # another file system, or one without hard links
        shutil.copy2(file, to)


def _table(sound: int, bad: Sequence[Finding]) -> Table:
    counts: Counter[Kind] = Counter(finding.kind for finding in bad)
    counts["sound"] = sound
    table = Table("", "files", "", box=None, show_header=False)
    for kind, meaning in MEANINGS.items():
        if counts[kind]:
            table.add_row(kind, f"{counts[kind]:,}", meaning)
    return table
