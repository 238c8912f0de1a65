"""A fork leaves the garbage collector as the user has it, however many threads fork at once."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from proxyloader import forks
from tests.faults import in_fork


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


class Slow:
    """Has runs under way until told otherwise."""

    def __init__(self) -> None:
        self.asked, self.done = threading.Event(), threading.Event()
        self.forgotten = False
        self.held: list[int] = []
        """By which threads, those that let it go on removed."""

    def hold_still(self) -> bool:
        self.asked.set()
        self.held.append(threading.get_ident())
        return self.done.wait(10)

    def go_on(self) -> None:
        self.held.remove(threading.get_ident())

    def forget_in_child(self) -> None:
        self.forgotten = True


def child(enabled: bool) -> None:
    assert gc.isenabled() is enabled


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_the_collector_is_as_it_was_in_parent_and_child(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    assert in_fork(lambda: child(enabled)) == 0
    assert gc.isenabled() is enabled


def test_the_collector_is_on_again_after_two_threads_forked_at_once() -> None:
    slow, results = Slow(), []
    forks.watch(slow)
    threads = [threading.Thread(target=lambda: results.append(in_fork(lambda: child(True)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert slow.asked.wait(10) and not gc.isenabled()
    slow.done.set()
    for thread in threads:
        thread.join(20)
    assert results == [0, 0] and gc.isenabled() and not slow.held


def test_a_child_forgets_what_it_inherited_and_destroys_nothing_of_it() -> None:
    server = Slow()
    server.done.set()
    forks.watch(server)
    destroyed = []

    class Precious:
        def __del__(self) -> None:
            destroyed.append(1)

    held = [Precious()]
    forks.keep_from_children(held[0])

    def drop() -> None:
        assert server.forgotten
        held.clear()
        gc.collect()
        assert not destroyed

    assert in_fork(drop) == 0
    assert not server.forgotten
    held.clear()
    assert destroyed


class Interrupted(Slow):
    """Ctrl-C comes while it is asked to hold still."""

    def hold_still(self) -> bool:
        if not self.asked.is_set():
            self.asked.set()
            raise KeyboardInterrupt
        return super().hold_still()


def test_an_interrupt_before_a_fork_comes_after_it() -> None:
    server = Interrupted()
    server.done.set()
    forks.watch(server)
    began_s = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            assert in_fork(lambda: child(True)) == 0
            assert server.asked.is_set()
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began_s < 8
    assert gc.isenabled() and not server.held


class Faulty(Slow):
    """Has runs that cannot be waited for."""

    def hold_still(self) -> bool:
        raise OSError("no such run")

    def __repr__(self) -> str:
        return "Faulty()"


def test_a_server_that_a_fork_finds_at_work_is_named(caplog: pytest.LogCaptureFixture) -> None:
    server = Faulty()
    forks.watch(server)
    assert in_fork(lambda: child(True)) == 0
    assert gc.isenabled()
    assert "before a fork Faulty() could not be brought to rest: OSError('no such run')" in caplog.text
