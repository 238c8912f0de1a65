"""Lifetime of threads, pipelines and workers across ``os.fork()``, Ctrl-C and the end of the interpreter.

NOTE [ Shutdown order ]
**Fork.** Only the forking thread exists in a child. Locks that other threads hold stay locked, and waiting for a thread
never returns. So a fork waits until DALI is idle: each watched queue collects its runs and blocks new ones, and a short
sleep lets DALI release its inputs. Forks of several threads take turns. The fork also waits for a draw from torch's
default generator, which a worker seeds first. The child must not destroy an inherited pipeline, as that joins threads.
Therefore pipelines are leaked there (``dali/executor.py``), and the garbage collector, which is disabled during the
fork, never visits objects older than the fork.

**Ctrl-C.** Python ignores exceptions in the functions that it calls around a fork, and a partial import of DALI cannot
be repaired. SIGINT is delivered after either.

**Exit.** Python calls ``atexit`` functions, latest first, then clears modules one by one and destroys what is left. An
object cannot know which modules are gone by then, so no ``__del__`` of this package does anything at that point.
Instead pipelines are ended first and workers second, immediately before multiprocessing ends the workers of torch's
loader. Exit handlers that a script registers after importing torch run earlier and can still load batches, as with
torch. Handlers registered before run later. They find no workers, as with torch, and a loader without workers builds
its pipeline again. DALI's own exit handler could run before those of the script, and is unregistered.

Python stops a daemon thread when it next requests the GIL. Inside DALI that aborts the process. So the exit waits for
threads inside DALI, and a thread that is about to enter DALI blocks until the process is gone.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import ctypes
import functools
import gc
import logging
import multiprocessing
import multiprocessing.context
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any, Protocol, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_PRIORITY = 100
"""Priority of the exit handler among multiprocessing's finalizers, whose queues and pools have lower ones."""

END_S = 1.0
"""Seconds that the exit waits for threads inside DALI, and for workers to end."""

POLL_S = 0.001
LET_GO_S = 0.002
LATER_S = 0.1


class Server(Protocol):
    """An object that has runs in progress."""

    def pause(self) -> bool:
        """Wait for all runs and block new ones. Return whether there were any runs."""

    def resume(self) -> None:
        """Allow runs again. Called in the thread that called ``pause``, and in the child."""

    def forget_in_child(self) -> None: ...

    def end(self) -> None:
        """Prevent other threads from using the pipeline. Called when the interpreter ends, before the pipeline."""


# All of these belong to the process, because forks, signals and the exit do.
_servers: weakref.WeakSet[Server] = weakref.WeakSet()
_leaked_in_child: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.RLock()  # held from before a fork until after it
_starting = threading.RLock()  # held while a ``ForkProcess`` starts
_preparation = threading.local()  # ``undo``: what undoes this thread's preparation of the fork in progress
_ends: list[Callable[[], None]] = []
_inside: set[object] = set()  # one token for each thread inside DALI, except the main thread
_is_ending = False


def watch(server: Server) -> None:
    """Pause this server before each fork, and call its ``forget_in_child`` in each child."""
    _servers.add(server)


def watched() -> list[Server]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has added one meanwhile
            return list(_servers)


def leak_in_child(thing: Any) -> None:
    """Never destroy this object in a forked child, such as CUDA events, whose destruction there aborts the process."""
    _leaked_in_child.add(thing)


def leak(thing: Any) -> None:
    """Add a reference that is never released, so that the object is not destroyed even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


# --- forks -----------------------------------------------------------------------------------------------------------


def _before_fork() -> None:
    undo = _preparation.undo = contextlib.ExitStack()
    undo.enter_context(interrupts_deferred())
    undo.enter_context(_forking)
    if gc.isenabled():
        gc.disable()
        undo.callback(gc.enable)
    was_busy = False
    for server in watched():
        try:
            was_busy |= server.pause()
            undo.callback(server.resume)
        except Exception as error:
            log.warning("before a fork %r could not be brought to rest: %r", server, error)
            was_busy = True
    if was_busy:
        time.sleep(LET_GO_S)
    torch.get_rng_state()  # waits for a draw; the last thing here, as the sleep lets other threads draw


def _undo_preparation() -> None:
    _preparation.undo.close()


def _after_fork_in_child() -> None:
    global _forking, _starting
    if _servers:
        gc.freeze()
        at_exit(gc.unfreeze)  # otherwise C extensions that report leaked objects at exit would print all of them
    for thing in list(_leaked_in_child):
        leak(thing)
    for server in watched():
        server.forget_in_child()
    _undo_preparation()  # may release the last reference to a server that another thread dropped during the fork
    _forking, _starting = threading.RLock(), threading.RLock()  # ``ForkProcess.start`` still holds the latter
    # torch seeds CUDA's generators in a worker, too. Another thread may have been starting CUDA.
    torch.cuda._initialization_lock = threading.Lock()
    _register_exit()  # multiprocessing runs a finalizer only in the process that registered it


class ForkProcess(multiprocessing.context.ForkProcess):
    """A forked process that is not started while another thread forks.

    Some libraries, such as filelock 4, a dependency of torch, do not allow a thread to fork while another thread does.
    Locking in ``_before_fork`` would be too late, because the check of these libraries runs before it. This must not
    hold ``_forking``, though: a library that is imported later, such as h5py, takes its own lock at each fork before
    ``_before_fork`` is called. Another thread that forks could hold that lock and wait for ``_forking``, and this
    thread for that lock.
    """

    def start(self) -> None:
        with _starting:
            with _forking:
                pass  # until no other thread forks
            super().start()

    def run(self) -> None:
        # At its end a process waits for the threads of each ThreadPoolExecutor. A process that such a thread has forked
        # would wait for itself, and exit with status 1, which torch reports as a lost worker.
        concurrent.futures.thread._threads_queues.pop(threading.current_thread(), None)  # type: ignore[attr-defined]
        super().run()


class ForkContext(multiprocessing.context.ForkContext):
    Process = ForkProcess


def fork_in_turn(context: Any) -> Any:
    """Return a ``multiprocessing_context`` that forks workers one at a time; one that does not fork is unchanged.

    None stands for Python's default.
    """
    given = multiprocessing.get_context() if context is None else context
    plain = type(given) in (multiprocessing.context.ForkContext, multiprocessing.context.DefaultContext)
    return ForkContext() if plain and given.get_start_method() == "fork" else context


class cached_property(functools.cached_property[T]):  # named as Python's
    """Python's ``cached_property`` without a lock.

    Before Python 3.12 all objects of a class share one. A child waits for it forever if another thread was computing
    the property of any of them at the fork.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = contextlib.nullcontext()


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Deliver SIGINT shortly after the body. In other threads than the main one, which get no signals, do nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came: list[int] = []
    process, handler = os.getpid(), signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came and os.getpid() == process:  # later, as after a fork Python would still ignore it
            threading.Timer(LATER_S, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()


# --- the end of the interpreter --------------------------------------------------------------------------------------


def at_exit(end: Callable[[], None]) -> Callable[[], None]:
    """Register a function to be called when the interpreter ends. Functions registered later are called earlier."""
    _ends.append(end)
    return end


@contextlib.contextmanager
def before_exit() -> Iterator[None]:
    """Context manager whose body either finishes before the interpreter ends or is not entered."""
    if threading.current_thread() is threading.main_thread():
        yield
        return
    token = object()
    _inside.add(token)  # added before _is_ending is read: in the other order, the exit could start in between
    try:
        while _is_ending:
            _inside.discard(token)
            time.sleep(END_S)
        yield
    finally:
        _inside.discard(token)


def _end_all() -> None:
    global _is_ending
    _is_ending = True
    until_s = time.monotonic() + END_S
    while _inside and time.monotonic() < until_s:
        time.sleep(POLL_S)
    for end in reversed(_ends):
        end()


def _register_exit() -> None:
    _inside.clear()  # in a forked child, these are threads of the parent
    Finalize(None, _end_all, exitpriority=EXIT_PRIORITY)


_register_exit()
os.register_at_fork(before=_before_fork, after_in_parent=_undo_preparation, after_in_child=_after_fork_in_child)
