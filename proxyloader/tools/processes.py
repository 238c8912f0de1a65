"""Parallel processes, their CPU time, and a progress bar. Requires neither torch nor DALI."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context, resource_tracker
from typing import TypeVar

from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

Item = TypeVar("Item")
Result = TypeVar("Result")


class ProgressBar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
    """A tqdm bar without a monitor thread, which would outlive the bar and make forks unsafe."""

    monitor_interval = 0


def in_processes(
    name: str, work: Callable[[Item], Result], items: Sequence[Item], processes: int, chunk_size: int, progress: bool
) -> Iterator[Result]:
    """Yield ``work(item)`` for each item, in order. With ``processes=1``, run in this process.

    Shows a progress bar if stderr is a terminal, unless ``progress`` is false. ChildProcessError: a process died.
    """
    bar = partial(ProgressBar, total=len(items), desc=name, unit="image", disable=None if progress and items else True)
    if processes == 1:
        yield from bar(map(work, items))
        return
    # Forking is unsafe, as this process may have threads of CUDA, DALI or a DataLoader.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            with block_sigint():
                results = pool.map(work, items, chunksize=chunk_size)
            yield from bar(results)
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"{name}: a process died, possibly for lack of memory. Scripts need "
                '`if __name__ == "__main__":`; from stdin, use processes=1'
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)  # otherwise Ctrl-C waits for pending work


@contextmanager
def block_sigint() -> Iterator[None]:
    """Defer SIGINT in this process, and block it in processes started by the body."""
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants, including exited ones. Requires psutil."""
    import psutil

    this, seconds = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # it has exited
            seconds += sum(process.cpu_times()[:4])
    return seconds
