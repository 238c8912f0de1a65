"""The device that images arrive on.

NOTE [ Queues ]
Work reaches a GPU through a few hardware queues, which a process's streams share: eight, unless
CUDA_DEVICE_MAX_CONNECTIONS says otherwise when CUDA starts. DALI decodes each image of a batch in one of several
streams, in many small kernels; in a queue that they share with the model, these wait for the model's, and it for them.
So importing the package asks for 32, which is the most there are, unless the user has asked for another number. It does
nothing in a process that has started CUDA before.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def check_device(device: Any) -> None:
    """
    Raises:
        ValueError: it is neither a CUDA device nor the CPU.
    """
    try:
        known = device is None or torch.device(device).type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise ValueError(f"device is a CUDA device ('cuda', 'cuda:1') or 'cpu', got {device!r}")


def cuda_ordinal(device: Any) -> int | None:
    """The CUDA device to decode on, or None for the CPU. To be asked for late: asking starts CUDA.

    Raises:
        ValueError: there is no such device.
    """
    if device is None:
        return _of_this_process() if torch.cuda.is_available() else None
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={str(device)!r}, and torch sees {torch.cuda.device_count() or 'no'} CUDA device(s). "
            "Leave device out to use a GPU where there is one and the CPU elsewhere"
        )
    return int(device.index) if device.index is not None else torch.cuda.current_device()


def _of_this_process() -> int:
    """The current device; under torchrun, in a script that has not set it, the one with the number of the local rank.

    Otherwise all processes of such a script would decode on the first GPU.
    """
    current, rank = torch.cuda.current_device(), os.environ.get("LOCAL_RANK", "")
    return int(rank) if current == 0 and rank.isdecimal() and int(rank) < torch.cuda.device_count() else current


def current_stream(device_id: int | None) -> torch.cuda.Stream | None:
    """Of a GPU; None for the CPU."""
    return torch.cuda.current_stream(device_id) if device_id is not None and torch.cuda.is_available() else None
