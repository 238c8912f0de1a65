"""The pipeline of a plan: any order of steps is right, nothing in it is random, and its options suit the machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from proxyloader.dali.build import PipelineOptions
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer

from .. import compare
from ..compare import BY_DALI, assert_alike, images
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
