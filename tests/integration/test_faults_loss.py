"""Workers and trainers that are lost: every wait ends, and nothing is mixed up.

Rows 5b to 5e of the table of faults.
"""

from __future__ import annotations

import multiprocessing
import textwrap
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchvision.datasets import ImageFolder

from ..faults import assert_gone, await_line, training, without_torchs_signal
from ..limits import WAIT_S
from ..outcomes import without_frames
from .roads import BATCH, ROADS, Road, assert_batches_match, assert_pictures_match


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


class Ballast(ImageFolder):
    """Gives with each picture more than a pipe holds, and says when it has got ahead of the loop."""

    ahead: Any
    ballast_bytes: int

    def __getitem__(self, index: int) -> Any:
        if index == 3 * BATCH:
            self.ahead.set()
        return *super().__getitem__(index), bytes(self.ballast_bytes)


@pytest.mark.parametrize("is_full", [False, True], ids=["", "full pipe"])
def test_a_killed_worker_is_an_error_and_the_next_epoch_holds_its_own_pictures(
    road: Road, is_full: bool, start_method: str
) -> None:
    dataset = road.dataset(Ballast, ahead=multiprocessing.get_context(start_method).Event())
    # Pictures do not fill a stock loader's pipe, and all else there is torch's affair.
    dataset.ballast_bytes = 1 << 18 if is_full and road.name != "produced" else 0
    loader = road.loader(dataset, num_workers=1, prefetch_factor=8, multiprocessing_context=start_method)
    batches = iter(loader)
    assert_pictures_match(*next(batches)[:2])
    assert not is_full or dataset.ahead.wait(WAIT_S)
    with without_torchs_signal():
        kill_workers()
        error = loss_of(batches)
        del batches
    # A connection that breaks off is what torch raises where the worker dies while it hands over a tensor.
    assert isinstance(error, (OSError, EOFError)) or "DataLoader worker" in str(error), error
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

    threads = [threading.Thread(target=loop, args=(at,), daemon=True) for at in range(len(roads))]
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


class Large:
    """Makes a label that is larger than a pipe."""

    def __call__(self, number: int) -> bytes:
        return bytes(1 << 18)


TRAINER = """
    from tests.integration.roads import Road
    from tests.integration.test_faults_loss import Large

    kept = []
    for name in ("compiled", "server"):  # on the third road workers are a stock loader's
        road = Road(name, Path(root))
        dataset = road.dataset(target_transform=Large())
        workers = 2 if method == "fork" else 1
        loader = road.loader(dataset, num_workers=workers, prefetch_factor=5, multiprocessing_context=method)
        kept += [road, iter(loader)]
        next(kept[-1])
    say_ready()
    hang()
"""


def test_a_killed_trainer_takes_its_workers_along(spelled_root: Path, tmp_path: Path, start_method: str) -> None:
    body = f"method = {start_method!r}\n" + textwrap.dedent(TRAINER)
    with training(tmp_path, spelled_root, body) as process:
        await_line(process, "ready")
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert len(children) >= 2
        assert_gone(children, WAIT_S)
