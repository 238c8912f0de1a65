"""These tests are about GPUs alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> None:
    if not torch.cuda.is_available():
        if os.environ.get("PROXYLOADER_REQUIRE_GPU") == "1":
            pytest.fail("PROXYLOADER_REQUIRE_GPU=1, and torch sees no CUDA device")
        pytest.skip("no CUDA device")
    request.getfixturevalue("loaded_decoder")
