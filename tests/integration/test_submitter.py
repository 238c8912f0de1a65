"""Runs that are started beside the model: in a loop of long steps a thread does it, and all else is the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import transforms

from proxyloader import DataLoader, ImageError
from proxyloader.loader.feed import LONG_STEP_S

from ..faults import Spelled, all_numbers, await_true, in_fork, numbers_of
from ..outcomes import outcomes
from .roads import BATCH, PICTURES

TO_TENSOR = transforms.ToTensor()
ALL = list(range(PICTURES))
STEP_S = 3 * LONG_STEP_S


def loader_of(root: Path, device: str, **arguments: Any) -> Any:
    return DataLoader(Spelled(root), BATCH, num_workers=2, device=device, **arguments)


def run_starters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("proxyloader-run-starter")]


def slowly(batches: Any) -> Iterator[Any]:
    """A loop with a model: each step takes a while, and in the end waits."""

    def trained(batch: Any) -> Any:
        time.sleep(STEP_S)
        return batch

    return map(trained, batches)


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


def test_the_batches_are_those_of_a_loop_of_short_steps(spelled_root: Path, device: str) -> None:
    def found(wrapper: Any) -> list[torch.Tensor]:
        torch.manual_seed(5)
        dataset = Spelled(spelled_root, transform=transforms.Compose([transforms.RandomResizedCrop(32), TO_TENSOR]))
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=2, device=device)
        return [images.cpu() for _ in range(2) for images, _ in wrapper(loader)]

    assert all(map(torch.equal, found(slowly), found(iter)))


def test_an_error_stays_with_its_batch(spelled_root: Path, tmp_path: Path, device: str) -> None:
    loader = loader_of(spelled_root, device)
    bad = 6 * BATCH + 1
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    loader.dataset.samples[bad] = str(tmp_path / "bad.jpg"), 0
    found = outcomes(slowly(loader))
    error = found.pop(6)
    assert isinstance(error, ImageError) and error.index == bad
    assert all_numbers(found) == [*range(6 * BATCH), *range(7 * BATCH, PICTURES)]


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
