"""Checks of the machine: memory and files that processes share, cores, NUMA, hardware queues of CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding
from .subject import Subject

SHM_BYTES = 2 << 30
"""Free memory in /dev/shm below which tensors of torch's workers may not fit. A batch of 256 float images of 224 px has
154 MB, and each worker makes two ahead."""

FILES, FILES_OF_WORKER = 20, 4
"""Number of open files of a process with one loader without a GPU: those of the process, and those for each worker."""

ENOUGH_FILES = 1024
"""Linux's usual limit of open files. A GPU, further loaders and tensors of torch's workers take some, too."""

FEW_QUEUES = 8
"""CUDA's own number of hardware queues. With fewer the decoder and the model wait for each other."""


def shared_memory(subject: Subject) -> Iterator[Finding]:
    folder = subject.root / "dev" / "shm"
    remedy = "Start a container with --shm-size=8g or --ipc=host. Elsewhere: mount -o remount,size=8g /dev/shm"
    try:
        told = os.statvfs(folder)
    except OSError as error:
        yield Finding("/dev/shm", "fail", f"torch's workers need it, and it is not there: {error.strerror}", remedy)
        return
    size_bytes, free_bytes = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
    found = f"{_in_words(free_bytes)} free of {_in_words(size_bytes)}"
    if not os.access(folder, os.W_OK):
        yield Finding("/dev/shm", "fail", f"torch's workers need it, and may not write there; {found}", remedy)
    elif free_bytes < SHM_BYTES:
        what = "images that DALI decodes do not go through it, and tensors that torch's workers make do"
        remedy = remedy if size_bytes < SHM_BYTES else "Delete what ended processes left in /dev/shm"
        yield Finding("/dev/shm", "warn", f"{found}; {what}", remedy)
    else:
        yield Finding("/dev/shm", "ok", found)


def _in_words(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GB" if size_bytes >= 1 << 30 else f"{size_bytes >> 20} MB"


def limits(subject: Subject) -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        yield Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")
    else:
        remedy = "ulimit -n 65536 in the shell that starts the script"
        if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
            remedy = f"The hard limit is {hard}. Raise it: docker run --ulimit nofile=65536, or LimitNOFILE= of systemd"
        needed = FILES + FILES_OF_WORKER * subject.cores
        found = f"at most {soft}; a loader with a worker for each core needs {needed}, and CUDA and tensors more"
        yield Finding("open files", "fail" if soft < needed else "warn", found, remedy)

    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Finding("locked memory", "ok", "no limit")
    elif len(subject.gpus) < 2:
        yield Finding("locked memory", "ok", f"at most {locked >> 10} KB; the loader needs none")
    else:
        found = f"at most {locked >> 10} KB; the loader needs none, and NCCL over InfiniBand needs more"
        remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        yield Finding("locked memory", "warn", found, remedy)


def cores(subject: Subject) -> Iterator[Finding]:
    found = f"{subject.cores} of {os.cpu_count()} by affinity"
    quota = cpu_quota(subject.root)
    if quota is None:
        yield Finding("cores", "ok", f"{found}; no cgroup quota")
    elif quota >= subject.cores:
        yield Finding("cores", "ok", f"{found}; a cgroup quota of {quota:g}")
    else:
        whole = max(1, int(quota))
        found += f", and a cgroup quota of {quota:g}: it stops threads made for {subject.cores} cores again and again"
        remedy = (
            "Raise the quota (docker run --cpus, limits.cpu of Kubernetes), or start the script with taskset -c "
            f"{','.join(map(str, sorted(os.sched_getaffinity(0))[:whole]))} and give it num_workers={whole}"
        )
        yield Finding("cores", "warn", found, remedy)


def cpu_quota(root: Path) -> float | None:
    """Return the CPU quota of this process's control groups in cores, the lowest of all, or None if there is none.

    Args:
        root: where the files of the kernel are: ``proc/self/cgroup``, ``sys/fs/cgroup``.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")  # version 1 has a folder for each controller
        group = top / path.lstrip("/")
        # In a container the path may be that of the host, of which there is only the top here.
        quotas += [_quota_of(each) for each in (group, *group.parents) if each.is_relative_to(top)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    """Return the quota of one group, in cores. Version 2 has one file for it, and version 1 has two."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # "max" is no number
        return None


def numa(subject: Subject) -> Iterator[Finding]:
    folder = subject.root / "sys/devices/system/node"
    nodes = {int(path.name[4:]): cores_of_list((path / "cpulist").read_text()) for path in folder.glob("node[0-9]*")}
    if len(nodes) < 2:
        yield Finding("NUMA", "ok", "one node")
        return
    ours = os.sched_getaffinity(0)
    places = [(index, gpu["numa_node"]) for index, gpu in enumerate(subject.gpus) if gpu.get("numa_node") is not None]
    at = "".join(f"; GPU {index} is at node {node}" for index, node in places)
    found = f"{len(nodes)} nodes, of which this process may use {sum(bool(ours & each) for each in nodes.values())}{at}"
    far = [(index, node) for index, node in places if not ours & nodes.get(node, ours)]
    if far:
        index, node = far[0]
        found += f"; no core of this process is near GPU {index}"
        yield Finding("NUMA", "warn", found, f"Start the process of GPU {index} with numactl --cpunodebind={node}")
    else:
        yield Finding("NUMA", "ok", found)


def cores_of_list(text: str) -> set[int]:
    """Return the cores of a list of the kernel, such as ``0-3,8``."""
    ranges = [each.split("-") for each in text.strip().split(",") if each]
    return {core for each in ranges for core in range(int(each[0]), int(each[-1]) + 1)}


def queues(subject: Subject) -> Iterator[Finding]:
    name, value = "CUDA_DEVICE_MAX_CONNECTIONS", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value is None:
        yield Finding(name, "ok", f"not set, so CUDA has {FEW_QUEUES} hardware queues")
    elif value.isdecimal() and int(value) >= FEW_QUEUES:
        yield Finding(name, "ok", value)
    else:
        remedy = "Unset it before the script starts: importing proxyloader then sets 32"
        yield Finding(name, "warn", f"{value!r}: the decoder waits for the model, and the model for it", remedy)


CHECKS = (shared_memory, limits, cores, numa, queues) if sys.platform == "linux" else ()
