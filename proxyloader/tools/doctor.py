"""``proxyloader doctor``: examine the machine and the installed packages.

Whatever may crash or hang runs in a child process with a time limit. The child prints a line of JSON per answer, so
answers that precede a crash are kept.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from .. import __version__
from .._cores import usable_cores

Facts = dict[str, Any]
Answers = tuple[list[Facts], str]
"""Answers of a child process, and why it failed or ""."""

FORMATS = ("JPEG", "JPEG 4:4:4", "grey JPEG", "progressive JPEG", "PNG", "BMP", "TIFF", "WebP")
"""What is decoded. The JPEG engines take the first."""

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

FILES, FILES_PER_WORKER, ENOUGH_FILES = 20, 4, 1024
"""Open files of a process with one loader on the CPU, of each worker, and Linux's usual limit."""


class Finding(NamedTuple):
    """A line of the report. Without a remedy all is well."""

    name: str
    found: str
    remedy: str = ""
    severity: str = "warn"

    @property
    def status(self) -> str:
        return self.severity if self.remedy else "ok"


def doctor(as_json: bool, limit: float) -> int:
    """Print the report and return the exit status: 1 if a check failed. Each child may take ``limit`` seconds."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not limit > 0:
        raise ValueError(f"limit must be > 0, got {limit:g}")
    questions = ["driver", "torch", "torchvision", "DALI", "pictures cpu 0"]
    findings = list(examine(Machine(ask(questions, limit), limit)))
    counts = {status: sum(each.status == status for each in findings) for status in ("ok", "warn", "fail")}
    if as_json:
        report: Facts = {"proxyloader": __version__, "system": platform.platform()}
        report["status"] = [status for status in counts if counts[status]][-1]
        report["findings"] = [
            {key: getattr(each, key) for key in ("name", "status", "found", "remedy")} for each in findings
        ]
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


def ask(questions: list[str], limit_s: float) -> dict[str, Answers]:
    """Ask each question in a child process of its own, all at once, and kill those that exceed the limit."""
    with ExitStack() as stack:
        running = {}
        for question in questions:
            facts, output = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            command = [sys.executable, "-c", CHILD, json.dumps(sys.path), *question.split()]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=facts, stderr=output)
            stack.callback(_end, child)
            running[question] = (child, facts, output)
        end_s, answers = time.monotonic() + limit_s, {}
        for question, (child, facts, output) in running.items():
            try:
                status = child.wait(max(0.0, end_s - time.monotonic()))
                failure = f"exit status {status}" if status >= 0 else f"crashed with {signal.Signals(-status).name}"
            except subprocess.TimeoutExpired:
                _end(child)
                status, failure = 1, f"timed out after {limit_s:g} s (--limit S allows more)"
            facts.seek(0)
            output.seek(0)
            text = output.read().decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            said = " / ".join(lines[-1:] if "Traceback (most recent call last):" in text else lines[-3:])[:300]
            told = [json.loads(line) for line in facts if line.endswith(b"\n")]  # the last one may be incomplete
            answers[question] = (told, ": ".join(filter(None, [failure, said])) if status else "")
        return answers


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with suppress(subprocess.TimeoutExpired):  # a hanging driver may keep it
        child.wait(5.0)


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
        facts: Facts = {"uuid": pynvml.nvmlDeviceGetUUID(gpu), "engines": "JPEG engines"}
        try:
            pynvml.nvmlDeviceGetJpgUtilization(gpu)
        except (pynvml.NVMLError, AttributeError) as error:  # AttributeError: an older nvidia-ml-py
            unsupported = type(error).__name__ == "NVMLError_NotSupported"
            facts["engines"] = "no JPEG engines" if unsupported else "JPEG engines unknown"
        with suppress(pynvml.NVMLError):
            masks = enumerate(pynvml.nvmlDeviceGetCpuAffinity(gpu, 64))
            facts["near"] = [64 * word + bit for word, mask in masks for bit in range(64) if mask >> bit & 1]
        yield facts


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
        capability, uuid = f"{properties.major}.{properties.minor}", str(getattr(properties, "uuid", ""))
        facts: Facts = {"name": properties.name, "uuid": uuid, "capability": capability, "error": ""}
        try:
            torch.ones(8, device=f"cuda:{index}").sum().item()
            facts["free"], facts["total"] = (size / 2**30 for size in torch.cuda.mem_get_info(index))
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

    from ..dali.api import decoder_arguments, fn, pipeline_def, types
    from ..dali.jpeg_engines import MOST_LEVELS, known_picture

    device_id = None if engine == "cpu" else int(device)
    options = decoder_arguments("decoders__Image", device_id, float(engine == "engines"))

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=2, num_threads=1, device_id=device_id, prefetch_queue_depth=1, exec_dynamic=True
    )
    def decoder() -> Any:
        return fn.decoders.image(fn.external_source(name="files", ndim=1, dtype=types.UINT8), **options)

    pipeline = None
    for number, name in enumerate(FORMATS):
        jpeg: dict[str, Any] = {"quality": 90, "progressive": "progressive" in name}
        if "grey" not in name:  # whose engines' pixels are others with subsampling, so that loaders leave it to Pillow
            jpeg["subsampling"] = "4:4:4" if ":" in name else "4:2:0"
        how = ("L" if "grey" in name else "RGB", "JPEG", jpeg) if "JPEG" in name else ("RGB", name, {"lossless": True})
        # Two different pictures, as a failing decoder may return an earlier picture. The sides differ, too.
        files, expected = zip(*[known_picture(2 * number + k, (256, 192), *how[:2], **how[2]) for k in range(2)])
        facts: Facts = {"format": name, "bound": JPEG_BOUNDS[engine] if "JPEG" in name else 0, "error": ""}
        try:
            pipeline, off = pipeline or decoder(), []
            pipeline.build()
            for count in (1, 2):  # the engines keep separate memory for single images and batches
                pipeline.feed_input("files", list(files[:count]))
                (images,) = pipeline.run()
                images = images if device_id is None else images.as_cpu()
                off += [np.abs(np.asarray(image).astype(int) - right) for image, right in zip(images, expected)]
            facts["levels_off"] = int(max(map(np.max, off)))
            facts["by_engines"] = bool(max(map(np.mean, off)) < MOST_LEVELS)
        except (RuntimeError, MemoryError, ValueError) as error:  # ValueError: wrong shape
            facts["error"], pipeline = " ".join(str(error).split()), None
        yield facts


class Machine:
    """What the checks look at: answers of child processes, installed packages, and the files of the system."""

    def __init__(self, answers: dict[str, Answers], limit_s: float, root: Path = Path("/")) -> None:
        self.answers, self.limit_s, self.root = answers, limit_s, root
        found = [(each.metadata["Name"] or "", each.version) for each in importlib.metadata.distributions()]
        self.packages = {name.lower().replace("_", "-"): version for name, version in found}

    def facts(self, question: str) -> Facts:
        """Return the first answer to a question, or {}."""
        return next(iter(self.answers[question][0]), {})

    def builds(self, prefix: str) -> list[str]:
        """Return the installed packages that begin so, with their versions."""
        found = self.packages.items()
        return [f"{name} {version}" for name, version in found if name.startswith(prefix) and "plugin" not in name]

    @property
    def gpus(self) -> list[Facts]:
        """The GPUs that torch sees, with what the driver knows of them."""
        known = {gpu["uuid"].removeprefix("GPU-"): gpu for gpu in self.answers["driver"][0][1:]}
        return [{**known.get(gpu["uuid"], {}), **gpu} for gpu in self.answers["torch"][0][1:]]


def examine(machine: Machine) -> Iterator[Finding]:
    """Yield the findings of all checks. A check that raises an error does not stop the others."""
    for check in (packages, environment, gpus, decoders, *([limits, cores] if sys.platform == "linux" else [])):
        try:
            yield from check(machine)
        except Exception as error:
            found = f"this check raised {type(error).__name__}: {error}"
            yield Finding(check.__name__, found, "Report it with the output of proxyloader doctor --json")


def packages(machine: Machine) -> Iterator[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    supported = (3, 10) <= sys.version_info[:2] <= (3, 14) and sys.platform == "linux"
    yield Finding("Python", found, "" if supported else "Use Python 3.10 to 3.14 on Linux", "fail")
    (facts, failure), newest = machine.answers["driver"], machine.facts("driver").get("cuda")
    if failure or newest is None:
        found = f"cannot be queried: {failure}" if failure else "none; images are decoded on the CPU"
        yield Finding("driver", found, failure and "Run nvidia-smi. Reboot after a driver update")
    else:
        found = f"{facts[0]['version']} for CUDA {newest}, {len(facts) - 1} GPU(s)"
        yield Finding("driver", found, "" if newest >= 12 else "Install driver 525.60 or later, for CUDA 12", "fail")
    builds = machine.builds("nvidia-dali-")
    for name, (oldest, _) in INSTALL.items():
        told, cuda = machine.facts(name), machine.facts(name).get("cuda")
        problems = [] if told else [f"cannot be imported: {machine.answers[name][1]}"]
        if told and Version(told["version"]).release < Version(oldest).release:
            problems.append(f"{oldest} is required")
        if cuda and newest and int(cuda) > int(newest):
            problems.append(f"the driver supports CUDA {newest}")
        if name == "DALI" and len(builds) > 1:
            problems.append("these packages install the same files")
        versions = [*builds] if name == "DALI" and builds else [told["version"]] if told else []
        found = "; ".join([*versions, *([f"built for CUDA {cuda}"] if cuda else []), *problems])
        first = "torch" if name == "DALI" and not machine.facts("torch") else name  # DALI's plugin imports it
        yield Finding(name, found, INSTALL[first][1] if problems else "", "fail")
    if told := machine.facts("DALI"):
        found = ", ".join(machine.builds("nvidia-nvimgcodec-")) or "no package of its own"
        remedy = "" if told["codec"] else f"pip install 'nvidia-nvimgcodec-cu{told['cuda']}[all]'"
        yield Finding("nvImageCodec", f"{found}; DALI cannot load it" if remedy else found, remedy, "fail")
    unmet = []
    for name in {"torch", "torchvision", *(build.split()[0] for build in builds)} & machine.packages.keys():
        for each in map(Requirement, importlib.metadata.requires(name) or []):
            version = machine.packages.get(each.name.lower().replace("_", "-"), "")
            is_needed = each.marker is None or each.marker.evaluate({"extra": ""})
            if is_needed and not (version and each.specifier.contains(version, prereleases=True)):
                unmet.append(f"{name} requires {each.name}{each.specifier}, found {version or 'none'}")
    yield Finding("requirements", "; ".join(unmet) or "met", "Install these; see pip check" if unmet else "")


def environment(machine: Machine) -> Iterator[Finding]:
    """Versions and variables that work, but slow down loading."""
    pillow, capabilities = machine.packages["pillow"], os.environ.get("NVIDIA_DRIVER_CAPABILITIES", "all")
    if Version(pillow).release < (11,):
        yield Finding("Pillow", f"{pillow} decodes JPEGs itself where a dataset opens them", "pip install 'pillow>=11'")
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding("CUDA_LAUNCH_BLOCKING", "1: the CPU waits for each kernel", "Unset it except to debug")
    if machine.gpus and not {"all", "video"} & {*capabilities.split(",")}:
        found, remedy = f"{capabilities}: the JPEG engines need video", "docker run -e with compute,utility,video"
        yield Finding("NVIDIA_DRIVER_CAPABILITIES", found, remedy)
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    few = not queues.isdecimal() or int(queues) < 8
    found = f"{queues}: the decoder and the model wait for each other" if few else queues
    yield Finding("CUDA_DEVICE_MAX_CONNECTIONS", found, "Unset it; importing proxyloader then sets 32" if few else "")


def gpus(machine: Machine) -> Iterator[Finding]:
    told, hidden = machine.facts("torch"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if told and not machine.gpus:
        found, remedy = "none; images are decoded on the CPU", "Start containers with --gpus all. See nvidia-smi"
        if machine.answers["driver"][0][1:] and hidden is not None:
            found, remedy = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}", "Unset it to decode on a GPU"
        elif machine.answers["driver"][0][1:]:
            found, remedy = f"torch cannot use it: {told['error']}", INSTALL["torch"][1]
        yield Finding("GPU", found, remedy, "fail" if remedy == INSTALL["torch"][1] else "warn")
    for index, gpu in enumerate(machine.gpus):
        found = f"{gpu['name']}, compute capability {gpu['capability']}, {gpu.get('engines', 'JPEG engines unknown')}"
        if gpu["error"]:
            yield Finding(f"GPU {index}", f"{found}; torch cannot use it: {gpu['error']}", INSTALL["torch"][1], "fail")
        else:
            found += f", {gpu['free']:.1f} of {gpu['total']:.1f} GB free"
            yield Finding(f"GPU {index}", found, "End other processes; see nvidia-smi" if gpu["free"] < 1 else "")


def decoders(machine: Machine) -> Iterator[Finding]:
    usable = [index for index, gpu in enumerate(machine.gpus) if not gpu["error"]]
    names = {"cpu 0": "decoding on the CPU"}
    names |= {f"engines {index}": f"decoding by the engines of GPU {index}" for index in usable}
    names |= {f"cuda {index}": f"decoding by CUDA of GPU {index}" for index in usable}
    for decoder, name in names.items() if machine.facts("DALI") else []:
        question, (engine, index) = f"pictures {decoder}", decoder.split()
        if question not in machine.answers:  # one after the other, as they share the engines
            machine.answers |= ask([question], machine.limit_s)
        facts, failure = machine.answers[question]
        right = [each["format"] for each in facts if not each["error"] and each["levels_off"] <= each["bound"]]
        bad = {each["format"]: each for each in facts if each["format"] not in right}
        parts = [f"correct pixels: {', '.join(right)}"] if right else []
        for format, each in bad.items():
            error = each["error"].partition("encountered: ")[2] or each["error"]  # without the pipeline's trace
            wrong = f"wrong pixels, off by {each.get('levels_off')} levels"
            parts.append(f"{format}: {error[:300] or wrong}")
        parts += [f"{[*FORMATS, 'exit'][len(facts)]}: {failure}"] if failure else []
        found, remedy, severity = "; ".join(parts), "", "warn"
        if failure or any("JPEG" in format or not each["error"] for format, each in bad.items()):
            option = {"cpu": "translate=False", "engines": "hw_decoder_load=0", "cuda": 'device="cpu"'}[engine]
            remedy, severity = f"Reinstall DALI; see pip check. Until then: DataLoader({option})", "fail"
        elif bad:
            remedy = "None for proxyloader.DataLoader, which uses Pillow. DALI pipelines cannot read these files"
        elif engine == "engines" and not facts[0]["by_engines"]:
            found = f"CUDA decodes instead; {found}"
            if machine.gpus[int(index)].get("engines") != "no JPEG engines":
                remedy = "Give containers the driver capability video. End other processes that decode on this GPU"
        yield Finding(name, found, remedy, severity)


def limits(machine: Machine) -> Iterator[Finding]:
    import resource

    shm, remedy = machine.root / "dev/shm", "Start containers with --shm-size=8g or --ipc=host"
    if os.access(shm, os.W_OK):
        told = os.statvfs(shm)
        size, free = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
        remedy = remedy if size < SHM_BYTES else "Delete what ended processes left there"
        found = f"{free >> 20:,} of {size >> 20:,} MB free"
        yield Finding("/dev/shm", found, remedy if free < SHM_BYTES else "")
    else:
        yield Finding("/dev/shm", "missing or not writable; torch's workers need it", remedy, "fail")
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES + FILES_PER_WORKER * usable_cores()
    few = most != resource.RLIM_INFINITY and most < ENOUGH_FILES
    found = "unlimited" if most == resource.RLIM_INFINITY else f"at most {most}"
    found += f"; a loader with a worker per core opens {needed}, CUDA and tensors more" if few else ""
    remedy = "ulimit -n 65536, docker run --ulimit nofile=65536, or LimitNOFILE= in systemd" if few else ""
    yield Finding("open files", found, remedy, "fail" if most < needed else "warn")


def cores(machine: Machine) -> Iterator[Finding]:
    ours, quota = os.sched_getaffinity(0), float("inf")
    with suppress(OSError):
        groups = (machine.root / "proc/self/cgroup").read_text().splitlines()
        group = Path(next((line[4:] for line in groups if line.startswith("0::/")), ""))
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # "max" is not a number
                most, period = (machine.root / "sys/fs/cgroup" / folder / "cpu.max").read_text().split()
                quota = min(quota, int(most) / int(period))
    found, remedy, few = f"{len(ours)} of {os.cpu_count()} usable", "", sorted(ours)[: max(1, int(min(quota, 4096)))]
    if quota < len(ours):
        found += f"; a cgroup quota of {quota:g} throttles threads started for {len(ours)} cores"
        remedy = f"Raise the quota, or use taskset -c {','.join(map(str, few))} and num_workers={len(few)}"
    yield Finding("cores", found, remedy)
    nodes = len([*(machine.root / "sys/devices/system/node").glob("node[0-9]*")])
    far = [str(index) for index, gpu in enumerate(machine.gpus) if not ours & {*gpu.get("near", ours)}]
    found = f"{max(1, nodes)} node(s)" + f"; this process runs on no core near GPU {', '.join(far)}" * bool(far)
    yield Finding("NUMA", found, "Start each GPU's process with numactl; see nvidia-smi topo -m" if far else "")
