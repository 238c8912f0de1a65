"""Ctrl-C at moments when an exception would leave something half done: it comes a little later. Main thread."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

LATER_S = 0.1

_handler: Any = None
"""Handler of SIGINT that was replaced; None if none was."""


def put_off() -> None:
    """Deliver SIGINT after ``take``. Other threads than the main one get none, and change nothing."""
    global _handler
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _handler is None and signal.getsignal(signal.SIGINT) is not None:
        _handler = signal.signal(signal.SIGINT, _again_later)


def take() -> None:
    """Deliver SIGINT at once again."""
    global _handler
    if _handler is not None and threading.current_thread() is threading.main_thread():
        before, _handler = _handler, None
        signal.signal(signal.SIGINT, before)


def _again_later(*_: Any) -> None:
    again = threading.main_thread().ident, signal.SIGINT
    threading.Timer(LATER_S, signal.pthread_kill, again).start()


@contextlib.contextmanager
def are_put_off() -> Iterator[None]:
    put_off()
    try:
        yield
    finally:
        take()
