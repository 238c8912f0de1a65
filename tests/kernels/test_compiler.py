"""Compiled kernels: kept in the user's cache, and errors where they cannot be compiled. NVRTC needs no GPU."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from proxyloader.kernels import compiler
from proxyloader.kernels.compiler import KernelError, compile_kernels

from .. import scripts
from ..limits import WAIT_S

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no NVRTC")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "proxyloader"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is compiled at once."""
    monkeypatch.setattr(compiler, "read_source", lambda: "__global__ void kernel() {}")


def compile_for_h100(_: int = 0) -> bytes:
    return compile_kernels("sm_90")


def test_code_is_kept_and_read_again(cache: Path) -> None:
    code = compile_for_h100()
    (kept,) = cache.iterdir()
    assert code.startswith(b"\x7fELF") and kept.read_bytes() == code
    kept.write_bytes(b"kept")
    assert compile_for_h100() == b"kept"


@pytest.mark.usefixtures("small")
def test_processes_that_compile_at_once_keep_one_file(cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first, second = pool.map(compile_for_h100, range(2))
    (kept,) = cache.iterdir()
    assert first == second == kept.read_bytes()


@pytest.mark.usefixtures("small")
def test_where_nothing_can_be_written_the_code_is_compiled_each_time(cache: Path) -> None:
    cache.write_text("a file, and no folder")
    assert compile_for_h100().startswith(b"\x7fELF")


def test_an_unknown_architecture_is_an_error_with_the_words_of_the_compiler(cache: Path) -> None:
    with pytest.raises(KernelError, match=r"cannot compile the kernels with --gpu-architecture=sm_1 "):
        compile_kernels("sm_1")
    assert not cache.exists() or not os.listdir(cache)


@pytest.fixture
def unasked() -> Iterator[None]:
    """As in a process that has not asked yet whether kernels can be compiled."""
    asked = compiler._nvrtc, compiler.can_compile
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()


@pytest.mark.usefixtures("unasked")
class TestWhetherKernelsCanBeCompiled:
    def test_not_without_nvrtc_and_the_error_says_so(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", "1.0")
        with pytest.raises(KernelError, match=r"libnvrtc\.so\.1 was not found"):
            compile_for_h100()
        assert not compiler.can_compile() and "libnvrtc.so.1 was not found" in caplog.text

    @pytest.mark.parametrize(("gpus", "unknown"), [({90}, []), ({80, 90}, []), ({80, 123}, ["sm_123"])], ids=str)
    def test_for_gpus_that_nvrtc_knows_and_of_others_it_is_said_once(
        self, gpus: set[int], unknown: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(compiler, "_gpu_architectures", lambda: gpus)
        assert [compiler.can_compile() for _ in range(2)] == [not unknown] * 2
        assert re.findall(r"sm_\d+", caplog.text) == unknown and len(caplog.records) == len(unknown)

    def test_is_asked_without_initializing_cuda(self) -> None:
        """So a forked child can use CUDA. It can't on a CPU, but there it is asked, too."""
        script = "import torch; from proxyloader.kernels import compiler; compiler.can_compile();"
        script += "print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork())"
        assert scripts.run(script, timeout_s=WAIT_S).stdout == "False False\n"
