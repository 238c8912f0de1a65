"""Plans of transforms as programs: bit for bit what torchvision makes of the decoded image, with the same draws."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from timm.data import auto_augment as timm
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from proxyloader.kernels.operations import build_programs, get_missing_kernel
from proxyloader.transforms.chain import START

from ..compare import jpeg_of, opened, seed_all
from ..undecoded import image_calls_in, opened_late
from .emulation import run

SIZES = [(223, 161), (97, 120), (64, 65), (130, 40)]
"""Width and height of the images."""

NORMALIZE = v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
BICUBIC, BILINEAR, NEAREST = InterpolationMode.BICUBIC, InterpolationMode.BILINEAR, InterpolationMode.NEAREST
CROP = v1.RandomResizedCrop(48)

EXACT: dict[str, list[Any]] = {
    "train": [v1.RandomResizedCrop(64), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE],
    "train, v2": [v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), v2.ToImage(),
                  v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,) * 3, (0.25,) * 3)],
    "cropped, normalized and flipped": [v1.Resize((60, 70)), v1.ToTensor(), v1.RandomCrop(64, 3),
                                        v1.RandomHorizontalFlip(), NORMALIZE, v1.RandomVerticalFlip()],
    "lanczos": [v1.Resize((50, 90), InterpolationMode.LANCZOS), v1.ToTensor()],
    "nearest": [v1.Resize((50, 90), NEAREST), v1.ToTensor()],
    "ragged": [v1.Pad((3, 5, 7, 1), fill=(1, 2, 3)), v1.RandomHorizontalFlip(), v1.ToTensor()],
    "RandAugment": [CROP, v1.RandAugment(4), v1.ToTensor(), NORMALIZE],
    "AutoAugment": [CROP, v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10), v1.ToTensor()],
    "AugMix": [CROP, v1.AugMix(), v1.ToTensor()],
    "SimCLR": [CROP, v1.RandomHorizontalFlip(), v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
               v1.RandomGrayscale(0.2), v1.ToTensor()],
    "warps": [v1.RandomRotation(40, BILINEAR, expand=True), v1.RandomAffine(20, (0.1, 0.2), (0.7, 1.3), 10),
              v1.RandomPerspective(p=0.7, interpolation=BILINEAR, fill=3), v1.Resize((40, 60)), v1.ToTensor()],
    "others": [v1.RandomInvert(), v1.RandomPosterize(3), v1.RandomSolarize(100.5), v1.RandomAutocontrast(),
               v1.RandomEqualize(), v1.RandomAdjustSharpness(1.7), v2.RandomChannelPermutation(), v1.ToTensor()],
    "choices": [v1.RandomChoice([v1.RandomCrop(40), v1.Resize((40, 40))]),
                v1.RandomOrder([v1.RandomInvert(), v1.ColorJitter(0.5)]), v1.ToTensor()],
    "timm's RandAugment": [CROP, timm.rand_augment_transform("rand-m9-mstd0.5-inc1", {"img_mean": (124, 116, 104)}),
                           timm.rand_augment_transform("rand-m7-n4", {"interpolation": 3}), v1.ToTensor()],
    "erasing": [CROP, v1.ToTensor(), NORMALIZE, v1.RandomErasing(0.9, value="random")],
    "erasing, color": [CROP, v1.ToTensor(), NORMALIZE, v1.RandomErasing(0.9, value=(0.1, -2.0, 3.0))],
}  # fmt: skip
"""Plans of PIL images, for one batch. ``tests/transforms`` has those of each class, and on a CPU runs kernels, too."""

TENSORS: dict[str, Any] = {
    "rotations": lambda v: [v.RandomRotation(40, expand=True), v.RandomRotation(25, BILINEAR, fill=(1, 20.5, 255)),
                            v.RandomRotation(90, BILINEAR, center=(3, 5), fill=None if v is v2 else 0)],
    "affine": lambda v: [v.RandomAffine(20, (0.1, 0.2), (0.7, 1.3), 10),
                         v.RandomAffine(5, (0.1, 0.2), shear=(1, 2, 3, 4), fill=9),
                         v.RandomAffine(30, None, (0.8, 1.1), interpolation=BILINEAR, fill=7, center=(20, 1))],
    "perspective": lambda v: [v.RandomPerspective(0.6, 0.8), v.RandomPerspective(0.4, 1, NEAREST, (9, 0, 250))],
    "of grey": lambda v: [v.Grayscale(), v.RandomPerspective(0.6, 0.8, fill=77), v.RandomRotation(30, BILINEAR)],
    "resizes": lambda v: [v.RandomCrop((39, 50), pad_if_needed=True), v.Resize(64, antialias=True),
                          v.Resize((90, 70)), v.RandomHorizontalFlip(), v.Resize((50, 40), BICUBIC)],
    "RandAugment": lambda v: [v.RandAugment(4, 15, fill=[9.0, 1.5, 99.0])],
    "AutoAugment": lambda v: [v.AutoAugment(interpolation=BILINEAR)],
    "TrivialAugmentWide": lambda v: [v.TrivialAugmentWide(interpolation=BILINEAR, fill=7)],
    "jitter": lambda v: [v.ColorJitter(0.4, 0.4, 0.4, 0.1), v.RandomAdjustSharpness(1.7), v.RandomAutocontrast(),
                         v.RandomGrayscale(0.3)],
}  # fmt: skip
"""Plans of uint8 tensors, in both versions."""

FLOATS: dict[str, Any] = {
    "evaluation": lambda v: [v1.ToTensor(), v.Resize(40, antialias=True), v.CenterCrop((32, 24)), NORMALIZE],
    "training": lambda v: [v1.ToTensor(), v.RandomResizedCrop(24, antialias=True), v.RandomHorizontalFlip(), NORMALIZE],
    "crops and flips": lambda v: [v1.ToTensor(), v.RandomCrop(31), v.Resize((40, 61), BICUBIC, antialias=True),
                                  v.RandomHorizontalFlip(), v.RandomCrop((30, 20)), v.RandomVerticalFlip(),
                                  v.RandomHorizontalFlip(), v.RandomCrop((20, 19)), v.RandomErasing(0.5)],
    "of grey": lambda v: [v1.Grayscale(), v1.ToTensor(), v.Resize((50, 20), antialias=True)],
    "moved pixels": lambda v: [v1.ToTensor(), v.RandomRotation(9), v2.RandomChannelPermutation(), v.Resize(60, NEAREST),
                               v.RandomPerspective(0.5, 1, NEAREST), v.RandomAffine(20, (0.1, 0.1)), NORMALIZE],
    "levels as floats": lambda v: [v2.ToImage(), v2.ToDtype(torch.float32), v2.Resize(30), v2.ToPureTensor()],
}  # fmt: skip
"""Plans of float tensors, in both versions. Each is within 1e-6 of torchvision's."""


def compose(transforms: list[Any]) -> Any:
    return v2.Compose(transforms) if isinstance(transforms[0], v2.Transform) else v1.Compose(transforms)


def recorded(transforms: Iterable[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the calls that transforms record, each of another image, and torchvision's tensors."""
    calls, theirs = [], []
    for seed, transform in enumerate(transforms):
        data = jpeg_of(SIZES[seed % len(SIZES)], seed)
        seed_all(seed)
        theirs.append(torch.as_tensor(transform(opened(data))))
        seed_all(seed)
        with opened_late():
            (call,) = image_calls_in(transform(opened(data)))
        assert get_missing_kernel(call.plan) == ""
        calls.append(call)
    return calls, theirs


@pytest.mark.parametrize("version", [v1, v2])
def test_normalizing_some_images_of_a_batch_is_left_to_torchvision(version: Any) -> None:
    chain = START.through(version.Compose([v1.ToTensor(), version.RandomApply([NORMALIZE])]))
    assert chain is not None
    assert get_missing_kernel(chain.plan).endswith("with branches that convert or normalize differently")


def outputs_of(transforms: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the kernels' and torchvision's tensor for each image."""
    calls, theirs = recorded([compose(transforms)] * 3 * len(SIZES))
    return list(zip(run_programs(calls), theirs, strict=True))


def run_programs(calls: list[Any]) -> list[torch.Tensor]:
    images = [np.asarray(call.image.decoded()) for call in calls]
    programs = build_programs([(call.plan, call.image.size[::-1], call.row.packed()) for call in calls])
    return run(images, programs, "CHW", getattr(torch, calls[0].plan.output.dtype))


@pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", FLOATS)
def test_plan_of_floats_is_within_a_millionth(name: str, version: Any) -> None:
    for ours, theirs in outputs_of(FLOATS[name](version)):
        torch.testing.assert_close(ours, theirs, atol=1e-6 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", TENSORS)
def test_plan_of_tensors(name: str, version: Any) -> None:
    """Exact, but for v2's colors: see ``truth.CLOSE``."""
    share = 0.002 if version is v2 and name in ("RandAugment", "AutoAugment", "TrivialAugmentWide", "jitter") else 0
    start = [v1.PILToTensor()] if version is v1 else [v2.ToImage()]
    for ours, theirs in outputs_of([*start, *TENSORS[name](version)]):
        off = (ours.int() - theirs.int()).abs()
        assert off.max() <= 1 and (off > 0).float().mean() <= share


def test_images_of_a_batch_may_have_different_plans() -> None:
    """With and without parameters, with branches, arrays and resizes of floats, of one kind of output."""
    plans = {**EXACT, "floats": FLOATS["evaluation"](v1), "floats, flipped": FLOATS["crops and flips"](v1)}
    calls, expected = recorded(compose(parts) for parts in [*plans.values()] * 4)
    for name, ours, theirs in zip([*plans] * 4, run_programs(calls), expected, strict=True):
        bound = 1e-6 * float(theirs.abs().max()) if name.startswith("floats") else 0
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= bound, name
