"""The pipeline of a plan: any order of steps is right, nothing is random; when its server builds it again."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, PILToTensor, transforms as v1, v2

from proxyloader.dali import jpeg_engines, plan_server
from proxyloader.dali.build import PipelineOptions
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer
from proxyloader.data.encoded_image import EncodedImage

from .. import compare
from ..compare import BY_DALI, assert_alike, images
from ..odd_formats import encoded
from ..plans import plan_for
from ..undecoded import image_calls_in

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
LARGE = images("landscape", "portrait", "large", "grey", "PNG")


class TestGraph:
    """Of the CPU, which crops, resizes, flips, converts and normalizes."""

    @pytest.mark.parametrize("position", range(5))
    def test_a_flip_anywhere(self, position: int) -> None:
        steps = [v1.RandomCrop(140, pad_if_needed=True, fill=9), v1.Pad((5, 0)), v1.ToTensor(), v1.Normalize(MEAN, STD)]
        for flip in (v1.RandomHorizontalFlip(), v2.RandomVerticalFlip()):
            assert_alike(v1.Compose([*steps[:position], flip, *steps[position:]]), "dali")

    @pytest.mark.parametrize("position", range(4))
    def test_a_resize_anywhere(self, position: int) -> None:
        steps = [v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
        transform = v1.Compose([*steps[:position], v1.Resize(128, antialias=True), *steps[position:]])
        assert_alike(transform, "dali", LARGE, bound=BY_DALI)

    @pytest.mark.parametrize("interpolation", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
    @pytest.mark.parametrize(
        "resize", [v1.RandomResizedCrop, v2.RandomResizedCrop, v1.Resize, v2.Resize], ids=lambda each: each.__module__
    )
    def test_resizes_of_photographs(self, resize: Any, interpolation: InterpolationMode) -> None:
        for size in 128, 200, 224:
            transform = v1.Compose([resize(size, interpolation=interpolation), v1.PILToTensor()])
            assert_alike(transform, "dali", LARGE, bound=BY_DALI)

    def test_conversions(self) -> None:
        for to_tensor in v1.PILToTensor(), v1.ToTensor(), v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)]):
            assert_alike(v1.Compose([to_tensor, v1.CenterCrop(50)]), "dali")

    def test_outputs_are_a_pure_function_of_bytes_and_draws_whatever_threads_and_queue(self) -> None:
        transform = v1.Compose([v1.RandomResizedCrop(128), v1.RandomHorizontalFlip(), v1.PILToTensor()])
        files = images("landscape", "portrait", "grey", "PNG")
        calls, plan = image_calls_in(compare.undecoded(transform, files)), plan_for(transform)
        server = compare.dali_server(plan, 16)

        def outputs(calls: list[Any]) -> torch.Tensor:
            (output,) = server.collect(server.submit([*map(list, zip(*(call.inputs for call in calls)))]))
            return output  # type: ignore[return-value]

        first = outputs(calls)
        torch.manual_seed(99)
        found = [(outputs(calls), first), (outputs(calls[::-1]), first.flip(0)), (outputs(calls[2:3]), first[2:3])]
        for threads, depth in ((1, 1), (3, 4)):
            options = PipelineOptions(4, num_threads=threads, prefetch_queue_depth=depth)
            server = PlanServer(plan, options, OutputFormat())
            found.append((outputs(calls), first))
        assert all(torch.equal(*pair) for pair in found)


class TestOptions:
    def test_threads_are_as_given_or_one_more_than_the_cores_and_with_a_gpu_at_most_four(self) -> None:
        cores = len(os.sched_getaffinity(0))
        assert (PipelineOptions(8).threads, PipelineOptions(8, num_threads=3).threads) == (cores + 1, 3)
        assert PipelineOptions(8, device_id=0).threads == min(4, cores)
        assert PipelineOptions(8, device_id=0, num_threads=7).threads == 7

    def test_without_an_affinity_all_cores_of_the_machine_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        monkeypatch.delattr(os, "sched_getaffinity")
        assert PipelineOptions(8).threads == (os.cpu_count() or 0) + 1

    @pytest.mark.parametrize(
        ("cores", "ranks", "threads"),
        [
            *((16, None, 16), (12, None, 12), (64, None, 16), (64, "4", 16), (48, "4", 12), (13, "", 13)),
            *((13, "0", 13), (11, None, 11), (16, "2", 8), (2, None, 2), (2, "8", 1)),
        ],
    )
    def test_cuda_helps_with_large_photographs_if_there_are_many_cores_and_decodes_progressive_ones_alone(
        self, cores: int, ranks: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:  # on the machine, as torchrun tells
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        options = PipelineOptions(64, device_id=0, prefetch_queue_depth=3)
        wanted = PipelineOptions(64, 0, threads, prefetch_queue_depth=3, hw_decoder_load=0.65)
        large = wanted if threads >= 12 else options
        assert options.for_files_of(1_200_000, 0.0) == options.for_files_of(6_000_000, 0.01) == large
        assert options.for_files_of(1_199_999, 0.0) == options.for_files_of(187_500, 0.01) == options
        by_cuda = replace(wanted, hw_decoder_load=None)
        assert options.for_files_of(187_500, 0.02) == by_cuda
        assert options.for_files_of(6_000_000, 0.02) == (wanted if threads >= 12 else by_cuda)
        assert options.engine_share == 1.0

    @pytest.mark.parametrize(
        "options",
        [
            PipelineOptions(64),
            PipelineOptions(64, device_id=0, num_threads=2),
            PipelineOptions(64, device_id=0, hw_decoder_load=1.0),
            PipelineOptions(64, device_id=0, num_threads=2, hw_decoder_load=0.0),
        ],
    )
    def test_given_options_and_those_of_a_cpu_stay_for_large_photographs(self, options: PipelineOptions) -> None:
        assert options.for_files_of(1e6, 1.0) == options


# --- built again for the files ---------------------------------------------------------------------------------------

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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is known of a GPU that is not here: its engines, by device, and whether it is crowded."""
    known = SimpleNamespace(engines={}, is_crowded=False)
    monkeypatch.setattr(jpeg_engines, "_engines", known.engines)
    monkeypatch.setattr(jpeg_engines, "is_crowded", lambda _: known.is_crowded)
    return known


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
    found: str, asked: Asked, files: list[np.ndarray], gpu: SimpleNamespace
) -> None:
    progressive = encoded(Image.open(io.BytesIO(files[0].tobytes())), "JPEG", progressive=True)
    some = [*files[1:4], np.frombuffer(progressive, np.uint8)]
    server, other = new_server(), new_server()
    before = server.pipeline
    gpu.engines[None] = found
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
def with_engines(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(PipelineOptions, "wants_engines", True)
    gpu.engines[None] = "decoding"
    return gpu


@pytest.mark.parametrize("found", ["decoding", "absent", None], ids=["engines decode", "none do", "without a GPU"])
def test_a_much_larger_batch_gets_a_pipeline_whose_engines_decode_all_of_it(
    found: str | None, files: list[np.ndarray], request: pytest.FixtureRequest
) -> None:
    if found is not None:
        request.getfixturevalue("with_engines").engines[None] = found
    server = new_server()
    used, runs = [], []
    for count in (2, 1, 3, 4, 5, 8, 1, 8):
        runs.append((count, server.submit([files[:count]])))
        used.append(server.pipeline)
    assert [used.count(each) for each in dict.fromkeys(used)] == ([3, 2, 3] if found == "decoding" else [8])
    wanted = collected(new_server(), files)
    for count, run in runs:
        assert all(map(torch.equal, server.collect(run)[0], wanted[:count]))


def test_on_a_crowded_gpu_the_pipeline_stays(files: list[np.ndarray], with_engines: SimpleNamespace) -> None:
    server = new_server()
    collected(server, files[:1])
    before = server.pipeline
    with_engines.is_crowded = True
    with_engines.engines.clear()  # it would be tried now, and found not to decode
    collected(server, files)
    assert server.pipeline is before and with_engines.engines == {}


def test_ctrl_c_while_it_is_built_again_or_run_is_made_good_with_the_next_batch(
    files: list[np.ndarray], with_engines: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
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
