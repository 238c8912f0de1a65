"""Loaders in threads, in forked and spawned processes, several at once, and a hundred in turn."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

from proxyloader import DataLoader

from ..faults import (
    BATCH,
    Misstep,
    Spelled,
    all_numbers,
    await_true,
    children_of,
    in_fork,
    in_thread,
    loader_of,
    numbers_of,
    run_alone,
)
from ..limits import WAIT_S

ALL = list(range(48))
WORKERS = pytest.mark.parametrize(
    "arguments",
    [dict(workers=0), dict(workers=2), dict(workers=2, persistent_workers=True)],
    ids=["no workers", "workers", "persistent workers"],
)


def in_threads(*runs: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=run, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


# --- a fork in mid epoch ---------------------------------------------------------------------------------------------


@WORKERS
def test_children_that_use_what_they_inherited_do_no_harm(spelled_root: Path, arguments: Any, device: str) -> None:
    held: list[Any] = [loader_of(spelled_root, device=device, **arguments)]
    held.append(iter(held[0]))
    numbers = all_numbers(itertools.islice(held[1], 3))

    def go_on() -> None:
        rest = []
        try:
            rest = all_numbers(held[1])
        except AssertionError:
            raise
        except Exception as error:
            assert str(error)
        assert rest in ([], ALL[12:])

    def drop() -> None:
        held.clear()
        gc.collect()

    assert in_fork(go_on) == 0 and in_fork(drop) == 0
    assert in_thread(lambda: numbers + all_numbers(held[1])) == ALL
    assert all_numbers(held[0]) == ALL


@WORKERS
def test_a_child_may_iterate_while_its_parent_goes_on(spelled_root: Path, tmp_path: Path, arguments: Any) -> None:
    loader = loader_of(spelled_root, **arguments)
    batches = iter(loader)
    numbers = all_numbers(itertools.islice(batches, 3))
    begun, resume = tmp_path / "begun", tmp_path / "go_on"

    def child() -> None:
        own = iter(loader)
        found = numbers_of(next(own))
        begun.touch()
        await_true(resume.exists)
        assert found + all_numbers(own) == ALL

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    await_true(begun.exists)
    numbers += all_numbers(itertools.islice(batches, 3))
    resume.touch()
    assert numbers + all_numbers(batches) == ALL
    process.join(WAIT_S)
    assert process.exitcode == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "workers"])
def test_a_loader_goes_to_another_process_in_mid_epoch(spelled_root: Path, method: str, workers: int) -> None:
    loader = loader_of(spelled_root, workers=workers)
    batches = iter(loader)
    numbers = numbers_of(next(batches))
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        assert pool.submit(all_numbers, loader).result(WAIT_S) == ALL
    assert numbers + all_numbers(batches) == ALL


def test_workers_in_a_daemon_process_are_refused_as_by_torch(spelled_root: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(all_numbers, [loader_of(spelled_root, workers=0)]) == ALL
        with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
            pool.apply(all_numbers, [loader_of(spelled_root)])
        pool.close()
        pool.join()


def test_a_fork_while_a_thread_waits_for_a_batch(spelled_root: Path, tmp_path: Path) -> None:
    misstep = Misstep(13, functools.partial(await_true, (tmp_path / "go_on").exists), tmp_path)
    loader, found = loader_of(spelled_root, misstep), []
    thread = threading.Thread(target=lambda: found.extend(all_numbers(loader)), daemon=True)
    thread.start()
    misstep.await_s()
    assert in_fork(lambda: numbers_of(next(iter(loader_of(spelled_root))))) == 0
    assert in_fork(lambda: numbers_of(next(iter(loader_of(spelled_root, workers=0))))) == 0
    (tmp_path / "go_on").touch()
    thread.join(WAIT_S)
    assert found == ALL


# --- threads ---------------------------------------------------------------------------------------------------------


@WORKERS
def test_four_threads_may_have_a_loader_each(spelled_root: Path, arguments: Any, device: str) -> None:
    dataset, found = Spelled(spelled_root), {}
    how = {"num_workers": arguments["workers"], "persistent_workers": "persistent_workers" in arguments}

    def epochs(name: int) -> None:
        loader = DataLoader(dataset, BATCH + name, device=device, **how)
        found[name] = [all_numbers(loader) for _ in range(2)]

    in_threads(*(functools.partial(epochs, name) for name in range(4)))
    assert found == {name: [ALL, ALL] for name in range(4)}


def test_threads_that_start_workers_fork_in_turn(spelled_root: Path) -> None:
    """filelock refuses a fork while another thread is in one; this does the same with any version and Python."""
    script = f"""
        import os, sys, threading
        from proxyloader import DataLoader
        from tests.faults import Spelled
        forking, forks, refused = set(), [], []
        def refuse(event, _):
            if event != "os.fork":
                return
            forks.append(event)
            if forking - {{threading.get_ident()}}:
                refused.append(event)
                raise RuntimeError("a fork while another thread is in one")
        dataset, done = Spelled({str(spelled_root)!r}), []
        def loop(seed):
            how = dict(num_workers=2, seed=seed, device="cpu", multiprocessing_context="fork")
            done.append(len(list(DataLoader(dataset, 4, **how))))
        loop(None)  # with a pipeline there, a fork takes longer
        sys.addaudithook(refuse)
        mark = lambda: forking.add(threading.get_ident())
        os.register_at_fork(before=mark, after_in_parent=lambda: forking.discard(threading.get_ident()))
        threads = [threading.Thread(target=loop, args=(seed,)) for seed in (None, None, 1, 1)]
        [thread.start() for thread in threads]
        [thread.join({WAIT_S}) for thread in threads]
        print(len(done), len(forks), len(refused))
    """
    done = run_alone(script, timeout_s=2 * WAIT_S)
    assert done.stdout == "5 8 0\n", done.stderr


def test_workers_start_beside_forks_that_wait_for_a_library_first() -> None:
    """As for h5py, whose functions are called before ours, as it is imported later."""
    script = f"""
        import multiprocessing, os, threading, time
        from proxyloader import lifetime
        lock = threading.Lock()
        def take():
            lock.acquire()
            time.sleep(0.01)
        os.register_at_fork(before=take, after_in_parent=lock.release, after_in_child=lock.release)
        def start(context):
            for _ in range(20):
                process = context.Process(target=int)
                process.start()
                process.join()
        contexts = lifetime.ForkContext(), multiprocessing.get_context("fork")
        threads = [threading.Thread(target=start, args=(context,), daemon=True) for context in contexts]
        [thread.start() for thread in threads]
        [thread.join({WAIT_S / 2}) for thread in threads]
        print([thread.is_alive() for thread in threads], flush=True)
        os._exit(0)
    """
    done = run_alone(script)
    assert done.stdout == "[False, False]\n", done.stderr


def test_a_child_does_not_destroy_the_pipeline_of_a_loader_that_is_dropped_during_the_fork(spelled_root: Path) -> None:
    """As another thread may drop it while the fork waits for DALI."""
    script = f"""
        import os
        held = []
        os.register_at_fork(before=held.clear)  # called after the functions that were registered later
        from proxyloader import DataLoader
        from tests.faults import Spelled
        held.append(DataLoader(Spelled({str(spelled_root)!r}), 4, device="cpu"))
        list(held[0])
        child = os.fork()
        if not child:
            os._exit(0)
        print(len(held), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = run_alone(script)
    assert done.stdout == "0 0\n", done.stderr


class Waits(Spelled):
    """Its loader cannot begin before another one has ended."""

    other: Callable[[], Any] = staticmethod(lambda: None)

    @property
    def transform(self) -> Any:
        self.other()
        return self._transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self._transform = transform


def test_a_loader_may_begin_while_another_one_begins(spelled_root: Path) -> None:
    dataset, found = Waits(spelled_root), []
    loader: DataLoader[Any] = DataLoader(dataset, BATCH, device="cpu")

    def load_in_another_thread() -> None:
        dataset.other = lambda: None
        found.append(in_thread(lambda: all_numbers(loader_of(spelled_root, workers=0))))

    dataset.other = load_in_another_thread
    assert all_numbers(loader) == ALL and found == [ALL]


class MeetsOthers(Sampler[int]):
    """Of a rank that is a thread: all meet before the first of them goes on."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def __iter__(self) -> Iterator[int]:
        self.barrier.wait(WAIT_S)
        return iter(ALL)

    def __len__(self) -> int:
        return len(ALL)


def test_samplers_of_threads_that_start_workers_may_wait_for_each_other(spelled_root: Path) -> None:
    dataset, barrier, found = Spelled(spelled_root), threading.Barrier(2), []

    def epoch() -> None:
        how: Any = dict(num_workers=1, multiprocessing_context="fork", device="cpu")
        found.append(all_numbers(DataLoader(dataset, BATCH, sampler=MeetsOthers(barrier), **how)))

    in_threads(epoch, epoch)
    assert found == [ALL, ALL]


class Draws(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(()) for _ in range(4))


@pytest.mark.parametrize(
    ("dataset", "epochs", "arguments"),
    [(torch.arange(64), 25, {"shuffle": True}), (Draws(), 2, {"num_workers": 2, "multiprocessing_context": "fork"})],
    ids=["shuffled", "drawn in workers"],
)
def test_a_seed_holds_beside_those_of_other_threads(dataset: Any, epochs: int, arguments: Any) -> None:
    def loops(seed: int, found: dict[int, Any]) -> None:
        loader: DataLoader[Any] = DataLoader(dataset, 2, seed=seed, device="cpu", **arguments)
        found[seed] = [torch.cat(list(loader)).tolist() for _ in range(epochs)]

    alone: dict[int, Any] = {}
    together: dict[int, Any] = {}
    for seed in range(4):
        loops(seed, alone)
    before = torch.get_rng_state()
    in_threads(*(functools.partial(loops, seed, together) for seed in range(4)))
    assert together == alone
    if "num_workers" in arguments:  # else samples are fetched here, under a default generator that is theirs
        assert torch.equal(torch.get_rng_state(), before)


class HandedOn:
    """A batch sampler that is its own iterator; threads may ask it, as it hands on those of a list."""

    def __iter__(self) -> Iterator[list[int]]:
        self.batches = iter([[number] for number in ALL])
        return self

    def __next__(self) -> list[int]:
        time.sleep(0)  # another thread's turn
        return next(self.batches)


@WORKERS
def test_threads_may_share_an_iterator_without_taking_turns(spelled_root: Path, arguments: Any, device: str) -> None:
    arguments = {"num_workers": arguments["workers"]} | {k: v for k, v in arguments.items() if k != "workers"}
    batches = iter(DataLoader(Spelled(spelled_root), batch_sampler=HandedOn(), device=device, **arguments))
    assert in_thread(lambda: numbers_of(next(batches))) == [0]
    found: list[int] = []
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(*6 * [lambda: found.extend(all_numbers(batches))])
    finally:
        sys.setswitchinterval(interval_s)
    assert sorted(found) == ALL[1:] and next(batches, None) is None


@pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "workers"])
def test_threads_that_share_a_loader_have_an_epoch_each(spelled_root: Path, workers: int, device: str) -> None:
    epochs: Any = loader_of(spelled_root, workers=0, device=device, shuffle=True, seed=3)
    expected = [all_numbers(epochs) for _ in range(8)]
    shared: Any = loader_of(spelled_root, workers=workers, device=device, shuffle=True, seed=3)
    together, found = threading.Barrier(4), []

    def two_epochs() -> None:
        together.wait(WAIT_S)
        found.extend([all_numbers(shared) for _ in range(2)])

    in_threads(*4 * [two_epochs])
    assert sorted(found) == sorted(expected)


def test_workers_that_a_pool_of_threads_starts_exit_cleanly(spelled_root: Path, device: str) -> None:
    def statuses() -> list[int | None]:
        batches = iter(loader_of(spelled_root, device=device))
        workers = multiprocessing.active_children()
        assert all_numbers(batches) == ALL
        return [worker.exitcode for worker in workers]

    pool = ThreadPoolExecutor(1)
    try:
        assert pool.submit(statuses).result(WAIT_S) == [0, 0]
    finally:
        pool.shutdown(wait=False)


# --- several loaders -------------------------------------------------------------------------------------------------


def leave_with_an_error(loader: Any) -> None:
    try:
        for _ in loader:
            raise LookupError("mine")
    except LookupError:
        pass


WAYS = [lambda loader: None, iter, lambda loader: next(iter(loader)), leave_with_an_error, all_numbers]


def kept_by_this_process() -> dict[str, int]:
    return {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")} | {"children": len(children_of())}


def test_thirty_loaders_in_turn_leave_no_thread_no_descriptor_and_no_child(spelled_root: Path, device: str) -> None:
    def use(loaders: int) -> None:
        for k in range(loaders):
            persistent = k % 3 > 0 and k % 2 > 0
            loader = loader_of(spelled_root, None, k % 3, persistent_workers=persistent, device=device, num_threads=1)
            WAYS[k % len(WAYS)](loader)

    use(15)  # all ways with all numbers of workers
    before = kept_by_this_process()
    use(15)
    # What is ending has ended soon; what leaks stays.
    deadline = time.monotonic() + WAIT_S
    while any(kept_by_this_process()[name] > before[name] for name in before) and time.monotonic() < deadline:
        time.sleep(0.05)
    after = kept_by_this_process()
    assert all(after[name] <= before[name] for name in before), (before, after)
