"""Decide what runs a plan: kernels, or without them DALI's operators, or else torchvision in the workers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Collection

import PIL
import pynvml
import torch

from ..transforms.plan import Plan, iter_steps
from .compiler import KernelError, _check, _nvrtc
from .operations import get_missing_kernel

log = logging.getLogger(__name__)

NO_KERNELS = "without CUDA kernels, torchvision runs it"
"""Reason that a machine without kernels gives."""


def find_obstacle(plan: Plan, has_kernels: bool, left_out: Collection[str] = ()) -> str:
    """Return why torchvision runs a plan; "" if kernels run it, or on a machine without kernels, DALI's operators.

    ``left_out``: names of the classes of steps that the installed Pillow does differently.
    """
    if not has_kernels:
        return NO_KERNELS if any(step.needs_kernels for step in plan.steps) else ""
    if left_out and (names := {type(step).__name__ for step in iter_steps(plan.steps)}.intersection(left_out)):
        return f"Pillow {PIL.__version__} differs from the kernels in {', '.join(sorted(names))}"
    return get_missing_kernel(plan)


@functools.cache
def can_compile() -> bool:
    """Return whether NVRTC is installed and supports all GPUs, as far as NVML knows them. If not, log why.

    This does not initialize CUDA, so the process may still fork.
    """
    try:
        if unknown := _gpu_architectures() - _compiler_architectures():
            raise KernelError(f"NVRTC does not support the architecture sm_{min(unknown)} of a GPU")
    except KernelError as error:
        log.warning("CUDA kernels cannot be compiled, so torchvision runs most transforms: %s", error)
        return False
    return True


def _compiler_architectures() -> set[int]:
    count = ctypes.c_int()
    _check(_nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
    architectures = (ctypes.c_int * count.value)()
    _check(_nvrtc().nvrtcGetSupportedArchs(architectures), "nvrtcGetSupportedArchs")
    return set(architectures)


def _gpu_architectures() -> set[int]:
    """Return the compute capabilities of the visible GPUs, such as 90."""
    found = set()
    with contextlib.suppress(pynvml.NVMLError, RuntimeError):
        pynvml.nvmlInit()
        for index in map(torch.cuda._get_nvml_device_index, range(torch.cuda.device_count())):
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(index))
            found.add(10 * int(major) + int(minor))
    return found
