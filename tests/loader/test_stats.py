"""Numbers of a loader, in the formats of others; the warning of a loop that waits; rows of torch's profiler."""

from __future__ import annotations

import copy
import importlib.util
import logging
import pickle
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader as StockLoader, Dataset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, LoaderStats, ProxyServer
from proxyloader.loader import stats as module
from proxyloader.loader.stats import STARVED_STEPS, WINDOW_BATCHES, StatsRecorder, Step, profile_row
from proxyloader.workers.messages import PackedBatch, PackedInput, PackedRun

from ..faults import Spelled, in_thread
from ..integration.roads import Stream, picture_folder, picture_pipeline, read_bytes
from ..integration.test_any_dataset import Photo
from ..numbered import spell_dataset
from .test_backend import of_arrays

TRANSFORM = transforms.Compose([transforms.CenterCrop(32), transforms.ToTensor()])


def counts(stats: LoaderStats) -> tuple[int, ...]:
    """Samples, and how many images DALI, Pillow and the workers made."""
    return stats.images, stats.images_by_dali, stats.images_by_pillow, stats.images_by_workers


def size_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.jpg"))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_images_that_dali_makes_each_is_counted_with_its_bytes(num_workers: int, photos: Path, device: str) -> None:
    loader = DataLoader(ImageFolder(str(photos), TRANSFORM), 20, num_workers=num_workers, device=device)
    assert set(loader.stats().as_dict().values()) == {0}
    for epoch in (1, 2):
        list(loader)
        stats = loader.stats()
        assert counts(stats) == (48 * epoch, 48 * epoch, 0, 0)
        assert (stats.batches, stats.errors, stats.batches_ahead) == (3 * epoch, 0, 0)
        assert stats.bytes_read == epoch * size_bytes(photos)
        assert stats.images_per_s > 0 and 0 < stats.wait_p50_ms <= stats.wait_p99_ms


class OfBatches(Dataset[Any]):
    """Makes a batch itself: a dict, which has another length."""

    def __len__(self) -> int:
        return 48

    def __getitems__(self, indices: list[int]) -> Any:
        return {"numbers": torch.tensor(indices)}


WAYS: dict[str, Any] = {
    "torchvision in the workers": (lambda root: ImageFolder(str(root), TRANSFORM), {"translate": False}, (0, 0, 48)),
    "tensors": (lambda _: TensorDataset(torch.arange(48)), {}, (0, 0, 48)),
    "batches of the dataset's own": (lambda _: OfBatches(), {"collate_fn": lambda samples: samples}, (0, 0, 48)),
    "arrays": (lambda _: of_arrays(48), {}, (0, 48, 0)),
    "a stream": (lambda root: Stream(sorted(root.rglob("*.jpg")), TRANSFORM, Image.open), {}, (48, 0, 0)),
    "no batches": (lambda root: ImageFolder(str(root), TRANSFORM), {"batch_size": None}, (48, 0, 0)),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_load_counts_its_samples(way: str, num_workers: int, photos: Path, device: str) -> None:
    dataset_of, arguments, made_by = WAYS[way]
    dataset = dataset_of(photos)
    loader = DataLoader(dataset, **{"batch_size": 20, "num_workers": num_workers, "device": device} | arguments)
    given = len(list(loader))
    assert counts(loader.stats()) == (48, *made_by)
    assert loader.stats().batches == given == (48 if arguments.get("batch_size", 20) is None else 3)


def test_what_a_server_makes_counts_and_what_is_left_out_is_an_error(photos: Path, device: str, tmp_path: Path) -> None:
    with ProxyServer(picture_pipeline(device, batch_size=20)) as server:
        loader = DataLoader(picture_folder(photos, server.proxy, read_bytes), 20, num_workers=1, server=server)
        list(loader)
    assert counts(loader.stats()) == (48, 48, 0, 0) and loader.stats().bytes_read == size_bytes(photos)
    (tmp_path / "class").mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))[:8]):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(path.read_bytes() if number != 3 else b"no image")
    loader = DataLoader(ImageFolder(str(tmp_path), TRANSFORM), 4, on_error="skip", device=device)
    list(loader)
    assert counts(loader.stats()) == (7, 7, 0, 0) and loader.stats().errors == 1


@pytest.mark.parametrize("is_met", [False, True], ids=["", "a transform that is not known before the first batch"])
def test_in_mid_epoch_any_thread_sees_what_was_given_and_what_waits(photos: Path, device: str, is_met: bool) -> None:
    dataset: Any = Photo(photos, tf=TRANSFORM) if is_met else ImageFolder(str(photos), TRANSFORM)
    loader, ahead = DataLoader(dataset, 4, num_workers=1, device=device), []
    for number, _ in enumerate(loader, start=1):
        stats = in_thread(loader.stats)
        assert (stats.batches, stats.images) == (number, 4 * number)
        ahead.append(stats.batches_ahead)
        time.sleep(0.02)
    runs = 8 if device == "cuda" else 1  # a GPU decodes small batches together
    assert 1 <= max(ahead) <= loader.prefetch * runs and ahead[-1] == 0


def test_times_are_those_of_the_loop_and_a_copy_counts_anew(photos: Path) -> None:
    def slowly(samples: Any) -> Any:
        time.sleep(0.02)
        return samples

    loader = DataLoader(TensorDataset(torch.arange(12)), 2, collate_fn=slowly)
    for _ in loader:
        time.sleep(0.01)
    stats = loader.stats()
    assert stats.wait_p50_ms >= 20 and stats.step_p50_ms >= 30
    assert stats.images_per_s <= 2 / 0.03 * 6 / 5  # the last batch has no loop behind it
    loader = DataLoader(TensorDataset(torch.arange(12)), 2)
    list(loader)
    for copied in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert copied.stats().batches == 0
        list(copied)
        assert copied.stats().batches == loader.stats().batches == 6


def recorded(steps: list[Step]) -> LoaderStats:
    recorder = StatsRecorder(range(48), 1)
    for step in steps:
        recorder.add(PackedBatch(None, image_counts=(0, 0, step.images), num_samples=step.images), step)
    return recorder.stats(batches_ahead=2, errors=1)


def test_percentiles_and_speed_are_of_the_last_batches_and_counts_of_all() -> None:
    stats = recorded([Step(0.01, 0.001 * number, 0.0, 32) for number in range(101)])
    assert (stats.wait_p50_ms, stats.wait_p99_ms, stats.step_p50_ms) == pytest.approx((50, 99, 60))
    assert stats.images_per_s == pytest.approx(101 * 32 / (101 * 0.01 + 5.05))
    early, late = Step(1.0, 1.0, 0.0, 8), Step(0.003, 0.001, 0.0, 8)
    stats = recorded([early] * 500 + [late] * WINDOW_BATCHES)
    assert (stats.wait_p99_ms, stats.step_p50_ms, stats.images_per_s) == pytest.approx((1, 4, 2000))
    assert (stats.batches, stats.images) == (1500, 12_000)


SOME = LoaderStats(1234, 315_904, 12_345.6, 0.42, 12.0, 20.7, 315_000, 904, 0, 2, 33_200_000_000, 3)


def test_printed_it_is_three_lines_and_as_a_dict_numbers_by_name() -> None:
    assert str(SOME).splitlines() == [
        "LoaderStats: 1,234 batches, 315,904 images, 12,346 images/s",
        "  wait 0.42 ms in a step of 20.70 ms (medians), 12.00 ms at the 99th percentile; 2 batches ahead",
        "  produced by DALI 315,000, Pillow 904, workers 0; 33,200.0 MB read; 3 errors",
    ]
    numbers = SOME.as_dict()
    assert list(numbers) == [field.name for field in fields(LoaderStats)]
    assert all(type(number) in (int, float) for number in numbers.values())
    assert LoaderStats(**numbers) == SOME  # type: ignore[arg-type]


LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*"'
FAMILY = re.compile(
    r"# TYPE (?P<name>proxyloader_[a-z0-9_]+) (?P<kind>counter|gauge)\n"
    rf"(?P=name)(?:\{{(?P<labels>{LABEL}(?:,{LABEL})*)\}})? (?P<value>\d+(?:\.\d+)?(?:e[+-]\d+)?)\n"
)
"""The type and one sample of a metric in Prometheus's text format."""


@pytest.mark.parametrize(
    ("labels", "written"),
    [
        ({}, None),
        ({"loader": "train", "rank": "0"}, 'loader="train",rank="0"'),
        ({"name": 'a "b"\\c\nd é'}, 'name="a \\"b\\"\\\\c\\nd é"'),
    ],
)
def test_prometheus_reads_it(labels: dict[str, str], written: str | None) -> None:
    text = SOME.prometheus(**labels)
    families = list(FAMILY.finditer(text))
    assert "".join(family[0] for family in families) == text
    assert {family["labels"] for family in families} == {written}
    values = {family["name"].removeprefix("proxyloader_"): float(family["value"]) for family in families}
    assert len(values) == len(families) == len(fields(LoaderStats))
    assert all((family["kind"] == "counter") == family["name"].endswith("_total") for family in families)
    assert (values["batches_total"], values["bytes_read_total"]) == (1234, 33_200_000_000)
    assert values["wait_p50_seconds"] == pytest.approx(0.00042)
    if importlib.util.find_spec("prometheus_client") is not None:
        from prometheus_client.parser import text_string_to_metric_families

        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert {sample.name.removeprefix("proxyloader_"): sample.value for sample in samples} == values
        assert all(sample.labels == labels for sample in samples)


def test_workers_of_which_some_fall_back_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder, step = StatsRecorder(range(9), 2), Step(0.0, 0.0, 0.0, 4)
    run = PackedRun("server", (PackedInput("|u1", np.zeros(4, np.int64), np.ones((4, 1), np.int64)),), ("",) * 4)
    for _ in range(3):
        recorder.add(PackedBatch(None, has_fallen_back=True, has_seen_images=True, decode_reason="pixels"), step)
        recorder.add(PackedBatch(None, runs=(run,)), step)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["proxyloader: range, 9 samples: falling back to torch's loading: pixels"]


# --- a loop that waits -----------------------------------------------------------------------------------------------

STARVED = Step(loop_s=0.002, wait_s=0.02, worker_wait_s=0.019, images=8)
FED = Step(loop_s=0.02, wait_s=0.002, worker_wait_s=0.001, images=8)
IDLE = Step(loop_s=0.0001, wait_s=0.02, worker_wait_s=0.02, images=8)


def warnings_of(
    caplog: pytest.LogCaptureFixture, steps: list[Step], num_workers: int = 1, workers_make_images: bool = False
) -> list[str]:
    caplog.clear()
    recorder = StatsRecorder(TensorDataset(torch.arange(48)), num_workers)
    for step in [Step(loop_s=0.01, wait_s=60.0, worker_wait_s=0.0, images=8), *steps]:  # the start of the first epoch
        recorder.add_step(step, worker_images=step.images * workers_make_images)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([STARVED] * (STARVED_STEPS - 1), 0),
        ([STARVED] * STARVED_STEPS, 1),
        ([STARVED] * 5 * STARVED_STEPS, 1),
        ([STARVED, FED._replace(loop_s=0.03)] * STARVED_STEPS, 0),
        ([STARVED, FED] * STARVED_STEPS, 0),
        ([FED] * STARVED_STEPS + [STARVED] * STARVED_STEPS, 1),
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
        "proxyloader: TensorDataset, 48 samples: over 100 steps, the training loop waited 20 ms per step for data and "
        "worked 2 ms. "
    )
    start = Step(loop_s=0.0001, wait_s=2.0, worker_wait_s=2.0, images=8)
    assert not warnings_of(caplog, [start, FED, FED] * STARVED_STEPS, num_workers=4)


def test_workers_that_give_their_batches_together_are_looked_at_together(caplog: pytest.LogCaptureFixture) -> None:
    at_once = Step(loop_s=0.002, wait_s=0.0001, worker_wait_s=0.0001, images=8)
    bursts = [STARVED, at_once, at_once, at_once] * STARVED_STEPS
    assert len(warnings_of(caplog, bursts, num_workers=4)) == 1
    ahead_at_an_epochs_start = [IDLE._replace(wait_s=0.1), at_once, at_once, at_once] + [STARVED] * 12
    assert len(warnings_of(caplog, ahead_at_an_epochs_start * 10, num_workers=4)) == 1
    one_stall = [at_once] * STARVED_STEPS + [STARVED._replace(wait_s=10.0)] + [at_once] * STARVED_STEPS
    assert len(warnings_of(caplog, one_stall, num_workers=4)) == 0


FOR_DALI = STARVED._replace(worker_wait_s=0.001)


@pytest.mark.parametrize(
    ("num_workers", "step", "workers_make_images", "says"),
    [
        (0, STARVED, False, "With num_workers=0, nothing is loaded in the meantime. Set num_workers"),
        (0, FOR_DALI, True, "With num_workers=0, nothing is loaded in the meantime. Set num_workers"),
        (2, FOR_DALI, False, "DALI is the bottleneck. Try a larger prefetch"),
        (2, STARVED, True, "The workers decode and transform the images; print(loader.backend) shows why"),
        (2, STARVED, False, "The workers are the bottleneck. Increase num_workers"),
    ],
)
def test_it_names_what_is_behind_with_one_way_out(
    num_workers: int, step: Step, workers_make_images: bool, says: str, caplog: pytest.LogCaptureFixture
) -> None:
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
    monkeypatch.setattr(module, "STARVED_STEPS", 2)  # of one epoch: on a busy machine a step may take longer
    # Reading takes several times what DALI takes for a batch on a busy machine.
    dataset = Spelled(spell_dataset(tmp_path / "set", 16), lambda index: time.sleep(0.03))
    loader = DataLoader(dataset, 4, device=device, **options)
    for _ in range(3):
        for _ in loader:
            time.sleep(0.002)
    (record,) = [each for each in caplog.records if "the training loop waited" in each.getMessage()]
    assert says in record.getMessage() and record.levelno == logging.WARNING


# --- torch's profiler ------------------------------------------------------------------------------------------------

# Torch 2.11 says so of each profile that is told no schedule, though it has a single cycle.
PROFILED = pytest.mark.filterwarnings("ignore:.*clears events at the end of each cycle:UserWarning")


def rows_of(loader: Iterable[Any]) -> Counter[str]:
    """How often each row of a loader is in the profile of a loop."""
    with profile(activities=[ProfilerActivity.CPU]) as of_loop:
        for _ in loader:
            pass
    names = [event.name for event in of_loop.events() or ()]
    return Counter(name for name in names if name.startswith(("enumerate(DataLoader)", "proxyloader.")))


@PROFILED
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_row_of_next_is_torchs_and_its_parts_have_rows_too(num_workers: int, photos: Path, device: str) -> None:
    dataset = ImageFolder(str(photos), TRANSFORM)
    stock = rows_of(StockLoader(dataset, 16, num_workers=num_workers))
    ours = rows_of(DataLoader(dataset, 16, num_workers=num_workers, device=device))
    assert {name: count for name, count in ours.items() if not name.startswith("proxyloader.")} == stock
    assert ours["proxyloader.take_from_workers"] == 4
    # One batch has nothing for DALI, and a GPU may decode others together.
    assert ours["proxyloader.submit_to_dali"] == 3 or device == "cuda"
    assert ours["proxyloader.wait_for_dali"] >= 3


@PROFILED
def test_a_loader_that_torch_loads_has_torchs_row_and_unprofiled_nothing_is_recorded(photos: Path) -> None:
    dataset = TensorDataset(torch.arange(6))
    stock, ours = (rows_of(kind(dataset, 2)) for kind in (StockLoader, DataLoader))
    assert ours == stock
    assert not isinstance(profile_row("proxyloader.anything"), profiler.record_function)
    with profile(activities=[ProfilerActivity.CPU]):
        assert isinstance(profile_row("proxyloader.anything"), profiler.record_function)
    assert not isinstance(profile_row("proxyloader.anything"), profiler.record_function)


@pytest.mark.gpu
def test_under_emit_nvtx_a_loader_has_ranges_and_gives_the_same_batches(photos: Path) -> None:
    loader = DataLoader(ImageFolder(str(photos), TRANSFORM), 16, num_workers=1)
    expected = list(loader)
    with profiler.emit_nvtx():
        assert isinstance(profile_row("proxyloader.anything"), profiler.record_function)
        found = list(loader)
    assert [torch.equal(ours, theirs) for (ours, _), (theirs, _) in zip(found, expected, strict=True)] == [True] * 3
