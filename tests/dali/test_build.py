"""The graph of a plan: every step has its operator, any order of steps is right, and nothing random happens in it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.data.auto_augment import AugmentOp, AugMixAugment
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import ResizeKeepRatio
from torchvision.transforms import AugMix, InterpolationMode, RandAugment, v2
from torchvision.transforms import transforms as v1

from proxyloader import EncodedImage, compile_transforms
from proxyloader.dali.build import PipelineOptions
from proxyloader.dali.operators import OPERATORS
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer
from proxyloader.transforms.plan import Step
from proxyloader.transforms.registry import plan_for
from proxyloader.transforms.resize import EXACT_EDGES_BELOW
from proxyloader.transforms.type_conversion import ToFloat, ToTensor

from .. import compare
from ..compare import BILINEAR, EXACT, Images, assert_alike, images
from ..undecoded import image_calls_in

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


MADE_OF_OTHERS = [
    v1.ColorJitter(0.1, 0.1, 0.1, 0.1),
    v2.RandomPhotometricDistort(),
    v2.RandomChannelPermutation(),
    v1.RandomPosterize(4),
    v1.RandomRotation(30),
    v1.RandomAffine(30),
    v1.RandomPerspective(),
    RandAugment(),
    v1.RandomApply([v1.RandomInvert()]),
    v1.RandomChoice([v1.RandomInvert()]),
    v1.RandomOrder([v1.RandomInvert()]),
    AugMix(),
    v1.GaussianBlur(3),
    v2.RandomErasing(),
    v2.GaussianNoise(),
    v2.Resize(9, InterpolationMode.NEAREST),
    AugmentOp("Rotate"),
    AugMixAugment([AugmentOp("Invert"), AugmentOp("Rotate")]),
    ResizeKeepRatio(9, interpolation="random"),
    RandomErasing(max_count=3, device="cpu"),
]
"""A transform for each kind of step that has no operator of its own."""


def kinds_of(base: type[Step]) -> Iterator[type[Step]]:
    """The package's classes below a base that are no bases themselves."""
    for cls in base.__subclasses__():
        if cls.__subclasses__():
            yield from kinds_of(cls)
        elif cls.__module__.startswith("proxyloader."):
            yield cls


def steps_of(transform: Any) -> list[Step]:
    """Of a transform, without those of the conversion."""
    # Older versions of torchvision take float tensors only.
    conversion = v1.ToTensor() if isinstance(transform, v2.GaussianNoise) else v1.PILToTensor()
    before = isinstance(transform, (AugmentOp, AugMixAugment, ResizeKeepRatio))  # timm's are of PIL images
    steps = plan_for(v1.Compose([transform, conversion] if before else [conversion, transform])).steps
    return [step for step in steps if type(step) not in (ToTensor, ToFloat)]


class Compiled:
    """A server for one transform, which may be run many times."""

    def __init__(self, transform: Any, device: str, batch_size: int) -> None:
        self.transform = compile_transforms(transform)
        self.server = compare.server_of(self.transform.plan, device, batch_size)

    def calls(self, files: Images) -> list[Any]:
        return image_calls_in([self.transform(EncodedImage.from_bytes(data)) for data in files.values()])

    def outputs(self, calls: list[Any]) -> Any:
        return self.server.collect(self.server.submit([*map(list, zip(*(call.inputs for call in calls)))]))


class TestOperators:
    def test_every_kind_of_step_has_one_or_is_made_of_others_that_have_one(self) -> None:
        wanted = {cls for cls in kinds_of(Step) if cls.operations is Step.operations}
        missing = sorted(cls.__name__ for cls in wanted - OPERATORS.keys())
        assert not missing, f"these steps have no operator; does dali/operators/__init__.py import theirs? {missing}"
        assert OPERATORS.keys() == wanted
        assert not any(cls.__subclasses__() for cls in OPERATORS)
        wanted = {cls for cls in kinds_of(Step) if cls.operations is not Step.operations}
        found = set()
        waiting = [step for transform in MADE_OF_OTHERS for step in steps_of(transform)]
        assert all(step.operations != (step,) for step in waiting)
        while waiting:
            step = waiting.pop()
            found.add(type(step))
            parts = [each for each in step.operations if each is not step]
            assert not parts or step.num_params == sum(each.num_params for each in parts)
            assert parts or type(step) in OPERATORS
            waiting += parts
            waiting += [each for branch in getattr(step, "branches", ()) for each in branch]
        missing = sorted(cls.__name__ for cls in wanted - found)
        assert not missing, f"these steps are made of others; add a transform to MADE_OF_OTHERS: {missing}"


def some_transforms(seed: int) -> list[Any]:
    """Steps that are exact in any order, with the conversions to a tensor and to float somewhere among them."""
    rng = random.Random(seed)
    version = rng.choice([v1, v2])

    def one() -> Any:
        return rng.choice(
            [
                lambda: version.RandomHorizontalFlip(),
                lambda: version.RandomVerticalFlip(),
                lambda: version.CenterCrop((rng.randint(20, 90), rng.randint(20, 90))),
                lambda: version.RandomCrop(
                    (rng.randint(20, 90), rng.randint(20, 90)), padding=3, pad_if_needed=True, fill=1
                ),
                lambda: version.Pad((1, 2, 3, rng.randint(0, 9)), fill=rng.choice([0, 1])),
                lambda: version.RandomResizedCrop(rng.randint(20, 90), interpolation=InterpolationMode.NEAREST),
            ]
        )()

    def some() -> list[Any]:
        return [one() for _ in range(rng.randint(0, 3))]

    steps = [*some(), v1.PILToTensor(), *some()]
    if rng.random() < 0.8:
        steps += [v2.ToDtype(torch.float32, scale=rng.random() < 0.7), *some()]
        if rng.random() < 0.5:
            steps += [version.Normalize(MEAN, STD), *some()]
    return steps


class TestOrder:
    @pytest.mark.parametrize("seed", range(60))
    def test_any_order_of_steps_is_right(self, seed: int, device: str) -> None:
        transform = v1.Compose(some_transforms(seed))
        assert_alike(transform, device, images("landscape", "small"), seed=seed)

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
    def test_of_one_size_are_one_tensor_and_of_several_a_list(self, device: str) -> None:
        compiled = Compiled(v1.Compose([v1.CenterCrop((20, 30)), v1.ToTensor()]), device, 16)
        (output,) = compiled.outputs(compiled.calls(images("landscape", "tiny")))
        assert isinstance(output, torch.Tensor)
        assert (output.shape, output.dtype, output.device.type) == ((2, 3, 20, 30), torch.float32, device)
        compiled = Compiled(v1.PILToTensor(), device, 16)
        calls = compiled.calls(images("landscape", "tiny"))
        assert compiled.server.names == ["images"] and {len(call.inputs) for call in calls} == {1}  # it draws nothing
        (output,) = compiled.outputs(calls)
        assert [tensor.shape for tensor in output] == [(3, 120, 160), (3, 7, 9)]
        assert all((tensor.dtype, tensor.device.type) == (torch.uint8, device) for tensor in output)

    def test_are_a_pure_function_of_bytes_and_draws_whatever_threads_and_queue(self, device: str) -> None:
        transform = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.PILToTensor()])
        compiled = Compiled(transform, device, 16)
        calls = compiled.calls(images("landscape", "portrait", "grey", "PNG"))
        (first,) = compiled.outputs(calls)
        torch.manual_seed(99)
        (again,) = compiled.outputs(calls)
        (backwards,) = compiled.outputs(calls[::-1])
        (alone,) = compiled.outputs(calls[2:3])
        found = [(again, first), (backwards, first.flip(0)), (alone, first[2:3])]
        for threads, depth in ((1, 1), (3, 4)):
            device_id = None if device == "cpu" else 0
            options = PipelineOptions(4, device_id=device_id, num_threads=threads, prefetch_queue_depth=depth)
            compiled.server = PlanServer(compiled.transform.plan, options, OutputFormat())
            found.append((compiled.outputs(calls)[0], first))
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
    def test_threads_are_those_given_or_one_more_than_the_cores_and_beside_a_gpu_at_most_four(self) -> None:
        cores = len(os.sched_getaffinity(0))
        assert (PipelineOptions(8).threads, PipelineOptions(8, num_threads=3).threads) == (cores + 1, 3)
        assert PipelineOptions(8, device_id=0).threads == min(4, cores)
        assert PipelineOptions(8, device_id=0, num_threads=7).threads == 7

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
    def test_large_photographs_are_decoded_by_cuda_too_where_there_are_many_cores_and_progressive_ones_by_it_alone(
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
    def test_what_is_given_stays_for_large_photographs_too_and_so_does_a_cpus(self, options: PipelineOptions) -> None:
        assert options.for_files_of(1e6, 1.0) == options
