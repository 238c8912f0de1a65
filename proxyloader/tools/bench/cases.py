"""The table of what is compared: each case is a function from a setting to loops over batches.

All of them crop at random, resize to 224, flip and normalise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import dali_cases, own_cases, torch_cases
from .config import BenchConfig, Tuning
from .torch_cases import Loops

OURS = "proxyloader"


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        loops: of a setting; and of an augmentation, by its name, where it takes one.
        needs: what of a ``Tuning`` its users have to say.
        takes: what of it has a default.
        is_own: it is this library's.
        is_ceiling: it leaves work out, to show what no loader can exceed.
        needs_gpu: it is left out on a CPU.
        for_models: it is there where a model is trained (True), or where none is (False); None: in either case.
        augments: it can augment images, too.
        runs_ahead: into the next loop, so that batches lie ready when a round begins.
    """

    loops: Callable[..., Loops]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    is_own: bool = False
    is_ceiling: bool = False
    needs_gpu: bool = False
    for_models: bool | None = None
    augments: bool = False
    runs_ahead: bool = False


WORKERS, THREADS, BOTH = ("workers",), ("threads",), ("workers", "threads")
LOAD = ("hw_decoder_load",)

CASES = {
    "torch": Case(torch_cases.stock, WORKERS, augments=True),
    "torch-gpu": Case(torch_cases.torchvision_on_a_gpu, WORKERS, needs_gpu=True),
    "upstream-proxy": Case(dali_cases.upstream_with_bytes, BOTH, LOAD),
    "upstream-proxy-paths": Case(dali_cases.upstream_with_paths, BOTH, LOAD),
    "nvidia-example": Case(dali_cases.nvidia_example, THREADS, LOAD, runs_ahead=True),
    "iterator": Case(dali_cases.iterator, THREADS, LOAD, runs_ahead=True),
    OURS: Case(own_cases.swap, WORKERS, THREADS + LOAD, is_own=True, augments=True),
    "FileReaderLoader": Case(own_cases.reader_loader, (), THREADS + LOAD, is_own=True, runs_ahead=True),
    "decode-only": Case(dali_cases.decoder_alone, THREADS, LOAD, is_ceiling=True, for_models=False, runs_ahead=True),
    "decode-only, two pipelines": Case(
        dali_cases.two_decoders, THREADS, LOAD, is_ceiling=True, for_models=False, runs_ahead=True
    ),
    "synthetic": Case(torch_cases.synthetic, is_ceiling=True, for_models=True),
    "replay": Case(own_cases.replay, WORKERS, is_ceiling=True, for_models=True),
}
"""By name, in the order of the report."""

WITH = " + "
"""Between the names of a case and of what its images are augmented by."""

BY_DEFAULT = ", by default"
"""Behind the name of a case whose users say nothing but what they have to."""


def cases_for(setting: BenchConfig) -> list[str]:
    """Those that have a meaning there, tuned; behind them by default those that have a default for what is tuned."""
    trains = setting.model != "none"
    names = [
        name
        for name, each in CASES.items()
        if (setting.on_gpu or not each.needs_gpu) and each.for_models in (None, trains)
    ]
    augmenting = [name for name in names if CASES[name].augments]
    names += [name + WITH + added for added in setting.augmentations for name in augmenting]
    return names + [name + BY_DEFAULT for name in names if case_of(name).takes and not case_of(name).is_ceiling]


def peers_for(setting: BenchConfig) -> list[str]:
    """Those that a user may start with."""
    names = [name for name in cases_for(setting) if not name.endswith(BY_DEFAULT)]
    return [name for name in names if not case_of(name).is_ceiling]


def base_of(name: str) -> str:
    """The key of CASES, without an augmentation."""
    return name.removesuffix(BY_DEFAULT).split(WITH)[0]


def case_of(name: str) -> Case:
    """By its name, alone or with an augmentation, tuned or by default."""
    return CASES[base_of(name)]


def loops_of(name: str, setting: BenchConfig) -> Loops:
    return case_of(name).loops(setting, *name.removesuffix(BY_DEFAULT).split(WITH)[1:])


@dataclass(frozen=True)
class Ranges:
    """The values that are tried of each part of a ``Tuning``, from small to large."""

    workers: tuple[int, ...]
    threads: tuple[int, ...]
    hw_decoder_load: tuple[float, ...]

    def most(self, case: Case) -> Tuning:
        """Of what its users have to say as much as there is; the rest is left at its default."""
        return Tuning(**{name: getattr(self, name)[-1] for name in case.needs})
