"""Processes: work that is spread over the cores, and its progress bar. Needs neither torch nor DALI."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from typing import TypeVar

from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

Item = TypeVar("Item")
Result = TypeVar("Result")


class ProgressBar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
    """A tqdm bar without tqdm's monitor thread, which would outlive the bar and make a fork unsafe."""

    monitor_interval = 0


def in_processes(
    name: str, work: Callable[[Item], Result], items: Sequence[Item], processes: int, chunk_size: int
) -> Iterator[Result]:
    """Yield ``work(item)`` for each item, in their order, computed by this number of processes.

    With 1, this process computes them.

    Args:
        name: of the whole work, for messages.

    Raises:
        ChildProcessError: a process ended early.
    """
    if processes == 1:
        yield from map(work, items)
        return
    # Not fork: the calling process may run threads (CUDA, DALI, a DataLoader's), which a fork breaks.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            with ctrl_c_held_back():  # for good in the processes, which this one ends
                results = pool.map(work, items, chunksize=chunk_size)
            yield from results
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"{name}: a process ended early. Killed for memory? Or called from a script without "
                '`if __name__ == "__main__":`, or from stdin? Then use processes=1'
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)  # else an interrupt waits for all that is still to be done


@contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """Delay Ctrl-C in this process, and block it for good in processes that are started meanwhile, as a terminal sends
    it to all of its processes."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, and it unblocks Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
