"""Workers and trainers that are killed, hang, or are forgotten: nothing waits for ever, and nothing stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import operator
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import default_collate

from proxyloader import DataLoader, ImageError, ProxyServer

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
    hang,
    in_thread,
    loader_of,
    numbers_of,
    shared_batches,
    training,
    without_torchs_signal,
)
from ..limits import ERROR_S, GIVEN_UP_S, LOST_S, STOP_S, WAIT_S
from ..outcomes import outcomes
from ..tiers import by_default
from .roads import PERSISTENT, assert_batches_match, picture_folder, picture_pipeline, read_bytes


def directly(run: Callable[[], Any]) -> Any:
    return run()


PLACES = {"main thread": directly, "another thread": in_thread}
ANYWHERE = pytest.mark.parametrize("consumed", by_default(PLACES, *PLACES))


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
@pytest.mark.parametrize("asks_again", [False, True], ids=["", "asks again"])
@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS.keys())
def test_a_worker_that_dies_is_an_error_at_once_and_the_next_epoch_is_right(
    spelled_root: Path, tmp_path: Path, death: Callable[[], None], persistent: bool, consumed: Any, asks_again: bool
) -> None:
    misstep = Misstep(13, death, tmp_path)
    loader = loader_of(spelled_root, misstep, persistent_workers=persistent)
    # torch's signal interrupts the loop in the main thread.
    with without_torchs_signal() if asks_again else contextlib.nullcontext():
        batches: Any = iter(loader) if asks_again else loader
        numbers, lost_s = numbers_until_lost(batches, consumed)
        if asks_again:
            assert consumed(lambda: next(batches, None)) is None
            assert loader.state_dict()["batches"] == len(numbers) // BATCH  # so that the rest can be had from there
    assert lost_s - misstep.await_s() < LOST_S
    assert numbers == list(range(len(numbers))) and len(numbers) <= 12
    assert consumed(lambda: all_numbers(loader)) == list(range(48))


@ANYWHERE
@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "in any order"])
def test_a_worker_that_sends_hides_no_loss(spelled_root: Path, tmp_path: Path, in_order: bool, consumed: Any) -> None:
    misstep = Misstep(5, be_killed, tmp_path)

    def slow_but_one(index: int) -> None:
        """Every worker but the one that dies takes its time, and always has the next batch almost ready."""
        misstep(index)
        if index // BATCH % 2 == 0:
            time.sleep(0.25)  # and its six batches take longer than torch waits

    loader = loader_of(spelled_root, slow_but_one, prefetch_factor=6, in_order=in_order)
    numbers, lost_s = numbers_until_lost(loader, consumed)
    assert lost_s - misstep.await_s() < LOST_S
    assert not set(numbers) & {4, 5, 6, 7}


def kill(worker: psutil.Process) -> None:
    with contextlib.suppress(RuntimeError):  # by which torch tells the main thread, wherever that is
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # psutil, if interrupted, would leave a file open
        time.sleep(0.05)  # the signal may have come to another thread, which hands it on


@pytest.mark.parametrize("consumed", by_default(PLACES, "main thread"))
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
    assert time.monotonic() - start_s < LOST_S


def test_a_worker_killed_in_one_loader_leaves_another_loader_right(spelled_root: Path, tmp_path: Path) -> None:
    # torch tells the main thread of the loss wherever it is, so the loss is the first loader's to raise or the other's.
    healthy, dying = loader_of(spelled_root), loader_of(spelled_root, Misstep(13, be_killed, tmp_path))
    with pytest.raises(RuntimeError, match=WORKER_LOST):
        assert all(numbers_of(a) == numbers_of(b) for a, b in zip(healthy, dying))
    assert all_numbers(healthy) == all_numbers(dying) == list(range(48))


# --- workers without memory ------------------------------------------------------------------------------------------


def assert_only_the_fourth_fails(loader: Any, error: Any, match: str | None = None) -> None:
    batches = iter(loader)
    numbers = all_numbers(itertools.islice(batches, 3))
    with pytest.raises(error, match=match):
        next(batches)
    assert numbers + all_numbers(batches) == [*range(12), *range(16, 48)]


def allow_little_memory(worker_id: int) -> None:
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20),) * 2)


@ANYWHERE
@PERSISTENT
def test_no_memory_is_the_batchs_error(spelled_root: Path, tmp_path: Path, persistent: bool, consumed: Any) -> None:
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


@ANYWHERE
@pytest.mark.parametrize(
    "error", [local_error, lambda: ValueError("mine", lambda: None)], ids=["of a local class", "that holds a lambda"]
)
def test_an_error_that_cannot_be_pickled_is_raised_at_its_batch(spelled_root: Path, error: Any, consumed: Any) -> None:
    def misstep(index: int) -> None:
        if index == 13:
            raise error()

    loader = loader_of(spelled_root, misstep)
    in_thread(lambda: consumed(lambda: assert_only_the_fourth_fails(loader, Exception, "mine")))


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
            in_thread(lambda: next(batches))


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


@pytest.mark.parametrize("body", by_default(KILLED, "fork, persistent", [*KILLED][-1]))
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


# --- stopping, which is done at once in any state and leaves no worker behind ----------------------------------------


def after(count: int | None, root: Path, notes: Path, **arguments: Any) -> Any:
    """After so many batches, or the whole epoch."""
    batches = iter(loader_of(root, **arguments))
    assert all_numbers(itertools.islice(batches, count)) == list(range(48 if count is None else BATCH * count))
    return batches


def after_errors(root: Path, notes: Path, **arguments: Any) -> Any:
    """Of a file, and of the dataset."""
    misstep = Misstep(9, functools.partial(operator.truediv, 1, 0), notes)
    loader = loader_of(shutil.copytree(root, notes / "set"), misstep, **arguments)
    Path(loader.dataset.samples[5][0]).unlink()
    batches = iter(loader)
    (first,), (of_file,), (of_dataset,) = (outcomes(itertools.islice(batches, 1)) for _ in range(3))
    assert numbers_of(first) == [0, 1, 2, 3]
    assert isinstance(of_file, ImageError) and isinstance(of_dataset, ZeroDivisionError)
    return batches


def after_a_timeout(root: Path, notes: Path, **arguments: Any) -> Any:
    batches = iter(loader_of(root, Misstep(5, hang, notes), timeout=GIVEN_UP_S, **arguments))
    first, error = outcomes(itertools.islice(batches, 2))
    assert numbers_of(first) == [0, 1, 2, 3] and "timed out" in str(error)
    return batches


def with_a_worker_that_sleeps(root: Path, notes: Path, **arguments: Any) -> Any:
    misstep = Misstep(13, hang, notes)
    batches = iter(loader_of(root, misstep, **arguments))
    assert numbers_of(next(batches)) == [0, 1, 2, 3]
    misstep.await_s()
    return batches


def deaf(worker_id: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def with_a_worker_that_is_stopped(root: Path, notes: Path, **arguments: Any) -> Any:
    batches = after(6, root, notes, sampler=[*range(48)] * 20, **arguments)
    for child in children_of():
        child.send_signal(signal.SIGSTOP)
    return batches


def open_pipe(path: str | Path) -> None:
    open(path, "rb").close()


STATES: dict[str, Callable[..., Any]] = {
    "before the first batch": functools.partial(after, 0),
    "after the first batch": functools.partial(after, 1),
    "in mid epoch": functools.partial(after, 6),
    "at the end": functools.partial(after, None),
    "after errors": after_errors,
    "after a timeout": after_a_timeout,
    "with a worker that sleeps": with_a_worker_that_sleeps,
    "with a worker that ignores SIGTERM": functools.partial(with_a_worker_that_sleeps, worker_init_fn=deaf),
    "with a worker that is stopped": with_a_worker_that_is_stopped,
}


@contextlib.contextmanager
def at_once(workers: Sequence[psutil.Process] = ()) -> Iterator[None]:
    """What is done within takes but a moment, in which these end, too."""
    start_s = time.monotonic()
    yield
    assert time.monotonic() - start_s < STOP_S
    assert_gone(workers, start_s + STOP_S - time.monotonic())


@ANYWHERE
@pytest.mark.parametrize("state", STATES)
@PERSISTENT
def test_dropping_a_loader_takes_no_time_and_no_garbage_collection(
    spelled_root: Path, tmp_path: Path, state: str, persistent: bool, consumed: Any, device: str, no_collector: None
) -> None:
    held = [STATES[state](spelled_root, tmp_path, persistent_workers=persistent, device=device)]
    threads = threading.active_count() + (consumed is in_thread)

    def drop() -> None:
        held.clear()
        assert threading.active_count() <= threads, "a thread stops it"

    with at_once(children_of()):
        consumed(drop)


def test_a_new_epoch_begins_at_once_where_a_worker_hangs_in_the_last(spelled_root: Path, tmp_path: Path) -> None:
    misstep = Misstep(13, hang, tmp_path)
    loader = loader_of(spelled_root, misstep)
    for _ in loader:
        misstep.await_s()
        break
    with at_once():
        batches = iter(loader)
        assert numbers_of(next(batches)) == [0, 1, 2, 3]
    assert all_numbers(batches) == list(range(4, 48))


def test_timeout_ends_the_wait_for_a_worker_that_hung_in_the_epoch_before(spelled_root: Path, tmp_path: Path) -> None:
    misstep = Misstep(13, hang, tmp_path)
    loader = loader_of(spelled_root, misstep, persistent_workers=True, timeout=GIVEN_UP_S)
    for _ in loader:
        misstep.await_s()
        break
    start_s = time.monotonic()
    try:
        numbers = all_numbers(loader)
    except RuntimeError as error:
        assert "timed out" in str(error)
        error.__traceback__ = None
        numbers = all_numbers(loader)
    assert numbers == list(range(48))
    assert time.monotonic() - start_s < WAIT_S


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------

CONTROL_C = {
    # Said late, when the trainer waits indeed: Python may lose an interrupt while it still forks and builds.
    "waiting for the first batch": """
        for batch in loader_of(root, Misstep(0, lambda: (time.sleep(3), say_ready_and_hang()), notes)): pass
    """,
    "waiting for a batch in mid epoch": "for batch in loader_of(root, Misstep(13, say_ready_and_hang, notes)): pass",
    "in the body, with a worker that sleeps": """
        for batch in loader_of(root, Misstep(6, say_ready_and_hang, notes), persistent_workers=True): hang()
    """,
    "in the body, with full queues": "for batch in loader_of(root, Misstep(19, say_ready, notes)): hang()",
    "between two epochs of persistent workers": """
        kept = loader_of(root, persistent_workers=True)
        all_numbers(kept); say_ready(); hang()
    """,
    "while a spawned worker is given the dataset": """
        Spelled.__getstate__ = say_ready_and_hang
        for batch in loader_of(root, multiprocessing_context="spawn"): pass
    """,
    "waiting for a worker that waits for a file": """
        os.mkfifo(notes / "fifo")
        for batch in loader_of(root, Misstep(13, lambda: (say_ready(), open_pipe(notes / "fifo")), notes)): pass
    """,
    "waiting in the calling thread": "for batch in loader_of(root, lambda index: say_ready_and_hang(), 0): pass",
}


ALONE = "waiting for a worker that waits for a file", "in the body, with a worker that sleeps"


@pytest.mark.parametrize(
    ("body", "interrupt"),
    by_default(
        {name: (body, os.killpg) for name, body in CONTROL_C.items()}
        | {f"{name}, of the trainer alone": (CONTROL_C[name], os.kill) for name in ALONE},
        "waiting for a batch in mid epoch",
        "between two epochs of persistent workers",
        "while a spawned worker is given the dataset",
        "waiting for a worker that waits for a file, of the trainer alone",
        "in the body, with a worker that sleeps, of the trainer alone",
    ),
)
def test_control_c_stops_the_training_and_its_workers_at_once(
    spelled_root: Path, tmp_path: Path, body: str, interrupt: Callable[[int, int], None]
) -> None:
    # The interpreter takes a while to end, with torch in it; so the script says when it begins to.
    steps = ("\n" + " " * 12).join(line.strip() for line in body.strip().splitlines())
    script = f"""
        from tests.integration.test_processes import open_pipe
        notes = Path({str(tmp_path)!r})
        def train():
            {steps}
        try:
            train()
        except KeyboardInterrupt as error:
            error.__traceback__ = None
            print("stopped", time.monotonic(), flush=True)
            sys.exit(130)
    """
    with training(tmp_path, spelled_root, script) as process:
        await_line(process, "ready")
        children = children_of(process.pid)
        start_s = time.monotonic()
        interrupt(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130, errors
        word, stopped_s = output.replace("ready\n", "").split()
        assert word == "stopped" and float(stopped_s) - start_s < STOP_S
        assert_gone(children, STOP_S)
        if "spawn" not in body:  # where a worker says that its dataset never came
            assert "Traceback" not in errors


# --- servers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True], ids=["never started", "started"])
def test_dropping_a_server_that_is_open_takes_no_time(spelled_root: Path, started: bool, device: str) -> None:
    server = ProxyServer(picture_pipeline(device))
    if started:
        server.start_thread()
    dataset = picture_folder(spelled_root, server.proxy, read_bytes)
    loader = DataLoader(dataset, BATCH, num_workers=1, server=server)
    batches = iter(loader)
    assert_batches_match([next(batches)], range(BATCH))
    with at_once():
        del server, dataset, loader, batches


@PERSISTENT
def test_an_iterator_that_was_interrupted_hands_out_nothing_more(
    spelled_root: Path, persistent: bool, device: str
) -> None:
    """The batch that it was about to hand out may be lost; the next one would be taken for it."""
    asked = []

    def interrupt(samples: Any) -> Any:
        asked.append(samples)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return torch.utils.data.default_collate(samples)

    server = ProxyServer(picture_pipeline(device))  # its samples are collated in the main process
    dataset = picture_folder(spelled_root, server.proxy, read_bytes)
    arguments: dict[str, Any] = dict(num_workers=2, persistent_workers=persistent, collate_fn=interrupt, server=server)
    loader = DataLoader(dataset, 4, **arguments)
    batches = iter(loader)
    assert_batches_match([next(batches)], range(4))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="interrupted"):
            next(batches)
    assert_batches_match(loader)


@PERSISTENT
def test_loops_that_are_left_leave_their_memory_to_the_next(spelled_root: Path, persistent: bool, device: str) -> None:
    loader = loader_of(spelled_root, persistent_workers=persistent, device=device)
    memory = []
    for _ in range(12):
        assert numbers_of(next(iter(loader))) == [0, 1, 2, 3]
        memory.append(shared_batches(psutil.Process()))
    assert all(each == memory[0] for each in memory)
    assert len(memory[0]) == (1 if device == "cpu" else 2)  # on a GPU, the marks of passed checks have their own
    assert all_numbers(loader) == list(range(48))
    arena: Any = loader._pool.arena  # type: ignore[union-attr]
    assert [arena.acquire() for _ in range(arena.slots + 1)].count(None) == 1
