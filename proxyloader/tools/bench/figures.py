"""The answers of a case. They cross from its process to the one that asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """All is imported, and nothing is begun."""


@dataclass(frozen=True)
class Start:
    """The first loop.

    Attributes:
        first_batch_s: from the making of the loader to its first batch; the libraries were imported before, and CUDA
            was started.
    """

    first_batch_s: float


@dataclass(frozen=True)
class RoundResult:
    """What was measured in whole loops of some seconds.

    Attributes:
        images_per_s: that went through the loop.
        cpu_ms_per_image: of this process and all its children.
        wait_ms: of the loop for its batches: the median, the 99th percentile, and the longest.
        pause_ms: before a loop's first batch, which is one of those waits: the median of the loops.
        host_mb: that this process and its children have to themselves.
        gpu_mb: that the case has taken, without the CUDA context. None without a GPU.
        gpu_percent: of the time, that the GPU was at work. None where NVML does not tell.
        jpeg_percent: the same of its JPEG engines.
    """

    images_per_s: float
    cpu_ms_per_image: float
    wait_ms: tuple[float, float, float]
    pause_ms: float
    host_mb: float
    gpu_mb: float | None = None
    gpu_percent: float | None = None
    jpeg_percent: float | None = None


@dataclass(frozen=True)
class Trial:
    """What was measured with one tuning of those that are swept.

    Attributes:
        images_per_s: in the second loop.
        was_cut: the first loop took too long, and was left; the figures are of its part behind its first batch.
    """

    images_per_s: float
    cpu_ms_per_image: float
    was_cut: bool = False


@dataclass(frozen=True)
class Epoch:
    """One of the first epochs.

    Attributes:
        first_batch_s: what the loop waited for it; of the first epoch from the making of the loader on.
        images_per_s: from there to the last batch, the wait for the first one included.
        images_per_s_after_first_batch: the rest of the images in the rest of the time.
    """

    first_batch_s: float
    images_per_s: float
    images_per_s_after_first_batch: float


@dataclass(frozen=True)
class Failure:
    """
    Attributes:
        reason: in one line.
        is_missing: something is not installed.
        has_hung: no batch came for long.
    """

    reason: str
    is_missing: bool = False
    has_hung: bool = False
