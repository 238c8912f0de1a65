"""Errors that come between two lines: from a signal handler, from an ``iter(loader)`` that fails, from Ctrl-C. What
comes after them must be right, and nothing may be lost without a word."""

from __future__ import annotations

import itertools
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali import Pipeline
from nvidia.dali.backend import TensorListCPU, TensorListGPU

from proxyloader.dali import run_queue

from .. import scripts
from ..faults import BATCH, all_numbers, loader_of, numbers_of
from ..limits import WAIT_S
from ..outcomes import outcomes
from .roads import PICTURES

ALL = list(range(PICTURES))
NOWHERE = "cuda:63"
"""A device with which a loop cannot begin, as that is not there."""


class Preempted(RuntimeError):
    """What a signal handler of the user's raises; DALI's own errors are RuntimeErrors, too."""


ALARMS = """
    import itertools, random, signal, sys, time
    from proxyloader import DataLoader
    from tests.faults import *

    root, device, error, workers = *sys.argv[1:4], int(sys.argv[4])

    def interrupt(*_):
        raise {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[error]("by a signal")

    all_numbers(loader_of(root, device=device))  # for DALI's modules: an interrupted import leaves a part of them
    kept = iter(loader_of(root, device=device))
    numbers_of(next(kept))  # DALI's decoders stay loaded, or on a GPU each pipeline that is built anew would load them
    loader, draw = loader_of(root, workers=workers, device=device), random.Random(4)
    raised, end_s = 0, time.monotonic() + 4
    signal.signal(signal.SIGALRM, interrupt)
    while time.monotonic() < end_s or raised <= 10:
        batches = iter(loader) if workers else loader  # Python loses what is raised in the middle of a fork
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, 0.03))
            all_numbers(batches)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except AssertionError:
            raise
        except (Exception, KeyboardInterrupt):  # the handler's, or what the code in between makes of it
            raised += 1
        del batches
        all_numbers(itertools.islice(loader, 2))
    print(raised, len(all_numbers(loader)))
"""


@pytest.mark.parametrize(("error", "workers"), [("RuntimeError", 0), ("KeyboardInterrupt", 1)])
def test_pictures_are_right_after_a_signal_handler_has_raised_in_whatever_line(
    spelled_root: Path, error: str, workers: int, device: str
) -> None:
    # On a GPU that other tests use, it takes minutes.
    done = scripts.run(textwrap.dedent(ALARMS), spelled_root, device, error, workers, timeout_s=6 * WAIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    raised, images = map(int, done.stdout.split())
    assert raised > 10 and images == PICTURES


def interrupt_second_run(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    of_dali, calls = Pipeline.outputs, itertools.count()

    def outputs(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise error
        return of_dali(pipeline, *args, **kwargs)

    monkeypatch.setattr(Pipeline, "outputs", outputs)


@pytest.mark.parametrize(("workers", "error"), [(0, ""), (2, ""), (2, "DataLoader worker (pid 1) is killed")])
def test_a_batch_that_an_interrupt_took_is_the_next_one_of_the_state(
    spelled_root: Path, workers: int, error: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, resumed = (loader_of(spelled_root, workers=workers, device=device) for _ in range(2))
    interrupt_second_run(monkeypatch, RuntimeError(error) if error else KeyboardInterrupt())
    seen: list[int] = []
    with pytest.raises(RuntimeError if error else KeyboardInterrupt):
        seen += map(numbers_of, loader)
    resumed.load_state_dict(loader.state_dict())
    assert loader.state_dict()["batches"] == len(seen) and all_numbers(resumed) == ALL[BATCH * len(seen) :]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_before_dali_gave_a_run_up_is_the_users_and_shifts_nothing(
    spelled_root: Path, workers: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_second_run(monkeypatch, Preempted("by a signal"))
    loader = loader_of(spelled_root, workers=workers, device=device)
    found = outcomes(loader)
    batches = [each for each in found if not isinstance(each, Preempted)]
    assert len(found) == len(batches) + 1 and len(all_numbers(batches)) == PICTURES - BATCH
    assert all_numbers(loader) == ALL


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_could_not_begin_leaves_nothing(spelled_root: Path, persistent: bool, device: str) -> None:
    sleep_s = [0.03]  # for each picture, as from a cold disk; workers that have begun keep to what it was
    how: dict[str, Any] = {"prefetch_factor": 4, "persistent_workers": persistent, "device": device, "shuffle": True}
    loader = loader_of(spelled_root, lambda index: time.sleep(sleep_s[0]), **how)
    loader.device = NOWHERE
    try:
        iter(loader)
    except ValueError:  # whose traceback keeps the frames, and what was in them, here
        sleep_s[0], loader.device = 0.001, device
        seen = all_numbers(loader)
    assert sorted(seen) == ALL
    assert sorted(all_numbers(loader)) == ALL


@pytest.mark.parametrize("shards", [None, 1])
@pytest.mark.parametrize("batches", [0, 5])
def test_an_epoch_or_a_state_is_not_used_up_by_a_loop_that_could_not_begin(
    spelled_root: Path, shards: int | None, batches: int, device: str
) -> None:
    how: dict[str, Any] = {"shuffle": True, "seed": 3, "device": device, "num_shards": shards}
    first, second, third = (loader_of(spelled_root, **how) for _ in range(3))
    loop = iter(first)
    whole = [numbers_of(batch) for batch in itertools.islice(loop, batches)]
    if batches:
        second.load_state_dict(first.state_dict())
    whole += map(numbers_of, loop)
    second.device = NOWHERE
    with pytest.raises(ValueError, match=NOWHERE):
        iter(second)
    second.device = device
    assert second.state_dict()["epoch"] == 0
    assert list(map(numbers_of, second)) == whole[batches:]
    assert list(map(numbers_of, third)) == whole


class Order(list[int]):
    is_interrupted = False

    def __iter__(self) -> Iterator[int]:
        if self.is_interrupted:
            raise KeyboardInterrupt
        return super().__iter__()


def test_after_an_interrupt_in_iter_an_older_iterator_does_not_end_as_if_it_were_done(
    spelled_root: Path, device: str
) -> None:
    order = Order(ALL)
    loader = loader_of(spelled_root, sampler=order, persistent_workers=True, device=device)
    older = iter(loader)
    numbers_of(next(older))
    order.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    order.is_interrupted = False
    with pytest.raises(RuntimeError, match="interrupted"):
        list(older)
    assert all_numbers(loader) == ALL


def test_no_signal_is_lost_where_a_batch_goes_from_dali_to_torch(device: str) -> None:
    numbers = torch.arange(4.0, device=device)
    output = TensorListCPU(numbers.numpy(), "", False) if device == "cpu" else TensorListGPU(numbers, "")
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
                    run_queue.to_torch([output], exec_dynamic=True)
                is_inside = False
            except KeyboardInterrupt:
                caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught == raised == 100
