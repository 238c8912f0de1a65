"""What bounds a run, and whether this loader is worth it, in sentences with figures."""

from __future__ import annotations

from collections.abc import Callable

from .conditions import WORTH, losing, winning
from .diagnosis import Bound, Diagnosis
from .figures import Figures, Kind
from .trials import Trial
from .words import ms, percent, rate, three_digits

APART = 1.15
"""Factor from which a time is surely above another one."""

HINDERED = 1.25
"""Factor above what was estimated from which nothing is sure, as step and loader hinder each other."""

LARGE = 100
"""Gain above which its number says nothing."""

BUSY = 0.7
"""Share of the time from which a GPU, its engines, a thread or all cores count as busy."""

HALF = 0.5
"""Share of the time from which a worker counts as busy, and one that reads as waiting."""


def diagnosed(figures: Figures, trials: tuple[Trial, ...]) -> Diagnosis:
    """Return what follows from the figures."""
    bound = bound_of(figures)
    return Diagnosis(
        bound=bound,
        verdict=_verdict(figures, bound),
        reason=f"{_REASONS[bound](figures)}.{_hindered(figures)}",
        most=_most(figures),
        wins=winning(figures),
        loses=losing(figures),
        trials=trials,
        figures=figures,
    )


def bound_of(figures: Figures) -> Bound:
    """Return what bounds the run: whatever takes longest alone, or the cores that the step and the loader share."""
    step_s, loader_s = figures.step.step_s, figures.loader.step_s
    longest_s = APART * max(step_s, loader_s)
    if figures.shared_cores_s(figures.watched) > longest_s and figures.both.step_s > longest_s:
        return "cores"
    if step_s >= loader_s:
        return "loop" if _is_python(figures) else "model"
    return "disk" if not _loader_is_busy(figures) and _reads_wait(figures) else "input"


def _is_python(figures: Figures) -> bool:
    """Whether the step computes in its thread alone: without a GPU, and without threads as of a model on the CPU."""
    step = figures.step
    gpu_is_idle = (step.gpu_percent or 0.0) < 100 * HALF
    return gpu_is_idle and step.thread_share > BUSY and step.main_cpu_s < APART * step.thread_cpu_s


def _workers_share(figures: Figures) -> float:
    return figures.loader.workers_busy / max(1, figures.num_workers)


def _loader_is_busy(figures: Figures) -> bool:
    loader = figures.loader
    return (
        max(loader.gpu_percent or 0.0, loader.jpeg_percent or 0.0) > 100 * BUSY
        or loader.cores_used > BUSY * figures.cores
        or _workers_share(figures) > HALF
        or loader.thread_share > (BUSY if figures.num_workers else HALF)
    )


def _reads_wait(figures: Figures) -> bool:
    loader = figures.loader
    return loader.bytes_from_disk > HALF * loader.bytes_read > 0 or (figures.waiting_share or 0.0) > HALF


_NAMES: dict[Bound, str] = {
    "input": "The input bounds",
    "disk": "The disk bounds",
    "model": "The model bounds",
    "loop": "The CPU of the loop bounds",
    "cores": "The cores, which step and loader share, bound",
}


def _verdict(figures: Figures, bound: Bound) -> str:
    both, step, loader = (ms(phase.step_s) for phase in (figures.both, figures.step, figures.loader))
    times = f"a step takes {both} ms, {step} ms without its loader, and the loader alone {loader} ms"
    return f"{_NAMES[bound]} this run ({times}); {_worth(figures)}."


def _worth(figures: Figures) -> str:
    if len(figures.alone) < 2:
        return f"there is no other loader to compare with ({figures.failure})"
    ours, stock = figures.step_s("proxyloader"), figures.step_s("stock")
    compared = f"{rate(figures, ours)} with proxyloader and {rate(figures, stock)} with the stock loader"
    may = bool(_hindered(figures))
    if stock > WORTH * ours:
        return (
            f"proxyloader {'may be' if may else 'is'} worth it: {compared}, {three_digits(stock / ours)} times as many"
        )
    return f"proxyloader {'may not be' if may else 'is not'} worth it here: {compared}"


def _most(figures: Figures) -> str:
    """Return what a loader that takes no time would bring, by Amdahl's law."""
    kind: Kind = "stock" if "stock" in figures.alone else figures.watched
    now_s, least_s = figures.step_s(kind), figures.step.step_s
    most, name = now_s / least_s, "the stock loader" if kind == "stock" else "this loader"
    text = f"With {name} a step takes {ms(now_s)} ms, of which {percent(1 - 1 / most)} are the loader's"
    if most < WORTH:
        return f"{text}. So no loader makes it faster."
    bound = f"1 / (1 - {1 - 1 / most:.2f}) = {most:.3g} times" if most < LARGE else f"{LARGE} times or more"
    text = f"{text}. So by Amdahl's law a loader that takes no time makes it {bound} as fast"
    if len(figures.alone) < 2:
        return f"{text}."
    return f"{text}; proxyloader makes it {now_s / figures.step_s('proxyloader'):.3g} times as fast."


def _input_reason(figures: Figures) -> str:
    loader = figures.loader
    parts = [f"Alone, the loader uses {loader.cores_used:.1f} of {figures.cores} cores"]
    if figures.num_workers:
        parts.append(
            f"its workers ({figures.num_workers}) are busy {percent(min(1.0, _workers_share(figures)))} of the time"
        )
    if loader.jpeg_percent is not None:
        parts.append(f"the JPEG engines are busy {loader.jpeg_percent:.0f} % of it")
    if loader.gpu_percent is not None:
        parts.append(f"the GPU is busy {loader.gpu_percent:.0f} % of it")
    if not _loader_is_busy(figures):
        parts.append("none of it is busy, so more workers may help")
    return "; ".join(parts)


def _disk_reason(figures: Figures) -> str:
    loader = figures.loader
    read, from_disk = (number / loader.wall_s / 1e6 for number in (loader.bytes_read, loader.bytes_from_disk))
    reason = (
        f"The loader mostly waits: it uses {loader.cores_used:.1f} of {figures.cores} cores, reads {read:.1f} MB/s, "
        f"{from_disk:.1f} of them from a disk of this machine"
    )
    if figures.waiting_share is not None:
        reason += f", and a sample that is read alone waits {percent(figures.waiting_share)} of its time"
    return reason


def _model_reason(figures: Figures) -> str:
    reason = f"The loop waits {ms(figures.both.wait_s)} ms of each step for its batch"
    gpu = figures.step.gpu_percent
    return reason if gpu is None else f"{reason}, and the GPU is busy {gpu:.0f} % of the step alone"


def _loop_reason(figures: Figures) -> str:
    gpu = figures.step.gpu_percent
    beside = "no GPU works" if gpu is None else f"the GPU is busy {gpu:.0f} %"
    return (
        f"The thread of the loop computes {percent(figures.step.thread_share)} of the step alone, and {beside}: that "
        "is Python, or a model on one core"
    )


def _cores_reason(figures: Figures) -> str:
    return (
        f"A step takes {ms(figures.step.cpu_s)} ms of CPU time, and a batch {ms(figures.loader.cpu_s)} ms. That takes "
        f"{figures.cores} cores {ms(figures.shared_cores_s(figures.watched))} ms at best"
    )


_REASONS: dict[Bound, Callable[[Figures], str]] = {
    "input": _input_reason,
    "disk": _disk_reason,
    "model": _model_reason,
    "loop": _loop_reason,
    "cores": _cores_reason,
}


def _hindered(figures: Figures) -> str:
    """Return what the loop as it is takes above what was estimated, or "" if that is little."""
    above = figures.both.step_s / figures.step_s(figures.watched)
    if above < HINDERED:
        return ""
    return (
        f" Together, step and loader take {above:.1f} times what follows from each alone: they hinder each other, or "
        "other programs hinder them."
    )
