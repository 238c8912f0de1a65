"""Where the kernels run: emulated on the CPU, and on a GPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from .emulation import where


@pytest.fixture(autouse=True)
def _kernels_run_on(device: str) -> Iterator[None]:
    """Skip the emulation where there is no g++, except in CI."""
    if device == "cpu" and not shutil.which("g++") and "CI" not in os.environ:
        pytest.skip("no g++")
    where["device"] = device
    yield
    where["device"] = "cpu"
