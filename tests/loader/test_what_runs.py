"""Kernels, DALI or torchvision: what runs a transform is decided by its plan and by whether kernels can be compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader import DataLoader, PipelineError
from proxyloader.dali import plan_server
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


@pytest.mark.parametrize(("transforms", "on_gpu", "on_cpu"), OBSTACLES.values(), ids=OBSTACLES)
def test_a_plan_says_why_torchvision_runs_it(transforms: list[Any], on_gpu: str, on_cpu: str) -> None:
    plan = plan_for(v2.Compose(transforms))
    assert (find_obstacle(plan, True), find_obstacle(plan, False)) == (on_gpu, on_cpu)


def options_of(**changed: Any) -> LoaderOptions:
    return LoaderOptions.from_loader(DataLoader([0], device="cpu"), **changed)


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
