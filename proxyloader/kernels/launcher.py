"""Run the programs of a batch on a GPU, from the decoded images to the output tensors. Main process."""

import functools
import itertools
from typing import Any

import torch

from ..errors import PipelineError
from .compiler import FORMATS, Batch, KernelError, Module
from .programs import Schedule

Images = torch.Tensor | list[torch.Tensor]
"""(N, C, H, W), or a list of (C, H, W) if the images differ in size."""


class Launcher:
    """Runs programs on a device. PipelineError: the kernels cannot be compiled or loaded."""

    def __init__(self, device_id: int) -> None:
        self.device = torch.device("cuda", device_id)
        try:
            self._module = Module(device_id)
        except KernelError as error:
            raise PipelineError(
                f"the CUDA kernels cannot be used: {error}. Pass translate=False, so that torchvision transforms the "
                "images in the workers",
                code="no-kernels",
            ) from error

    def run(self, schedule: Schedule, decoded: Any, stream: torch.cuda.Stream) -> list[Images]:
        """Launch everything in ``stream``, torch's current one, without waiting. Return the outputs of the schedule.

        ``decoded``: address of each decoded image, (H, W, 3) uint8 in the memory of the device.
        """
        num_values, is_ragged = schedule.num_values, any(len(sizes) > 1 for _, sizes in schedule.outputs)
        num_values = _round_up(num_values) if is_ragged else num_values
        buffer = torch.empty(num_values, dtype=schedule.dtype, device=self.device)
        parts = (schedule.scratch_bytes, schedule.stats_bytes, schedule.pool_bytes)  # by their alignment
        scratch, stats, pool, end = itertools.accumulate(parts, initial=0)
        memory = torch.empty(_round_up(max(1, end)), dtype=torch.uint8, device=self.device)
        if pool > stats:
            memory[stats:pool].zero_()
        base = memory.data_ptr()
        staged = torch.empty(len(schedule.memory), dtype=torch.uint8, pin_memory=True)
        schedule.bind(staged.numpy(), base + scratch, buffer.data_ptr(), decoded)
        described = staged.to(self.device, non_blocking=True)
        at = [described.data_ptr() + begin for begin in schedule.begins]
        batch = make_batch(schedule, *at, base + stats, base + pool, base + scratch)
        with torch.cuda.device(self.device):  # the driver launches kernels of the current device only
            for launch in schedule.launches:
                self._module.launch(launch, batch, stream.cuda_stream)
        return as_images(buffer, schedule)


get_launcher = functools.cache(Launcher)
"""Returns the launcher of a device."""


def _round_up(size: int) -> int:
    """Return one of few sizes, because torch reserves less memory if it can reuse what other batches have freed."""
    step = 1 << max(0, size.bit_length() - 2)
    return -(-size // step) * step


def make_batch(schedule: Schedule, *addresses: int) -> Batch:
    """Return what the kernels are called with, given the addresses in the order of ``Batch``."""
    return Batch(*addresses, [*FORMATS].index(schedule.dtype), not schedule.channels_last)


def as_images(buffer: torch.Tensor, schedule: Schedule) -> list[Images]:
    """Return views of the outputs."""
    channels, outputs, begin = schedule.channels, [], 0
    for count, sizes in schedule.outputs:
        images, first = [], 0 if len(sizes) == 1 else 1
        for height, width in sizes:
            size = channels * height * width
            inner = (1, channels * width, channels) if schedule.channels_last else (height * width, width, 1)
            shape, strides = (count, channels, height, width), (size, *inner)
            images.append(buffer.as_strided(shape[first:], strides[first:], begin))
            begin += size if first else count * size
        outputs.append(images if first else images[0])
    return outputs
