"""Python environments that lack a package, or have another in its place: folders for ``PYTHONPATH``."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import proxyloader

SITE = Path(sysconfig.get_path("purelib"))


def without(folder: Path, *names: str) -> Path:
    """A folder with links to all that is installed, but for what these names are a part of: ``nvidia/dali``."""
    (folder / "nvidia").mkdir(parents=True)
    for path in [*SITE.iterdir(), *(SITE / "nvidia").iterdir()]:
        name = path.relative_to(SITE).as_posix()
        if name != "nvidia" and path.suffix != ".pth" and not any(each in name for each in names):
            (folder / name).symlink_to(path)
    return folder


def with_own_dali(folder: Path) -> Path:
    """The same folder with DALI in files of its own, for DALI looks for its libraries from where it is itself."""
    (folder / "nvidia" / "dali").unlink()
    shutil.copytree(SITE / "nvidia" / "dali", folder / "nvidia" / "dali", copy_function=os.link)
    return folder


def stand_in(folder: Path, distribution: str, version: str, code: str) -> Path:
    """A folder with an installed build of DALI, of which importing runs ``code``."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
    module = folder / "nvidia" / "dali" / "__init__.py"
    text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    for path, content in ((metadata, text), (module, code)):
        path.parent.mkdir(parents=True)
        path.write_text(content)
    return folder


def environment(*folders: Path, **more: str) -> Mapping[str, str]:
    """The environment of ``python -S``, which finds nothing but what is in these folders, and this project."""
    paths = [*folders, Path(proxyloader.__file__).parents[1]]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | more
