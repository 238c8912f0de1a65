"""Datasets of pictures that show from outside how far the workers are, or hold them where they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchvision.datasets import ImageFolder

from ..limits import WAIT_S
from .roads import BATCH, Road


class Counted(ImageFolder):
    """Notes in the file ``log`` each picture that was read: one byte for each."""

    log: str

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        with open(self.log, "ab", buffering=0) as file:
            file.write(b".")
        return sample


class Heavy(Counted):
    """Gives a long text with each picture, so that a few batches fill the pipe to the training process."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), "x" * 100_000)


class Gated(ImageFolder):
    """Waits before picture 16 until somebody opens the named pipe ``gate`` for writing."""

    gate: str

    def __getitem__(self, index: int) -> Any:
        if index == 16:
            with open(self.gate, "rb"):
                pass
        return super().__getitem__(index)


def wait_until_read(log: Path, pictures: int) -> None:
    """Wait until the workers of a ``Counted`` have read so many."""
    deadline = time.monotonic() + WAIT_S
    while not log.exists() or log.stat().st_size < pictures:
        assert time.monotonic() < deadline, f"the workers read no more; {pictures} pictures were asked for"
        time.sleep(0.005)


def runs_under_way(road: Road, loader: Any) -> int:
    """How many batches DALI works on or holds ready."""
    queues = [road.server.runs] if road.server is not None else list(loader._servers.queues.values())
    return sum(queue.num_runs for queue in queues)


class Batches:
    """A batch sampler of any batches that says that they are of the pipeline's size."""

    batch_size = BATCH

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)
