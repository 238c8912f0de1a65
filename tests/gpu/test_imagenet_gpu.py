"""``examples/imagenet/train.py`` on all GPUs of the host."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from ..scripts import command_line
from ..test_examples import make_parts
from ..test_imagenet_example import BACKENDS, EPOCHS, IMAGES, SCRIPT, VAL_IMAGES, trained
from ..tiers import by_default


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", by_default(dict(zip(BACKENDS, BACKENDS)), "proxy", "dali"))
def test_every_gpu_trains(tmp_path: Path, backend: str) -> None:
    data = make_parts(tmp_path / "data", IMAGES, VAL_IMAGES, size=(96, 72))
    ranks = torch.cuda.device_count()
    options = ["--amp", "float16", "--channels-last", "--batch-size", 32 // ranks, "--epochs", EPOCHS]
    log = trained(data, tmp_path / "out", "--data-backend", backend, *options, ranks=ranks, device="cuda")
    assert {line["images"] for line in log} == {IMAGES} and log[-1]["top1"] > 40


@pytest.mark.parametrize("backend", ["proxy", "dali"])
def test_the_first_batch_is_on_the_gpu_as_the_model_wants_it(photos: Path, tmp_path: Path, backend: str) -> None:
    for part in ("train", "val"):
        (tmp_path / part).symlink_to(photos)
    options = ["--batch-size", 16, "--amp", "float16", "--channels-last", "--workers", 1]
    with command_line(SCRIPT, tmp_path, *options):
        example = runpy.run_path(str(SCRIPT))
        train_loader, _ = example["BACKENDS"][backend](example["parse_args"](), example["join_world"]())
    images, labels = next(iter(train_loader))
    assert images.shape == (16, 3, 224, 224) and images.is_cuda and images.dtype == torch.float16
    assert labels.shape == (16,)
