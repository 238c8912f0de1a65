"""The pipeline of a plan: any order of steps is right, nothing in it is random, and its options suit the machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader import EncodedImage, compile_transforms
from proxyloader.dali.build import PipelineOptions
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer
from proxyloader.transforms.resize import EXACT_EDGES_BELOW

from .. import compare
from ..compare import BILINEAR, EXACT, assert_alike, images
from ..undecoded import image_calls_in

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class TestOrder:
    @pytest.mark.parametrize("position", range(5))
    def test_a_flip_anywhere(self, position: int, device: str) -> None:
        steps = [v1.RandomResizedCrop(40), v1.Pad((5, 0)), v1.ToTensor(), v1.Normalize(MEAN, STD)]
        for flip in (v1.RandomHorizontalFlip(1), v2.RandomVerticalFlip(1)):
            transform = v1.Compose([*steps[:position], flip, *steps[position:]])
            assert_alike(transform, device, bound=BILINEAR)

    @pytest.mark.parametrize("position", range(4))
    def test_a_resize_anywhere(self, position: int, device: str) -> None:
        steps = [v1.RandomHorizontalFlip(1), v1.ToTensor(), v1.Normalize(MEAN, STD)]
        transform = v1.Compose([*steps[:position], v1.Resize((40, 50)), *steps[position:]])
        assert_alike(transform, device, bound=BILINEAR)


class TestOutputs:
    def test_are_a_pure_function_of_bytes_and_draws_whatever_threads_and_queue(self, device: str) -> None:
        transform = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.PILToTensor()])
        compiled = compile_transforms(transform)
        files = images("landscape", "portrait", "grey", "PNG")
        calls = image_calls_in([compiled(EncodedImage.from_bytes(data)) for data in files.values()])
        server = compare.server_of(compare.the_plan(compiled), device, 16)

        def outputs(calls: list[Any]) -> torch.Tensor:
            (output,) = server.collect(server.submit([*map(list, zip(*(call.inputs for call in calls)))]))
            return output  # type: ignore[return-value]

        first = outputs(calls)
        torch.manual_seed(99)
        found = [(outputs(calls), first), (outputs(calls[::-1]), first.flip(0)), (outputs(calls[2:3]), first[2:3])]
        for threads, depth in ((1, 1), (3, 4)):
            device_id = None if device == "cpu" else 0
            options = PipelineOptions(4, device_id=device_id, num_threads=threads, prefetch_queue_depth=depth)
            server = PlanServer(compare.the_plan(compiled), options, OutputFormat())
            found.append((outputs(calls), first))
        # On a GPU the rest of the batch decides whether the engine or CUDA decodes an image.
        assert all((ours.int() - wanted.int()).abs().max() <= EXACT.on(device).max for ours, wanted in found)


class TestExactEdges:
    """From EXACT_EDGES_BELOW on the outermost pixels are further off: see ``TestResize`` in test_resize.py."""

    @pytest.mark.parametrize("size", [1, 2, 31, EXACT_EDGES_BELOW - 1])
    def test_below_the_limit(self, size: int, device: str) -> None:
        files = images("landscape", "large", "tiny", "one pixel wide")
        for resize in (v1.Resize((size, 200)), v1.Resize((200, size))):
            assert_alike(v1.Compose([resize, v1.PILToTensor()]), device, files, bound=BILINEAR)


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
            *(
                (16, None, 16),
                (12, None, 12),
                (64, None, 16),
                (64, "4", 16),
                (48, "4", 12),
                (13, "", 13),
                (13, "0", 13),
            ),
            *((11, None, 11), (16, "2", 8), (2, None, 2), (2, "8", 1)),
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
