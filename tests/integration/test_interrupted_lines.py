"""Errors that come between two lines: from a signal handler, from an ``iter(loader)`` that fails, from Ctrl-C. What
comes after them must be right, and nothing may be lost without a word."""

from __future__ import annotations

import contextlib
import itertools
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali.backend import TensorCPU, TensorGPU

from proxyloader import DataLoader
from proxyloader.dali import api, plan_server
from proxyloader.dali import outputs as _outputs
from proxyloader.loader.feed import RunSubmitter
from proxyloader.loader.plan_servers import PlanServers

from .. import scripts
from ..faults import Spelled
from ..limits import STOP_S, WAIT_S
from ..numbered import read_numbers, spell_dataset

IMAGES, BATCH = 64, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spell_dataset(tmp_path_factory.mktemp("spelled") / "set", IMAGES)


def numbers_of(batch: Any) -> list[int]:
    images, indices = batch
    found = read_numbers(images, white=1.0)
    assert found == indices.tolist()
    return found


class Preempted(RuntimeError):
    """What a signal handler of the user's raises; DALI's own errors are RuntimeErrors, too."""


ALARMS = """
    import itertools, signal, sys, time
    from proxyloader import DataLoader
    from tests.numbered import read_numbers
    from tests.faults import Spelled

    def preempt(*_):
        global is_armed
        if is_armed:
            is_armed = False
            raise RuntimeError("by a signal")

    def check(batch):
        images, indices = batch
        if read_numbers(images, white=1.0) != indices.tolist():
            sys.exit("wrong pictures")
        return indices.tolist()

    loader = DataLoader(Spelled(sys.argv[1]), 4, device=sys.argv[2], num_workers=0)
    list(map(check, loader))  # for DALI's modules: one whose import was interrupted is not whole in a second one
    kept = iter(DataLoader(Spelled(sys.argv[1]), 4, device=sys.argv[2], num_workers=0))
    check(next(kept))  # DALI's decoders stay loaded, or on a GPU each pipeline that is built anew would load them
    raised, end_s, is_armed = 0, time.monotonic() + 4, False
    signal.signal(signal.SIGALRM, preempt)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.00731)
    while time.monotonic() < end_s or raised <= 10:
        try:
            is_armed = True
            for batch in loader:
                check(batch)
            is_armed = False
        except Exception:  # the handler's, or what the code in between makes of it
            raised += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(raised, len(list(itertools.chain.from_iterable(map(check, loader)))))
"""


def test_pictures_are_right_after_a_signal_handler_has_raised_in_whatever_line(root: Path, device: str) -> None:
    done = scripts.run(textwrap.dedent(ALARMS), root, device, timeout_s=2 * WAIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    raised, images = map(int, done.stdout.split())
    assert raised > 10 and images == IMAGES


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_before_dali_gave_a_run_up_is_the_users_and_shifts_nothing(
    root: Path, workers: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_dali, calls = api.Pipeline.outputs, itertools.count()

    def outputs(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 5:
            raise Preempted("by a signal")
        return of_dali(pipeline, *args, **kwargs)

    monkeypatch.setattr(api.Pipeline, "outputs", outputs)
    loader = DataLoader(Spelled(root), BATCH, device=device, num_workers=workers)
    batches, seen, raised = iter(loader), 0, 0
    while True:
        try:
            seen += len(numbers_of(next(batches)))
        except Preempted:
            raised += 1
        except StopIteration:
            break
    assert (raised, seen) == (1, IMAGES - BATCH)
    assert list(itertools.chain.from_iterable(map(numbers_of, loader))) == list(range(IMAGES))


class Slow:
    """Each picture takes so long, as from a cold disk; workers that have begun keep to what it was."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def __call__(self, index: int) -> None:
        time.sleep(self.sleep_s)


@pytest.fixture
def one_build_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    build, calls = plan_server.build_pipeline, itertools.count()

    def fails_once(*args: Any) -> Any:
        if next(calls) == 0:
            raise MemoryError("there is none")
        return build(*args)

    monkeypatch.setattr(plan_server, "build_pipeline", fails_once)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_could_not_begin_leaves_nothing_to_the_next_one(
    root: Path, persistent: bool, device: str, one_build_fails: None
) -> None:
    slow = Slow(0.03)
    dataset = Spelled(root, slow)
    how: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": persistent, "device": device}
    loader = DataLoader(dataset, BATCH, shuffle=True, **how)
    try:
        iter(loader)
    except MemoryError:  # whose traceback keeps the frames, and what was in them, here
        slow.sleep_s = 0.001
        seen = list(itertools.chain.from_iterable(map(numbers_of, loader)))
    assert sorted(seen) == list(range(IMAGES))
    assert sorted(itertools.chain.from_iterable(map(numbers_of, loader))) == list(range(IMAGES))


@pytest.mark.parametrize("sharded", [False, True])
def test_an_epoch_that_could_not_begin_is_still_to_come(
    root: Path, sharded: bool, device: str, one_build_fails: None
) -> None:
    how: dict[str, Any] = {"shuffle": True, "seed": 3, "device": device, "num_workers": 2}
    how |= {"num_shards": 1} if sharded else {}
    loader = DataLoader(Spelled(root), BATCH, **how)
    with pytest.raises(MemoryError):
        iter(loader)
    assert loader.state_dict()["epoch"] == 0
    whole = list(map(numbers_of, loader))
    batches = iter(DataLoader(Spelled(root), BATCH, **how))
    assert [numbers_of(next(batches)) for _ in range(3)] == whole[:3]


def test_a_state_that_was_loaded_is_not_used_up_by_a_loop_that_could_not_begin(
    root: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"shuffle": True, "device": device, "num_workers": 2}
    first = DataLoader(Spelled(root), BATCH, **how)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    state = first.state_dict()
    left = list(map(numbers_of, batches))
    second = DataLoader(Spelled(root), BATCH, **how)
    second.load_state_dict(state)
    build = plan_server.build_pipeline
    monkeypatch.setattr(plan_server, "build_pipeline", _raises(MemoryError))
    with pytest.raises(MemoryError):
        iter(second)
    monkeypatch.setattr(plan_server, "build_pipeline", build)
    assert list(map(numbers_of, second)) == left


def _raises(kind: type[BaseException]) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise kind

    return raises


@contextlib.contextmanager
def interrupted_in(cls: type, method: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The body is, when it comes to this method."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cls, method, _raises(KeyboardInterrupt))
        yield


def test_after_an_interrupt_in_iter_an_older_iterator_does_not_end_as_if_it_were_done(
    root: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(Spelled(root), BATCH, num_workers=2, persistent_workers=True, device=device)
    older = iter(loader)
    numbers_of(next(older))
    with interrupted_in(PlanServers, "of", monkeypatch):
        iter(loader)
    with pytest.raises(RuntimeError, match="interrupted"):
        list(older)
    assert list(itertools.chain.from_iterable(map(numbers_of, loader))) == list(range(IMAGES))


def test_an_interrupt_when_a_batch_was_finished_ends_the_loop(
    root: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(Spelled(root), BATCH, num_workers=2, persistent_workers=True, device=device)
    batches = iter(loader)
    numbers_of(next(batches))
    time.sleep(0.3)  # others are ready
    with interrupted_in(RunSubmitter, "start_soon", monkeypatch):
        for batch in batches:
            numbers_of(batch)
    with pytest.raises(RuntimeError, match="interrupted .* in the middle of a batch"):
        next(batches)
    assert list(itertools.chain.from_iterable(map(numbers_of, loader))) == list(range(IMAGES))


def test_no_signal_is_lost_where_a_batch_goes_from_dali_to_torch(device: str) -> None:
    numbers = torch.arange(4.0, device=device)
    output = TensorCPU(numbers.numpy(), "", False) if device == "cpu" else TensorGPU(numbers, "")
    stream = None if device == "cpu" else torch.cuda.current_stream()
    is_inside, raised, caught = False, 0, 0

    def interrupt(*_: Any) -> None:
        nonlocal is_inside, raised
        if is_inside:
            is_inside, raised = False, raised + 1
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        until_s = time.monotonic() + WAIT_S
        while raised < 100 and time.monotonic() < until_s:
            try:
                is_inside = True
                for _ in range(1000):
                    _outputs._tensor_to_torch(output, stream, exec_dynamic=True)
                    _outputs._view(output, stream)
                is_inside = False
            except KeyboardInterrupt:
                caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught == raised == 100


def test_an_interrupt_in_the_middle_of_a_put_leaves_no_lock_that_the_end_would_wait_for(root: Path) -> None:
    batches = iter(DataLoader(Spelled(root), BATCH, num_workers=2, device="cpu"))
    numbers_of(next(batches))
    batches._feed._batches._index_queues[0]._notempty.acquire()
    start_s = time.monotonic()
    del batches
    assert time.monotonic() - start_s < STOP_S
