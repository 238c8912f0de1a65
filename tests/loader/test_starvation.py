"""The warning of a loop that waits for its batches: when it comes, and what it says."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from proxyloader import DataLoader
from proxyloader.loader import stats
from proxyloader.loader.stats import STARVED_STEPS, StatsRecorder, Step

from ..faults import Spelled
from ..numbered import spell_dataset

STARVED = Step(loop_s=0.002, wait_s=0.02, worker_wait_s=0.019, images=8)
FED = Step(loop_s=0.02, wait_s=0.002, worker_wait_s=0.001, images=8)
IDLE = Step(loop_s=0.0001, wait_s=0.02, worker_wait_s=0.02, images=8)


def warnings_of(
    caplog: pytest.LogCaptureFixture, steps: list[Step], num_workers: int = 1, workers_make_images: bool = False
) -> list[str]:
    caplog.clear()
    recorder = StatsRecorder("Photographs, 48 samples", num_workers)
    for step in [Step(loop_s=0.01, wait_s=60.0, worker_wait_s=0.0, images=8), *steps]:  # the start of the first epoch
        recorder.add_step(step, worker_images=step.images * workers_make_images)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([STARVED] * (STARVED_STEPS - 1), 0),
        ([STARVED] * STARVED_STEPS, 1),
        ([STARVED] * 5 * STARVED_STEPS, 1),
        ([STARVED] * (STARVED_STEPS - 1) + [FED] + [STARVED] * (STARVED_STEPS - 1), 0),
        ([STARVED] * (STARVED_STEPS - 1) + [FED] + [STARVED] * STARVED_STEPS, 1),
        ([STARVED] * (STARVED_STEPS - 1) + [IDLE, STARVED], 1),
        ([IDLE] * 5 * STARVED_STEPS, 0),
        ([FED] * 5 * STARVED_STEPS, 0),
    ],
)
def test_one_warning_comes_after_so_many_steps_in_a_row(
    steps: list[Step], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(warnings_of(caplog, steps)) == count


def test_it_says_how_long_the_loop_waits_and_does_not_count_new_workers(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(caplog, [FED, *[STARVED] * STARVED_STEPS])
    assert warning.startswith(
        "Photographs, 48 samples: over 100 steps, the training loop waited 20 ms per step for data and worked 2 ms. "
    )
    start = Step(loop_s=0.0001, wait_s=2.0, worker_wait_s=2.0, images=8)
    assert not warnings_of(caplog, [start, FED, FED] * STARVED_STEPS, num_workers=4)


def test_workers_that_give_their_batches_together_are_looked_at_together(caplog: pytest.LogCaptureFixture) -> None:
    at_once = Step(loop_s=0.002, wait_s=0.0001, worker_wait_s=0.0001, images=8)
    bursts = [STARVED, at_once, at_once, at_once] * STARVED_STEPS
    assert len(warnings_of(caplog, bursts, num_workers=4)) == 1
    assert len(warnings_of(caplog, bursts, num_workers=1)) == 0
    ahead_at_an_epochs_start = [IDLE._replace(wait_s=0.1), at_once, at_once, at_once] + [STARVED] * 12
    assert len(warnings_of(caplog, ahead_at_an_epochs_start * 10, num_workers=4)) == 1
    one_stall = [at_once] * STARVED_STEPS + [STARVED._replace(wait_s=10.0)] + [at_once] * STARVED_STEPS
    assert len(warnings_of(caplog, one_stall, num_workers=4)) == 0


FOR_DALI = STARVED._replace(worker_wait_s=0.001, bytes_read=8 * 120_000)


@pytest.mark.parametrize(
    ("num_workers", "step", "workers_make_images", "says"),
    [
        (0, STARVED, False, "With num_workers=0, nothing is loaded in the meantime. Set num_workers=4"),
        (0, FOR_DALI, True, "With num_workers=0, nothing is loaded in the meantime. Set num_workers=4"),
        (2, FOR_DALI, False, "DALI is the bottleneck, at 364 images/s of 120 kB on average. Try a larger prefetch"),
        (2, FOR_DALI._replace(bytes_read=0), False, "DALI is the bottleneck, at 364 images/s. Try a larger prefetch"),
        (2, STARVED, True, "The workers decode and transform the images; print(loader.backend) shows why"),
        (2, STARVED, False, "The workers are the bottleneck, and 2 of 4 cores are free. Increase num_workers"),
        (4, STARVED, False, "The workers are the bottleneck, and use all cores. Read from a faster disk"),
    ],
)
def test_it_names_what_is_behind_with_one_way_out(
    num_workers: int, step: Step, workers_make_images: bool, says: str, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(stats, "cores_of_process", lambda: 4)
    (warning,) = warnings_of(caplog, [step] * STARVED_STEPS, num_workers, workers_make_images)
    assert says in warning


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers": 0}, "With num_workers=0"),
        ({"num_workers": 1}, "The workers are the bottleneck"),
        ({"num_workers": 1, "translate": False}, "The workers decode and transform the images"),
    ],
)
def test_a_loop_that_starves_is_told_once(
    options: Any, says: str, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(stats, "STARVED_STEPS", 3)  # of those of an epoch, as on a busy machine a step may take longer
    # Reading takes several times what DALI takes for a batch on a busy machine.
    dataset = Spelled(spell_dataset(tmp_path / "set", 16), lambda index: time.sleep(0.03))
    loader = DataLoader(dataset, 4, device=device, **options)
    for _ in range(3):
        for _ in loader:
            time.sleep(0.002)
    (record,) = [each for each in caplog.records if "the training loop waited" in each.getMessage()]
    assert says in record.getMessage() and record.levelno == logging.WARNING


def test_a_loop_that_is_fed_is_told_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(stats, "STARVED_STEPS", 2)
    for _ in DataLoader(torch.utils.data.TensorDataset(torch.arange(40)), 4):
        time.sleep(0.02)
    assert not caplog.records
