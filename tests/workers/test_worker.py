from __future__ import annotations

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from proxyloader.workers.worker import leave_core

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only loaders with a GPU need it, on Linux")


def _leave(cores: set[int]) -> tuple[int, int]:
    os.sched_setaffinity(0, cores)
    before = ctypes.CDLL(None).sched_getcpu()
    leave_core()
    assert os.sched_getaffinity(0) == cores
    return before, ctypes.CDLL(None).sched_getcpu()


def test_a_worker_leaves_its_core_and_keeps_its_affinity() -> None:
    cores = os.sched_getaffinity(0)
    with ThreadPoolExecutor(1) as thread:  # affinity belongs to a thread
        moves = [thread.submit(_leave, cores).result() for _ in range(10)]
        assert len(cores) == 1 or any(before != after for before, after in moves)
        before, after = thread.submit(_leave, {min(cores)}).result()
        assert before == after == min(cores)
