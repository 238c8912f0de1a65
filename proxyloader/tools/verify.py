"""``proxyloader verify``: list the damaged, truncated and foreign files of a dataset."""

from __future__ import annotations

import io
import os
import shutil
import stat
import warnings
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image, UnidentifiedImageError

from .._cores import usable_cores
from ..data.bad_samples import is_system_fault
from ..data.encoded_image import SYSTEM_ADVICE
from ..data.jpeg import find_damage, read_jpeg_header, read_scans
from .files import check_can_be_written
from .processes import ProgressBar, in_processes

Kind = Literal["sound", "damaged", "truncated", "clipped", "foreign", "unreadable"]

MEANINGS: dict[Kind, str] = {
    "sound": "no problem was found",
    "damaged": "Pillow decodes it, but a part of the image is wrong or gray",
    "truncated": "the end is missing, or Pillow cannot decode it",
    "clipped": 'convert("RGB") clips its values above 255 to white',
    "foreign": "not an image, or in a format other than its suffix says",
    "unreadable": "the file cannot be read",
}

FILES_PER_TASK = 32
JPEG_FORMATS = {"JPEG", "MPO"}  # MPO: a JPEG with several images, as some cameras write
APPLE_DOUBLE = b"\0\5\x16\7"  # start of files such as "._name.jpg", where macOS stores metadata on other file systems


class Finding(NamedTuple):
    """The result for a file. ``reason`` is "" for a sound file."""

    path: str
    kind: Kind
    reason: str = ""


def verify(
    folder: Path, processes: int | None = None, sound: Path | None = None, copy: Path | None = None
) -> list[Finding]:
    """Check all image files of a folder and its subfolders. Print the bad ones and a summary; return the bad ones."""
    if copy is not None and copy.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{copy}: the copy must be outside of {folder}")
    if copy is not None and copy.exists() and any(copy.iterdir()):
        raise FileExistsError(f"{copy} is not empty: choose a new or empty folder")
    if sound is not None:
        check_can_be_written(sound)
    paths, bad = image_files(folder), list[Finding]()
    processes = processes or usable_cores()
    for finding in in_processes(folder.name, check_file, paths, processes, FILES_PER_TASK, progress=True):
        if finding.kind != "sound":
            bad.append(finding)
            with ProgressBar.external_write_mode():
                print(f"{finding.path}: {finding.kind}: {finding.reason}")
    sound_paths = sorted({*paths} - {finding.path for finding in bad})
    if sound is not None:
        sound.write_text("".join(f"{path}\n" for path in sound_paths))
    if copy is not None:
        for path in map(Path, sound_paths):
            _link(path, copy / path.relative_to(folder))
    counts = Counter[Kind](finding.kind for finding in bad)
    counts["sound"] = len(sound_paths)
    for kind in counts:
        print(f"{kind:<10}  {counts[kind]:>6,}  {MEANINGS[kind]}")
    return bad


def image_files(folder: Path) -> list[str]:
    """Return the sorted paths of all files that ``ImageFolder`` would load: those in subfolders. Without any, return
    those in the folder itself."""
    from torchvision.datasets.folder import IMG_EXTENSIONS  # imports torch, which the child processes do not need

    walk = os.walk(folder, followlinks=True, onerror=_raise)
    paths = sorted(os.path.join(root, name) for root, _, names in walk for name in names)
    paths = [path for path in paths if path.lower().endswith(IMG_EXTENSIONS)]
    if not paths:
        raise ValueError(f"{folder} has no files with the suffix of an image, such as .jpg or .png")
    return [path for path in paths if Path(path).parent != folder] or paths


def check_file(path: str) -> Finding:
    """Read a file to its end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Finding(path, "unreadable", "it is not a regular file")
        data = Path(path).read_bytes()
    except OSError as error:
        advice = f". {SYSTEM_ADVICE}" if is_system_fault(error) else ""
        return Finding(path, "unreadable", f"{error.strerror or error}{advice}")
    if not data:
        return Finding(path, "truncated", "it is empty")
    if data.startswith(APPLE_DOUBLE):
        return Finding(path, "foreign", "macOS metadata of another file (AppleDouble), not an image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large images and old formats
        try:
            with Image.open(io.BytesIO(data)) as image:
                expected, actual = Image.registered_extensions()[Path(path).suffix.lower()], str(image.format)
                if expected != actual and not {expected, actual} <= JPEG_FORMATS:
                    return Finding(path, "foreign", f"its suffix says {expected}, but it is {actual}")
                damage = _find_jpeg_damage(data) if actual in JPEG_FORMATS else None
                if damage != "":
                    image.load()
                low, high = image.getextrema() if image.mode[0] in "IF" else (0, 255)
                if low < 0 or high > 255:
                    reason = f'values from {low} to {high} in mode {image.mode!r}, which convert("RGB") clips to 0..255'
                    return Finding(path, "clipped", reason)
        except UnidentifiedImageError:
            return Finding(path, "foreign", "Pillow does not recognize the format")
        except MemoryError:
            raise
        except Exception as error:  # plugins raise different exceptions
            return Finding(path, "truncated", f"Pillow cannot decode it: {error}")
    return Finding(path, "damaged", damage) if damage else Finding(path, "sound")


def _find_jpeg_damage(data: bytes) -> str | None:
    """Return the damage of a JPEG, "" if it is sound, or None if only Pillow can tell."""
    header = read_jpeg_header(data)
    if header is None or not header.matches_pillow:
        return None
    scans = read_scans(data, header)
    return "a marker is misplaced, or a scan is missing" if scans is None else find_damage(data[: scans.end])


def _raise(error: OSError) -> None:
    raise error


def _link(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file.resolve(), target)  # not to a symbolic link, which may be relative
    except OSError:  # a different file system, or no support for hard links
        shutil.copy2(file, target)
