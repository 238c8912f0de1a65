"""What the doctor asks of the installed packages and of the driver. Runs in a child process."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

Engine = Literal["cpu", "engines", "cuda"]
"""Who decodes: DALI on the CPU; on a GPU its JPEG engines alone, or CUDA alone."""

Format = Literal["JPEG", "JPEG 4:4:4", "grey JPEG", "progressive JPEG", "PNG", "BMP", "TIFF", "WebP"]
"""What is decoded, in this order. The first is what the engines take."""

Facts = dict[str, Any]


def answer(file: str, question: str, *arguments: str) -> None:
    """Append the answers to a file, each as a line of JSON. An exception ends the process, with its traceback."""
    with open(file, "a", buffering=1) as answers:
        for facts in QUESTIONS[question](*arguments):
            answers.write(json.dumps(facts) + "\n")


def driver() -> Iterator[Facts]:
    """Yield the driver, or the ``error`` for which there is none, and then each GPU, also those hidden from CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield {"version": None, "error": ""}
        return
    except pynvml.NVMLError as error:
        yield {"version": None, "error": str(error)}
        return
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    yield {"version": pynvml.nvmlSystemGetDriverVersion(), "cuda": [cuda // 1000, cuda % 1000 // 10]}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        yield {
            "name": pynvml.nvmlDeviceGetName(gpu),
            "uuid": pynvml.nvmlDeviceGetUUID(gpu),
            "has_engines": _has_engines(pynvml, gpu),
            "numa_node": _numa_node(pynvml.nvmlDeviceGetPciInfo(gpu).busId),
        }


def _has_engines(pynvml: Any, gpu: Any) -> bool | None:
    """Return whether a GPU has JPEG engines, or None if the driver does not tell."""
    try:
        pynvml.nvmlDeviceGetJpgUtilization(gpu)
    except pynvml.NVMLError_NotSupported:
        return False
    except (pynvml.NVMLError, AttributeError):  # older drivers, older versions of nvidia-ml-py
        return None
    return True


def _numa_node(bus_id: str | bytes) -> int | None:
    """Return the NUMA node of a PCI device such as 00000000:3B:00.0, or None if the system does not tell."""
    bus = (bus_id.decode() if isinstance(bus_id, bytes) else bus_id).lower()
    try:
        node = int(Path("/sys/bus/pci/devices", bus[-12:], "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def torch() -> Iterator[Facts]:
    """Yield torch's build, and then each GPU that it sees, with the ``error`` of a kernel on it."""
    import torch

    error = ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as failed:
        error = str(failed).splitlines()[0]
    cuda = torch.version.cuda
    yield {
        "version": torch.__version__,
        "cuda": list(map(int, cuda.split(".")[:2])) if cuda else None,
        "gpus": 0 if error else torch.cuda.device_count(),
        "error": error,
    }
    for index in range(0 if error else torch.cuda.device_count()):
        yield _gpu_of_torch(torch, index)


def _gpu_of_torch(torch: Any, index: int) -> Facts:
    properties, error, free = torch.cuda.get_device_properties(index), "", None
    try:
        if not bool((torch.ones(8, device=f"cuda:{index}") + 1 == 2).all()):
            error = "a kernel computed 1 + 1 wrongly"
        free = torch.cuda.mem_get_info(index)[0]
    except RuntimeError as failed:
        error = str(failed).splitlines()[0]
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "capability": [properties.major, properties.minor],
        "total_bytes": properties.total_memory,
        "free_bytes": free,
        "error": error,
    }


def torchvision() -> Iterator[Facts]:
    """Yield the version. The import fails where torchvision was built for another torch."""
    yield {"version": importlib.import_module("torchvision").__version__}


def dali() -> Iterator[Facts]:
    """Yield DALI's version, and the major version of its CUDA and the version of nvImageCodec, each None if unknown.

    The version of nvImageCodec is "" if DALI does not find it.
    """
    from ...errors import MissingDaliError

    try:
        from ...dali import api
    except MissingDaliError as error:
        raise error.__cause__ or error from None  # the loader's own words
    backend: Any = api.backend
    cuda, codec = getattr(backend, "__cuda_version__", None), None
    with suppress(AttributeError):  # private, and missing in some versions
        number = int(backend.GetNvimgcodecVersion())
        codec = f"{number // 1000}.{number % 1000 // 100}.{number % 100}" if number > 0 else ""
    yield {
        "version": api.__version__,
        "cuda": None if cuda is None else cuda // 1000,
        "codec": codec,
    }


def pictures(engine: Engine, device_id: str) -> Iterator[Facts]:
    """Yield how far the pictures of each format are from Pillow's, decoded by an engine. See ``pictures.py``."""
    from .pictures import decode_all

    yield from decode_all(engine, int(device_id))


QUESTIONS: dict[str, Callable[..., Iterator[Facts]]] = {
    each.__name__: each for each in (driver, torch, torchvision, dali, pictures)
}
