"""Fork safety: quiesce DALI before ``os.fork()``, disarm it in the child.

NOTE [ Forks ]
A child has one thread, and of all others what they held at the moment of the fork. So DALI's threads are given nothing
to do then: all runs are waited for, no thread may start another one, and there is a moment more, in which DALI lets go
of the memory it was lent. And no child may destroy a pipeline, which would wait for threads that it does not have:
neither one in use, which is taken from its server, nor one that waits for the garbage collector. That is held from
before the fork on, and in the child whatever was there before is never collected. The CUDA events of runs cannot be
destroyed in a child either, and are kept.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import multiprocessing.context
import os
import signal
import threading
import time
import weakref
from typing import Any, Protocol

from ._exit_safety import at_exit

log = logging.getLogger(__name__)

LET_GO_S = 0.002
MOST_INTERRUPTS = 3
AFTER_THE_FORK_S = 0.1


class Server(Protocol):
    """Whoever has runs under way."""

    def pause(self) -> bool:
        """Wait for all runs, and start no others; says whether there were any."""

    def resume(self) -> None:
        """In the thread that made it hold still."""

    def forget_in_child(self) -> None: ...

    def end(self) -> None:
        """The interpreter ends, and its pipeline before: let no other thread use that."""


_servers: weakref.WeakSet[Server] = weakref.WeakSet()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.RLock()
"""Several threads may fork at once; here they take turns."""

_starting = threading.RLock()
"""Held where a ``ForkProcess`` starts."""

_held: list[Server] = []
"""Those that hold still for the fork under way."""

_collects_garbage = False
"""Whether the collector was on before it."""


def watch(server: Server) -> None:
    """Settle this server before each fork, and let children forget it."""
    _servers.add(server)


def watched() -> list[Server]:
    return list(_servers)


def keep_from_children(thing: Any) -> None:
    """Never destroy this in a child."""
    _kept.add(thing)


def leak(thing: Any) -> None:
    """Also not when the interpreter ends, which empties all modules: one reference too many, that nobody has."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class ForkProcess(multiprocessing.context.ForkProcess):
    """That no thread starts while another one does.

    Libraries may let no thread fork while another one is at it (filelock 4, which torch brings), and here a fork takes
    as long as runs that are under way. ``_before`` comes too late: what they forbid, they forbid before it.
    """

    def start(self) -> None:
        with _starting:
            super().start()


class ForkContext(multiprocessing.context.ForkContext):
    Process = ForkProcess


def in_turn(context: Any) -> Any:
    """A ``multiprocessing_context`` for torch's loader, whose workers are forked in turn where they are forked.

    Args:
        context: the user's; None: Python's default.
    """
    given = multiprocessing.get_context() if context is None else context
    plain = type(given) in (multiprocessing.context.ForkContext, multiprocessing.context.DefaultContext)
    return ForkContext() if plain and given.get_start_method() == "fork" else context


def _before() -> None:
    global _collects_garbage
    _take_turn()
    _collects_garbage = gc.isenabled()
    gc.disable()
    were_under_way = False
    for server in list(_servers):
        were_under_way |= _held_still(server)
    if were_under_way:
        try:
            time.sleep(LET_GO_S)
        except KeyboardInterrupt:
            _interrupt_later()
            time.sleep(LET_GO_S)


def _take_turn() -> None:
    """Python drops what is raised in here, and forks. So Ctrl-C, in whatever line it comes, has to wait."""
    while True:
        try:
            while not _forking._is_owned():  # type: ignore[attr-defined]
                _forking.acquire()
            return
        except KeyboardInterrupt:
            _interrupt_later()


def _held_still(server: Server) -> bool:
    """Also here."""
    for _ in range(MOST_INTERRUPTS):
        try:
            were_under_way = server.pause()
        except KeyboardInterrupt:
            _interrupt_later()
        except Exception as error:
            log.warning("before a fork %r could not be brought to rest: %r", server, error)
            return True
        else:
            _held.append(server)
            return were_under_way
    return True


def _interrupt_later() -> None:
    again = threading.main_thread().ident, signal.SIGINT
    threading.Timer(AFTER_THE_FORK_S, signal.pthread_kill, again).start()


def _after_in_parent() -> None:
    try:
        while _held:
            try:
                while _held:
                    _held.pop().resume()
            except KeyboardInterrupt:  # Python would drop it, and here servers would stand still for ever
                _interrupt_later()
    finally:
        try:
            if _collects_garbage:
                gc.enable()
        finally:
            _forking.release()


def _after_in_child() -> None:
    global _forking, _starting
    if _servers:
        gc.freeze()
        at_exit(gc.unfreeze)  # or modules in C that look for what is left would find all of it, and print that
    for thing in list(_kept):
        leak(thing)
    for server in list(_servers):
        server.forget_in_child()
    _held.clear()
    if _collects_garbage:
        gc.enable()
    _forking, _starting = threading.RLock(), threading.RLock()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
