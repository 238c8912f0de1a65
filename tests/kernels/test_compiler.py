"""Compiled kernels: kept in the user's cache, and errors where they cannot be compiled. NVRTC needs no GPU."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from proxyloader.kernels import compiler
from proxyloader.kernels.compiler import KernelError, compile_kernels

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no NVRTC")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "proxyloader"


def compile_for_h100(_: int = 0) -> bytes:
    return compile_kernels("sm_90")


def test_code_is_kept_and_read_again(cache: Path) -> None:
    code = compile_for_h100()
    (kept,) = cache.iterdir()
    assert code.startswith(b"\x7fELF") and kept.read_bytes() == code
    kept.write_bytes(b"kept")
    assert compile_for_h100() == b"kept"


def test_processes_that_compile_at_once_keep_one_file(cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first, second = pool.map(compile_for_h100, range(2))
    (kept,) = cache.iterdir()
    assert first == second == kept.read_bytes()


def test_where_nothing_can_be_written_the_code_is_compiled_each_time(cache: Path) -> None:
    cache.write_text("a file, and no folder")
    assert compile_for_h100().startswith(b"\x7fELF")


def test_an_unknown_architecture_is_an_error_with_the_words_of_the_compiler(cache: Path) -> None:
    with pytest.raises(KernelError, match=r"cannot compile the kernels with --gpu-architecture=sm_1 "):
        compile_kernels("sm_1")
    assert not cache.exists() or not os.listdir(cache)


def test_without_nvrtc_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    compiler._nvrtc.cache_clear()
    try:
        with pytest.raises(KernelError, match=r"libnvrtc\.so\.1 was not found"):
            compile_for_h100()
    finally:
        compiler._nvrtc.cache_clear()
