"""Workers and trainers that are killed, hang, or are forgotten: nothing waits for ever, and nothing stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import default_collate

from proxyloader import DataLoader

from ..faults import (
    BATCH,
    WORKER_LOST,
    Misstep,
    Spelled,
    all_numbers,
    assert_gone,
    await_line,
    await_true,
    be_killed,
    children_of,
    in_thread,
    loader_of,
    numbers_of,
    shared_batches,
    training,
    without_torchs_signal,
)
from ..limits import ERROR_S
from ..tiers import by_default
from .roads import PERSISTENT


def directly(run: Callable[[], Any]) -> Any:
    return run()


ANYWHERE = pytest.mark.parametrize("consumed", [directly, in_thread], ids=["main thread", "another thread"])


# --- workers that die ------------------------------------------------------------------------------------------------


def numbers_until_lost(batches: Any, consumed: Callable[[Callable[[], Any]], Any]) -> tuple[list[int], float]:
    """What a loader gives before it says that a worker is lost, and when it says so."""

    def consume() -> tuple[list[int], float]:
        numbers: list[int] = []
        with pytest.raises(RuntimeError, match=WORKER_LOST):
            for batch in batches:
                numbers += numbers_of(batch)
        return numbers, time.monotonic()

    numbers, lost_s = consumed(consume)
    return numbers, lost_s


DEATHS: dict[str, Callable[[], Any]] = {
    "killed": be_killed,
    "sys.exit": functools.partial(sys.exit, 3),
    "os._exit": functools.partial(os._exit, 3),
    "a segmentation fault": functools.partial(ctypes.string_at, 0),
}


@ANYWHERE
@PERSISTENT
@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS.keys())
def test_a_worker_that_dies_is_an_error_at_once_and_the_next_epoch_is_right(
    spelled_root: Path, tmp_path: Path, death: Callable[[], None], persistent: bool, consumed: Any
) -> None:
    misstep = Misstep(13, death, tmp_path)
    loader = loader_of(spelled_root, misstep, persistent_workers=persistent)
    numbers, lost_s = numbers_until_lost(loader, consumed)
    assert lost_s - misstep.await_s() < ERROR_S
    assert numbers == list(range(len(numbers))) and len(numbers) <= 12
    assert consumed(lambda: all_numbers(loader)) == list(range(48))


@ANYWHERE
@PERSISTENT
def test_a_loop_that_asks_again_ends(spelled_root: Path, tmp_path: Path, persistent: bool, consumed: Any) -> None:
    loader = loader_of(spelled_root, Misstep(33, be_killed, tmp_path), persistent_workers=persistent)
    batches = iter(loader)
    found: list[Any] = []

    def ask() -> None:
        while True:
            try:
                found.extend(numbers_of(next(batches)))
            except StopIteration:
                return
            except RuntimeError as error:
                found.append(str(error))

    with without_torchs_signal():
        consumed(ask)
    assert [each for each in found if isinstance(each, str)] == found[-1:], "the error is the last thing that comes"
    assert found[:-1] == list(range(len(found) - 1)) and re.search(r"worker \(pid.*(exited|killed)", found[-1])
    assert loader.state_dict()["batches"] == len(found) // 4  # so that the rest can be had from there
    assert consumed(lambda: all_numbers(loader)) == list(range(48))


@ANYWHERE
@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "in any order"])
def test_a_worker_that_delivers_hides_no_loss(
    spelled_root: Path, tmp_path: Path, in_order: bool, consumed: Any
) -> None:
    misstep = Misstep(5, be_killed, tmp_path)

    def slow_but_one(index: int) -> None:
        """Every worker but the one that dies takes its time, and always has the next batch almost ready."""
        misstep(index)
        if index // BATCH % 2 == 0:
            time.sleep(0.25)  # and its six batches take longer than ERROR_S

    loader = loader_of(spelled_root, slow_but_one, prefetch_factor=6, in_order=in_order)
    numbers, lost_s = numbers_until_lost(loader, consumed)
    assert lost_s - misstep.await_s() < ERROR_S
    assert not set(numbers) & {4, 5, 6, 7}


def kill(worker: psutil.Process) -> None:
    with contextlib.suppress(RuntimeError):  # by which torch tells the main thread, wherever that is
        worker.kill()
        await_true(lambda: worker.status() == psutil.STATUS_ZOMBIE or not worker.is_running())


@ANYWHERE
def test_persistent_workers_killed_between_two_epochs_are_replaced(spelled_root: Path, consumed: Any) -> None:
    loader = loader_of(spelled_root, persistent_workers=True)
    assert consumed(lambda: all_numbers(loader)) == list(range(48))
    for worker in children_of():
        kill(worker)

    def epoch() -> list[int]:
        try:
            return all_numbers(loader)
        except RuntimeError as error:  # allowed once, and the epoch after it must be whole
            error.__traceback__ = None
        return all_numbers(loader)

    start_s = time.monotonic()
    assert consumed(epoch) == list(range(48))
    assert time.monotonic() - start_s < ERROR_S


def test_a_worker_killed_in_one_loader_leaves_another_loader_right(spelled_root: Path, tmp_path: Path) -> None:
    # torch tells the main thread of the loss wherever it is, so the loss is the first loader's to raise or the other's.
    healthy, dying = loader_of(spelled_root), loader_of(spelled_root, Misstep(13, be_killed, tmp_path))
    with pytest.raises(RuntimeError, match=WORKER_LOST):
        assert all(numbers_of(a) == numbers_of(b) for a, b in zip(healthy, dying))
    assert all_numbers(healthy) == all_numbers(dying) == list(range(48))


# --- batches that fail -----------------------------------------------------------------------------------------------


def assert_only_the_fourth_fails(loader: Any, error: Any, match: str | None = None) -> None:
    batches = iter(loader)
    numbers = all_numbers(itertools.islice(batches, 3))
    with pytest.raises(error, match=match):
        next(batches)
    assert numbers + all_numbers(batches) == [*range(12), *range(16, 48)]


# --- workers without memory ------------------------------------------------------------------------------------------


def allow_little_memory(worker_id: int) -> None:
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20),) * 2)


@ANYWHERE
@PERSISTENT
def test_no_memory_is_an_error_of_its_batch(
    spelled_root: Path, tmp_path: Path, persistent: bool, consumed: Any
) -> None:
    misstep = Misstep(13, functools.partial(bytearray, 1 << 30), tmp_path)
    loader = loader_of(spelled_root, misstep, worker_init_fn=allow_little_memory, persistent_workers=persistent)
    consumed(lambda: assert_only_the_fourth_fails(loader, MemoryError))
    gc.collect()
    assert consumed(lambda: all_numbers(loader)) == list(range(48))


def test_of_a_file_larger_than_the_workers_memory_a_part_is_read(spelled_root: Path, tmp_path: Path) -> None:
    dataset = Spelled(shutil.copytree(spelled_root, tmp_path / "set"))
    with open(dataset.samples[13][0], "ab") as file:
        file.truncate(1 << 30)  # by zeros behind the JPEG
    loader = DataLoader(dataset, BATCH, num_workers=1, worker_init_fn=allow_little_memory, device="cpu")
    assert all_numbers(loader) == list(range(48))


# --- what cannot be pickled ------------------------------------------------------------------------------------------


def local_error() -> BaseException:
    class LocalError(Exception):
        """Cannot be pickled."""

    return LocalError("mine")


def raise_at_13(make: Callable[[], BaseException]) -> Callable[[int], None]:
    def misstep(index: int) -> None:
        if index == 13:
            raise make()

    return misstep


@ANYWHERE
@pytest.mark.parametrize(
    "error", [local_error, lambda: ValueError("mine", lambda: None)], ids=["of a local class", "that holds a lambda"]
)
def test_an_error_that_cannot_be_pickled_is_raised_at_its_batch(spelled_root: Path, error: Any, consumed: Any) -> None:
    loader = loader_of(spelled_root, raise_at_13(error))
    in_thread(lambda: consumed(lambda: assert_only_the_fourth_fails(loader, Exception, "mine")), 10)


@pytest.mark.parametrize("pictures", [True, False], ids=["pictures", "numbers"])
def test_a_collate_fn_makes_what_cannot_be_pickled_without_workers_and_fails_with_them(
    spelled_root: Path, pictures: bool
) -> None:
    dataset: Any = Spelled(spelled_root) if pictures else range(48)
    how: dict[str, Any] = dict(collate_fn=lambda samples: (default_collate(samples), lambda: None), device="cpu")
    for batch, made in DataLoader(dataset, BATCH, **how):
        assert (numbers_of(batch) if pictures else batch.tolist())[0] % BATCH == 0 and made() is None
    batches = iter(DataLoader(dataset, BATCH, num_workers=1, **how))
    for _ in range(2):
        with pytest.raises((AttributeError, TypeError, RuntimeError), match="pickle"):
            in_thread(lambda: next(batches), 10)


# --- trainers that end -----------------------------------------------------------------------------------------------

KILLED = {
    "fork, persistent": "kept = loader_of(root, persistent_workers=True)",
    "forkserver": "kept = loader_of(root, multiprocessing_context='forkserver', workers=1)",
    "spawn": "kept = loader_of(root, multiprocessing_context='spawn', workers=1)",
    "spawn, persistent": "kept = loader_of(root, multiprocessing_context='spawn', persistent_workers=True, workers=1)",
    "a worker that sleeps": "kept = loader_of(root, Misstep(9, hang, notes))",
    "workers blocked in full pipes, with a server and without": """
        from tests.integration.roads import Road
        roads = [Road(name, root) for name in ("compiled", "server")]
        datasets = [road.dataset(target_transform=lambda number: bytes(1 << 18)) for road in roads]
        kept = zip(*(road.loader(each, num_workers=2, prefetch_factor=5) for road, each in zip(roads, datasets)))
    """,
}


@pytest.mark.parametrize("body", by_default(KILLED, "fork, persistent", "spawn", [*KILLED][-1]))
def test_a_killed_trainer_leaves_no_worker_and_no_memory_behind(spelled_root: Path, tmp_path: Path, body: str) -> None:
    lines = [line.strip() for line in body.strip().splitlines()]
    lines += ["batches = iter(kept)", "next(batches)", "say_ready()", "hang()"]
    shared_before = set(os.listdir("/dev/shm"))
    script = f"notes = Path({str(tmp_path)!r})\n" + "\n".join(lines)
    with training(tmp_path, spelled_root, script) as process:
        await_line(process, "ready")
        trainer = psutil.Process(process.pid)
        children = children_of(process.pid)
        assert children
        memory = shared_batches(trainer)
        assert memory  # which the workers have, too
        assert any(shared_batches(child) & memory for child in children)
        shared = {name for name in os.listdir("/dev/shm") if name not in shared_before}
        process.kill()
        process.wait()
        assert_gone(children, ERROR_S)
        assert not [each for each in psutil.process_iter() if shared_batches(each) & memory]
        pids = {str(child.pid) for child in [trainer, *children]}
        await_true(lambda: not [n for n in shared & set(os.listdir("/dev/shm")) if pids & set(n.split("_"))])
