"""``proxyloader doctor``: examine the machine and the installed packages.

Whatever may crash or hang runs in a child process with a time limit. The child prints a line of JSON per answer, so
answers that precede a crash are kept.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from .. import __version__

Facts = dict[str, Any]
Answers = tuple[list[Facts], str]
"""Answers of a child process, and why it failed or ""."""

FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 90},
    "JPEG 4:4:4": {"quality": 90, "subsampling": "4:4:4"},
    "grey JPEG": {"quality": 90, "mode": "L"},
    "progressive JPEG": {"quality": 90, "progressive": True},
    **{name: {"format": name, "lossless": True} for name in ("PNG", "BMP", "TIFF", "WebP")},
}
"""What is decoded, and how it is made. The JPEG engines take the first."""

JPEG_BOUNDS = {"cpu": 0, "engines": 3, "cuda": 3}
"""Maximum difference from Pillow in levels of 255, by decoder (docs/fidelity.md). Other formats are exact."""

INSTALL = {
    "torch": ("2.6", "pip install -U 'torch>=2.6' torchvision, built for the driver's CUDA (pytorch.org)"),
    "torchvision": ("0.21", "pip install -U 'torchvision>=0.21' and the matching torch"),
    "DALI": ("1.53", "pip uninstall all nvidia-dali packages, then pip install -U nvidia-dali-cuda120"),
}
"""The oldest version that is supported, and how to install a newer one."""

SHM_BYTES = 2 << 30
"""Worker tensors may not fit in less. A batch of 256 float images of 224 px takes 154 MB, and workers prefetch two."""


class Finding(NamedTuple):
    """A line of the report."""

    name: str
    status: str
    found: str
    remedy: str


def finding(name: str, found: str, remedy: str = "", severity: str = "warn") -> Finding:
    """Return a line of the report. Without a remedy all is well."""
    return Finding(name, severity if remedy else "ok", found, remedy)


def doctor(as_json: bool, limit: int) -> int:
    """Print the report and return the exit status: 1 if a check failed. Each child may take ``limit`` seconds."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    findings = list(examine(Machine({}, limit)))
    counts = {status: sum(each.status == status for each in findings) for status in ("ok", "warn", "fail")}
    if as_json:
        worst = [status for status in counts if counts[status]][-1]
        report: Facts = {"proxyloader": __version__, "system": platform.platform(), "status": worst}
        report["findings"] = [each._asdict() for each in findings]
        print(json.dumps(report, indent=2))
    else:
        table, console = Table(box=None, show_header=False, pad_edge=False), Console()
        for each in findings:
            style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[each.status]
            text = f"{each.found}\n-> {each.remedy}" if each.remedy else each.found
            table.add_row(Text(each.status, style), each.name, Text(text))
        console.print(table)
        console.print("\n{ok} ok, {warn} to look at, {fail} failed".format(**counts), highlight=False)
    return int(counts["fail"] > 0)


CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from proxyloader.tools import doctor; doctor.answer()"


def ask(question: str, limit_s: float) -> Answers:
    """Ask a question in a child process, and kill it if it exceeds the limit."""
    command = [sys.executable, "-c", CHILD, json.dumps(sys.path), *question.split()]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        facts, output = child.communicate(timeout=limit_s)
        status = child.returncode
        failure = f"crashed with {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    except subprocess.TimeoutExpired as expired:
        facts, output = expired.stdout or b"", expired.stderr or b""
        failure = f"timed out after {limit_s:g} s (--limit S allows more)"
    finally:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # a hanging driver may keep it
            child.communicate(timeout=5.0)
    said = output.decode(errors="replace").rstrip().rpartition("\n")[2][:300]
    told = [json.loads(line) for line in facts.splitlines(keepends=True) if line.endswith(b"\n")]  # the last may be cut
    return told, "" if failure == "exit status 0" else f"{failure}: {said}".removesuffix(": ")


def answer() -> None:
    """Answer the question of the command line in a child process. Whatever libraries print goes to stderr."""
    facts, (question, *arguments) = os.fdopen(os.dup(1), "w", buffering=1), sys.argv[2:]
    os.dup2(2, 1)
    for each in globals()[f"_{question}"](*arguments):
        facts.write(json.dumps(each) + "\n")


def _driver() -> Iterator[Facts]:
    """Yield the driver, then each GPU, including those hidden from CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield {"cuda": None}
        return
    version, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    yield {"version": version, "cuda": cuda // 1000 + cuda % 1000 / 100}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            pynvml.nvmlDeviceGetJpgUtilization(gpu)
            engines = "JPEG engines"
        except pynvml.NVMLError_NotSupported:
            engines = "no JPEG engines"
        except (pynvml.NVMLError, AttributeError):  # AttributeError: an older nvidia-ml-py
            engines = "unknown engines"
        yield {"uuid": pynvml.nvmlDeviceGetUUID(gpu), "engines": engines}


def _torch() -> Iterator[Facts]:
    """Yield the build, then each visible GPU after running a kernel on it."""
    import torch

    error, cuda = "", torch.version.cuda
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as failed:
        error = str(failed).splitlines()[0]
    yield {"version": torch.__version__, "cuda": float(cuda) if cuda else None, "error": error}
    for index in range(0 if error else torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        facts: Facts = {"name": properties.name, "uuid": str(getattr(properties, "uuid", "")), "error": ""}
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
    facts: Facts = {"version": api.__version__, "cuda": None, "codec": None}
    with suppress(AttributeError):  # private, missing in some versions
        backend: Any = api.backend
        facts["cuda"] = backend.__cuda_version__ // 1000
        facts["codec"] = int(backend.GetNvimgcodecVersion())
    yield facts


def _pictures(engine: str, device: str) -> Iterator[Facts]:
    """Yield the largest difference from Pillow for each format, or DALI's ``error``."""
    import numpy as np

    from ..dali import jpeg_engines

    pipeline, device_id = None, None if engine == "cpu" else int(device)
    for number, (name, how) in enumerate(FORMATS.items()):
        # Two different pictures, as a failing decoder may return an earlier picture. The sides differ, too.
        files, expected = zip(*[jpeg_engines.known_picture(2 * number + k, (256, 192), **how) for k in range(2)])
        facts: Facts = {"format": name, "bound": JPEG_BOUNDS[engine] if "JPEG" in name else 0, "error": ""}
        try:
            pipeline = pipeline or jpeg_engines.decoder(device_id, float(engine == "engines"))
            pipeline.build()
            # The engines keep separate memory for single images and batches.
            found = [image for count in (1, 2) for image in jpeg_engines.decode(pipeline, [*files[:count]])]
            off = [np.abs(image - right) for image, right in zip(found, (expected[0], *expected))]
            facts["levels_off"] = int(max(map(np.max, off)))
            facts["by_engines"] = bool(max(map(np.mean, off)) < jpeg_engines.MOST_LEVELS)
        except (RuntimeError, MemoryError, ValueError) as error:  # ValueError: wrong shape
            text, pipeline = " ".join(str(error).split()), None
            facts["error"] = (text.partition("encountered: ")[2] or text)[:300]  # without the pipeline's trace
        yield facts


class Machine:
    """What the checks look at: answers of child processes, installed packages, and the files of the system."""

    def __init__(self, answers: dict[str, Answers], limit_s: float, root: Path = Path("/")) -> None:
        self.answers, self.limit_s, self.root = answers, limit_s, root
        found = importlib.metadata.distributions()
        self.packages = {(each.name or "").lower().replace("_", "-"): each.version for each in found}

    def answer(self, question: str) -> Answers:
        if question not in self.answers:
            self.answers[question] = ask(question, self.limit_s)
        return self.answers[question]

    def facts(self, question: str) -> Facts:
        """Return the first answer to a question, or {}."""
        return next(iter(self.answer(question)[0]), {})

    def builds(self, prefix: str) -> list[str]:
        """Return the installed packages that begin so, with their versions."""
        found = self.packages.items()
        return [f"{name} {version}" for name, version in found if name.startswith(prefix) and "plugin" not in name]

    @property
    def gpus(self) -> list[Facts]:
        """The GPUs that torch sees, with what the driver knows of them."""
        known = {gpu["uuid"].removeprefix("GPU-"): gpu["engines"] for gpu in self.answer("driver")[0][1:]}
        return [{**gpu, "engines": known.get(gpu["uuid"], "unknown engines")} for gpu in self.answer("torch")[0][1:]]


def examine(machine: Machine) -> Iterator[Finding]:
    """Yield the findings of all checks."""
    for check in (packages, environment, gpus, decoders, *([limits] if sys.platform == "linux" else [])):
        yield from check(machine)


def packages(machine: Machine) -> Iterator[Finding]:
    yield finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    (facts, failure), newest = machine.answer("driver"), machine.facts("driver").get("cuda")
    if failure or newest is None:
        found = f"cannot be queried: {failure}" if failure else "none; images are decoded on the CPU"
        yield finding("driver", found, failure and "Run nvidia-smi. Reboot after a driver update")
    else:
        found = f"{facts[0]['version']} for CUDA {newest}, {len(facts) - 1} GPU(s)"
        yield finding("driver", found, "" if newest >= 12 else "Install driver 525.60 or later, for CUDA 12", "fail")
    builds = machine.builds("nvidia-dali-")
    for name, (oldest, _) in INSTALL.items():
        told, cuda = machine.facts(name), machine.facts(name).get("cuda")
        problems = [] if told else [f"cannot be imported: {machine.answer(name)[1]}"]
        if told and Version(told["version"]).release < Version(oldest).release:
            problems.append(f"{oldest} is required")
        if cuda and newest and int(cuda) > int(newest):
            problems.append(f"the driver supports CUDA {newest}")
        if name == "DALI" and len(builds) > 1:
            problems.append("these packages install the same files")
        versions = [*builds] if name == "DALI" and builds else [told["version"]] if told else []
        found = "; ".join([*versions, *([f"built for CUDA {cuda}"] if cuda else []), *problems])
        first = "torch" if name == "DALI" and not machine.facts("torch") else name  # DALI's plugin imports it
        yield finding(name, found, INSTALL[first][1] if problems else "", "fail")
    if told := machine.facts("DALI"):
        found = ", ".join(machine.builds("nvidia-nvimgcodec-")) or "no package of its own"
        remedy = "" if told["codec"] else f"pip install 'nvidia-nvimgcodec-cu{told['cuda']}[all]'"
        yield finding("nvImageCodec", f"{found}; DALI cannot load it" if remedy else found, remedy, "fail")


def environment(machine: Machine) -> Iterator[Finding]:
    """Versions and variables that work, but slow down loading."""
    pillow = machine.packages.get("pillow") or machine.packages["pillow-simd"]
    if Version(pillow).release < (11,):
        yield finding("Pillow", f"{pillow} decodes JPEGs itself where a dataset opens them", "pip install 'pillow>=11'")
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    few = not queues.isdecimal() or int(queues) < 8
    found = f"{queues}: the decoder and the model wait for each other" if few else queues
    yield finding("CUDA_DEVICE_MAX_CONNECTIONS", found, "Unset it; importing proxyloader then sets 32" if few else "")


def gpus(machine: Machine) -> Iterator[Finding]:
    known, hidden = machine.answer("driver")[0][1:], os.environ.get("CUDA_VISIBLE_DEVICES")
    if machine.facts("torch") and not machine.gpus:
        if not known:
            yield finding("GPU", "none; images are decoded on the CPU", "docker run --gpus all; see nvidia-smi")
        elif hidden is not None:
            yield finding("GPU", f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}", "Unset it to decode on a GPU")
        else:
            yield finding("GPU", f"torch cannot use it: {machine.facts('torch')['error']}", INSTALL["torch"][1], "fail")
    for index, gpu in enumerate(machine.gpus):
        found = f"{gpu['name']}, {gpu['engines']}"
        found += f"; torch cannot use it: {gpu['error']}" if gpu["error"] else ""
        yield finding(f"GPU {index}", found, INSTALL["torch"][1] if gpu["error"] else "", "fail")


def decoders(machine: Machine) -> Iterator[Finding]:
    names = {("cpu", 0): "decoding on the CPU"}
    for index, gpu in enumerate(machine.gpus):
        if not gpu["error"]:
            names["engines", index] = f"decoding by the engines of GPU {index}"
            names["cuda", index] = f"decoding by CUDA of GPU {index}"
    for (engine, index), name in names.items() if machine.facts("DALI") else []:
        facts, failure = machine.answer(f"pictures {engine} {index}")
        right = [each["format"] for each in facts if not each["error"] and each["levels_off"] <= each["bound"]]
        bad = [each for each in facts if each["format"] not in right]
        parts = [f"correct pixels: {', '.join(right)}"] if right else []
        for each in bad:
            error = each["error"] or f"wrong pixels, off by {each['levels_off']} levels"
            parts.append(f"{each['format']}: {error}")
        parts += [f"{[*FORMATS, 'exit'][len(facts)]}: {failure}"] if failure else []
        found, remedy, severity = "; ".join(parts), "", "warn"
        if failure or any("JPEG" in each["format"] or not each["error"] for each in bad):
            option = {"cpu": "translate=False", "engines": "hw_decoder_load=0", "cuda": 'device="cpu"'}[engine]
            remedy, severity = f"Reinstall DALI; see pip check. Until then: DataLoader({option})", "fail"
        elif bad:
            remedy = "None for proxyloader.DataLoader, which uses Pillow. DALI pipelines cannot read these files"
        elif engine == "engines" and not facts[0]["by_engines"]:
            found = f"CUDA decodes instead; {found}"
            if machine.gpus[index]["engines"] != "no JPEG engines":
                remedy = "Give containers the driver capability video. End other processes that decode on this GPU"
        yield finding(name, found, remedy, severity)


def limits(machine: Machine) -> Iterator[Finding]:
    import resource

    shm, remedy = machine.root / "dev/shm", "Start containers with --shm-size=8g or --ipc=host"
    size, _, free = shutil.disk_usage(shm) if shm.exists() else (0, 0, 0)
    remedy = f"{remedy}, or delete files of ended processes" if free < SHM_BYTES else ""
    yield finding("/dev/shm", f"{free >> 20:,} of {size >> 20:,} MB free", remedy)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = "unlimited" if most == resource.RLIM_INFINITY else f"at most {most}"
    few = 0 <= most < 1024  # Linux's default. A loader opens 4 files per worker, CUDA and tensors more
    remedy = "ulimit -n 65536, docker run --ulimit nofile=65536, or LimitNOFILE= in systemd" if few else ""
    yield finding("open files", found, remedy)
    cores, quota, remedy = os.sched_getaffinity(0), float("inf"), ""
    with suppress(OSError, ValueError):  # without a quota it has no such file, or says "max"
        used, period = (machine.root / "sys/fs/cgroup/cpu.max").read_text().split()
        quota = int(used) / int(period)
    found = f"{len(cores)} of {os.cpu_count()} usable"
    if quota < len(cores):
        few_cores = sorted(cores)[: max(1, int(quota))]
        found += f"; a cgroup quota of {quota:g} throttles threads started for {len(cores)} cores"
        remedy = f"Raise the quota, or use taskset -c {','.join(map(str, few_cores))} and num_workers={len(few_cores)}"
    yield finding("cores", found, remedy)
    if machine.gpus:
        yield finding("NUMA", "nvidia-smi topo -m shows the cores near each GPU")
