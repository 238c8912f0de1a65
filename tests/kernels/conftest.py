"""Where the kernels run: emulated on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .emulation import skip_without_compiler, where


@pytest.fixture(autouse=True)
def _kernels_run_on(device: str) -> Iterator[None]:
    if device == "cpu":
        skip_without_compiler()
    where["device"] = device
    yield
    where["device"] = "cpu"


@pytest.fixture(autouse=True)
def _grids_round(grids_round_each_product: None) -> None:
    """In all tests of kernels."""
