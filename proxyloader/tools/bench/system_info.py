"""The machine, and the reasons why it may be slow."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

from ... import __version__
from ..synthetic.dataset import usable_cores
from .config import BenchConfig

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
    """Return a sentence for each reason why this machine is slower than it could be."""
    found = []
    if setting.on_gpu:
        engines = _nvml_says("jpeg")
        if engines == 0:
            found.append("The GPU has no JPEG engine: CUDA decodes, at about a quarter of the speed.")
        if _nvml_says("throttled"):
            found.append("The GPU is throttled (heat or power), so all figures are low.")
        if usable_cores() < CORES_BESIDE_A_GPU:
            found.append(f"There are {usable_cores()} cores beside the GPU: reading and drawing may be the limit.")
    load = os.getloadavg()[0]
    if load > 0.5 * usable_cores():
        found.append(f"Other work is going on here (a load of {load:.1f} on {usable_cores()} cores).")
    return found


def _nvml_says(what: str) -> int | None:
    """Return whether the GPU has JPEG engines ("jpeg"), or whether its clocks are throttled; None if not known."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        if what == "jpeg":
            try:
                pynvml.nvmlDeviceGetJpgUtilization(gpu)
            except pynvml.NVMLError_NotSupported:
                return 0
            return 1
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        return int(reasons & (pynvml.nvmlClocksThrottleReasonHwSlowdown | pynvml.nvmlClocksThrottleReasonSwPowerCap))
    except Exception:  # not installed, no driver, too old
        return None
