"""``examples/imagenet/train.py`` on all GPUs of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from proxyloader.make_dataset import make_dataset
from tests.test_imagenet_example import BACKENDS, EPOCHS, IMAGES, VAL_IMAGES, trained

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_gpu_trains(tmp_path: Path, backend: str) -> None:
    data = tmp_path / "data"
    make_dataset(data / "train", images=IMAGES, size=(96, 72), progress=False)
    make_dataset(data / "val", images=VAL_IMAGES, size=(96, 72), seed=1, progress=False)
    ranks = torch.cuda.device_count()
    options = ["--amp", "float16", "--channels-last", "--batch-size", 32 // ranks, "--epochs", EPOCHS]
    log = trained(data, tmp_path / "out", "--data-backend", backend, *options, ranks=ranks, device="cuda")
    assert {line["images"] for line in log} == {IMAGES} and log[-1]["top1"] > 40
