"""Inputs that DALI cannot decode or take: an error of the batch that holds them, and of no other, now or later.

And workers that are lost: every wait ends, and nothing is mixed up. Rows 3, 4 and 5 of the table of faults.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import get_worker_info
from torchvision.datasets import ImageFolder

from proxyloader import ImageError, InputError, PipelineError

from ..faults import await_true, in_thread, without_torchs_signal
from ..limits import GIVEN_UP_S, WAIT_S
from ..outcomes import outcomes, raises, without_frames
from ..side_by_side import Failed, assert_as_torch, one_epoch
from .roads import (
    BATCH,
    BATCHES,
    PICTURES,
    Faulty,
    Gated,
    Road,
    assert_batches_match,
    assert_only_these_fail,
    assert_pictures_match,
    on_roads,
    on_servers,
    picture_folder,
    take,
)
from .test_processes import directly

DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: np.random.default_rng(3).bytes(len(data)),
    lambda data: b"",
    lambda data: data[:100],  # cut in the header
    # Cut in the scan. What a GPU's engine makes of what is missing is its own affair, unless Pillow is asked first.
    lambda data: data[: data.rindex(b"\xff\xda") + 40],
]
OBJECTS = np.array([object()])
OTHERS = {
    "another dtype": np.float64([1, 2]),
    "a smaller dtype of another kind": np.int8([1, 2]),
    "one more dimension": np.uint8([[1, 2]]),
    "three more": np.zeros((2, 3, 4, 1), np.float32),
    "text": "text",
    "nothing": None,
    "objects": OBJECTS,
    "a number": 7,
    "a boolean": np.array(True),
    "a dict": {"a": 1},
    "a tensor": torch.zeros(3),
}
FAULTS: dict[str, dict[int, Any]] = {
    "damaged files": {BATCH * (2 * k + 1) + k: how for k, how in enumerate(DAMAGES)},
    "other inputs, first in their batch": {BATCH * at: other for at, other in enumerate(OTHERS.values(), 1)},
    "other inputs, within their batch": {BATCH * at + 2: other for at, other in enumerate(OTHERS.values(), 1)},
    # The first, a middle and the last sample of their batches, and two batches in a row.
    "exceptions": {
        number: KeyError(f"sample {number}")
        for number in (BATCH, 3 * BATCH + 2, 5 * BATCH - 1, 8 * BATCH + 1, 8 * BATCH + 2, 9 * BATCH)
    },
}
"""What there is at which index: a function that damages the file, an exception, or what a transform is given."""


OTHER_EXECUTORS = (", old executor", ", in the calling thread")


def hurt(dataset: ImageFolder, *numbers: int, how: Callable[[bytes], bytes] = DAMAGES[0]) -> None:
    for number in numbers:
        path = Path(dataset.samples[number][0])
        path.write_bytes(how(path.read_bytes()))


def error_kind(road: Road) -> type[Exception]:
    return ImageError if road.name == "compiled" else PipelineError


def assert_told(error: Any, road: Road, number: int, fault: Any, path: str) -> None:
    """The error is of the class, and says what, that this road promises for the fault at an index."""
    start = number // BATCH * BATCH
    batch = [start, start + 1, start + 2, start + 3]
    if isinstance(fault, Exception):
        assert isinstance(error, KeyError) and "sample" in str(error), error
    elif callable(fault):
        assert isinstance(error, error_kind(road)), error
        if road.name == "compiled":
            assert f"dataset[{number}]" in str(error) and path in str(error)
        else:
            assert error.code == "failed"
            assert road.name == "produced" or (error.indices == batch and f"dataset indices {batch}" in str(error))
    elif road.name == "compiled":
        assert isinstance(error, TypeError)  # torchvision's
    else:
        is_of_one_sample = type(fault) in (str, dict, type(None)) or fault is OBJECTS
        assert isinstance(error, InputError) and error.code == ("wrong-input" if is_of_one_sample else "wrong-kind")
        assert error.index == (number if is_of_one_sample and road.name != "produced" else None)


def test_a_fault_is_an_error_of_its_own_batch_and_of_no_other(road: Road, root: Path, start_method: str) -> None:
    for faults in FAULTS.values():
        if road.device == "cuda" and road.server is not None:
            faults = {number: fault for number, fault in faults.items() if fault is not DAMAGES[3]}
        dataset = road.dataset(Faulty, root, faults={k: each for k, each in faults.items() if not callable(each)})
        for number in faults.keys() - dataset.faults:
            hurt(dataset, number, how=faults[number])
        arguments: dict[str, Any] = dict(timeout=WAIT_S, multiprocessing_context=start_method)
        persistent = road.loader(dataset, num_workers=1, persistent_workers=True, **arguments)
        for loader in (road.loader(dataset), persistent, persistent):
            found = outcomes(loader)
            assert_only_these_fail(found, {number // BATCH for number in faults})
            for number, fault in faults.items():
                assert_told(found[number // BATCH], road, number, fault, dataset.samples[number][0])
        shutil.copytree(road.root, root, dirs_exist_ok=True)
        assert_batches_match(road.loader())


@on_roads(*(f"{name}{variant}" for name in ("server", "produced") for variant in ("", *OTHER_EXECUTORS)))
def test_a_corrupt_picture_fails_its_own_batch_under_any_executor(road: Road, root: Path) -> None:
    dataset = road.dataset(root=root)
    hurt(dataset, BATCH * 6)
    for workers in (0, 1, 1):
        assert_only_these_fail(outcomes(road.loader(dataset, num_workers=workers)), {6}, PipelineError)


class LateFirstBatch(ImageFolder):
    """The first worker holds its first batch back until the other has sent its own and begun the next."""

    overtaken: Any

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if index == 3 * BATCH:
            self.overtaken.set()
        elif info is not None and info.id == 0 and not self.overtaken.wait(WAIT_S):
            raise TimeoutError("the other worker sent nothing")
        return super().__getitem__(index)


def overtaking(road: Road, root: Path, start_method: str) -> Any:
    """With a corrupt picture in the batch that overtakes."""
    overtaken = multiprocessing.get_context(start_method).Event()
    dataset = road.dataset(LateFirstBatch, root, overtaken=overtaken)
    hurt(dataset, BATCH + 2)
    return dataset


def test_a_corrupt_picture_that_overtakes_a_batch_does_not_fail_it(road: Road, root: Path, start_method: str) -> None:
    dataset = overtaking(road, root, start_method)
    loader = road.loader(dataset, num_workers=2, multiprocessing_context=start_method)
    assert_only_these_fail(outcomes(loader), {1}, error_kind(road))


def test_a_corrupt_picture_of_an_abandoned_batch_is_no_others_error(road: Road, root: Path, start_method: str) -> None:
    loader = road.loader(
        overtaking(road, root, start_method),
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    take(loader, 1)
    shutil.copytree(road.root, root, dirs_exist_ok=True)
    for _ in range(2):
        assert_batches_match(loader)
    del loader
    assert_batches_match(road.loader())


@pytest.mark.parametrize("workers", [0, 2])
def test_what_dali_does_not_take_is_given_to_torchvision_with_its_errors(spelled_root: Path, workers: int) -> None:
    def build(kind: Any) -> Any:
        dataset = picture_folder(spelled_root, kind=Faulty)
        dataset.faults = {BATCH * at: other for at, other in enumerate(OTHERS.values(), 1)}
        dataset.faults[3] = Image.new("L", (50, 40), 99).convert("RGB")  # and what it takes, but not as a file
        return kind(dataset, BATCH, num_workers=workers)

    seen = assert_as_torch(build, one_epoch)["epochs"][0]["batches"]
    assert [isinstance(batch, Failed) for batch in seen] == [0 < at <= len(OTHERS) for at in range(BATCHES)]


@on_servers
def test_an_encoded_picture_may_be_bytes(road: Road) -> None:
    dataset = road.dataset(Faulty)
    dataset.faults = {number: Path(dataset.samples[number][0]).read_bytes() for number in range(1, PICTURES, 3)}
    assert_batches_match(road.loader(dataset, num_workers=1))


@on_servers
def test_a_server_that_refused_an_input_can_be_stopped_and_started_again(road: Road) -> None:
    assert road.server is not None
    dataset = road.dataset(Faulty, faults={BATCH + 1: OTHERS["another dtype"], 2 * BATCH + 3: None})
    loader = road.loader(dataset, num_workers=1, prefetch_factor=4, persistent_workers=True)
    for _ in range(3):
        batches = iter(loader)
        assert_pictures_match(*next(batches))
        with raises(InputError):
            next(batches)
        road.server.stop_thread()
        road.server.start_thread()
        del batches
        assert_only_these_fail(outcomes(loader), {1, 2}, InputError)
        assert_batches_match(road.loader())


@pytest.mark.parametrize(
    ("failed", "exec_dynamic"),
    # An old executor has no way back from a first batch that it takes for encoded.
    [([0], True), ([1, 2], True), ([1, 2], False)],
    ids=["the first batch", "later ones", "later ones, old executor"],
)
@pytest.mark.parametrize("other", ["another dtype", "one more dimension"])
@pytest.mark.parametrize("name", ["server", "produced"])
def test_a_batch_of_another_kind_fails_alone(
    name: str, failed: list[int], other: str, exec_dynamic: bool, spelled_root: Path
) -> None:
    with Road(name, spelled_root, exec_dynamic=exec_dynamic) as road:
        assert road.server is not None
        dataset = road.dataset(Faulty)
        dataset.faults = {BATCH * at + k: OTHERS[other] for at in failed for k in range(BATCH)}
        for _ in range(2):
            found = outcomes(road.loader(dataset))
            assert_only_these_fail(found, failed, (InputError, PipelineError))
            if failed != [0]:  # of which nobody can know what it should be
                assert [found[at].code for at in failed] == ["wrong-kind"] * 2
            road.server.stop_thread()
            road.server.start_thread()
            assert_batches_match(road.loader())


@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)  # a spawned one starts for longer
def test_a_timeout_ends_the_wait_for_a_worker(road: Road, start_method: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    dataset = road.dataset(Gated, gate=str(gate))
    loader = road.loader(dataset, num_workers=1, timeout=GIVEN_UP_S, multiprocessing_context=start_method)
    for consumed in (directly,) if road.name == "produced" else (directly, in_thread):  # torch's own wait takes long
        batches = iter(loader)
        start_s = time.perf_counter()
        found = consumed(functools.partial(outcomes, itertools.islice(batches, 5)))
        assert GIVEN_UP_S <= time.perf_counter() - start_s < WAIT_S
        error = found.pop()
        assert type(error) is RuntimeError and str(error) == f"DataLoader timed out after {GIVEN_UP_S} seconds"
        assert_batches_match(found, range(16))
        del batches
    gate.unlink()
    gate.touch()
    assert_batches_match(loader)


# --- workers that are lost -------------------------------------------------------------------------------------------


def loss_of(batches: Any) -> BaseException:
    """What the loop meets when its workers are gone; the batches until then are right."""
    while True:
        try:
            images, numbers, *_ = next(batches)
        except StopIteration:
            raise AssertionError("an epoch without workers came to its end") from None
        except (RuntimeError, OSError, EOFError) as error:
            return without_frames(error)
        assert_pictures_match(images, numbers)


class Ballast(ImageFolder):
    """Gives with each picture more than a pipe holds, and says when it has got ahead of the loop.

    The last picture waits until the file ``may_end`` exists.
    """

    ahead: Any
    may_end: Path
    ballast_bytes: int

    def __getitem__(self, index: int) -> Any:
        if index == 3 * BATCH:
            self.ahead.set()
        if index == len(self) - 1:
            await_true(self.may_end.exists)
        return *super().__getitem__(index), bytes(self.ballast_bytes)


@pytest.mark.parametrize("is_full", [False, True], ids=["", "full pipe"])
def test_a_killed_worker_is_an_error_and_the_next_epoch_holds_its_own_pictures(
    road: Road, is_full: bool, start_method: str, tmp_path: Path
) -> None:
    ahead = multiprocessing.get_context(start_method).Event()
    dataset = road.dataset(Ballast, ahead=ahead, may_end=tmp_path / "may end")
    # Pictures do not fill a stock loader's pipe, and all else there is torch's affair.
    dataset.ballast_bytes = 1 << 18 if is_full and road.name != "produced" else 0
    loader = road.loader(dataset, num_workers=1, prefetch_factor=8, multiprocessing_context=start_method)
    for consumed in (directly, in_thread):
        dataset.ahead.clear()
        dataset.may_end.unlink(missing_ok=True)
        batches = iter(loader)
        assert_pictures_match(*next(batches)[:2])
        assert not is_full or dataset.ahead.wait(WAIT_S)
        with without_torchs_signal():
            for child in multiprocessing.active_children():
                child.kill()
            error = consumed(functools.partial(loss_of, batches))
            del batches
        # A connection that breaks off is what torch raises where the worker dies while it hands over a tensor.
        assert isinstance(error, (OSError, EOFError)) or "DataLoader worker" in str(error), error
        dataset.may_end.touch()
        assert_batches_match((images, numbers) for images, numbers, _ in loader)
