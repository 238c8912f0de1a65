"""``loader.stats()``: what a loader has given, for each way that it loads, and in the formats of others."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, LoaderStats, ProxyServer
from proxyloader.loader.stats import METRICS, WINDOW_BATCHES, StatsRecorder, Step
from proxyloader.workers.messages import PackedBatch

from ..faults import in_thread
from ..integration.roads import picture_folder, picture_pipeline, read_bytes
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


class Stream(IterableDataset[Any]):
    def __init__(self, root: Path) -> None:
        self.paths = sorted(root.rglob("*.jpg"))

    def __iter__(self) -> Iterator[Any]:
        return (TRANSFORM(Image.open(path)) for path in self.paths)


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
    "a stream": (Stream, {}, (48, 0, 0)),
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


def test_in_mid_epoch_any_thread_sees_what_was_given_and_what_waits(photos: Path, device: str) -> None:
    loader = DataLoader(ImageFolder(str(photos), TRANSFORM), 4, num_workers=1, device=device)
    ahead = []
    for number, _ in enumerate(loader, start=1):
        stats = in_thread(loader.stats)
        assert (stats.batches, stats.images) == (number, 4 * number)
        ahead.append(stats.batches_ahead)
        time.sleep(0.02)
    assert 1 <= max(ahead) <= loader.prefetch and ahead[-1] == 0


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
    recorder = StatsRecorder("a dataset", 1)
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
    assert list(numbers) == list(METRICS) and all(type(number) in (int, float) for number in numbers.values())
    assert LoaderStats(**numbers) == SOME  # type: ignore[arg-type]


LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*"'
FAMILY = re.compile(
    r"# HELP (?P<name>proxyloader_[a-z0-9_]+) [^\n]+\n"
    r"# TYPE (?P=name) (?P<kind>counter|gauge)\n"
    rf"(?P=name)(?:\{{(?P<labels>{LABEL}(?:,{LABEL})*)\}})? (?P<value>\d+(?:\.\d+)?(?:e[+-]\d+)?)\n"
)
"""A description and one sample in Prometheus's text format."""


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
    assert len(values) == len(families) == len(METRICS)
    assert all((family["kind"] == "counter") == family["name"].endswith("_total") for family in families)
    assert (values["batches_total"], values["read_bytes_total"]) == (1234, 33_200_000_000)
    assert values["wait_p50_seconds"] == pytest.approx(0.00042)
    if importlib.util.find_spec("prometheus_client") is not None:
        from prometheus_client.parser import text_string_to_metric_families

        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert {sample.name.removeprefix("proxyloader_"): sample.value for sample in samples} == values
        assert all(sample.labels == labels for sample in samples)
