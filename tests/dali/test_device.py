"""Which device images arrive on."""

from __future__ import annotations

import pytest
import torch

from proxyloader.dali.device import check_device, cuda_ordinal


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:3", torch.device("cuda", 1)])
def test_known_devices_are_taken(device: object) -> None:
    check_device(device)


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", "cuda:x", object()])
def test_others_are_refused(device: object) -> None:
    with pytest.raises((ValueError, TypeError), match="device"):
        check_device(device)


def test_a_gpu_that_is_not_there_is_refused_and_the_cpu_has_no_ordinal() -> None:
    with pytest.raises(ValueError, match=r"device='cuda:99', and torch sees .* CUDA device\(s\)"):
        cuda_ordinal("cuda:99")
    assert cuda_ordinal("cpu") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_local_rank_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cuda_ordinal(None) is None
