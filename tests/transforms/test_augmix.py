"""AugMix: the operations, chains and weights are torchvision's, and so is their mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torchvision.transforms import InterpolationMode, autoaugment, v2
from torchvision.transforms import transforms as v1

from proxyloader.transforms.auto_augment import AugMix, put_chain
from proxyloader.transforms.registry import plan_for

from ..compare import Bound, as_image, assert_alike, both_versions, images, lossless, many

MIXED = Bound(0.3, 1, 25)
"""The weights sum up to about one, and whole levels are cut off: where the sum is nearly whole, the last bit of a float
decides, in a pixel of 50. And a warp may fetch a pixel from the other side of a border."""

DEEP = Bound(0.3, 16, 64)
"""As MIXED; and where one operation upon the other differs in a pixel, Equalize makes levels of it. (On a CPU 16 and at
most 17 of v1, 16 and 77 of v2, in 3 pixels of image 7.)"""


@both_versions
@pytest.mark.parametrize("before", [[], [v2.ToImage()]], ids=["a PIL image", "a uint8 tensor"])
def test_pixels(version: Any, before: list[Any], device: str) -> None:
    files = images(but=("large",)) | many("small", times=40, of=lossless)
    assert_alike(as_image(*before, version.AugMix()), device, files, bound=MIXED)


@both_versions
def test_other_chains_and_fills(version: Any, device: str) -> None:
    nearest = InterpolationMode.NEAREST
    deep = version.AugMix(10, 1, 4, 0.5, False, interpolation=nearest, fill=[10.0, 20.0, 30.0])
    bound, files = replace(DEEP, max=80 if version is v2 else 64), many("small", times=16, of=lossless)
    assert_alike(as_image(deep), device, files, bound=bound)
    wide = version.AugMix(severity=1, mixture_width=5, chain_depth=1, alpha=3.0, fill=40)
    assert_alike(as_image(v2.ToImage(), wide), device, files, bound=MIXED)


@both_versions
def test_of_grey_images_and_among_other_steps(version: Any, device: str) -> None:
    grey = as_image(v1.Grayscale(), version.AugMix(mixture_width=2))
    assert_alike(grey, device, many("small", times=16, of=lossless), bound=MIXED)
    steps = [v1.RandomHorizontalFlip(), v1.RandomApply([version.AugMix(mixture_width=2, chain_depth=1)]), v1.ToTensor()]
    transform = v1.Compose([*steps, v1.RandomVerticalFlip()])
    assert_alike(transform, device, many("small", times=8, of=lossless), bound=MIXED)


@both_versions
def test_draws_are_torchvisions(version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = version.AugMix(severity=7, mixture_width=4)
    (step, _) = plan_for(as_image(transform)).steps
    assert isinstance(step, AugMix)
    image = torch.zeros((3, 31, 47), dtype=torch.uint8)
    chains: list[list[tuple[str, float]]] = []

    def apply(given: Any, name: str, magnitude: float, **_: Any) -> Any:
        if given.data_ptr() == image.data_ptr():
            chains.append([])
        chains[-1].append((name, magnitude))
        return given.clone()

    monkeypatch.setattr(autoaugment, "_apply_op", apply)
    monkeypatch.setattr(v2.AugMix, "_apply_image_or_video_transform", lambda _, *given, **how: apply(*given, **how))
    for seed in range(300):
        chains.clear()
        torch.manual_seed(seed)
        transform(image)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        own = torch._sample_dirichlet(torch.tensor([[1.0, 1.0]]))
        shares = torch._sample_dirichlet(torch.ones((1, 4))) * own[:, 1]
        expected = [float(own[0, 0]), *shares[0].tolist()]
        for chain in chains:
            put_chain(step.source.choice, [step.source.done(*each, (31, 47)) for each in chain], 3, expected)
        torch.manual_seed(seed)
        row: list[float] = []
        step.sample_params((31, 47), row)
        assert row == expected
        assert torch.equal(torch.get_rng_state(), state)
        assert len(row) == step.num_params
