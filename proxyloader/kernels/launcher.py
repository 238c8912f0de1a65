"""Run the programs of a batch on a GPU, from the decoded images to the output tensors. Main process."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from .compiler import BatchPointers, KernelError, Module, output_macros
from .programs import STATS_BYTES, TABLE_BYTES, Programs

log = logging.getLogger(__name__)

ALIGNMENT = 16

RESIZE_KERNELS = ("build_weights", "resample_", "store", "erase_output")
"""First letters of the names of the kernels in ``resize.cu``. The others are in ``colour.cu``."""


@functools.cache
def load_module(name: str, device_id: int, macros: tuple[str, ...] = ()) -> Module:
    """Return the kernels of a module on a device. They are loaded once in a process."""
    return Module(name, device_id, macros)


@functools.cache
def get_launcher(device_id: int, dtype: torch.dtype, channels_last: bool) -> Launcher | None:
    """Return the launcher of a device and an output format. None: the kernels cannot be used, which is logged."""
    try:
        return Launcher(device_id, dtype, channels_last)
    except KernelError as error:
        log.warning("DALI transforms the images, as the kernels cannot be used: %s", error)
        return None


class Launcher:
    """Runs programs on a device, with results of a dtype and a layout.

    Raises:
        KernelError: the kernels cannot be compiled or loaded.
    """

    def __init__(self, device_id: int, dtype: torch.dtype, channels_last: bool) -> None:
        self.device, self.dtype, self.channels_last = torch.device("cuda", device_id), dtype, channels_last
        with ThreadPoolExecutor(2) as pool:  # the first compilation of each takes a second
            colour = pool.submit(load_module, "colour", device_id)
            self._resize = load_module("resize", device_id, output_macros(dtype, not channels_last))
            self._colour = colour.result()

    def run(self, programs: Programs, decoded: Any, channels: int) -> torch.Tensor | list[torch.Tensor]:
        """Launch everything in torch's current stream, without waiting for it.

        Args:
            decoded: addresses of the decoded images, (H, W, 3) uint8 in the memory of the device.
            channels: number of channels of the results.

        Returns:
            (N, C, H, W), or a list of (C, H, W) if the results differ in size.
        """
        stream = torch.cuda.current_stream(self.device)
        jobs = programs.jobs()
        sizes = programs.sizes[: programs.num_outputs]
        outputs, addresses = self._allocate(sizes, channels)
        height, width = sizes.T
        strides = (width * channels, 1) if self.channels_last else (width, height * width)
        scratch = self._empty(jobs.scratch_bytes)
        jobs.bind(decoded, scratch.data_ptr(), addresses, *strides)
        runs = jobs.runs()
        described, at = self._upload([jobs.jobs], [jobs.steps], [runs], jobs.extras)
        stats = torch.zeros(max(1, jobs.num_stats) * STATS_BYTES, dtype=torch.uint8, device=self.device)
        tables, pool = self._empty(len(runs) * TABLE_BYTES), self._empty(4 * jobs.pool_size)
        batch = BatchPointers(*at, stats.data_ptr(), tables.data_ptr(), pool.data_ptr())
        with torch.cuda.device(self.device):  # the driver launches kernels of the current device only
            for launch in jobs.launches(runs):
                module = self._resize if launch.name.startswith(RESIZE_KERNELS) else self._colour
                module.launch(launch, batch, stream)
        del described  # not earlier, or torch would reuse its memory for the others
        return outputs

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(max(1, num_bytes), dtype=torch.uint8, device=self.device)

    def _allocate(self, sizes: Any, channels: int) -> tuple[torch.Tensor | list[torch.Tensor], Any]:
        """Return the outputs and the address of each."""
        counts = channels * sizes.prod(1)
        item_bytes = self.dtype.itemsize
        buffer = torch.empty(int(counts.sum()), dtype=self.dtype, device=self.device)
        ends = counts.cumsum()
        addresses = buffer.data_ptr() + (ends - counts) * item_bytes
        if (sizes == sizes[0]).all():
            height, width = map(int, sizes[0])
            if self.channels_last:
                return buffer.view(-1, height, width, channels).permute(0, 3, 1, 2), addresses
            return buffer.view(-1, channels, height, width), addresses
        parts = torch.split(buffer, counts.tolist())
        if self.channels_last:
            return [part.view(*size, channels).permute(2, 0, 1) for part, size in zip(parts, sizes.tolist())], addresses
        return [part.view(channels, *size) for part, size in zip(parts, sizes.tolist())], addresses

    def _upload(self, *groups: list[Any]) -> tuple[torch.Tensor, list[int]]:
        """Copy groups of arrays to the device in one transfer. Return the memory and the address of each group."""
        begins = [0]
        for arrays in groups:
            begins.append(begins[-1] + -(-sum(array.nbytes for array in arrays) // ALIGNMENT) * ALIGNMENT)
        staged = torch.empty(max(1, begins[-1]), dtype=torch.uint8, pin_memory=True)
        memory = staged.numpy()
        for begin, arrays in zip(begins, groups):
            for array in arrays:
                memory[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
                begin += array.nbytes
        uploaded = staged.to(self.device, non_blocking=True)
        return uploaded, [uploaded.data_ptr() + begin for begin in begins[:-1]]
