"""Fork safety: quiesce DALI before ``os.fork()``, disarm it in the child.

NOTE [ Forks ]
A forked child has one thread. Locks and other resources held by the other threads at the moment of the fork stay held
in it. Therefore DALI's threads are idle during a fork: all runs are waited for, no thread may start another run, and a
short sleep gives DALI the time to release the memory of its inputs.

A child must not destroy a pipeline, because that would wait for threads that the child does not have. This applies to
pipelines in use, which are taken from their servers, and to pipelines that wait for the garbage collector. Garbage
collection is disabled from before the fork, and the child never collects objects that existed at the fork. CUDA events
of runs cannot be destroyed in a child either, and are kept.

A worker seeds torch's default generator first. A draw from it holds a lock of C++ code, without Python's lock. So a
fork waits for a draw in progress, of any thread. A thread that draws all the time may begin the next one meanwhile.
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
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from . import _interrupts
from ._exit_safety import at_exit

log = logging.getLogger(__name__)

T = TypeVar("T")

LET_GO_S = 0.002


class Server(Protocol):
    """An object that has runs in progress."""

    def pause(self) -> bool:
        """Wait for all runs and block new ones. Return whether there were any runs."""

    def resume(self) -> None:
        """Allow runs again. Called in the thread that called ``pause``."""

    def forget_in_child(self) -> None: ...

    def end(self) -> None:
        """Prevent other threads from using the pipeline. Called when the interpreter ends, before the pipeline."""


_servers: weakref.WeakSet[Server] = weakref.WeakSet()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.RLock()
"""Lock that serializes forks from several threads."""

_starting = threading.RLock()
"""Lock that is held while a ``ForkProcess`` starts."""

_held: list[Server] = []
"""Servers that are paused for the current fork."""

_collects_garbage = False
"""Whether garbage collection was enabled before the fork."""


def watch(server: Server) -> None:
    """Pause this server before each fork, and call its ``forget_in_child`` in each child."""
    _servers.add(server)


def watched() -> list[Server]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has added one meanwhile
            return list(_servers)


def keep_from_children(thing: Any) -> None:
    """Prevent this object from being destroyed in a forked child."""
    _kept.add(thing)


def leak(thing: Any) -> None:
    """Add a reference that is never released, so that the object is not destroyed even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class cached_property(functools.cached_property[T]):  # named as Python's
    """Python's ``cached_property`` without a lock.

    Before Python 3.12 all objects of a class share one. A child waits for it for ever, if another thread computed the
    property of any of them at the fork.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = contextlib.nullcontext()


class ForkProcess(multiprocessing.context.ForkProcess):
    """A forked process that is not started while another thread starts one.

    Some libraries, such as filelock 4, a dependency of torch, do not allow a thread to fork while another thread does.
    Here a fork lasts as long as the runs in progress. Locking in ``_before`` would be too late, because the check of
    these libraries runs before it.
    """

    def start(self) -> None:
        with _starting:
            super().start()

    def run(self) -> None:
        # At its end a process waits for the threads of each ThreadPoolExecutor. A process that such a thread has forked
        # would wait for itself, and exit with status 1, which torch reports as a lost worker.
        concurrent.futures.thread._threads_queues.pop(threading.current_thread(), None)  # type: ignore[attr-defined]
        super().run()


class ForkContext(multiprocessing.context.ForkContext):
    Process = ForkProcess


def in_turn(context: Any) -> Any:
    """Return a ``multiprocessing_context`` in which workers are forked one at a time; one that does not fork as it is.

    None stands for Python's default.
    """
    given = multiprocessing.get_context() if context is None else context
    plain = type(given) in (multiprocessing.context.ForkContext, multiprocessing.context.DefaultContext)
    return ForkContext() if plain and given.get_start_method() == "fork" else context


def _before() -> None:
    global _collects_garbage
    _interrupts.put_off()  # Python ignores exceptions that are raised in these functions, and forks anyway
    _forking.acquire()
    _collects_garbage = gc.isenabled()
    gc.disable()
    were_under_way = False
    for server in watched():
        try:
            were_under_way |= server.pause()
            _held.append(server)
        except Exception as error:
            log.warning("before a fork %r could not be brought to rest: %r", server, error)
            were_under_way = True
    if were_under_way:
        time.sleep(LET_GO_S)
    torch.get_rng_state()  # waits for a draw; the last thing here, as the sleep lets other threads draw


def _after_in_parent() -> None:
    with contextlib.ExitStack() as stack:  # calls each of them, the last one first, also if one raises
        stack.callback(_interrupts.take)
        stack.callback(_forking.release)
        if _collects_garbage:
            stack.callback(gc.enable)
        while _held:
            stack.callback(_held.pop(0).resume)


def _after_in_child() -> None:
    global _forking, _starting
    if _servers:
        gc.freeze()
        at_exit(gc.unfreeze)  # otherwise C extensions that report leaked objects at exit would print all of them
    for thing in list(_kept):
        leak(thing)
    for server in watched():
        server.forget_in_child()
    _held.clear()
    if _collects_garbage:
        gc.enable()
    _forking, _starting = threading.RLock(), threading.RLock()
    # torch seeds CUDA's generators in a worker, too. Another thread may have been starting CUDA.
    torch.cuda._initialization_lock = threading.Lock()
    _interrupts.take()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
