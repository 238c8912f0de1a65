"""The device of the images. Main process.

NOTE [ CUDA queues ]
All streams of a process submit their work to a GPU through a few hardware queues: eight, unless
CUDA_DEVICE_MAX_CONNECTIONS is set when CUDA is initialized. DALI decodes the images of a batch in several streams, with
many small kernels. In a queue that they share with the model, these kernels wait for the model's, and vice versa. So
importing the package sets the variable to 32, the maximum, unless the user has set it. This has no effect in a process
that has already initialized CUDA.
"""

import contextlib
import os
from typing import Any

import torch


def check_device(device: Any) -> None:
    """Raise ValueError unless the device is None, a CUDA device or the CPU."""
    with contextlib.suppress(RuntimeError):
        if device is None or torch.device(device).type in ("cpu", "cuda"):
            return
    raise ValueError(f"device must be a CUDA device ('cuda', 'cuda:1') or 'cpu', got {device!r}")


def check_device_exists(device: Any) -> None:
    """Raise ValueError if the device does not exist. This does not initialize CUDA, so the process may still fork."""
    if device is None or torch.device(device).type == "cpu":
        return
    device, count = torch.device(device), torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(
            f"device={str(device)!r}, but the number of CUDA devices is {count}. "
            "Omit device to use a GPU if there is one, and the CPU otherwise. `proxyloader doctor` shows why GPUs are "
            "missing"
        )


def cuda_ordinal(device: Any) -> int | None:
    """Return the ordinal of the CUDA device to decode on, or None for the CPU. This initializes CUDA.

    ValueError: there is no such device.
    """
    if device is None and not torch.cuda.is_available():
        return None
    if device is None:
        # The current device, or if the script has not set one, that of the local rank under torchrun and Slurm.
        # Otherwise all processes of such a script would decode on the first GPU.
        current = torch.cuda.current_device()
        rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "")
        return int(rank) if current == 0 and rank.isdecimal() and int(rank) < torch.cuda.device_count() else current
    device = torch.device(device)
    if device.type == "cpu":
        return None
    check_device_exists(device)
    return int(device.index) if device.index is not None else torch.cuda.current_device()


def current_stream(device_id: int | None) -> torch.cuda.Stream | None:
    """Return the current stream of a GPU, or None for the CPU."""
    return torch.cuda.current_stream(device_id) if device_id is not None and torch.cuda.is_available() else None
