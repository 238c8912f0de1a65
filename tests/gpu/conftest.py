"""These tests are about GPUs alone."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> None:
    if not torch.cuda.is_available():
        if os.environ.get("PROXYLOADER_REQUIRE_GPU") == "1":
            pytest.fail("PROXYLOADER_REQUIRE_GPU=1, and torch sees no CUDA device")
        pytest.skip("no CUDA device")
    request.getfixturevalue("loaded_decoder")
