"""The table of cases. Each case is a function from a setting to loops over batches.

All cases crop at random, resize to 224, flip and normalise.
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
    """A way to load the images.

    Attributes:
        loops: takes a setting, and if the case ``takes_more`` the name of an augmentation or of a dataset; returns
            loops.
        needs: fields of ``Tuning`` that users must set.
        takes: fields of ``Tuning`` that have a default.
        is_ceiling: whether it leaves work out, as an upper bound for all loaders.
        for_models: whether it applies only with a model (True), or only without (False). None: in both cases.
        runs_ahead: whether it prepares batches of the next loop before that begins.
    """

    loops: Callable[..., Loops]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    is_own: bool = False
    is_ceiling: bool = False
    needs_gpu: bool = False
    for_models: bool | None = None
    takes_more: bool = False
    runs_ahead: bool = False


WORKERS, THREADS, BOTH = ("workers",), ("threads",), ("workers", "threads")
LOAD = ("hw_decoder_load",)

CASES = {
    "torch": Case(torch_cases.stock, WORKERS, takes_more=True),
    "torch-gpu": Case(torch_cases.torchvision_on_a_gpu, WORKERS, needs_gpu=True),
    "upstream-proxy": Case(dali_cases.upstream_with_bytes, BOTH, LOAD),
    "upstream-proxy-paths": Case(dali_cases.upstream_with_paths, BOTH, LOAD),
    "nvidia-example": Case(dali_cases.nvidia_example, THREADS, LOAD, runs_ahead=True),
    "iterator": Case(dali_cases.iterator, THREADS, LOAD, runs_ahead=True),
    OURS: Case(own_cases.swap, WORKERS, THREADS + LOAD, is_own=True, takes_more=True, runs_ahead=True),
    "proxyloader, Image.open": Case(own_cases.own_dataset, WORKERS, THREADS + LOAD, is_own=True),
    "decode-only": Case(dali_cases.decoder_alone, THREADS, LOAD, is_ceiling=True, for_models=False, runs_ahead=True),
    "decode-only, two pipelines": Case(
        dali_cases.two_decoders, THREADS, LOAD, is_ceiling=True, for_models=False, runs_ahead=True
    ),
    "synthetic": Case(torch_cases.synthetic, is_ceiling=True, for_models=True),
    "replay": Case(own_cases.replay, WORKERS, is_ceiling=True, for_models=True),
}
"""By name, in the order of the report."""

WITH = " + "
"""Separator between the name of a case and the name of an augmentation or a dataset."""

BY_DEFAULT = ", by default"
"""Suffix of the name of a case in which users set only what they must."""


def cases_for(setting: BenchConfig) -> list[str]:
    """Return the names of the cases for a setting: the tuned cases, and then those with default values."""
    here = (None, setting.model != "none")
    at_hand = {name: case for name, case in CASES.items() if setting.on_gpu or not case.needs_gpu}
    names = [name for name, case in at_hand.items() if case.for_models in here]
    taking = [name for name in names if CASES[name].takes_more]
    names += [name + WITH + added for added in (*setting.augmentations, *setting.datasets) for name in taking]
    return names + [name + BY_DEFAULT for name in names if case_of(name).takes and not case_of(name).is_ceiling]


def peers_for(setting: BenchConfig) -> list[str]:
    """Return the names of the cases that a user may start with."""
    names = [name for name in cases_for(setting) if not name.endswith(BY_DEFAULT)]
    return [name for name in names if not case_of(name).is_ceiling]


def parts_of(name: str) -> list[str]:
    """Return the key in CASES of a case, whose name may have the suffix BY_DEFAULT, and what is added, if anything."""
    return name.removesuffix(BY_DEFAULT).split(WITH)


def case_of(name: str) -> Case:
    return CASES[parts_of(name)[0]]


def loops_of(name: str, setting: BenchConfig) -> Loops:
    return case_of(name).loops(setting, *parts_of(name)[1:])


@dataclass(frozen=True)
class Ranges:
    """The values of each field of ``Tuning`` that are tried, in ascending order."""

    workers: tuple[int, ...]
    threads: tuple[int, ...]
    hw_decoder_load: tuple[float, ...]

    def most(self, case: Case) -> Tuning:
        """Return the tuning with the largest value of each field that users must set."""
        return Tuning(**{name: getattr(self, name)[-1] for name in case.needs})
