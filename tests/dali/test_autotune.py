"""DALI's threads and the engines' share, where the user leaves them open."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torchvision import transforms
from torchvision.datasets import ImageFolder

import proxyloader
from proxyloader.dali import autotune
from proxyloader.dali.autotune import CLEARLY_FASTER, FEWEST_IMAGES, cache_path, is_to_be_tuned, measured, tuned
from proxyloader.dali.build import decoding_s
from proxyloader.dali.operators import PipelineOptions

ON_GPU = PipelineOptions(64, device_id=0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "proxyloader" / "decoding.json"


@pytest.fixture
def files(photos: Path) -> list[np.ndarray]:
    return [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(photos.rglob("*.jpg"))]


class TestWhatIsOpen:
    def test_is_measured_on_a_gpu_with_enough_images(self) -> None:
        assert is_to_be_tuned(ON_GPU, FEWEST_IMAGES)
        assert is_to_be_tuned(replace(ON_GPU, num_threads=2), FEWEST_IMAGES)
        assert is_to_be_tuned(replace(ON_GPU, hw_decoder_load=0.5), FEWEST_IMAGES)

    def test_is_left_at_its_default_otherwise(self) -> None:
        assert not is_to_be_tuned(ON_GPU, FEWEST_IMAGES - 1)
        assert not is_to_be_tuned(PipelineOptions(64), FEWEST_IMAGES)
        assert not is_to_be_tuned(replace(ON_GPU, num_threads=2, hw_decoder_load=0.5), FEWEST_IMAGES)
        assert ON_GPU.engine_share == 1.0 and ON_GPU.threads == min(4, len(os.sched_getaffinity(0)))


class TestTheChoice:
    @pytest.fixture(autouse=True)
    def sixteen_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def test_the_first_setting_stays_unless_another_is_clearly_faster(self) -> None:
        def a_little_slower(options: PipelineOptions) -> float:
            return 1.0 + 0.1 * (options.hw_decoder_load == 1.0) + 0.05 * (options.threads == 4)

        found = measured(ON_GPU, a_little_slower)
        assert (found.hw_decoder_load, found.num_threads) == (1.0, 4)

    def test_the_fastest_of_those_that_are_clearly_faster_is_taken(self) -> None:
        seconds = {1.0: 1.0, 0.65: 0.5, 0.0: 0.7}

        def with_one_engine(options: PipelineOptions) -> float:
            assert options.hw_decoder_load is not None
            return seconds[options.hw_decoder_load] * {4: 1.0, 8: 0.9 * CLEARLY_FASTER}[options.threads]

        found = measured(ON_GPU, with_one_engine)
        assert (found.hw_decoder_load, found.num_threads) == (0.65, 8)

    def test_what_is_given_is_not_tried(self) -> None:
        tried = []

        def note(options: PipelineOptions) -> float:
            tried.append((options.hw_decoder_load, options.num_threads))
            return 1.0

        measured(replace(ON_GPU, hw_decoder_load=0.3), note)
        assert tried == [(0.3, 4), (0.3, 8)]
        tried.clear()
        measured(replace(ON_GPU, num_threads=3), note)
        assert tried == [(1.0, 3), (0.65, 3), (0.0, 3)]

    def test_no_more_threads_are_tried_than_there_are_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        tried = []
        measured(ON_GPU, lambda options: tried.append(options.num_threads) or 1.0)
        assert set(tried) == {2}


@pytest.mark.alone
class TestTheMeasurement:
    """On the CPU, where only the threads are open; on a GPU it is the same code."""

    def test_decoding_takes_time(self, files: list[np.ndarray], device: str) -> None:
        options = PipelineOptions(64, device_id=0 if device == "cuda" else None, num_threads=2)
        few, many = (decoding_s(options, files[:count]) for count in (4, 48))
        assert 0 < few < many < 60

    def test_it_is_done_once_for_the_same_kind_of_batch(
        self, files: list[np.ndarray], caplog: pytest.LogCaptureFixture, cache: Path, device: str
    ) -> None:
        options = PipelineOptions(64, device_id=0 if device == "cuda" else None)
        with caplog.at_level(logging.INFO, "proxyloader"):
            first = tuned(options, files)
            assert tuned(options, files[:40]) == first
            assert len(caplog.messages) == 1 and "measuring how this GPU decodes" in caplog.messages[0]
            tuned(replace(options, batch_size=128), files)
            assert len(caplog.messages) == 2
        assert cache_path() == cache
        kept = json.loads(cache.read_text())
        assert len(kept) == 2 and all("batches of" in key and "KiB" in key for key in kept)
        assert first == replace(options, **next(iter(kept.values())))
        assert list(cache.parent.iterdir()) == [cache]

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"KEY": 3}', '{"KEY": {"hw_decoder_load": 7, "num_threads": 1}}'])
    def test_a_file_that_makes_no_sense_is_written_anew(self, text: str, files: list[np.ndarray], cache: Path) -> None:
        options = PipelineOptions(64)
        cache.parent.mkdir(parents=True)
        cache.write_text(text.replace("KEY", autotune._key(options, files)))
        found = tuned(options, files)
        assert json.loads(cache.read_text())[autotune._key(options, files)]["num_threads"] == found.num_threads

    def test_without_a_place_to_keep_the_answer_it_is_given_all_the_same(
        self, files: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
        assert tuned(PipelineOptions(64), files).num_threads

    def test_a_bad_image_is_left_to_the_run_that_it_belongs_to(self, files: list[np.ndarray], cache: Path) -> None:
        bad = files[0].copy()
        tables = bad.tobytes().find(b"\xff\xc4")
        bad[tables + 5 : tables + 21] = 0xFF  # counts of Huffman codes that cannot be
        found = tuned(PipelineOptions(64), [*files, bad])
        assert found.num_threads and found.hw_decoder_load == 1.0 and not cache.exists()


@pytest.mark.alone
def test_a_loader_measures_with_its_first_full_batch(photos: Path, cache: Path, device: str) -> None:
    transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])

    def loader(**options: object) -> object:
        return proxyloader.DataLoader(ImageFolder(str(photos), transform), 40, device=device, **options)

    plain = [images for images, _ in loader(num_threads=1, hw_decoder_load=1.0)]
    assert not cache.exists()
    for _ in range(2):
        for images, expected in zip((images for images, _ in loader()), plain, strict=True):
            assert (images - expected).abs().max() <= 4 / 255
        assert cache.exists() == (device == "cuda")
