"""Checks of the driver and of the installed packages: what there is, and whether it fits together."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

from .finding import Finding
from .subject import Subject

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)
OLDEST = {"torch": "2.6", "torchvision": "0.21", "dali": "1.53"}
OLDEST_CUDA = 12

ONE_BUILD = "pip uninstall each nvidia-dali-... that pip list shows, then pip install nvidia-dali-cuda120"


def python(subject: Subject) -> Iterator[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        yield Finding("Python", "fail", found, "Make an environment of Python 3.10 to 3.14")
    elif sys.platform != "linux":
        found += ": there is no DALI for it, and the loader works as torch's own"
        yield Finding("Python", "warn", found, "Use Linux to decode by DALI")
    else:
        yield Finding("Python", "ok", found)


def driver(subject: Subject) -> Iterator[Finding]:
    asked, cuda = subject.driver, subject.driver_cuda
    if not asked.told:
        remedy = "See what nvidia-smi says. pip install nvidia-ml-py, if that is what is missing"
        yield Finding("driver", "warn", f"it cannot be asked: {asked.failure}", remedy)
    elif asked.told[0].get("error"):
        remedy = "See what nvidia-smi says. After an update of the driver, start the machine again"
        yield Finding("driver", "fail", f"NVIDIA's driver does not answer: {asked.told[0]['error']}", remedy)
    elif cuda is None:
        yield Finding("driver", "ok", "none, so images are decoded on the CPU")
    else:
        found = f"{asked.told[0]['version']}, for CUDA up to {_dotted(cuda)}, with {len(subject.gpus_of_driver)} GPU(s)"
        if cuda[0] < OLDEST_CUDA:
            remedy = "Install driver 525.60 or newer, the first for CUDA 12"
            yield Finding("driver", "fail", f"{found}; CUDA {OLDEST_CUDA} or newer is needed", remedy)
        elif asked.failure:
            yield Finding("driver", "warn", f"{found}; then {asked.failure}", "See what nvidia-smi says")
        else:
            yield Finding("driver", "ok", found)


def torch(subject: Subject) -> Iterator[Finding]:
    if not subject.torch.told:
        remedy = "pip install --force-reinstall torch torchvision, in versions that belong together"
        yield Finding("torch", "fail", f"it cannot be imported: {subject.torch.failure}", remedy)
        return
    told = subject.torch.told[0]
    cuda, driver_cuda = told["cuda"], subject.driver_cuda
    found = f"{told['version']}, {f'built for CUDA {_dotted(cuda)}' if cuda else 'a build without CUDA'}"
    if _is_older(told["version"], OLDEST["torch"]):
        yield Finding("torch", "fail", found, f"pip install 'torch>={OLDEST['torch']}' and the torchvision of it")
    elif told["gpus"]:
        yield Finding("torch", "ok", f"{found}; it sees {told['gpus']} GPU(s)")
    elif not subject.gpus_of_driver:
        yield Finding("torch", "ok", found)
    elif cuda is None:
        yield Finding("torch", "fail", f"{found}, beside a GPU", "Install a build of torch with CUDA: pytorch.org")
    elif driver_cuda and cuda[0] > driver_cuda[0]:
        remedy = f"Install a build of torch for CUDA {driver_cuda[0]}, or a driver for CUDA {cuda[0]}"
        yield Finding("torch", "fail", f"{found}; the driver runs CUDA up to {_dotted(driver_cuda)}", remedy)
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        found += f"; CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides all GPUs"
        yield Finding("torch", "warn", found, "Unset CUDA_VISIBLE_DEVICES, if a GPU is to decode")
    else:
        remedy = "The driver lists a GPU. Start a container with --gpus all, and install a torch for this driver's CUDA"
        yield Finding("torch", "fail", f"{found}; it sees no GPU: {told['error']}", remedy)


def torchvision(subject: Subject) -> Iterator[Finding]:
    if not subject.torchvision.told:
        remedy = "Install the torchvision that belongs to this torch: pip install --force-reinstall torchvision"
        yield Finding("torchvision", "fail", f"it cannot be imported: {subject.torchvision.failure}", remedy)
        return
    version = subject.torchvision.told[0]["version"]
    is_older = _is_older(version, OLDEST["torchvision"])
    remedy = f"pip install 'torchvision>={OLDEST['torchvision']}' and the torch of it" if is_older else ""
    yield Finding("torchvision", "fail" if is_older else "ok", version, remedy)


def dali(subject: Subject) -> Iterator[Finding]:
    builds = ", ".join(f"{name} {version}" for name, version in subject.dali_builds.items())
    if sys.platform != "linux":
        return
    if not subject.dali.told:
        found = f"{builds or 'no nvidia-dali-...'} is installed, and it cannot be imported: {subject.dali.failure}"
        remedy = "Repair torch first, which DALI's plugin imports" if not subject.torch.told else ONE_BUILD
        yield Finding("DALI", "fail", found, remedy)
        return
    told, driver_cuda = subject.dali.told[0], subject.driver_cuda
    found = f"{builds or told['version']}, built for CUDA {told['cuda'] or 'unknown'}"
    if _is_older(told["version"], OLDEST["dali"]):
        yield Finding("DALI", "fail", f"{told['version']} ({found})", "pip install -U nvidia-dali-cuda120")
    elif driver_cuda and told["cuda"] and told["cuda"] > driver_cuda[0]:
        remedy = f"pip uninstall it, then pip install nvidia-dali-cuda{driver_cuda[0]}0. Or install a newer driver"
        yield Finding("DALI", "fail", f"{found}; the driver runs CUDA up to {_dotted(driver_cuda)}", remedy)
    else:
        yield Finding("DALI", "ok", found)


def codec(subject: Subject) -> Iterator[Finding]:
    if not subject.dali.told:
        return
    builds = ", ".join(f"{name} {version}" for name, version in subject.codec_builds.items())
    loaded, cuda = subject.dali.told[0]["codec"], subject.dali.told[0]["cuda"]
    found = builds or "no package of its own"
    found += {None: "", "": "; DALI finds none"}.get(loaded, f"; DALI has loaded {loaded}")
    others = [name for name in subject.codec_builds if cuda and not name.endswith(f"cu{cuda}")]
    if loaded == "" or (others and len(others) == len(subject.codec_builds)):
        remedy = f"pip install 'nvidia-nvimgcodec-cu{cuda or 12}[all]', in the version that pip check asks for"
        yield Finding("nvImageCodec", "fail", f"{found}; DALI was built for CUDA {cuda or 'unknown'}", remedy)
    else:
        yield Finding("nvImageCodec", "ok", found)


def requirements(subject: Subject) -> Iterator[Finding]:
    """Whether the packages have the versions that they ask of each other."""
    unmet = [each for name in ("torch", "torchvision", *subject.dali_builds) for each in _unmet(name)]
    if unmet:
        remedy = "pip install what is asked for. pip check lists it, too"
        yield Finding("requirements", "warn", "; ".join(unmet), remedy)
    else:
        yield Finding("requirements", "ok", "torch, torchvision and DALI have what they ask for")


def _unmet(name: str) -> list[str]:
    from packaging.requirements import Requirement

    try:
        asked = [Requirement(text) for text in importlib.metadata.requires(name) or []]
    except importlib.metadata.PackageNotFoundError:
        return []  # its own check tells
    unmet = []
    for each in asked:
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            try:
                version = importlib.metadata.version(each.name)
            except importlib.metadata.PackageNotFoundError:
                version = "none"
            if version == "none" or not each.specifier.contains(version, prereleases=True):
                unmet.append(f"{name} asks for {each.name}{each.specifier}, and there is {version}")
    return unmet


def combinations(subject: Subject) -> Iterator[Finding]:
    """What is known to go wrong together, or to be slow."""
    bad = list(_bad_combinations(subject))
    yield from bad or [Finding("combinations", "ok", "none that is known to be bad")]


def _bad_combinations(subject: Subject) -> Iterator[Finding]:
    if len(subject.dali_builds) > 1:
        found = f"{' and '.join(subject.dali_builds)}: they install the same files"
        yield Finding("several builds of DALI", "fail", found, ONE_BUILD)
    if _is_older(_version("pillow"), "11"):
        found = f"{_version('pillow')}: what a dataset opens with Image.open is decoded by Pillow in the workers"
        yield Finding("Pillow", "warn", found, "pip install -U 'pillow>=11'")
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding(
            "CUDA_LAUNCH_BLOCKING", "warn", "1: the CPU waits for each kernel", "Unset it outside of debugging"
        )
    capabilities = os.environ.get("NVIDIA_DRIVER_CAPABILITIES", "all").split(",")
    if subject.gpus and not {"all", "video"} & set(capabilities):
        found = f"{','.join(capabilities)}: without video a container cannot use the JPEG engines"
        remedy = "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
        yield Finding("NVIDIA_DRIVER_CAPABILITIES", "warn", found, remedy)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _is_older(version: Any, oldest: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release < Version(oldest).release
    except InvalidVersion:
        return False


def _dotted(cuda: list[int]) -> str:
    return ".".join(map(str, cuda))


CHECKS = (python, driver, torch, torchvision, dali, codec, requirements, combinations)
