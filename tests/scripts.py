"""Scripts in processes of their own, each of them forked from one that has imported torch and torchvision.

To import these takes three seconds of CPU time, most of what a small script takes. DALI and this library are not
among them: when and in which order they are loaded, and what they leave to the end of the process, is the script's.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from . import forks

_SERVE = "exec(__import__('tests.scripts').scripts.serve(int(__import__('sys').argv[1])))"
_ROOT = Path(__file__).parents[1]
QUICK_START = os.fspath(_ROOT / "tests" / "quick_start")
_PATHS = [QUICK_START, str(_ROOT), os.environ.get("PYTHONPATH", "")]
WITH_THE_PROJECT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, _PATHS))}
"""The environment of scripts that import the project and its tests from wherever they run."""

FORKED_FROM: list[int] = []
"""The process of this one's scripts, once there is one."""


def start(
    script: str | Path,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    under: Sequence[str] = (),
    afresh: bool = False,
) -> Any:
    """A script that runs in a session of its own: a ``subprocess.Popen``, or what can do the same.

    Args:
        script: a file; or its text, as for ``python -c``.
        environment: in addition to ``WITH_THE_PROJECT``.
        under: a command that runs it.
        afresh: it is about how torch is imported, which it then does itself. So does one that runs ``under`` a command,
            and one that may use a GPU.
    """
    environment = WITH_THE_PROJECT | dict(environment or {})
    is_file = isinstance(script, Path)
    if under or afresh or torch.cuda.is_available():
        return subprocess.Popen(
            [*under, sys.executable, *([] if is_file else ["-c"]), *map(str, (script, *arguments))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            start_new_session=True,
        )
    return Forked(
        {
            "path": str(script) if is_file else None,
            "text": script.read_text() if isinstance(script, Path) else script,
            "argv": [str(script) if is_file else "-c", *map(str, arguments)],
            "environment": environment,
            "cwd": os.fspath(cwd or os.getcwd()),
        }
    )


def run(script: str | Path, *arguments: Any, timeout_s: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with both outputs taken, of what ``start`` starts."""
    process = start(script, *arguments, **how)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run_ranks(
    script: str | Path, *arguments: Any, ranks: int, timeout_s: float, environment: Mapping[str, str]
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script in as many processes, which are told of each other as torchrun tells them, but start faster."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    group = {**environment, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    with ThreadPoolExecutor(ranks) as pool:
        processes = [
            start(script, *arguments, environment={**group, "RANK": str(k), "LOCAL_RANK": str(k)}) for k in range(ranks)
        ]
        try:
            said = list(pool.map(lambda process: process.communicate(timeout=timeout_s), processes))
        finally:
            for process in processes:
                end(process)
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *each) for process, each in zip(processes, said)
    ]


@contextlib.contextmanager
def command_line(*words: Any) -> Iterator[None]:
    """Of a program that is run in this process: what it finds in ``sys.argv``."""
    before, sys.argv = sys.argv, [*map(str, words)]
    try:
        yield
    finally:
        sys.argv = before


def in_own_namespace(*commands: str) -> list[str]:
    """A command line that runs another one where the mounts made by ``commands`` are its own."""
    return ["unshare", "-rm", "sh", "-c", " && ".join([*commands, 'exec "$0" "$@"'])]


def end(process: Any) -> None:
    """Leave nothing of a script, nor of what is in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()


class Forked:
    """What tests use of ``subprocess.Popen``, for a script that ``serve`` has forked."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.args, self.returncode = asked["argv"], None
        ends = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (os.fdopen(read, encoding="utf-8") for read, _ in ends)
        self.pid = int(_ask(asked, [write for _, write in ends]))
        for _, write in ends:
            os.close(write)
        self._has_ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._has_ended], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._has_ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            os.close(self._has_ended)
            self.returncode = os.waitstatus_to_exitcode(int(_ask({"wait": self.pid})))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        end_s = None if timeout is None else time.monotonic() + timeout
        found = {self.stdout: b"", self.stderr: b""}

        def left_s() -> float | None:
            return None if end_s is None else max(0.0, end_s - time.monotonic())

        with selectors.DefaultSelector() as selector:
            for file in found:
                selector.register(file, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(left_s())
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                for key, _ in ready:
                    piece = os.read(key.fd, 1 << 16)
                    found[key.fileobj] += piece  # type: ignore[index]
                    if not piece:
                        selector.unregister(key.fileobj)
        self.wait(left_s())
        return found[self.stdout].decode(), found[self.stderr].decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_asks = threading.Lock()


def _ask(asked: dict[str, Any], fds: Sequence[int] = ()) -> str:
    """What the process from which all are forked answers."""
    text = json.dumps(asked).encode()
    with _asks:
        connection = _connection()
        socket.send_fds(connection, [len(text).to_bytes(4, "big")], list(fds))
        connection.sendall(text)
        answer = connection.recv(32)
    assert answer, "the process from which scripts are forked has ended"
    return answer.decode()


@functools.cache
def _connection() -> socket.socket:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _SERVE, str(theirs.fileno())]
    quiet: Any = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    server = subprocess.Popen(
        command, env=WITH_THE_PROJECT, pass_fds=[theirs.fileno()], start_new_session=True, **quiet
    )
    theirs.close()
    FORKED_FROM.append(server.pid)

    def stop(pid: int = os.getpid()) -> None:
        if os.getpid() == pid:  # not in a child of a fork
            # Closing is not enough where a worker of a test that has failed holds it, too.
            ours.shutdown(socket.SHUT_RDWR)
            ours.close()
            server.wait()

    atexit.register(stop)
    return ours


def serve(fd: int) -> CodeType:
    """In the process from which scripts are forked. Only in their processes it returns, what is to be executed there.

    They execute it at the end of the stack, as if it were their program, and end as Python ends.
    """
    import torchvision.datasets
    import torchvision.transforms.v2  # noqa: F401

    forks.keep_what_is_there()
    connection = socket.socket(fileno=fd)
    while True:
        size, fds, _, _ = socket.recv_fds(connection, 4, 2)
        if not size:
            os._exit(0)
        text = b""
        while len(text) < int.from_bytes(size, "big"):
            text += connection.recv(1 << 16)
        asked = json.loads(text)
        if "wait" in asked:
            connection.sendall(str(os.waitpid(asked["wait"], 0)[1]).encode())
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are those of NumPy's BLAS
            pid = os.fork()
        if not pid:
            connection.close()
            return _become(asked, fds)
        for each in fds:
            os.close(each)
        connection.sendall(str(pid).encode())


def _become(asked: dict[str, Any], fds: Sequence[int]) -> CodeType:
    os.setsid()
    for fd, place in zip(fds, (1, 2)):
        os.dup2(fd, place)
        os.close(fd)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None  # TMPDIR may be another one
    if threads := os.environ.get("OMP_NUM_THREADS"):  # which is read when torch is loaded
        torch.set_num_threads(int(threads))
    sys.argv = asked["argv"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[0] = os.path.dirname(os.path.realpath(asked["path"])) if asked["path"] else ""
    if asked["path"]:
        sys.modules["__main__"].__file__ = asked["path"]  # which workers that are not forked import
    return compile(asked["text"], asked["path"] or "<string>", "exec", dont_inherit=True)
