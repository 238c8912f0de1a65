"""Batches of ``FileReaderLoader`` lie in DALI's memory, which may not be written again while a GPU still reads it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from proxyloader import FileReaderLoader, pipelines

CYCLES = 20_000_000
"""About 10 ms, in which DALI makes some batches."""

EPOCHS = 5


@pytest.mark.parametrize("on_a_stream_of_its_own", [False, True])
def test_batches_let_go_while_the_gpu_is_behind_keep_their_pictures(photos: Path, on_a_stream_of_its_own: bool) -> None:
    side = torch.cuda.stream(torch.cuda.Stream()) if on_a_stream_of_its_own else contextlib.nullcontext()
    with FileReaderLoader(photos, pipelines.validation, 8, resize=64, size=64, num_threads=2) as loader, side:
        wanted = torch.cat([images.double().sum((1, 2, 3)) for images, _ in loader])
        torch.cuda.synchronize()
        found = []
        for _ in range(EPOCHS):
            for images, _ in loader:
                torch.cuda._sleep(CYCLES)
                found.append(images.double().sum((1, 2, 3)))
                del images
        torch.cuda.synchronize()
        assert torch.equal(torch.cat(found), wanted.repeat(EPOCHS))
