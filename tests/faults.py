"""What goes wrong, on purpose: datasets with a misstep, scripts that are stopped from outside, children of a fork.

Every picture spells its number and travels with its index, so a batch that is wrong in any way shows it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import select
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader

from . import scripts
from .limits import LONG_S, WAIT_S
from .numbered import BLOCKS, SIDE_PX
from .scripts import WITH_THE_PROJECT as WITH_THE_PROJECT

T = TypeVar("T")

BATCH = 4
WORKER_LOST = "DataLoader worker .*(exited unexpectedly|killed by signal|exit)"


class Misstep:
    """What a dataset does before it gives the sample at one index. It happens once, in whichever process comes first.

    Args:
        at: the index.
        do: the misstep; a function that can be pickled where workers are not forked.
        notes: an empty folder, where it is noted that it happened, and when.
    """

    def __init__(self, at: int, do: Callable[[], Any], notes: Path) -> None:
        self.at, self.do, self._armed, self._taken = at, do, notes / "armed", notes / "taken"
        self._armed.touch()

    def __call__(self, index: int) -> None:
        if index != self.at:
            return
        try:
            os.utime(self._armed)
            self._armed.rename(self._taken)  # which takes no descriptor: there may be none
        except FileNotFoundError:
            return
        self.do()

    def await_s(self, timeout_s: float = WAIT_S) -> float:
        """Wait until it happened; returns when that was, on the clock of ``time.monotonic``."""
        await_true(self._taken.exists, timeout_s)
        return time.monotonic() - (time.time() - self._taken.stat().st_mtime)


class Spelled(ImageFolder):
    """Gives each picture with the number that it spells, which is its index."""

    def __init__(
        self, root: str | os.PathLike[str], misstep: Callable[[int], Any] | None = None, **arguments: Any
    ) -> None:
        super().__init__(os.fspath(root), **{"transform": transforms.ToTensor()} | arguments)
        self.misstep = misstep

    def __getitem__(self, index: int) -> Any:
        if self.misstep is not None:
            self.misstep(index)
        image, _ = super().__getitem__(index)
        return image, index


def loader_of(
    root: str | os.PathLike[str], misstep: Callable[[int], Any] | None = None, workers: int = 2, **arguments: Any
) -> DataLoader[Any]:
    return DataLoader(Spelled(root, misstep), BATCH, num_workers=workers, **{"device": "cpu"} | arguments)


def numbers_of(batch: Any) -> list[int]:
    """The numbers that a batch spells; fails where they are not those of its indices.

    By numpy, as torch's own threads do not survive a fork.
    """
    images, indices = batch
    blocks = images.cpu().numpy().mean(1).reshape(len(images), BLOCKS, SIDE_PX // BLOCKS, BLOCKS, SIDE_PX // BLOCKS)
    bits = blocks.mean((2, 4)).reshape(len(images), -1) > 0.5
    numbers = [int(number) for number in bits @ (1 << np.arange(BLOCKS**2))]
    assert numbers == indices.tolist()
    return numbers


def all_numbers(batches: Iterable[Any]) -> list[int]:
    return [number for batch in batches for number in numbers_of(batch)]


def hang() -> None:
    # In pieces: an interrupt that comes just before a sleep begins is noticed only when that has ended.
    end_s = time.monotonic() + LONG_S
    while time.monotonic() < end_s:
        time.sleep(0.1)


def be_killed() -> None:
    """As by the kernel where memory ends."""
    os.kill(os.getpid(), signal.SIGKILL)


def say_ready() -> None:
    os.write(1, b"ready\n")


def say_ready_and_hang(*_: Any) -> None:
    say_ready()
    hang()


# --- waiting ---------------------------------------------------------------------------------------------------------


def await_true(happened: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.01)


def await_line(process: subprocess.Popen[str], line: str, timeout_s: float = WAIT_S) -> None:
    """Wait until a script prints a line, alone."""
    assert process.stdout is not None and process.stderr is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    found = process.stdout.readline() if readable else f"nothing in {timeout_s} s"
    assert found == f"{line}\n", found or process.stderr.read()


def in_thread(run: Callable[[], T], timeout_s: float = WAIT_S) -> T:
    """What ``run`` returns or raises in a thread of its own; fails where that takes too long."""
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((run(), None))
        except BaseException as error:
            results.put((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    while results.empty() and time.monotonic() < deadline:
        # Where a loader was used in the main thread before, torch tells the main thread, too, of any lost worker. (Not
        # in join(): Python 3.11 takes a thread for finished when a signal handler raises in its join().)
        with contextlib.suppress(RuntimeError):
            time.sleep(0.01)
    assert not results.empty(), f"the thread hangs for {timeout_s} s"
    thread.join()
    value, error = results.get()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def without_torchs_signal() -> Iterator[None]:
    """torch's handler tells the main thread of a lost worker wherever that thread may be, also in a test's own code."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


# --- processes -------------------------------------------------------------------------------------------------------


def children_of(pid: int | None = None) -> list[psutil.Process]:
    """The processes of a training, at any depth, without those that Python or ``scripts`` keeps for the next one."""
    return [child for child in _descendants(psutil.Process(pid)) if not _is_kept(child, pid or os.getpid())]


def _descendants(process: psutil.Process) -> Iterator[psutil.Process]:
    """From the kernel's list of each thread's children. psutil reads the table of all processes, which takes 10 ms."""
    lists = list(Path(f"/proc/{process.pid}/task").glob("*/children"))
    if not lists:  # this kernel keeps none, or the process is gone
        yield from process.children(recursive=True)
    for path in lists:
        with contextlib.suppress(OSError, psutil.Error):  # the thread or the child ends meanwhile
            for pid in path.read_text().split():
                child = psutil.Process(int(pid))
                yield child
                yield from _descendants(child)


def _is_kept(child: psutil.Process, pid: int) -> bool:
    if child.pid in scripts.FORKED_FROM:
        return True
    with contextlib.suppress(psutil.Error):
        command = " ".join(child.cmdline())
        # A worker of the fork server looks as the server does, but is not a child of the trainer.
        return "resource_tracker" in command or ("multiprocessing.forkserver" in command and child.ppid() == pid)
    return False


def assert_gone(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    end_s, pids = time.monotonic() + timeout_s, {process.pid for process in processes}
    for child in multiprocessing.active_children():
        if child.pid in pids:  # psutil would take its exit status, and multiprocessing then take it for alive for ever
            child.join(max(0.0, end_s - time.monotonic()))
    _, alive = psutil.wait_procs(processes, timeout=max(0.0, end_s - time.monotonic()))
    assert not alive, f"still there after {timeout_s} s: {alive}"


def in_fork(run: Callable[[], Any], timeout_s: float = WAIT_S) -> int:
    """Run a function in a forked child that then leaves without cleaning up.

    Returns:
        0; 1 where the function raised; minus the signal that killed it; -9 where it hung.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return -signal.SIGKILL
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


HEADER = """
import contextlib, os, resource, signal, sys, threading, time
from functools import partial
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may inherit it ignored
from proxyloader import DataLoader, ImageError, ProxyServer
from tests.faults import *

if __name__ == "__main__":
    root = sys.argv[1]
"""


@contextlib.contextmanager
def training(
    folder: Path,
    root: Path,
    body: str,
    *,
    header: str = HEADER,
    under: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    afresh: bool = False,
) -> Iterator[Any]:
    """A training script in a session of its own, of which nothing is left afterwards.

    Args:
        folder: where the script is written; a file, so that workers that are not forked can import it.
        root: of a dataset.
        body: with ``root`` and all names of this module.
        under: a command that runs it.
        afresh: it imports torch itself.

    Yields:
        As ``scripts.start`` gives it.
    """
    script = folder / "train.py"
    script.write_text(header + textwrap.indent(textwrap.dedent(body), "    "))
    process = scripts.start(script, root, environment=environment, cwd=cwd, under=under, afresh=afresh)
    try:
        yield process
    finally:
        scripts.end(process)


def output_of(folder: Path, root: Path, body: str, *, timeout_s: float = WAIT_S, **arguments: Any) -> str:
    """What a script prints that ends well and quietly."""
    with training(folder, root, body, **arguments) as process:
        output, errors = process.communicate(timeout=timeout_s)
        assert (process.returncode, errors) == (0, ""), errors
        return output


def run_alone(script: str, timeout_s: float = WAIT_S, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script, in a process and a session of its own."""
    return scripts.run(textwrap.dedent(script), timeout_s=timeout_s, environment=environment)


def shared_batches(process: psutil.Process) -> set[int]:
    """The inodes of memory of ours that a process has open or mapped."""
    found = set()
    with contextlib.suppress(psutil.Error, OSError):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if "memfd:proxyloader" in line:
                found.add(int(line.split()[4]))
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            if "memfd:proxyloader" in os.readlink(link):
                found.add(link.stat().st_ino)
    return found
