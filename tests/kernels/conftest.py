"""Where the kernels run: emulated on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .emulation import skip_without_compiler, where


@pytest.fixture(autouse=True)
def _kernels_run_on(device: str) -> Iterator[None]:
    if device == "cpu":
        skip_without_compiler()
    where["device"] = device
    yield
    where["device"] = "cpu"


@pytest.fixture(autouse=True)
def _grids_round_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision multiplies the grids of warps with MKL, which fuses multiply and add on some CPUs. The kernels round
    each product, as MKL does on the others. A pixel on the boundary of two may differ, so it is held to the latter."""

    def bmm(grid: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        x, y, one = (grid[..., k : k + 1] * theta[:, k : k + 1] for k in range(3))
        return x + y + one

    monkeypatch.setattr(torch.Tensor, "bmm", bmm)
