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
    """Return a sentence for each fast path that is off, and for each reason why the figures say little."""
    cores, load, found = usable_cores(), os.getloadavg()[0], []
    if setting.on_gpu and cores < CORES_BESIDE_A_GPU:
        found.append(f"There are {cores} cores beside the GPU: reading and drawing may be the limit.")
    if load > 0.5 * cores:
        found.append(f"Other processes are running (load {load:.1f} on {cores} cores).")
    if setting.batches < FEW_BATCHES:
        found.append(
            f"A loop has {setting.batches} batches. DALI prepares some before the loop asks for them, so short loops "
            "flatter it. Give more --passes or --images, or a smaller --batch-size."
        )
    with suppress(Exception):  # no GPU, no package, no driver, too old
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        slow = pynvml.nvmlClocksThrottleReasonHwSlowdown | pynvml.nvmlClocksThrottleReasonSwPowerCap
        if setting.on_gpu and pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & slow:
            found.append("The GPU is throttled (heat or power), so all figures are low.")
        try:
            pynvml.nvmlDeviceGetJpgUtilization(gpu)
        except pynvml.NVMLError_NotSupported:
            found.append("The GPU has no JPEG engine: CUDA decodes, at about a quarter of the speed.")
    return found
