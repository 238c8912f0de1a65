"""Samples, workers and trainers that are lost, and loaders that share a server: every wait ends, nothing is mixed up.

Rows 5 and 6 of the table of faults.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder

from .. import scripts
from ..faults import await_line, without_torchs_signal
from ..limits import WAIT_S
from ..outcomes import outcomes, without_frames
from .roads import BATCH, PICTURES, ROADS, Road, assert_batches_match, assert_pictures_match

BATCHES = PICTURES // BATCH


class Raises(ImageFolder):
    """Cannot give some of its samples."""

    missing: tuple[int, ...]

    def __getitem__(self, index: int) -> Any:
        if index in self.missing:
            raise KeyError(f"sample {index}")
        return super().__getitem__(index)


def test_an_exception_in_the_middle_of_a_batch_is_of_that_batch_alone(road: Road, start_method: str) -> None:
    dataset = road.dataset(Raises)
    # The first, a middle and the last sample of their batches, and two batches in a row.
    dataset.missing = (BATCH, 3 * BATCH + 2, 5 * BATCH - 1, 8 * BATCH + 1, 8 * BATCH + 2)
    failed = {number // BATCH for number in dataset.missing}
    loader = road.loader(dataset, num_workers=1, persistent_workers=True, multiprocessing_context=start_method)
    for _ in range(3):
        found = outcomes(loader)
        assert len(found) == BATCHES
        for at, batch in enumerate(found):
            if at in failed:
                assert isinstance(batch, KeyError) and "sample" in str(batch), batch
            else:
                assert_pictures_match(*batch)
                assert batch[1].tolist() == list(range(BATCH * at, BATCH * (at + 1)))


def kill_workers() -> None:
    for child in multiprocessing.active_children():
        child.kill()


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


def test_a_killed_worker_is_an_error_and_the_next_epoch_holds_its_own_pictures(road: Road, start_method: str) -> None:
    loader = road.loader(num_workers=1, multiprocessing_context=start_method)
    batches = iter(loader)
    assert_pictures_match(*next(batches))
    with without_torchs_signal():
        kill_workers()
        error = loss_of(batches)
        del batches
    # A connection that breaks off is what torch raises where the worker dies while it hands over a tensor.
    assert isinstance(error, (OSError, EOFError)) or "DataLoader worker" in str(error), error
    assert_batches_match(loader)


class Ballast(ImageFolder):
    """Gives with each picture more than a pipe holds, and says when it has got ahead of the loop."""

    ahead: Any
    ballast_bytes = 1 << 18

    def __getitem__(self, index: int) -> Any:
        if index == 3 * BATCH:
            self.ahead.set()
        return *super().__getitem__(index), bytes(self.ballast_bytes)


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Ends a wait that would never end."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_worker_killed_at_a_full_pipe_does_not_block_the_next_epoch(road: Road, start_method: str) -> None:
    dataset = road.dataset(Ballast)
    dataset.ahead = multiprocessing.get_context(start_method).Event()
    if road.name == "produced":
        dataset.ballast_bytes = 0  # pictures do not fill a stock loader's pipe, and all else there is torch's affair
    loader = road.loader(dataset, num_workers=1, prefetch_factor=8, multiprocessing_context=start_method)
    batches = iter(loader)
    assert_pictures_match(*next(batches)[:2])
    assert dataset.ahead.wait(WAIT_S)
    with without_torchs_signal(), at_most(int(WAIT_S)):
        kill_workers()
        loss_of(batches)
        del batches
    assert_batches_match((images, numbers) for images, numbers, _ in loader)


def test_a_worker_killed_under_a_loop_in_a_thread_is_an_error_there(spelled_root: Path, start_method: str) -> None:
    # One thread for each road: to see that a worker is gone takes torch five seconds where no signal arrives.
    roads = [Road(name, spelled_root) for name in ROADS]
    loaders = [road.loader(num_workers=1, multiprocessing_context=start_method) for road in roads]
    begun, killed = threading.Barrier(len(roads) + 1), threading.Event()
    errors: dict[int, BaseException] = {}

    def loop(at: int) -> None:
        batches = iter(loaders[at])
        assert_pictures_match(*next(batches))
        begun.wait(WAIT_S)
        killed.wait(WAIT_S)
        errors[at] = loss_of(batches)

    threads = [threading.Thread(target=loop, args=(at,)) for at in range(len(roads))]
    for thread in threads:
        thread.start()
    begun.wait(WAIT_S)
    with without_torchs_signal():
        kill_workers()
        killed.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert sorted(errors) == list(range(len(roads)))
    for loader in loaders if start_method != "spawn" else loaders[:1]:
        assert_batches_match(loader)


TRAINER = """
import sys, time
from pathlib import Path
from tests.integration.roads import Road
from tests.integration.test_faults_loss import Large

if __name__ == "__main__":
    method, *names = sys.argv[2:]
    roads = [Road(name, Path(sys.argv[1])) for name in names]
    datasets = [road.dataset() for road in roads]
    for road, dataset in zip(roads, datasets):
        dataset.target_transform = Large()
    workers = 2 if method == "fork" else 1
    loaders = [
        road.loader(dataset, num_workers=workers, prefetch_factor=5, multiprocessing_context=method)
        for road, dataset in zip(roads, datasets)
    ]
    iterators = [iter(loader) for loader in loaders]
    for batches in iterators:
        next(batches)
    print("ready", flush=True)
    time.sleep(60)
"""


class Large:
    """Makes a label that is larger than a pipe."""

    def __call__(self, number: int) -> bytes:
        return bytes(1 << 18)


def test_a_killed_trainer_takes_its_workers_along(spelled_root: Path, tmp_path: Path, start_method: str) -> None:
    ours = [name for name in ROADS if name != "produced"]  # whose workers are a stock loader's
    script = tmp_path / "trainer.py"  # a file, which workers that are not forked can import
    script.write_text(TRAINER)
    process = scripts.start(script, spelled_root, start_method, *ours)
    try:
        await_line(process, "ready")
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert len(children) >= len(ours)
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
        for child in alive:
            child.kill()
    finally:
        scripts.end(process)
    assert not alive


def halves(road: Road) -> tuple[Any, Any]:
    """Pictures to train with and pictures to validate with, on one server."""
    dataset = road.dataset()
    return Subset(dataset, range(PICTURES // 2)), Subset(dataset, range(PICTURES // 2, PICTURES))


def test_train_and_validation_side_by_side_keep_their_pictures(road: Road, start_method: str) -> None:
    train, val = (
        road.loader(half, num_workers=1, multiprocessing_context=start_method, persistent_workers=True)
        for half in halves(road)
    )
    for _ in range(2):
        pairs = list(zip(train, val))
        assert_batches_match((batch for batch, _ in pairs), range(PICTURES // 2))
        assert_batches_match((batch for _, batch in pairs), range(PICTURES // 2, PICTURES))


def test_validation_in_the_midst_of_training_keeps_their_pictures_apart(road: Road, start_method: str) -> None:
    train, val = (
        road.loader(
            half, num_workers=1, prefetch_factor=4, multiprocessing_context=start_method, persistent_workers=True
        )
        for half in halves(road)
    )
    trained = []
    for at, batch in enumerate(train):
        trained.append(batch)
        if at % 2 == 0:
            assert_batches_match(val, range(PICTURES // 2, PICTURES))
        else:  # a look at the first batches, and away
            for images, numbers in itertools.islice(val, 2):
                assert_pictures_match(images, numbers)
    assert_batches_match(trained, range(PICTURES // 2))


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", ROADS)
def test_epochs_in_turn_keep_their_pictures(name: str, deterministic: bool, spelled_root: Path, device: str) -> None:
    with Road(name, spelled_root, device, deterministic=deterministic) as road:
        train, val = (road.loader(half, num_workers=1, persistent_workers=True) for half in halves(road))
        for _ in range(3):
            assert_batches_match(train, range(PICTURES // 2))
            assert_batches_match(val, range(PICTURES // 2, PICTURES))
