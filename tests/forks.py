"""Forks that cost little. A fork copies the page tables of all memory that a process has written, half a gigabyte here,
and later each page of it that either process writes."""

from __future__ import annotations

import ctypes
import gc
import os

import psutil

LARGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE, M_ARENA_MAX = 25, -8  # of Linux and of glibc
MOST_GROWTH_BYTES = 100 << 20

_libc = ctypes.CDLL(None)
_held_bytes = 0


def use_one_arena() -> None:
    """One arena of malloc's for all threads. With one for each, what thousands of pipelines free is scattered, and a
    process grows by much."""
    _libc.mallopt(M_ARENA_MAX, 1)


def keep_what_is_there() -> None:
    """What is there now stays. Else each collection would look at all of it, and so would those of forked workers, for
    which the kernel then copies it."""
    gc.collect()
    gc.freeze()
    use_large_pages()


def use_large_pages() -> None:
    """Have the memory that is there in pages of 2 MB, of whose tables there is little to copy. A kernel that cannot, as
    before Linux 6.1, leaves it as it is."""
    for mapping in psutil.Process().memory_maps(grouped=False):
        is_full = mapping.rss > 0.9 * mapping.size  # or it would take more memory
        if is_full and mapping.path in ("[anon]", "[heap]") and mapping.perms == "rw-p":
            begin, end = (int(each, 16) for each in mapping.addr.split("-"))
            begin, end = -(-begin // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES, end // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
            if begin < end:
                _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def give_memory_back() -> None:
    """Of what earlier tests have freed, or left to the garbage collector, where this process has grown by much."""
    global _held_bytes
    if _own_bytes() > _held_bytes + MOST_GROWTH_BYTES:
        gc.collect()
        _libc.malloc_trim(0)
        _held_bytes = _own_bytes()


def _own_bytes() -> int:
    """Memory of this process that is not that of a file."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, of_files, *_ = map(int, file.read().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")
