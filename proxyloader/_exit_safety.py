"""Exit safety: end pipelines and workers before the interpreter clears its modules. Main process.

NOTE [ The end of the interpreter ]
When a script has ended, Python calls the functions registered with ``atexit``, the latest first. Then it clears the
modules one after the other, and destroys the remaining objects. Which modules are already cleared when an object is
destroyed depends on the packages that the script imports. Therefore no ``__del__`` in this package does anything during
interpreter shutdown. Objects with threads or processes are ended earlier: first pipelines, then workers.

They are ended just before multiprocessing ends the workers of a stock loader. torch imports multiprocessing, so exit
handlers that a script registers later run earlier and can still load batches, as with torch. Exit handlers that were
registered before that import run last. They find no workers, as with torch. A loader without workers builds its
pipeline again for them. DALI registers an exit handler of its own that ends pipelines. DALI may be imported as late as
in the first epoch, so its handler could run before the handlers of the script. ``dali/executor.py`` unregisters it.

Daemon threads still run at that time. Python ends each of them when the thread next requests the GIL. If this happens
inside DALI's code, the process aborts. Therefore the exit waits for threads that are inside DALI, and a thread that is
about to enter DALI blocks until Python ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

PRIORITY = 100
"""Priority of the exit handler. The queues and pools of multiprocessing use the same mechanism with lower
priorities."""

END_S = 1.0
"""Seconds that the exit waits for threads inside DALI, and for workers to end."""

LOOK_S = 0.001
"""Seconds between two checks for threads inside DALI."""

_ends: list[Callable[[], None]] = []
_inside: set[object] = set()
"""One token for each thread inside DALI, except the main thread."""

_is_ending = False


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


def when_gone(thing: Any, call: Callable[..., object], *arguments: Any) -> None:
    """Call a function once nothing refers to an object any more, but not when the interpreter ends.

    ``weakref.finalize`` does the same, but at exit Python looks through all of them, and prints an error if a daemon
    thread makes another one meanwhile.
    """

    references, is_ending = _references, sys.is_finalizing  # the module's own names are cleared at the end

    def gone(reference: weakref.ref[Any]) -> None:
        if not is_ending():
            references.pop(id(reference), None)
            call(*arguments)

    reference = weakref.ref(thing, gone)
    _references[id(reference)] = reference


_references: dict[int, weakref.ref[Any]] = {}
"""By their identity, as a reference to what has no hash has none either."""


def _end_all() -> None:
    global _is_ending
    _is_ending = True
    until_s = time.monotonic() + END_S
    while _inside and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    for end in reversed(_ends):
        end()


def _register() -> None:
    _inside.clear()  # in a forked child, these are threads of the parent
    Finalize(None, _end_all, exitpriority=PRIORITY)


_register()
os.register_at_fork(after_in_child=_register)  # multiprocessing runs a finalizer only in the process that registered it
