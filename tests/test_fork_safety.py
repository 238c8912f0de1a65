"""A fork leaves the garbage collector as the user has it, however many threads fork at once."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from proxyloader import _fork_safety

from .faults import in_fork, run_alone
from .limits import LONG_S, WAIT_S


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

    def pause(self) -> bool:
        self.asked.set()
        self.held.append(threading.get_ident())
        return self.done.wait(WAIT_S)

    def resume(self) -> None:
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
    _fork_safety.watch(slow)
    threads = [threading.Thread(target=lambda: results.append(in_fork(lambda: child(True)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert slow.asked.wait(WAIT_S) and not gc.isenabled()
    slow.done.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == [0, 0] and gc.isenabled() and not slow.held


def beside(work: Callable[[threading.Event], Any], in_child: Callable[[], Any]) -> int:
    """Fork while another thread works, and return what ``in_fork`` says of the child."""
    has_begun = threading.Event()
    thread = threading.Thread(target=work, args=(has_begun,))
    thread.start()
    assert has_begun.wait(WAIT_S)
    try:
        return in_fork(in_child)
    finally:
        thread.join(WAIT_S)


def test_a_child_may_seed_although_another_thread_was_drawing() -> None:
    many = torch.empty(100_000_000)

    def draw(has_begun: threading.Event) -> None:
        threading.Timer(0.05, has_begun.set).start()
        many.uniform_()

    assert beside(draw, lambda: torch.manual_seed(1)) == 0


def test_a_child_may_seed_although_another_thread_was_starting_cuda() -> None:
    def start(has_begun: threading.Event) -> None:
        with torch.cuda._initialization_lock:
            has_begun.set()
            time.sleep(0.2)

    assert beside(start, lambda: torch.cuda._lazy_call(int)) == 0  # as torch.manual_seed does


def test_a_child_may_compute_a_property_although_another_thread_was_computing_it() -> None:
    class Slowly:
        asked = threading.Event()

        @_fork_safety.cached_property
        def value(self) -> int:
            self.asked.set()
            time.sleep(0.2)
            return 1

    def compute(has_begun: threading.Event) -> None:
        threading.Timer(0.1, has_begun.set).start()
        assert Slowly().value == 1

    assert beside(compute, lambda: Slowly().value) == 0


def test_a_worker_imports_nothing_of_pillows_formats() -> None:
    """Another thread may hold the lock of such an import at the fork."""
    code = "import proxyloader.data.lazy_image; from PIL import Image; assert Image._initialized"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def test_a_child_forgets_what_it_inherited_and_destroys_nothing_of_it() -> None:
    server = Slow()
    server.done.set()
    _fork_safety.watch(server)
    destroyed = []

    class Precious:
        def __del__(self) -> None:
            destroyed.append(1)

    held = [Precious()]
    _fork_safety.keep_from_children(held[0])

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

    def pause(self) -> bool:
        if not self.asked.is_set():
            self.asked.set()
            signal.raise_signal(signal.SIGINT)
        return super().pause()


def test_an_interrupt_before_a_fork_comes_after_it() -> None:
    server = Interrupted()
    server.done.set()
    _fork_safety.watch(server)
    began_s = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            assert in_fork(lambda: child(True)) == 0
            assert server.asked.is_set()
            time.sleep(LONG_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began_s < WAIT_S
    assert gc.isenabled() and not server.held


def test_an_interrupt_while_another_thread_forks_comes_after_ours() -> None:
    script = """
        import os, signal, sys, threading, time
        from proxyloader import _fork_safety
        class Slow:
            def pause(self):
                if threading.current_thread() is not threading.main_thread():
                    asked.set()
                    time.sleep(0.6)
                return True
            def resume(self): ...
            def forget_in_child(self): ...
        def fork():
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        slow, asked = Slow(), threading.Event()
        _fork_safety.watch(slow)
        other = threading.Thread(target=fork)
        other.start()
        asked.wait()
        threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        try:
            fork()
            time.sleep(5)
            print("lost")
        except KeyboardInterrupt:
            print("came")
        other.join()
        fork()
    """
    done = run_alone(script)
    assert done.stdout == "came\n" and "Exception ignored" not in done.stderr


class Faulty(Slow):
    """Has runs that cannot be waited for."""

    def pause(self) -> bool:
        raise OSError("no such run")

    def __repr__(self) -> str:
        return "Faulty()"


def test_a_server_that_a_fork_finds_at_work_is_named(caplog: pytest.LogCaptureFixture) -> None:
    server = Faulty()
    _fork_safety.watch(server)
    assert in_fork(lambda: child(True)) == 0
    assert gc.isenabled()
    assert "before a fork Faulty() could not be brought to rest: OSError('no such run')" in caplog.text
