"""Compile the kernels with NVRTC when they are first used, keep the code in the user's cache, and launch them.

Only the libraries that torch depends on are needed: its NVRTC, and the driver. NVRTC compiles for the very GPU, so the
driver has nothing left to compile.
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pynvml
import torch

from .programs import OPCODES, Launch

log = logging.getLogger(__name__)

# Pillow's wheels for x86-64 round each product before they add it. With fused multiply-add, some pixels would differ.
OPTIONS = ("--std=c++17", "--fmad=false")

SOURCES = ("image.cuh", "resize.cu", "colour.cu")

FORMATS = {torch.uint8: "UINT8", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT32"}
"""Dtypes of outputs, and their names in ``enum Format``, in order."""

MAX_SHARED_BYTES_OPTIN, MAX_DYNAMIC_SHARED_BYTES = 97, 8
"""Numbers of a CUdevice_attribute and of a CUfunction_attribute."""


class KernelError(RuntimeError):
    """The kernels cannot be compiled or launched on this machine."""


class Batch(ctypes.Structure):
    """``struct Batch``: addresses of the arrays that describe a batch, and of the memory for what kernels compute."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("jobs", "steps", "extras", "stats", "pool", "scratch")),
        *((name, ctypes.c_int) for name in ("format", "is_planar")),
    ]


def read_source() -> str:
    opcodes, formats = ", ".join(OPCODES), ", ".join(FORMATS.values())
    texts = [Path(__file__).with_name(name).read_text() for name in SOURCES]
    return "\n".join([f"enum Opcode {{ {opcodes} }};", f"enum Format {{ {formats} }};", *texts])


def compile_kernels(architecture: str) -> bytes:
    """Return the code of the kernels for an architecture such as "sm_90", from the user's cache if it is there.

    Raises:
        KernelError: NVRTC is missing, or refuses the source or the architecture.
    """
    source, options = read_source(), (f"--gpu-architecture={architecture}", *OPTIONS)
    key = hashlib.sha256("\0".join([source, *options, str(torch.version.cuda)]).encode()).hexdigest()
    cached = cache_folder() / f"kernels-{key[:32]}.cubin"
    with contextlib.suppress(OSError):
        return cached.read_bytes()
    code = _compile(source, options)
    keep(cached, code)
    return code


def cache_folder() -> Path:
    """Return the folder of compiled kernels: $XDG_CACHE_HOME/proxyloader, by default ~/.cache/proxyloader."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "proxyloader")


def keep(path: Path, content: bytes) -> None:
    """Write a file of the cache. Another process may write or read the same file meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        log.info("not caching %s: %s", path.name, error)


def _compile(source: str, options: tuple[str, ...]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    _check(created, "nvrtcCreateProgram")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            compiler_log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise KernelError(f"NVRTC cannot compile the kernels with {' '.join(options)}:\n{compiler_log.decode()}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(get_size: Any, get_content: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)), get_size.__name__)
    content = ctypes.create_string_buffer(size.value)
    _check(get_content(program, content), get_content.__name__)
    return content.raw


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Load the NVRTC of the installed torch, from its wheel or from the system."""
    torch_folder = Path(torch.__file__).parent
    name = f"libnvrtc.so.{(torch.version.cuda or '12').split('.')[0]}"
    found = itertools.chain((torch_folder.parent / "nvidia").glob(f"**/{name}"), torch_folder.glob(f"**/{name}"))
    for path in [*map(str, found), name]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise KernelError(f"{name} was not found; it comes with torch {torch.__version__}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError("libcuda.so.1 was not found: no NVIDIA driver is installed") from error


def _check(status: int, call: str) -> None:
    if status:
        raise KernelError(f"{call} failed with status {status}")


@functools.cache
def can_compile() -> bool:
    """Return whether NVRTC is installed and supports all GPUs, as far as NVML knows them. If not, log why.

    This does not initialize CUDA, so the process may still fork.
    """
    try:
        count = ctypes.c_int()
        _check(_nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        supported = (ctypes.c_int * count.value)()
        _check(_nvrtc().nvrtcGetSupportedArchs(supported), "nvrtcGetSupportedArchs")
        if unknown := _gpu_architectures().difference(supported):
            raise KernelError(f"NVRTC does not support the architecture sm_{min(unknown)} of a GPU")
    except KernelError as error:
        log.warning("CUDA kernels cannot be compiled, so torchvision runs most transforms: %s", error)
        return False
    return True


def _gpu_architectures() -> set[int]:
    """Return the compute capabilities of the visible GPUs, such as 90."""
    found = set()
    with contextlib.suppress(pynvml.NVMLError, RuntimeError):
        pynvml.nvmlInit()
        for index in map(torch.cuda._get_nvml_device_index, range(torch.cuda.device_count())):
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(index))
            found.add(10 * int(major) + int(minor))
    return found


class Module:
    """The kernels, loaded on a device."""

    def __init__(self, device_id: int) -> None:
        major, minor = torch.cuda.get_device_capability(device_id)
        code = compile_kernels(f"sm_{major}{minor}")
        self._device_id, self._handle = device_id, ctypes.c_void_p()
        with torch.cuda.device(device_id):
            torch.cuda.current_stream().query()  # makes torch's context current in this thread
            _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), code), "cuModuleLoadData")

    @functools.cache  # noqa: B019  a process keeps its modules
    def _function(self, name: str) -> ctypes.c_void_p:
        function, most = ctypes.c_void_p(), ctypes.c_int()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode()), name)
        _driver().cuDeviceGetAttribute(ctypes.byref(most), MAX_SHARED_BYTES_OPTIN, self._device_id)
        _driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, most)  # more than 48 KiB is on request
        return function

    def launch(self, launch: Launch, batch: Batch, stream: int) -> None:
        """Launch a kernel. The device must be torch's current device."""
        first = ctypes.c_int(launch.first)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(batch), ctypes.addressof(first))
        status = _driver().cuLaunchKernel(
            self._function(launch.name), *launch.grid, 1, launch.threads, 1, 1, launch.shared_bytes,
            ctypes.c_void_p(stream), arguments, None,
        )  # fmt: skip
        if status:
            raise KernelError(f"launching {launch} failed with status {status}")
