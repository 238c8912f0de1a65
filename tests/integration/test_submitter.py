"""Runs that are started beside the model: in a loop of long steps a thread does it, and all else is the same."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchvision import transforms

from proxyloader import DataLoader, EncodedImage, ImageError
from proxyloader.loader.feed import LONG_STEP_S

from .. import scripts
from ..faults import Spelled, all_numbers, await_true, in_fork, numbers_of
from ..limits import WAIT_S
from .roads import BATCH, PICTURES, TRANSFORM

TO_TENSOR = transforms.ToTensor()
ALL = list(range(PICTURES))
STEP_S = 3 * LONG_STEP_S


def loader_of(root: Path, device: str, **arguments: Any) -> Any:
    return DataLoader(Spelled(root), BATCH, num_workers=2, device=device, **arguments)


def run_starters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("proxyloader-run-starter")]


def slowly(batches: Any) -> Iterator[Any]:
    """A loop with a model: each step takes a while, and in the end waits."""
    for batch in batches:
        time.sleep(STEP_S)
        yield batch


def test_a_loop_of_long_steps_sees_each_picture_and_leaves_no_thread(spelled_root: Path, device: str) -> None:
    loader = loader_of(spelled_root, device, shuffle=True)
    for _ in range(2):
        seen, threads = [], set()
        for batch in slowly(loader):
            seen += numbers_of(batch)
            threads |= {thread.name for thread in run_starters()}
        assert sorted(seen) == ALL
        assert len(threads) == 1, "one thread starts what is not urgent"
    await_true(lambda: not run_starters())  # which go with their loop


def test_a_loop_of_short_steps_needs_no_thread(spelled_root: Path, device: str) -> None:
    for _ in loader_of(spelled_root, device):
        pass
    assert not run_starters()


def test_what_is_not_urgent_is_under_way_before_it_is_asked_for(spelled_root: Path, device: str) -> None:
    batches = iter(loader_of(spelled_root, device))
    for at in range(8):
        next(batches)
        time.sleep(STEP_S)
        in_thread = [fed.starting for fed in batches._feed._in_flight if fed.starting is not None]
        wait(in_thread, timeout=WAIT_S)
        assert all(len(fed.pipeline_runs) == 1 and not fed.pending for fed in batches._feed._in_flight)
        assert in_thread or at < 3


def test_the_batches_are_those_of_a_loop_of_short_steps(spelled_root: Path, device: str) -> None:
    def found(wrapper: Any) -> list[torch.Tensor]:
        torch.manual_seed(5)
        dataset = Spelled(spelled_root, transform=transforms.Compose([transforms.RandomResizedCrop(32), TO_TENSOR]))
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=2, device=device)
        return [images.cpu() for _ in range(2) for images, _ in wrapper(loader)]

    assert all(map(torch.equal, found(slowly), found(iter)))


def test_an_error_stays_with_its_batch(spelled_root: Path, tmp_path: Path, device: str) -> None:
    dataset = Spelled(spelled_root)
    bad = 6 * BATCH + 1
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    dataset.samples[bad] = str(tmp_path / "bad.jpg"), dataset.samples[bad][1]
    batches, given, errors = iter(DataLoader(dataset, BATCH, num_workers=2, device=device)), [], []
    while True:
        time.sleep(STEP_S)
        try:
            given.append(next(batches)[1].tolist())
        except StopIteration:
            break
        except ImageError as error:
            errors.append(error.index)
    assert errors == [bad]
    assert given == [list(range(k * BATCH, (k + 1) * BATCH)) for k in range(12) if k != 6]


@pytest.mark.parametrize("at", [0, 3, 4, 5])
def test_a_break_forgets_what_is_being_started(at: int, spelled_root: Path, device: str) -> None:
    loader = loader_of(spelled_root, device, persistent_workers=True)
    for _ in range(5):
        for k, batch in enumerate(loader):
            numbers_of(batch)
            if k == at:
                break
            time.sleep(STEP_S)
    assert all_numbers(loader) == ALL


def test_a_fork_finds_dali_at_rest(spelled_root: Path, device: str) -> None:
    """Also where the thread is about to start a run: it waits until the fork is over."""
    batches = iter(loader_of(spelled_root, device))
    for _ in range(8):
        numbers_of(next(batches))
        time.sleep(STEP_S)
        assert in_fork(lambda: batches.close()) == 0
    assert sum(1 for _ in batches) == 4


SCRIPT = """
import sys, time
from torchvision import transforms
from torchvision.datasets import ImageFolder
from proxyloader import DataLoader

if __name__ == "__main__":
    dataset = ImageFolder(sys.argv[1], transforms.ToTensor())
    batches = iter(DataLoader(dataset, 4, num_workers=2, device=sys.argv[2]))
    for _ in range(5):
        next(batches)
        time.sleep(0.05)
    next(batches)
    assert any(fed.starting is not None for fed in batches._feed._in_flight)
"""


def test_a_script_ends_with_an_iterator_that_is_half_way(spelled_root: Path, device: str) -> None:
    done = scripts.run(SCRIPT, spelled_root, device, timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr and "Exception" not in done.stderr, done.stderr


class Gated(Dataset[Any]):
    """One photograph, which the second batch has to wait for."""

    def __init__(self, path: Path, transform: Any, gate: Any) -> None:
        self.path, self.transform, self.gate = path, transform, gate

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            self.gate.wait(WAIT_S)
        return self.transform(EncodedImage.open(self.path))


def test_nobody_waits_for_a_worker_that_takes_longer_than_dali(photos: Path) -> None:
    path = next(photos.rglob("*.jpg"))
    handed_out = multiprocessing.get_context("fork").Event()
    loader = DataLoader(
        Gated(path, TRANSFORM, handed_out),
        4,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
        device="cpu",
    )
    for _ in range(2):
        handed_out.clear()
        batches = iter(loader)
        next(batches)
        assert not batches._feed._in_flight, "the first batch is handed out before the second is there"
        handed_out.set()
        assert len(list(batches)) == 2
