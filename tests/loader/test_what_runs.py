"""Kernels, DALI or torchvision: what runs a transform is decided by its plan and by whether kernels can be compiled."""

from __future__ import annotations

import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1

from proxyloader import DataLoader, PipelineError
from proxyloader.dali import plan_server
from proxyloader.loader import feed
from proxyloader.loader.options import LoaderOptions

from ..outcomes import raises


def test_the_transform_that_has_no_kernel_is_named_before_the_dataset_is_read(
    folder: ImageFolder, with_kernels: None
) -> None:
    folder.transform = v1.Compose([v1.ColorJitter(0.3), v1.ToTensor()])
    assert "Brightness" not in DataLoader(folder).backend and "DALI on" in DataLoader(folder).backend
    folder.transform = v1.Compose([v1.ToTensor(), v1.RandomErasing(), v1.RandomVerticalFlip()])
    assert DataLoader(folder).backend == "torch: RandomVerticalFlip: no CUDA kernel for Flip after erasing"


def test_kernels_that_cannot_be_compiled_are_an_error_that_says_what_to_do(
    with_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "cuda_ordinal", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (0, 1))
    monkeypatch.setattr(plan_server, "get_decoder", lambda *args: None)
    with raises(PipelineError, code="no-kernels") as caught:
        feed.PlanServers(LoaderOptions.from_loader(DataLoader([0], device="cpu")), 4, 4).serve(None)
    assert "cannot compile the kernels" in str(caught.value) and "translate=False" in str(caught.value)
