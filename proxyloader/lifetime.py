"""Lifetime of threads, pipelines and workers across ``os.fork()``, Ctrl-C and interpreter exit.

NOTE [ Shutdown order ]
**Fork.** Only the forking thread survives in a child. Locks held by other threads stay locked, and joining a thread
never returns. So a fork waits until DALI is idle: each watched queue collects its runs and blocks new ones, and a short
sleep lets DALI release its inputs. Threads fork one at a time. A fork also waits until no other thread holds the lock
of torch's default generator, which a worker seeds first. The child must not destroy an inherited pipeline, as that
joins threads. It therefore leaks pipelines (``dali/executor.py``), and its garbage collector, which is disabled during
the fork, never visits objects older than the fork.

**Ctrl-C.** Python ignores exceptions in fork handlers, and a partial import of DALI cannot be repaired. Fork handlers
and the import of DALI therefore defer SIGINT until they are done.

**Exit.** Python calls ``atexit`` functions in reverse order, then clears modules one by one and destroys the remaining
objects. A finalizer cannot know which modules are gone by then, so no ``__del__`` of this package does anything at that
point. Instead, an exit handler shuts down pipelines immediately before multiprocessing terminates the workers. Exit
handlers that a script registers after importing torch run earlier and can still load batches, as with torch. Handlers
registered before run later. They find no workers, as with torch, and a loader without workers rebuilds its pipeline.
DALI's own exit handler might run before those of the script, so it is unregistered.

Python stops a daemon thread when it next requests the GIL. Inside DALI that aborts the process. So the exit waits for
threads inside DALI, and a thread that is about to enter DALI blocks until the process is gone.
"""

import concurrent.futures.thread
import contextlib
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
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any

import torch

log = logging.getLogger(__name__)

EXIT_PRIORITY = 100  # of the exit handler among multiprocessing's finalizers, above those of queues and pools
EXIT_TIMEOUT_S = 1.0  # for which the exit waits for threads inside DALI
POLL_S = 0.001
RELEASE_S = 0.002
SIGNAL_DELAY_S = 0.1

# Process-wide, like forks, signals and the exit:
_queues: weakref.WeakSet[Any] = weakref.WeakSet()
_leaked_in_child: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.RLock()  # held from before a fork until after it
_starting = threading.RLock()  # held while a ``ForkProcess`` starts
_preparation = threading.local()  # ``cleanup``: undoes what this thread did to prepare the current fork
_exit_functions = contextlib.ExitStack()
_dali_threads: set[object] = set()  # a token for each thread inside DALI, except the main thread
_is_exiting = False

watch = _queues.add
"""Pause a ``RunQueue`` before each fork, and resume it afterwards in both processes.

The child calls its ``forget_in_child``, and the exit handler its ``end``, before its pipeline is shut down.
"""

leak_in_child = _leaked_in_child.add
"""Never destroy this object in a forked child. Destroying a CUDA event there, for example, aborts the process."""


def watched_queues() -> list[Any]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has added one
            return list(_queues)


def leak(obj: Any) -> None:
    """Add a reference that is never released, so that the object is never destroyed, not even at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


# --- forks -----------------------------------------------------------------------------------------------------------


def _before_fork() -> None:
    cleanup = _preparation.cleanup = contextlib.ExitStack()
    cleanup.enter_context(defer_interrupts())
    cleanup.enter_context(_forking)
    if gc.isenabled():
        gc.disable()
        cleanup.callback(gc.enable)
    was_busy = False
    for queue in watched_queues():
        try:
            was_busy |= cleanup.enter_context(queue.paused())
        except Exception as error:
            log.warning("failed to pause %r before a fork: %r", queue, error)
            was_busy = True
    if was_busy:
        time.sleep(RELEASE_S)
    torch.get_rng_state()  # waits for the lock; last, because other threads may draw during the sleep


def _after_fork_in_child() -> None:
    global _forking, _starting
    if _queues:
        gc.freeze()
        at_exit(gc.unfreeze)  # otherwise C extensions that report leaks at exit would list all objects
    for obj in list(_leaked_in_child):
        leak(obj)
    for queue in watched_queues():
        queue.forget_in_child()
    _preparation.cleanup.close()  # may drop the last reference to a queue that another thread released during the fork
    _forking, _starting = threading.RLock(), threading.RLock()  # ``ForkProcess.start`` still holds the latter
    # torch also seeds CUDA's generators in a worker. Another thread may have been initializing CUDA.
    torch.cuda._initialization_lock = threading.Lock()
    _register_exit_handler()  # multiprocessing runs a finalizer only in the process that registered it


class ForkProcess(multiprocessing.context.ForkProcess):
    """A forked process that does not start while another thread forks.

    Some libraries, such as filelock 4, a dependency of torch, do not allow two threads to fork at the same time, and
    check this before ``_before_fork`` runs. But holding ``_forking`` here could deadlock with another forking thread
    if a library imported later, such as h5py, acquires its own lock before ``_before_fork`` runs.
    """

    def start(self) -> None:
        with _starting:
            with _forking:
                pass  # wait until no other thread forks
            super().start()

    def run(self) -> None:
        # At exit, a process joins the threads of each ThreadPoolExecutor. A process forked by such a thread would
        # join itself and exit with status 1, which torch reports as a dead worker.
        concurrent.futures.thread._threads_queues.pop(threading.current_thread(), None)  # type: ignore[attr-defined]
        super().run()


class ForkContext(multiprocessing.context.ForkContext):
    Process = ForkProcess


def serialize_forks(context: Any) -> Any:
    """Return a context that forks workers one at a time, or ``context`` itself if it does not fork.

    None stands for Python's default.
    """
    resolved = multiprocessing.get_context() if context is None else context
    is_stock = type(resolved) in (multiprocessing.context.ForkContext, multiprocessing.context.DefaultContext)
    return ForkContext() if is_stock and resolved.get_start_method() == "fork" else context


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer SIGINT until shortly after the body. Only the main thread receives signals; in others, do nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    received: list[int] = []
    process, handler = os.getpid(), signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received and os.getpid() == process:  # Python would still ignore it right after a fork
            threading.Timer(SIGNAL_DELAY_S, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()


# --- exit ------------------------------------------------------------------------------------------------------------

at_exit = _exit_functions.callback
"""Register a function to be called at exit, in reverse order of registration."""


@contextlib.contextmanager
def delay_exit() -> Iterator[None]:
    """Delay the exit until the body is done, or block forever if the exit has begun."""
    if threading.current_thread() is threading.main_thread():
        yield
        return
    token = object()
    _dali_threads.add(token)  # before reading _is_exiting; otherwise the exit could begin in between
    try:
        while _is_exiting:
            _dali_threads.discard(token)
            time.sleep(EXIT_TIMEOUT_S)
        yield
    finally:
        _dali_threads.discard(token)


def _run_exit_functions() -> None:
    global _is_exiting
    _is_exiting = True
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while _dali_threads and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    _exit_functions.close()


def _register_exit_handler() -> None:
    _dali_threads.clear()  # in a forked child, these are threads of the parent
    Finalize(None, _run_exit_functions, exitpriority=EXIT_PRIORITY)


_register_exit_handler()
os.register_at_fork(before=_before_fork, after_in_parent=lambda: _preparation.cleanup.close())
os.register_at_fork(after_in_child=_after_fork_in_child)
