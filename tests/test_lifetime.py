"""Forks, Ctrl-C and exits while DALI and workers run: children, loops and scripts end as with torch's loader."""

from __future__ import annotations

import contextlib
import gc
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from proxyloader import lifetime

from . import scripts
from .faults import HEADER, assert_gone, children_of, in_fork, run_alone, training
from .limits import ERROR_S, LONG_S, WAIT_S
from .tiers import by_default

# --- forks -----------------------------------------------------------------------------------------------------------


class Slow:
    """Has runs under way until told otherwise."""

    def __init__(self) -> None:
        self.asked, self.done = threading.Event(), threading.Event()
        self.forgotten = False
        self.held: list[int] = []  # by which threads, until these resume it

    def pause(self) -> bool:
        self.asked.set()
        self.held.append(threading.get_ident())
        return self.done.wait(WAIT_S)

    @contextlib.contextmanager
    def paused(self) -> Iterator[bool]:
        yield self.pause()
        self.held.remove(threading.get_ident())

    def forget_in_child(self) -> None:
        self.forgotten = True


def child(enabled: bool) -> None:
    assert gc.isenabled() is enabled


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.usefixtures("no_collector")
def test_the_collector_is_as_it_was_in_parent_and_child(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    assert in_fork(lambda: child(enabled)) == 0
    assert gc.isenabled() is enabled


def test_the_collector_is_on_again_after_two_threads_forked_at_once() -> None:
    slow, results = Slow(), []
    lifetime.watch(slow)
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


def test_a_child_may_do_what_another_thread_was_doing() -> None:
    many = torch.empty(100_000_000)

    def draw(has_begun: threading.Event) -> None:
        threading.Timer(0.05, has_begun.set).start()
        many.uniform_()

    def start_cuda(has_begun: threading.Event) -> None:
        with torch.cuda._initialization_lock:
            has_begun.set()
            time.sleep(0.2)

    assert beside(draw, lambda: torch.manual_seed(1)) == 0
    assert beside(start_cuda, lambda: torch.cuda._lazy_call(int)) == 0  # as torch.manual_seed does


def test_a_worker_imports_nothing_of_pillows_formats() -> None:
    """Another thread may hold the lock of such an import at the fork."""
    code = "from PIL import Image; print(Image._initialized); import proxyloader.data.lazy_image"
    code += "; print(Image._initialized)"
    assert scripts.run(code, timeout_s=WAIT_S).stdout.split() == ["0", "1"]


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
    lifetime.watch(server)
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
        import contextlib, os, signal, sys, threading, time
        from proxyloader import lifetime
        class Slow:
            @contextlib.contextmanager
            def paused(self):
                if threading.current_thread() is not threading.main_thread():
                    asked.set()
                    time.sleep(0.6)
                yield True
            def forget_in_child(self): ...
        def fork():
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        slow, asked = Slow(), threading.Event()
        lifetime.watch(slow)
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
    lifetime.watch(server)
    assert in_fork(lambda: child(True)) == 0
    assert gc.isenabled()
    assert "failed to pause Faulty() before a fork: OSError('no such run')" in caplog.text


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
from proxyloader import DataLoader
from torchvision import datasets, transforms

calls = 0
def interrupt(frame, event, function):
    global calls
    calls += event == "c_call" and frame.f_code.co_name == "_load_ops"
    if calls == 700:  # in the middle of it; at its begin it would do no harm
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    dataset = datasets.ImageFolder(sys.argv[1], transform)
    loader = DataLoader(dataset, 4, device="cpu")
    sys.setprofile(interrupt)
    try:
        for _ in range(100):
            list(loader)
        print("it did not come")
    except KeyboardInterrupt:
        print("interrupted")
    print(sum(len(labels) for _, labels in loader) == len(dataset), calls)
"""


def test_an_interrupt_while_dali_is_imported_leaves_it_usable(photos: Path) -> None:
    done = scripts.run(INTERRUPTED, photos, timeout_s=WAIT_S)
    assert done.stdout == "interrupted\nTrue 700\n", done.stderr


# --- the end of the interpreter --------------------------------------------------------------------------------------

KEPT = """
import atexit, ctypes, sys


@atexit.register  # first, so it is called last
def keep_all_modules():  # as extension modules do, of pandas and others: then Python clears them one by one
    for module in list(sys.modules.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


{early}
"""


def ended(folder: Path, root: Path, body: str, early: str = "", afresh: bool = False) -> tuple[int, str, str]:
    """The status, output and errors of a script that has ended, and left no process.

    Args:
        early: stands before all imports.
        afresh: as of ``training``.
    """
    children: set[psutil.Process] = set()
    header = KEPT.format(early=textwrap.dedent(early)) + HEADER + "    notes = Path(sys.argv[0]).parent\n"
    with training(folder, root, body, header=header, afresh=afresh) as process:
        deadline_s = time.monotonic() + WAIT_S
        while process.poll() is None:
            assert time.monotonic() < deadline_s, "it does not end"
            try:
                children.update(children_of(process.pid))
            except psutil.Error:
                continue
            time.sleep(0.02)
        output, errors = process.communicate(timeout=WAIT_S)
        assert_gone(list(children), ERROR_S)
        return process.returncode, output, errors


LEFT_OPEN = {
    "in a thread that still runs": """
        batches = iter(loader_of(root, Misstep(13, hang, notes)))
        threading.Thread(target=all_numbers, args=(batches,), daemon=True).start()
        all_numbers([next(iter(loader_of(root)))])
    """,
    "os._exit while a worker sleeps": """
        misstep = Misstep(13, hang, notes)
        for batch in loader_of(root, misstep, persistent_workers=True): misstep.await_s(); os._exit(0)
    """,
    "an iterator in a cycle": "kept = [loader_of(root)]; kept += [iter(kept[0]), kept]; next(kept[1]); del kept",
    "cells of a notebook": """
        cells = ["from tests.faults import *", "batches = iter(loader_of(root))", "_ = next(batches)", "Out = {3: _}"]
        user = {"root": root}
        for cell in cells: exec(compile(cell, "<cell>", "exec"), user)
    """,
}


@pytest.mark.parametrize(
    "body",
    by_default(LEFT_OPEN, *("in a thread that still runs", "os._exit while a worker sleeps", "an iterator in a cycle")),
)
def test_a_script_that_leaves_it_open_ends_without_a_word(spelled_root: Path, tmp_path: Path, body: str) -> None:
    assert ended(tmp_path, spelled_root, body) == (0, "", "")


GOING_ON = {
    "with workers": "while True: all_numbers(loader_of(root))",
    "in DALI": "while True: all_numbers(loader)",
    "that build pipelines": "while True: all_numbers(loader_of(root, workers=0))",
}


@pytest.mark.parametrize("body", by_default(GOING_ON, "with workers"))
def test_threads_that_go_on_end_without_a_word(spelled_root: Path, tmp_path: Path, body: str) -> None:
    script = f"""
        def train(loader):
            {body}
        for _ in range(3):
            threading.Thread(target=train, args=(loader_of(root, workers=0),), daemon=True).start()
        time.sleep(2)
    """
    status, output, errors = ended(tmp_path, spelled_root, script)
    # Python before 3.14 ends a thread wherever it is. In torch's code that aborts the process; so it does with torch's
    # own loader, where it is the rule.
    if status == -signal.SIGABRT:
        errors = errors.removeprefix("terminate called without an active exception\n")
    assert (output, errors) == ("", "") and status in (0, -signal.SIGABRT)


ENDINGS = {
    "sys.exit": ("sys.exit(3)", 3, ""),
    "sys.exit with a message": ("sys.exit('enough')", 1, "enough"),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -2, "KeyboardInterrupt"),
    "an exception in a thread": (
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
        0,
        "ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize(("ending", "status", "last"), by_default(ENDINGS, "Ctrl-C"))
def test_a_script_ends_as_it_was_told(spelled_root: Path, tmp_path: Path, ending: str, status: int, last: str) -> None:
    body = f"""
        for batch in loader_of(root):
            {ending}
            break
    """
    found, output, errors = ended(tmp_path, spelled_root, body)
    assert (found, output, errors.count("Traceback")) == (status, "", last.count(":") or last.count("Keyboard"))
    assert errors.endswith(last + "\n" if last else "")


LOADS_AT_THE_END = """
    kept = iter(loader_of(root, persistent_workers=True)); next(kept)  # left open
    batches = iter(loader_of(root, workers={workers}))
    seen = all_numbers([next(batches)])

    {register}
    def load():
        print(seen + all_numbers(batches) == list(range(48)))
        print(all_numbers(loader_of(root, workers={workers})) == list(range(48)))
"""


@pytest.mark.parametrize("moment", ["after an epoch has begun", "before torch is imported", "before DALI is"])
def test_an_exit_handler_may_load_batches_whenever_it_was_registered(
    spelled_root: Path, tmp_path: Path, moment: str
) -> None:
    early, before, register, workers = "", "", "", 0
    if moment == "before torch is imported":
        early = """
            @atexit.register
            def load_in_the_end():
                load()
        """
    elif moment == "before DALI is":
        before = "    atexit.register(lambda: load())"
    else:
        register, workers = "@atexit.register", 2
    body = before + LOADS_AT_THE_END.format(workers=workers, register=register)
    assert ended(tmp_path, spelled_root, body, early, afresh=bool(early)) == (0, "True\nTrue\n", "")


def test_a_forked_child_ends_without_a_word(spelled_root: Path, tmp_path: Path) -> None:
    script = """
        from tests.integration.roads import picture_pipeline
        batches = iter(loader_of(root, workers=0)); next(batches)
        pipeline = picture_pipeline("cpu"); pipeline.build()
        cycle = [picture_pipeline("cpu")]; cycle[0].build(); cycle.append(cycle); del cycle
        pid = os.fork()
        if pid == 0:
            batches = iter(loader_of(root, workers=0)); next(batches)
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        next(batches)
    """
    assert ended(tmp_path, spelled_root, script) == (0, "3\n", "")
