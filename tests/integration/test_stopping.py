"""Stopping is done at once in any state, and leaves no worker behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from proxyloader import DataLoader, ImageError, ProxyServer

from ..faults import (
    BATCH,
    Misstep,
    all_numbers,
    assert_gone,
    await_line,
    children_of,
    hang,
    in_thread,
    loader_of,
    numbers_of,
    shared_batches,
    training,
)
from ..limits import ERROR_S, STOP_S, WAIT_S
from ..outcomes import outcomes
from ..tiers import by_default
from .roads import PERSISTENT, assert_batches_match, picture_folder, picture_pipeline, read_bytes


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
    batches = iter(loader_of(root, Misstep(5, hang, notes), timeout=1, **arguments))
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
    batches = after(6, root, notes, **arguments)
    for child in children_of():
        child.send_signal(signal.SIGSTOP)
    return batches


def open_pipe(path: str | Path) -> None:
    open(path, "rb").close()


def with_a_worker_blocked_in_open(root: Path, notes: Path, **arguments: Any) -> Any:
    os.mkfifo(notes / "fifo")
    misstep = Misstep(5, functools.partial(open_pipe, notes / "fifo"), notes)
    batches = iter(loader_of(root, misstep, **arguments))
    misstep.await_s()
    return batches


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
    "with a worker blocked in open": with_a_worker_blocked_in_open,
}


@contextlib.contextmanager
def at_once(workers: Sequence[psutil.Process] = ()) -> Iterator[None]:
    """What is done within takes but a moment, in which these end, too."""
    start_s = time.monotonic()
    yield
    assert time.monotonic() - start_s < STOP_S
    assert_gone(workers, start_s + STOP_S - time.monotonic())


@pytest.mark.parametrize("state", STATES)
@PERSISTENT
def test_dropping_a_loader_takes_no_time_and_no_garbage_collection(
    spelled_root: Path, tmp_path: Path, state: str, persistent: bool, device: str, no_collector: None
) -> None:
    held = [STATES[state](spelled_root, tmp_path, persistent_workers=persistent, device=device)]
    threads = threading.active_count()
    with at_once(children_of()):
        held.clear()
        assert threading.active_count() <= threads, "a thread stops it"


@PERSISTENT
def test_an_iterator_dropped_in_a_thread_stops_as_fast(spelled_root: Path, tmp_path: Path, persistent: bool) -> None:
    held = [with_a_worker_that_sleeps(spelled_root, tmp_path, persistent_workers=persistent)]
    with at_once(children_of()):
        in_thread(held.clear)


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


def test_timeout_ends_the_wait_for_a_worker_that_hangs_from_the_epoch_before(
    spelled_root: Path, tmp_path: Path
) -> None:
    misstep = Misstep(13, hang, tmp_path)
    loader = loader_of(spelled_root, misstep, persistent_workers=True, timeout=2)
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
        late = lambda index: (time.sleep(3), say_ready_and_hang()) if index == 4 else hang()
        for batch in loader_of(root, late): pass
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
    "while workers begin": "for batch in loader_of(root, worker_init_fn=say_ready_and_hang): pass",
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


ALONE = (
    "waiting for a batch in mid epoch",
    "waiting for a worker that waits for a file",
    "in the body, with a worker that sleeps",
)


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
    # Python loses an interrupt that comes in the middle of a fork; then the end of the workers ends the training.
    in_a_fork = "worker_init_fn" in body
    stop, stop_s = ("(KeyboardInterrupt, RuntimeError)", ERROR_S) if in_a_fork else ("KeyboardInterrupt", STOP_S)
    script = f"""
        from tests.integration.test_stopping import open_pipe
        notes = Path({str(tmp_path)!r})
        def train():
            {steps}
        try:
            train()
        except {stop} as error:
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
        assert word == "stopped" and float(stopped_s) - start_s < stop_s
        assert_gone(children, STOP_S)
        if "spawn" not in body and not in_a_fork:  # where a worker says that its dataset never came
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
