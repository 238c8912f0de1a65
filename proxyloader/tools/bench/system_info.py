"""The machine, and the reasons why it may be slow."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from typing import Any

import torch

from ... import __version__
from ..._cores import usable_cores
from .config import BenchConfig

FEW_BATCHES = 4
CORES_BESIDE_A_GPU = 8
"""With fewer cores, workers take longer than decoding on the GPU."""


def machine() -> dict[str, Any]:
    """Return the hardware and the installed versions, each None if there is none."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda_queues": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "cores": usable_cores(),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "dali": _version("nvidia-dali-cuda120") or _version("nvidia-dali-cuda130"),
        "proxyloader": __version__,
    }


def in_words(machine: dict[str, Any]) -> str:
    """Return a description of a machine in one line."""
    versions = [f"{name} {machine[name]}" for name in ("python", "torch", "torchvision", "dali", "proxyloader")]
    return ", ".join([machine["gpu"] or "no GPU", f"{machine['cores']} cores ({machine['cpu']})", *versions])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def warnings_for(setting: BenchConfig) -> list[str]:
    """Return a sentence for each reason why the figures are lower than they could be here, or say little."""
    found = _warnings_of_nvml() if setting.on_gpu else []
    if setting.on_gpu and usable_cores() < CORES_BESIDE_A_GPU:
        found.append(f"There are {usable_cores()} cores beside the GPU: reading and drawing may be the limit.")
    load = os.getloadavg()[0]
    if load > 0.5 * usable_cores():
        found.append(f"Other work is going on here (a load of {load:.1f} on {usable_cores()} cores).")
    if setting.batches < FEW_BATCHES:
        found.append(
            f"A loop has {setting.batches} batches. DALI's own reader makes some before the loop asks for them, so "
            "short loops flatter it. Give more --passes or --images, or a smaller --batch-size."
        )
    return found


def _warnings_of_nvml() -> list[str]:
    found = []
    with suppress(Exception):  # not installed, no driver, too old
        pynvml, gpu = nvml()
        slow = pynvml.nvmlClocksThrottleReasonHwSlowdown | pynvml.nvmlClocksThrottleReasonSwPowerCap
        if pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & slow:
            found.append("The GPU is throttled (heat or power), so all figures are low.")
        try:
            pynvml.nvmlDeviceGetJpgUtilization(gpu)
        except pynvml.NVMLError_NotSupported:
            found.append("The GPU has no JPEG engine: CUDA decodes, at about a quarter of the speed.")
    return found


def nvml() -> tuple[Any, Any]:
    """Return the module pynvml and its handle of the GPU. It raises if there is no such module, driver or GPU."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
