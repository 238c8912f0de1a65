"""The kernels on the CPU: g++ compiles the same sources, with emulate.h in CUDA's place."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proxyloader.dali import plan_server
from proxyloader.kernels import launcher
from proxyloader.kernels.compiler import Batch, read_source
from proxyloader.kernels.launcher import Launcher, as_images, get_launcher, make_batch
from proxyloader.kernels.programs import CODE, STEP, Jobs, Launch, Programs, Schedule

HEADER = Path(__file__).with_name("emulate.h")
FLAGS = ["-O2", "-std=c++17", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fPIC", "-shared", "-w", "-x", "c++"]
STORES = CODE["STORE"], CODE["STORE_RESIZED"]
GUARD, UNTOUCHED = 64, 0x5A
"""Bytes behind each piece of memory, and what they and memory that nothing was written to hold."""


class Module:
    """The kernels."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "kernels.cu"), Path(folder, "kernels.so")
            source.write_text(read_source())
            command = ["g++", *FLAGS, f'-DSOURCE="{source}"', str(HEADER), "-o", str(library)]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(library))

    def launch(self, launch: Launch, batch: Batch) -> None:
        """Run a launch to its end."""
        kernel = ctypes.cast(getattr(self._library, launch.name), ctypes.c_void_p)
        _, grid, threads, shared_bytes, first = launch
        if not self._library.launch(kernel, *grid, threads, shared_bytes, ctypes.byref(batch), first):
            raise ValueError(f"too many threads, or too much shared memory, for a GPU: {launch}")


_module = functools.cache(Module)


class Memory:
    """Bytes that are guarded at their end."""

    def __init__(self, size: int, content: Any = None) -> None:
        self.bytes = np.full(size + GUARD + 16, UNTOUCHED, np.uint8)
        self.address = -(-self.bytes.ctypes.data // 16) * 16
        self.begin, self.size = self.address - self.bytes.ctypes.data, size
        if content is not None:
            self.view[:] = np.ascontiguousarray(content).view(np.uint8).reshape(-1)

    @property
    def view(self) -> Any:
        return self.bytes[self.begin : self.begin + self.size]

    def check(self) -> None:
        """Raise if something was written behind the end."""
        assert (self.bytes[self.begin + self.size :] == UNTOUCHED).all(), f"written behind {self.size} bytes"


def skip_without_compiler() -> None:
    """Except in CI."""
    if not shutil.which("g++") and "CI" not in os.environ:
        pytest.skip("no g++")


where = {"device": "cpu"}
"""Where ``run`` runs. A fixture sets it."""


def run(
    images: Sequence[Any], programs: Programs, layout: str = "HWC", dtype: torch.dtype = torch.uint8
) -> list[torch.Tensor]:
    """Return the output of each program, in the format, as the CPU or a GPU makes it: see ``where``.

    Args:
        images: the decoded images that ``programs`` start from, (H, W, 3) uint8.
    """
    last = programs._added[-1][1].view(STEP)
    channels = int(last["numbers"][0, 0 if last["code"][0] in STORES else 8])
    schedule = Jobs(programs).schedule(channels, dtype, layout == "HWC")
    begins = np.cumsum([1] + [image.size + 1 for image in images])  # at odd addresses
    decoded = Memory(begins[-1])
    for image, begin in zip(images, begins):
        decoded.view[begin : begin + image.size] = image.reshape(-1)
    before = decoded.view.copy()
    if where["device"] == "cuda":
        on_gpu = torch.from_numpy(before).cuda()
        addresses, stream = on_gpu.data_ptr() + begins[:-1], torch.cuda.current_stream()
        outputs = get_launcher(0).run(schedule, addresses, stream)
        decoded.view[:] = on_gpu.cpu().numpy()
    else:
        outputs = EmulatedLauncher().run(schedule, decoded.address + begins[:-1], None)
    decoded.check()
    assert np.array_equal(decoded.view, before), "a decoded image was written to"
    flat = [image.cpu() for output in outputs for image in output]
    return flat if layout == "CHW" else [image.permute(1, 2, 0) for image in flat]


def _launch(schedule: Schedule, outputs: int, decoded: Any) -> None:
    described = Memory(schedule.memory.size)
    scratch, pool = map(Memory, (schedule.scratch_bytes, schedule.pool_bytes))
    stats = Memory(schedule.stats_bytes, np.zeros(schedule.stats_bytes, np.uint8))
    schedule.bind(described.view, scratch.address, outputs, decoded)
    memories = stats, pool, scratch
    arrays = [described.address + begin for begin in schedule.begins]
    batch = make_batch(schedule, *arrays, *(memory.address for memory in memories))
    for launch in schedule.launches:
        _module().launch(launch, batch)
    for memory in (described, *memories):
        memory.check()


class EmulatedLauncher(Launcher):
    """Takes the memory of the CPU for that of a GPU."""

    def __init__(self) -> None:
        pass

    def run(self, schedule: Schedule, decoded: Any, stream: Any) -> list[Any]:
        buffer = Memory(schedule.num_values * schedule.dtype.itemsize)
        _launch(schedule, buffer.address, decoded)
        buffer.check()
        return as_images(torch.from_numpy(buffer.view).view(schedule.dtype), schedule)


@pytest.fixture
def emulated_gpu(with_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders run kernels on the CPU, of images that DALI decodes there, as Pillow does."""
    skip_without_compiler()
    for module in (launcher, plan_server):
        monkeypatch.setattr(module, "get_launcher", lambda device_id: EmulatedLauncher())


@pytest.fixture
def grids_round_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision multiplies the grids of warps with MKL, which fuses multiply and add on some CPUs. The kernels round
    each product, as MKL does on the others. A pixel on the boundary of two may differ, so it is held to the latter."""

    def bmm(grid: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        x, y, one = (grid[..., k : k + 1] * theta[:, k : k + 1] for k in range(3))
        return x + y + one

    monkeypatch.setattr(torch.Tensor, "bmm", bmm)
