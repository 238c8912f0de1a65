"""Kernels, DALI or torchvision: what runs a transform is decided by its plan and by whether kernels can be compiled."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader import DataLoader, PipelineError
from proxyloader.dali import plan_server
from proxyloader.kernels import compiler
from proxyloader.kernels.operations import NO_KERNELS, find_obstacle
from proxyloader.loader import feed
from proxyloader.loader.options import LoaderOptions

from ..outcomes import raises
from ..plans import plan_for

NO_FLIP = "no CUDA kernel for Flip after erasing"

OBSTACLES: dict[str, tuple[list[Any], str, str]] = {
    "training": ([v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(0.5, 0.2)], "", ""),
    "evaluation": ([v1.Resize(256), v1.CenterCrop(224), v1.PILToTensor()], "", ""),
    "colors": ([v1.ColorJitter(0.3), v1.ToTensor()], "", NO_KERNELS),
    "a choice": ([v1.RandomApply([v1.CenterCrop(9)]), v1.ToTensor()], "", NO_KERNELS),
    "nearest": ([v1.Resize(200, v1.InterpolationMode.NEAREST), v1.ToTensor()], "", NO_KERNELS),
    "a flip after erasing": ([v1.ToTensor(), v1.RandomErasing(), v1.RandomVerticalFlip()], NO_FLIP, NO_KERNELS),
}


@pytest.mark.parametrize(("transforms", "with_kernels", "without"), OBSTACLES.values(), ids=OBSTACLES)
def test_a_plan_says_why_torchvision_runs_it(transforms: list[Any], with_kernels: str, without: str) -> None:
    plan = plan_for(v2.Compose(transforms))
    assert (find_obstacle(plan, True), find_obstacle(plan, False)) == (with_kernels, without)


@pytest.fixture
def unasked() -> Any:
    """As in a process that has not asked yet whether kernels can be compiled."""
    compiler.can_compile.cache_clear()
    yield
    compiler.can_compile.cache_clear()


@pytest.mark.usefixtures("unasked")
class TestCanCompile:
    def test_for_the_gpus_that_nvrtc_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiler, "_compiler_architectures", lambda: {80, 90})
        monkeypatch.setattr(compiler, "_gpu_architectures", lambda: {90})
        assert compiler.can_compile()

    def test_not_for_others_nor_without_nvrtc_and_it_is_said_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(compiler, "_compiler_architectures", lambda: {80})
        monkeypatch.setattr(compiler, "_gpu_architectures", lambda: {80, 123})
        assert not compiler.can_compile() and not compiler.can_compile()
        (record,) = caplog.records
        assert "sm_123" in record.getMessage()
        compiler.can_compile.cache_clear()
        monkeypatch.undo()

        def no_nvrtc() -> Any:
            raise compiler.KernelError("libnvrtc was not found")

        monkeypatch.setattr(compiler, "_nvrtc", no_nvrtc)
        assert not compiler.can_compile() and "libnvrtc was not found" in caplog.text

    def test_is_asked_without_initializing_cuda(self) -> None:
        """So a forked child can use CUDA. It can't on a CPU, but there it is asked, too."""
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(_asks_and_is_uninitialized)


def _asks_and_is_uninitialized() -> bool:
    compiler.can_compile()
    return not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()  # type: ignore[no-untyped-call]


def options_of(**changed: Any) -> LoaderOptions:
    return LoaderOptions.from_loader(DataLoader([0], device="cpu"), **changed)


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoaderOptions, "on_gpu", True)
    monkeypatch.setattr(LoaderOptions, "has_kernels", True)


def test_the_transform_that_has_no_kernel_is_named_before_the_dataset_is_read(
    folder: ImageFolder, with_kernels: None
) -> None:
    folder.transform = v1.Compose(OBSTACLES["colors"][0])
    assert "Brightness" not in DataLoader(folder).backend and "DALI on" in DataLoader(folder).backend
    folder.transform = v1.Compose(OBSTACLES["a flip after erasing"][0])
    assert DataLoader(folder).backend == f"torch: RandomVerticalFlip: {NO_FLIP}"


def test_kernels_that_cannot_be_compiled_are_an_error_that_says_what_to_do(
    with_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "cuda_ordinal", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (0, 1))
    monkeypatch.setattr(plan_server, "get_decoder", lambda options: None)
    with raises(PipelineError, code="no-kernels") as caught:
        feed.PlanServers(4).serve(None, options_of())
    assert "cannot compile the kernels" in str(caught.value) and "translate=False" in str(caught.value)
