"""The answers of a case, which its process sends to the main process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """All modules are imported, and no loop has begun."""


@dataclass(frozen=True)
class Start:
    """Figures of the first loop.

    Attributes:
        first_batch_s: time from the construction of the loader to its first batch. The libraries were imported and
            CUDA was started before.
    """

    first_batch_s: float


@dataclass(frozen=True)
class RoundResult:
    """Figures of whole loops over some seconds.

    Attributes:
        images_per_s: images per second.
        cpu_ms_per_image: CPU time of the process and its children per image.
        wait_ms: waits of the loop for batches: median, 99th percentile, maximum.
        pause_ms: median of the waits for the first batch of each loop, which are among those waits.
        host_mb: private memory of the process and its children.
        gpu_mb: GPU memory of the case, without the CUDA context. None without a GPU.
        gpu_percent: share of the time in which the GPU was busy. None if NVML does not report it.
        jpeg_percent: share of the time in which the JPEG engines were busy. None if NVML does not report it.
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
    """Figures of one tuning of a sweep.

    Attributes:
        images_per_s: images per second in the second loop.
        cpu_ms_per_image: CPU time of the process and its children per image.
        was_cut: whether the first loop took too long and was left. The figures are then those of its part after the
            first batch.
    """

    images_per_s: float
    cpu_ms_per_image: float
    was_cut: bool = False


@dataclass(frozen=True)
class Epoch:
    """Figures of one of the first epochs.

    Attributes:
        first_batch_s: time until the first batch, in the first epoch from the construction of the loader.
        images_per_s: images per second, including the time until the first batch.
        images_per_s_after_first_batch: images per second after the first batch.
    """

    first_batch_s: float
    images_per_s: float
    images_per_s_after_first_batch: float


@dataclass(frozen=True)
class Failure:
    """Failure of a case.

    Attributes:
        reason: the reason in one line.
        is_missing: whether a package is not installed.
        has_hung: whether no batch came for a long time.
    """

    reason: str
    is_missing: bool = False
    has_hung: bool = False
