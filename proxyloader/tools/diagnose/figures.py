"""The figures of a run, and what follows from them by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .phase import Phase

Kind = Literal["stock", "proxyloader"]

NAMES: dict[Kind, str] = {"stock": "stock loader", "proxyloader": "proxyloader"}


@dataclass(frozen=True)
class Alone:
    """A loader whose batches were thrown away.

    Attributes:
        first_batch_s: time from ``iter()`` to the first batch, in seconds. Workers and pipelines start in it.
    """

    first_batch_s: float
    phase: Phase


@dataclass(frozen=True)
class Figures:
    """What was measured.

    Attributes:
        watched: the kind of the loader of the loop.
        both: the loop as it is.
        step: its steps alone, each with the same batch.
        alone: each kind of loader alone, as far as it could be measured.
        failure: why the other kind could not be measured, or "".
        batch_size: images in a batch; 1 if the loader does not tell.
        num_workers: of the loader.
        cores: that this process may use.
        waiting_share: share of the time in which reading a sample of the dataset waited, and did not compute. None if
            it is not known.
    """

    watched: Kind
    both: Phase
    step: Phase
    alone: dict[Kind, Alone]
    failure: str
    batch_size: int
    num_workers: int
    cores: int
    waiting_share: float | None

    @property
    def loader(self) -> Phase:
        """The loader of the loop alone."""
        return self.alone[self.watched].phase

    def step_s(self, kind: Kind, without_loader_s: float | None = None) -> float:
        """Return the time of a step of the loop with a loader, in seconds.

        It is the longest of three: the step alone, the loader alone, and what all cores together take for both. Without
        workers the step and the loader come one after the other.

        Args:
            without_loader_s: time of the step alone, to which its CPU time is in proportion; None: as measured.
        """
        times = 1.0 if without_loader_s is None else without_loader_s / self.step.step_s
        loader = self.alone[kind].phase
        cpu_s = times * self.step.cpu_s + loader.cpu_s
        alone_s = times * self.step.step_s, loader.step_s
        return max(max(alone_s) if self.num_workers else sum(alone_s), cpu_s / self.cores)

    def shared_cores_s(self, kind: Kind) -> float:
        """Return the time in which all cores together do what the step and the loader compute, in seconds."""
        return (self.step.cpu_s + self.alone[kind].phase.cpu_s) / self.cores

    def images_per_s(self, seconds: float) -> float:
        return self.batch_size / seconds
