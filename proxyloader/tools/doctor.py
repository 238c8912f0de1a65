"""``proxyloader doctor``: check the machine and the installed packages.

Checks that may crash or hang run in a child process with a timeout. The child prints one line of JSON per fact, so a
crash does not lose earlier facts.
"""

import functools
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from .. import __version__

Facts = dict[str, Any]
Answer = tuple[list[Facts], str]  # facts from a child process, and the reason for its failure or ""
Ask = Callable[[str], Answer]

FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 90},
    "JPEG 4:4:4": {"quality": 90, "subsampling": "4:4:4"},
    "grayscale JPEG": {"quality": 90, "mode": "L"},
    "progressive JPEG": {"quality": 90, "progressive": True},
    **{name: {"format": name, "lossless": True} for name in ("PNG", "BMP", "TIFF", "WebP")},
}
"""Image formats to decode, and how they are encoded. JPEG engines support the first."""

DECODERS = {
    "cpu": ("decoding on the CPU", 0, "translate=False"),
    "engines": ("decoding by the engines of GPU {}", 3, "hw_decoder_load=0"),
    "cuda": ("decoding by CUDA of GPU {}", 3, 'device="cpu"'),
}
"""Name of each decoder, the maximum difference of a JPEG from Pillow in levels of 255 (docs/fidelity.md; other formats
must match exactly), and the argument of DataLoader that avoids it."""

INSTALL = {
    "torch": ("2.6", "pip install -U 'torch>=2.6' torchvision, built for the driver's CUDA (pytorch.org)"),
    "torchvision": ("0.21", "pip install -U 'torchvision>=0.21' and the matching torch"),
    "DALI": ("1.53", "pip uninstall all nvidia-dali packages, then pip install -U nvidia-dali-cuda120"),
}
"""Minimum version, and how to upgrade."""

CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from proxyloader.tools import doctor; doctor.answer()"
CORES_PER_GPU = 8  # with 8, 4 and 2, loading reaches 0.94, 0.88 and 0.68 of DALI's reader (``cores.jsonl``)
SHM_BYTES = 2 << 30  # a batch of 256 float images of 224 px takes 154 MB, and each worker prefetches two


class Finding(NamedTuple):
    """A line of the report: "ok", "warn" or "fail", what was found, and a remedy unless it is ok."""

    name: str
    status: str
    found: str
    remedy: str


def finding(name: str, found: str, remedy: str = "", severity: str = "warn") -> Finding:
    return Finding(name, severity if remedy else "ok", found, remedy)


def doctor(as_json: bool, limit: int) -> int:
    """Print the report. Return the exit status: 1 if a check failed. ``limit`` is the timeout of a child process."""
    from rich.console import Console  # not in the child processes
    from rich.table import Table
    from rich.text import Text

    findings = list(run_checks(functools.cache(functools.partial(ask, timeout_s=limit))))
    statuses = [each.status for each in findings]
    counts = {status: statuses.count(status) for status in ("ok", "warn", "fail")}
    if as_json:
        report: Facts = {"proxyloader": __version__, "system": platform.platform()}
        report["status"] = [status for status in counts if counts[status]][-1]
        print(json.dumps({**report, "findings": [each._asdict() for each in findings]}, indent=2))
    else:
        table, console = Table(box=None, show_header=False, pad_edge=False), Console()
        for name, status, found, remedy in findings:
            style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[status]
            table.add_row(Text(status, style), name, Text(f"{found}\n-> {remedy}" if remedy else found))
        console.print(table)
        console.print("\n{ok} ok, {warn} with warnings, {fail} failed".format(**counts), highlight=False)
    return int(counts["fail"] > 0)


def ask(question: str, timeout_s: float) -> Answer:
    """Answer a question in a child process, which is killed after the timeout."""
    command = [sys.executable, "-c", CHILD, json.dumps(sys.path), *question.split()]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = child.communicate(timeout=timeout_s)
        status = child.returncode
        failure = f"crashed with {signal.Signals(-status).name}" if status < 0 else status and f"exit status {status}"
    except subprocess.TimeoutExpired as expired:
        output, errors = expired.stdout or b"", expired.stderr or b""
        failure = f"timed out after {timeout_s:g} s (--limit S allows more)"
    finally:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # a hung driver can keep it alive
            child.communicate(timeout=5.0)
    lines = output[: output.rfind(b"\n") + 1].splitlines()  # the last one may be incomplete
    reason = errors.decode(errors="replace").rstrip().rpartition("\n")[2][:300]
    return [json.loads(line) for line in lines], f"{failure}: {reason}".removesuffix(": ") if failure else ""


def answer() -> None:
    """Answer the question on the command line, in a child process. Output of libraries goes to stderr."""
    facts, (question, *arguments) = os.fdopen(os.dup(1), "w", buffering=1), sys.argv[2:]
    os.dup2(2, 1)
    for fact in globals()[f"_{question}"](*arguments):
        facts.write(json.dumps(fact) + "\n")


def _driver() -> Iterator[Facts]:
    """Yield facts about the driver. It counts all GPUs, including those hidden from CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield {"cuda": None, "gpus": 0}
        return
    version, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    yield {"version": version, "cuda": cuda // 1000 + cuda % 1000 / 100, "gpus": pynvml.nvmlDeviceGetCount()}


def _torch() -> Iterator[Facts]:
    """Yield facts about the build, then about each visible GPU, after running a kernel on it."""
    import torch

    error, cuda = "", torch.version.cuda
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as failed:
        error = str(failed).splitlines()[0]
    yield {"version": torch.__version__, "cuda": float(cuda) if cuda else None, "error": error}
    for index in range(0 if error else torch.cuda.device_count()):
        facts: Facts = {"name": torch.cuda.get_device_name(index), "error": ""}
        try:
            torch.ones(8, device=f"cuda:{index}").sum().item()
        except RuntimeError as failed:
            facts["error"] = str(failed).splitlines()[0]
        yield facts


def _torchvision() -> Iterator[Facts]:
    import torchvision

    yield {"version": torchvision.__version__}


def _DALI() -> Iterator[Facts]:
    from ..errors import MissingDaliError

    try:
        from ..dali import api
    except MissingDaliError as error:
        raise error.__cause__ or error from None  # the dynamic loader's message
    backend: Any = api.backend
    codec = int(backend.GetNvimgcodecVersion())
    yield {"version": api.__version__, "cuda": backend.__cuda_version__ // 1000, "codec": codec}


def _pictures(engine: str, device: str) -> Iterator[Facts]:
    """Yield the maximum difference from Pillow for each format, or the ``error`` of DALI."""
    import numpy as np

    from ..dali import jpeg_engines

    pipeline, device_id = None, None if engine == "cpu" else int(device)
    for number, (name, options) in enumerate(FORMATS.items()):
        # Two different images, as a failing decoder may return an earlier one, with unequal sides.
        files, expected = zip(*[jpeg_engines.make_test_image(2 * number + k, (256, 192), **options) for k in range(2)])
        facts: Facts = {"format": name, "bound": DECODERS[engine][1] if "JPEG" in name else 0, "error": ""}
        try:
            pipeline = pipeline or jpeg_engines.create_decoder(device_id, float(engine == "engines"))
            pipeline.build()
            # The engines use separate memory for single images and batches.
            decoded = [image for count in (1, 2) for image in jpeg_engines.decode(pipeline, [*files[:count]])]
            errors = [np.abs(image - reference) for image, reference in zip(decoded, (expected[0], *expected))]
            facts["levels_off"] = int(max(map(np.max, errors)))
            facts["by_engines"] = bool(max(map(np.mean, errors)) < jpeg_engines.MAX_MEAN_ERROR)
        except (RuntimeError, MemoryError, ValueError) as error:  # ValueError: wrong shape
            text, pipeline = " ".join(str(error).split()), None
            facts["error"] = (text.partition("encountered: ")[2] or text)[:300]  # without DALI's traceback
        yield facts


def first(answer: Answer) -> Facts:
    """Return the first fact, or {} if there is none."""
    return next(iter(answer[0]), {})


def installed(prefix: str) -> list[str]:
    """Return the installed packages with a prefix, with their versions."""
    names = {(dist.name or "").lower().replace("_", "-"): dist.version for dist in importlib.metadata.distributions()}
    return [f"{name} {names[name]}" for name in names if name.startswith(prefix) and "plugin" not in name]


def run_checks(ask: Ask, root: Path = Path("/")) -> Iterator[Finding]:
    for check in (driver, packages, gpus, decoders):
        yield from check(ask)
    if sys.platform == "linux":
        yield from limits(root, len(ask("torch")[0][1:]))


def driver(ask: Ask) -> Iterator[Finding]:
    yield finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    facts, failure = ask("driver")
    if failure:
        yield finding("driver", f"cannot be queried: {failure}", "Run nvidia-smi. Reboot after a driver update")
    elif facts[0]["cuda"] is None:
        yield finding("driver", "none; images are decoded on the CPU")
    else:
        found = f"{facts[0]['version']} for CUDA {facts[0]['cuda']}, {facts[0]['gpus']} GPU(s)"
        remedy = "Install driver 525.60 or later, for CUDA 12" * (facts[0]["cuda"] < 12)
        yield finding("driver", found, remedy, "fail")


def packages(ask: Ask) -> Iterator[Finding]:
    driver_cuda = first(ask("driver")).get("cuda")
    for name, (minimum, remedy) in INSTALL.items():
        (facts, failure), cuda = ask(name), first(ask(name)).get("cuda")
        builds = installed("nvidia-dali-") if name == "DALI" else []
        parts = [*builds] or [fact["version"] for fact in facts[:1]]
        parts += [f"built for CUDA {cuda}"] if cuda else []
        problems = {
            f"cannot be imported: {failure}": not facts,
            f"{minimum} is required": facts and Version(facts[0]["version"]).release < Version(minimum).release,
            f"the driver supports CUDA {driver_cuda}": cuda and driver_cuda and int(cuda) > int(driver_cuda),
            "these packages install the same files": len(builds) > 1,
        }
        parts += (found := [problem for problem, is_there in problems.items() if is_there])
        if name == "DALI" and not first(ask("torch")):  # DALI's plugin imports torch
            remedy = INSTALL["torch"][1]
        yield finding(name, "; ".join(parts), remedy if found else "", "fail")
    if dali := first(ask("DALI")):
        codecs = ", ".join(installed("nvidia-nvimgcodec-")) or "no package of its own"
        remedy = "" if dali["codec"] else f"pip install 'nvidia-nvimgcodec-cu{dali['cuda']}[all]'"
        yield finding("nvImageCodec", f"{codecs}; DALI cannot load it" if remedy else codecs, remedy, "fail")


def gpus(ask: Ask) -> Iterator[Finding]:
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    is_low = not queues.isdecimal() or int(queues) < 8
    found = f"{queues}: the decoder and the model wait for each other" if is_low else queues
    yield finding("CUDA_DEVICE_MAX_CONNECTIONS", found, "Unset it; importing proxyloader then sets 32" * is_low)
    torch, found_gpus, hidden = first(ask("torch")), ask("torch")[0][1:], os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch and not found_gpus:
        if not first(ask("driver")).get("gpus"):
            remedy = "If there is one, check nvidia-smi, and start containers with --gpus all"
            yield finding("GPU", "none; images are decoded on the CPU", remedy)
        elif hidden is not None:
            yield finding("GPU", f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}", "Unset it to decode on a GPU")
        else:
            yield finding("GPU", f"torch cannot use it: {torch['error']}", INSTALL["torch"][1], "fail")
    for index, gpu in enumerate(found_gpus):
        error = f"; torch cannot use it: {gpu['error']}" if gpu["error"] else ""
        yield finding(f"GPU {index}", f"{gpu['name']}{error}", INSTALL["torch"][1] if error else "", "fail")


def decoders(ask: Ask) -> Iterator[Finding]:
    usable = [index for index, gpu in enumerate(ask("torch")[0][1:]) if not gpu["error"]]
    pairs = [("cpu", 0), *((engine, index) for index in usable for engine in ("engines", "cuda"))]
    for engine, index in pairs if first(ask("DALI")) else []:
        (facts, failure), (name, _, option) = ask(f"pictures {engine} {index}"), DECODERS[engine]
        correct = [fact["format"] for fact in facts if not fact["error"] and fact["levels_off"] <= fact["bound"]]
        bad = [fact for fact in facts if fact["format"] not in correct]
        parts = [f"correct pixels: {', '.join(correct)}"] if correct else []
        wrong = "wrong pixels, off by {levels_off} levels"
        parts += [f"{fact['format']}: {fact['error'] or wrong.format(**fact)}" for fact in bad]
        parts += [f"{[*FORMATS, 'exit'][len(facts)]}: {failure}"] if failure else []
        remedy, severity = "", "warn"
        if failure or any("JPEG" in fact["format"] or not fact["error"] for fact in bad):
            remedy, severity = f"Reinstall DALI; see pip check. Until then: DataLoader({option})", "fail"
        elif bad:
            remedy = "None for proxyloader.DataLoader, which uses Pillow. DALI pipelines cannot read these files"
        elif engine == "engines" and not facts[0]["by_engines"]:
            parts.insert(0, "CUDA decodes instead")
            remedy = "None for a GPU without JPEG engines. Otherwise, give containers the driver capability video"
        yield finding(name.format(index), "; ".join(parts), remedy, severity)


def limits(root: Path, gpus: int) -> Iterator[Finding]:
    import resource  # not on Windows

    shm = root / "dev/shm"
    size, _, free = shutil.disk_usage(shm) if shm.exists() else (0, 0, 0)
    remedy = "Start containers with --shm-size=8g or --ipc=host, or delete files of finished processes"
    yield finding("/dev/shm", f"{free >> 20:,} of {size >> 20:,} MB free", remedy * (free < SHM_BYTES))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_low = 0 <= limit < 1024  # Linux's default. A loader opens 4 files per worker, CUDA and tensors more
    remedy = "ulimit -n 65536, docker run --ulimit nofile=65536, or LimitNOFILE= in systemd" * is_low
    yield finding("open files", "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit}", remedy)
    cores, quota, remedy = os.sched_getaffinity(0), float("inf"), ""
    with suppress(OSError, ValueError):  # no such file, or "max": there is no quota
        quota_us, period_us = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        quota = int(quota_us) / int(period_us)
    found = f"{len(cores)} of {os.cpu_count()} usable"
    if quota < len(cores):
        subset = sorted(cores)[: max(1, int(quota))]
        found += f"; a cgroup quota of {quota:g} throttles threads started for {len(cores)} cores"
        remedy = f"Raise the quota, or use taskset -c {','.join(map(str, subset))} and num_workers={len(subset)}"
    elif len(cores) < CORES_PER_GPU * gpus:
        remedy = f"Use at least {CORES_PER_GPU} cores per GPU; with fewer, DALI's own reader is faster"
    yield finding("cores", found, remedy)
