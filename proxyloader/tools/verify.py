"""``proxyloader verify``: list the damaged, truncated and foreign files of a dataset."""

import io
import os
import stat
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from .._cores import usable_cores
from ..data.bad_samples import is_system_fault
from ..data.encoded_image import SYSTEM_ADVICE
from ..data.jpeg import find_damage, read_jpeg_header, read_scans
from .processes import ProgressBar, in_processes

MEANINGS = {
    "sound": "no problem was found",
    "damaged": "Pillow decodes it, but a part of the image is wrong or gray",
    "truncated": "the end is missing, or Pillow cannot decode it",
    "clipped": 'convert("RGB") clips its values above 255 to white',
    "foreign": "not an image, or in a format other than its suffix says",
    "unreadable": "the file cannot be read",
}

FILES_PER_TASK = 32
JPEG_FORMATS = {"JPEG", "MPO"}  # MPO: a JPEG with several images, as some cameras write


class Finding(NamedTuple):
    """The result for a file. ``kind`` is a key of ``MEANINGS``; ``reason`` is "" for a sound file."""

    path: str
    kind: str
    reason: str = ""


def verify(folder: Path, processes: int | None = None) -> list[Finding]:
    """Check all image files of a folder and its subfolders. Print the bad ones and a summary; return the bad ones."""
    paths, bad, counts = image_files(folder), list[Finding](), Counter[str]()
    processes = processes or usable_cores()
    for finding in in_processes(folder.name, check_file, paths, processes, FILES_PER_TASK, progress=True):
        counts[finding.kind] += 1
        if finding.kind != "sound":
            bad.append(finding)
            with ProgressBar.external_write_mode():
                print(f"{finding.path}: {finding.kind}: {finding.reason}")
    for kind, count in counts.items():
        print(f"{kind:<10}  {count:>6,}  {MEANINGS[kind]}")
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large images and old formats
        try:
            with Image.open(io.BytesIO(data)) as image:
                expected, actual = Image.registered_extensions()[Path(path).suffix.lower()], str(image.format)
                if expected != actual and not {expected, actual} <= JPEG_FORMATS:
                    return Finding(path, "foreign", f"its suffix says {expected}, but it is {actual}")
                damage: str | None = None  # of a JPEG, "" if it is sound; None if only Pillow can tell
                header = read_jpeg_header(data) if actual in JPEG_FORMATS else None
                if header is not None and header.matches_pillow:
                    scans = read_scans(data, header)
                    damage = find_damage(data[: scans.end]) if scans else "a marker is misplaced, or a scan is missing"
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


def _raise(error: OSError) -> None:
    raise error
