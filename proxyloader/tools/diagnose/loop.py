"""The loop of a user, whose batches come by way of here while it is measured.

NOTE [ Phases of a diagnosis ]
A loop asks for batches, and what it does between two of them is its step. So an iterator in the loader's place can
measure both, and change what the loop gets. It does four things, one after the other:

1. Both: batches of the loader are handed out as they come, first some that are not counted.
2. The step alone: the last batch is handed out again and again. Meanwhile the loader makes the batches that it makes
   ahead, so the first of these steps are not counted.
3. The loader alone: batches are drawn and thrown away, first those that were made ahead.
4. The other kind of loader alone, and variations of this one.

Then the loop ends. The GPU is waited for at the beginning and the end of each part, and not at each step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader as StockLoader

from ..._cores import usable_cores
from ...data.distributed import World
from .diagnosis import Diagnosis
from .figures import Alone, Figures, Kind
from .loaders import batches_ahead, drawn, endless, images_of, kind_of, measured_alone, other_kind
from .phase import Phase, recorded, thread_delay_s
from .trials import trials
from .verdict import diagnosed

SHARES = {"warm up": 0.1, "both": 0.25, "step": 0.15, "loader": 0.15, "other": 0.15, "trials": 0.2}
"""What each part has of the time."""

WARM_UP_STEPS = 3
"""Steps that are not counted, above those whose batches were made ahead."""

SAMPLES = 8
"""Samples that are read to see whether reading waits."""


def check_seconds(seconds: float) -> None:
    if not seconds > 0:
        raise ValueError(f"seconds={seconds:g}: it is a number of seconds above 0")


class DiagnosedLoop:
    """The batches of a loader, for a loop that is measured. See ``proxyloader.diagnosis``."""

    def __init__(self, loader: Any, seconds: float = 60.0) -> None:
        if not isinstance(loader, StockLoader):
            raise TypeError(
                f"the loader is a torch.utils.data.DataLoader or a proxyloader.DataLoader; got {type(loader).__name__}"
            )
        check_seconds(seconds)
        if World.current().num_shards > 1:
            raise ValueError(
                f"this is one of {World.current().num_shards} processes, whose loops wait for each other. Start the "
                "script alone, as python train.py with one GPU"
            )
        self._loader, self._seconds = loader, seconds
        self._result: Diagnosis | None = None
        self._batches: Generator[Any, None, None] | None = None

    def __enter__(self) -> DiagnosedLoop:
        return self

    def __exit__(self, *_: object) -> None:
        if self._batches is not None:
            self._batches.close()

    def __iter__(self) -> Iterator[Any]:
        self._batches = self._measured()
        return self._batches

    @property
    def result(self) -> Diagnosis:
        """What was found. RuntimeError: the loop was left before it ended by itself."""
        if self._result is None:
            raise RuntimeError(
                "there is no result, as the loop was left early. It ends by itself when all is measured; without a "
                f"break, that is after about {self._seconds:g} s"
            )
        return self._result

    def _seconds_of(self, part: str) -> float:
        return SHARES[part] * self._seconds

    def _measured(self) -> Generator[Any, None, None]:
        loader, kind = self._loader, kind_of(self._loader)
        batches = endless(loader)
        try:
            begin_s = time.perf_counter()
            batch = next(batches)
            first_batch_s = time.perf_counter() - begin_s
            yield batch
            yield from self._warm_up(batches)
            both, batch = yield from _handed_out(batches, self._seconds_of("both"))
            ahead_s = min(self._seconds_of("step") / 3, batches_ahead(loader) * both.step_s)
            step = yield from _repeated(batch, ahead_s, self._seconds_of("step"))
            alone = drawn(batches.__next__, batches_ahead(loader), self._seconds_of("loader"))
        finally:
            batches.close()  # type: ignore[attr-defined]
        loaders, failure = {kind: Alone(first_batch_s, alone)}, ""
        try:
            other = other_kind(loader)
            loaders[kind_of(other)] = measured_alone(other, self._seconds_of("other"))
            del other
        except Exception as error:  # a dataset for one of them, files that it does not read, no GPU memory for both
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        tried = trials(loader, batch, alone, self._seconds_of("trials"))
        figures = _figures(loader, kind, batch, both, step, loaders, failure)
        self._result = diagnosed(figures, tried)

    def _warm_up(self, batches: Iterator[Any]) -> Iterator[Any]:
        end_s = time.perf_counter() + self._seconds_of("warm up")
        for number in range(batches_ahead(self._loader) + WARM_UP_STEPS):
            if number >= WARM_UP_STEPS and time.perf_counter() > end_s:
                break
            yield next(batches)


def _handed_out(batches: Iterator[Any], seconds: float) -> Generator[Any, None, tuple[Phase, Any]]:
    with recorded(seconds) as recording:
        while recording.goes_on():
            batch = recording.drawn(batches.__next__)
            yield batch
    return recording.phase, batch


def _repeated(batch: Any, ahead_s: float, seconds: float) -> Generator[Any, None, Phase]:
    until_s = time.perf_counter() + ahead_s
    while time.perf_counter() < until_s:
        yield batch
    with recorded(seconds - ahead_s) as recording:
        while recording.goes_on():
            yield recording.drawn(lambda: batch)
    return recording.phase


def _figures(
    loader: Any, kind: Kind, batch: Any, both: Phase, step: Phase, loaders: dict[Kind, Alone], failure: str
) -> Figures:
    images = images_of(batch)
    return Figures(
        watched=kind,
        both=both,
        step=step,
        alone=loaders,
        failure=failure,
        batch_size=len(images) if images is not None else loader.batch_size or 1,
        num_workers=loader.num_workers,
        cores=usable_cores(),
        waiting_share=_waiting_share(loader.dataset),
    )


def _waiting_share(dataset: Any) -> float | None:
    """Return the share of the time in which reading samples waits in this thread, or None if there are no indices."""
    with suppress(Exception):
        indices = random.Random(0).sample(range(len(dataset)), min(SAMPLES, len(dataset)))
        begin_s, computed_s = time.perf_counter(), time.thread_time() + thread_delay_s()
        for index in indices:
            dataset[index]
        computed_s = time.thread_time() + thread_delay_s() - computed_s
        return 1 - computed_s / (time.perf_counter() - begin_s)
    return None
