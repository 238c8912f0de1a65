"""The kernels need a compiler."""

from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture(autouse=True)
def _compiler() -> None:
    """Skip where there is no g++, except in CI."""
    if not shutil.which("g++") and "CI" not in os.environ:
        pytest.skip("no g++")
