"""Exit safety: end pipelines and workers before the interpreter clears its modules. Main process.

NOTE [ The end of the interpreter ]
When a script has ended, Python calls what was registered with ``atexit``, the latest first. Then it clears one module
after the other, and destroys the objects that are left. Which modules are gone when an object is destroyed depends on
the packages that the script imports. So no ``__del__`` of ours does anything then, and what has threads or processes is
ended before: first pipelines, then workers.

That happens where multiprocessing ends the workers of a stock loader, just before it does. torch imports
multiprocessing, so the exit handlers that a script registers later come earlier, and may still load batches, as they
may with torch. Handlers from before that import come last. They find no workers, as with torch; a loader without
workers builds its pipeline anew for them. DALI would end pipelines in an exit handler of its own. That is registered
when DALI is imported, which may be in the first epoch, so it might come before a script's; ``dali/executor.py``
takes it back.

Daemon threads still run at that time. Python ends each of them when it asks for the interpreter again, and if that is
in DALI's code, the process aborts. So one that is in DALI is waited for, and one that would enter waits until Python
ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize

PRIORITY = 100
"""Those of multiprocessing's own queues and pools, which are ended by the same means, are lower."""

END_S = 1.0
"""So long threads that are in DALI are waited for, and workers that are told to end."""

LOOK_S = 0.001
"""How often it is looked whether they still are."""

_ends: list[Callable[[], None]] = []
_inside: set[object] = set()
"""A token for each thread in DALI, but the main thread."""

_is_ending = False


def at_exit(end: Callable[[], None]) -> Callable[[], None]:
    """Let a function be called when the interpreter ends. What is registered later is called earlier."""
    _ends.append(end)
    return end


@contextlib.contextmanager
def before_exit() -> Iterator[None]:
    """What the body does is done before the interpreter ends, or not at all."""
    if threading.current_thread() is threading.main_thread():
        yield
        return
    token = object()
    _inside.add(token)  # first, and then a look: the other way round the end could come in between
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
        time.sleep(LOOK_S)
    for end in reversed(_ends):
        end()


def _register() -> None:
    _inside.clear()  # in a forked child: they are threads of the parent
    Finalize(None, _end_all, exitpriority=PRIORITY)


_register()
os.register_at_fork(after_in_child=_register)  # multiprocessing asks which process has registered
