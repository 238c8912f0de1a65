"""A plan's server: when its pipeline is built again for the files. On a GPU: ``tests/gpu/test_gpu.py``."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import PILToTensor

from proxyloader.dali import jpeg_engines, plan_server
from proxyloader.dali.build import PipelineOptions
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer
from proxyloader.data.encoded_image import EncodedImage

from ..odd_formats import encoded
from ..plans import plan_for

Asked = list[tuple[float, float]]

OPTIONS = PipelineOptions(8, num_threads=1)


@pytest.fixture
def files(photos: Path) -> list[np.ndarray]:
    return [np.fromfile(path, np.uint8) for path in sorted(photos.rglob("*.jpg"))[:8]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """As on a GPU where all files need two threads, and files that are not progressive a part of them CUDA.

    What was asked about: mean number of pixels, and share of progressive ones.
    """
    about: Asked = []

    def for_files_of(options: PipelineOptions, mean_pixels: float, progressive: float) -> PipelineOptions:
        about.append((mean_pixels, progressive))
        threads = 2 if mean_pixels or progressive else options.num_threads
        return replace(options, num_threads=threads, hw_decoder_load=0.65 if mean_pixels and not progressive else None)

    monkeypatch.setattr(PipelineOptions, "for_files_of", for_files_of)
    return about


def mean_pixels_of(files: list[np.ndarray]) -> float:
    sizes = [Image.open(io.BytesIO(file.tobytes())).size for file in files]
    return sum(width * height for width, height in sizes) / len(sizes)


def collected(server: PlanServer, files: list[np.ndarray]) -> Any:
    return server.collect(server.submit([files]))[0]


def new_server() -> PlanServer:
    return PlanServer(plan_for(PILToTensor()), OPTIONS, OutputFormat())


def test_the_first_batch_decides_and_the_batches_are_the_same(asked: Asked, files: list[np.ndarray]) -> None:
    server = new_server()
    before = server.pipeline
    first = collected(server, files)
    assert asked == [(mean_pixels_of(files), 0)]
    rebuilt = server.pipeline
    assert rebuilt is not before and (before.num_threads, rebuilt.num_threads) == (1, 2)
    assert all(map(torch.equal, collected(server, files), first))
    assert len(asked) == 1 and server.pipeline is rebuilt


def test_images_that_pillow_has_decoded_do_not_count(asked: Asked, files: list[np.ndarray]) -> None:
    ppm = np.frombuffer(EncodedImage.from_pil(Image.open(io.BytesIO(files[0])).convert("RGB")).data, np.uint8)
    collected(new_server(), [files[0], ppm])
    collected(new_server(), [ppm, ppm])
    assert asked == [(mean_pixels_of(files[:1]), 0), (0, 0)]


@pytest.mark.parametrize("found", ["failing", "absent"])
def test_where_no_engines_decode_progressive_images_alone_get_more_threads(
    found: str, asked: Asked, files: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    progressive = encoded(Image.open(io.BytesIO(files[0].tobytes())), "JPEG", progressive=True)
    some = [*files[1:4], np.frombuffer(progressive, np.uint8)]
    server, other = new_server(), new_server()
    before = server.pipeline
    monkeypatch.setattr(jpeg_engines, "_engines", {None: found})
    collected(server, files)
    assert server.pipeline is before and asked[1:] == [(0, 0)]
    asked.clear()
    collected(other, some)
    assert asked == [(mean_pixels_of(some), 0.25)] and other.pipeline.num_threads == 2


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_without_memory_for_another_the_pipeline_stays(
    error: type[Exception], asked: Asked, files: list[np.ndarray], monkeypatch: Any, caplog: Any
) -> None:
    server = new_server()
    before = server.pipeline

    def build_pipeline(*_: Any) -> None:
        raise error("no memory is left")

    monkeypatch.setattr(plan_server, "build_pipeline", build_pipeline)
    assert len(collected(server, files)) == 8
    assert server.pipeline is before and "no memory is left" in caplog.text
    collected(server, files)
    assert len(asked) == 1


@pytest.fixture
def as_with_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineOptions, "wants_engines", True)
    monkeypatch.setattr(jpeg_engines, "_engines", {None: "decoding"})
    monkeypatch.setattr(jpeg_engines, "is_crowded", lambda _: False)


@pytest.mark.parametrize("found", ["decoding", "absent", None], ids=["engines decode", "none do", "without a GPU"])
def test_a_much_larger_batch_gets_a_pipeline_whose_engines_decode_all_of_it(
    found: str | None, files: list[np.ndarray], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found is not None:
        request.getfixturevalue("as_with_engines")
        monkeypatch.setattr(jpeg_engines, "_engines", {None: found})
    server = new_server()
    used, runs = [], []
    for count in (2, 1, 3, 4, 5, 8, 1, 8):
        runs.append((count, server.submit([files[:count]])))
        used.append(server.pipeline)
    assert [used.count(each) for each in dict.fromkeys(used)] == ([3, 2, 3] if found == "decoding" else [8])
    wanted = collected(new_server(), files)
    for count, run in runs:
        assert all(map(torch.equal, server.collect(run)[0], wanted[:count]))


def test_on_a_crowded_gpu_the_pipeline_stays(
    files: list[np.ndarray], as_with_engines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server()
    collected(server, files[:1])
    before = server.pipeline
    monkeypatch.setattr(jpeg_engines, "is_crowded", lambda _: True)
    monkeypatch.setattr(jpeg_engines, "_engines", {})  # it would be tried now, and found not to decode
    collected(server, files)
    assert server.pipeline is before and jpeg_engines._engines == {}


def test_ctrl_c_while_it_is_built_again_or_run_is_made_good_with_the_next_batch(
    files: list[np.ndarray], as_with_engines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server()
    collected(server, files[:1])
    before = server.pipeline

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(plan_server, "build_pipeline", interrupted)
        server.submit([files])
    assert len(collected(server, files)) == 8 and server.pipeline is not before
    server._in_sync = False  # as Ctrl-C leaves it
    collected(server, files[:1])
    before = server.pipeline
    assert len(collected(server, files)) == 8 and server.pipeline is not before
