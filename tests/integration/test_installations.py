"""What the library says where DALI, or a part of it, is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..installations import environment, with_own_dali, without
from ..limits import WAIT_S

LOADER = """
import sys
from torchvision import datasets, transforms
from proxyloader import DataLoader, PipelineError
transform = transforms.Compose([transforms.RandomCrop(8), transforms.ToTensor()])
loader = DataLoader(datasets.ImageFolder(sys.argv[1], transform), 48, device="cpu")
try:
    ((images, labels),) = loader
    print(*images.shape)
except PipelineError as error:
    print(error.code, str(error).splitlines()[0])
"""

SERVER = """
from proxyloader import MissingDaliError
try:
    from proxyloader import ProxyServer
except MissingDaliError as error:
    print(error.code, error)
"""


def said(script: str, photos: Path, folder: Path) -> tuple[str, str]:
    """What a script prints, and the log, where only what is in this folder is installed."""
    command = [sys.executable, "-S", "-c", script, str(photos)]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_without_dali_the_log_and_the_error_name_the_doctor(photos: Path, tmp_path: Path) -> None:
    folder = without(tmp_path / "site", "dali")
    shape, log = said(LOADER, photos, folder)
    assert shape == "48 3 8 8"
    assert (
        "NVIDIA DALI is not installed: torch loads the data, without a speedup. Run `proxyloader doctor` for advice"
        in log
    )
    error, _ = said(SERVER, photos, folder)
    assert error.startswith("missing-dali NVIDIA DALI cannot be imported (No module named 'nvidia.dali')")
    assert error.endswith("`proxyloader doctor` shows what is wrong")


def test_without_nvimagecodec_the_error_says_so_and_names_the_doctor(photos: Path, tmp_path: Path) -> None:
    try:
        folder = with_own_dali(without(tmp_path / "site", "nvimgcodec"))
    except OSError as error:
        pytest.skip(f"the temporary folder cannot share files with the installed DALI: {error}")
    error, _ = said(LOADER, photos, folder)
    assert error.startswith("no-decoder DALI cannot load nvImageCodec, its image decoding library")
    assert "`proxyloader doctor` shows the installed one" in error
