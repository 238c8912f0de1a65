"""Grey images: Pillow's luma for PIL images and torchvision's for tensors, to the level."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader import UnsupportedTransformError
from proxyloader.transforms.registry import plan_for

from .compare import EXACT, Bound, Images, assert_as_torchvision, images

NEARLY_EXACT = Bound(1e-3, 0, 1)
"""In float32, 20 of the 16.8 million colours end on the other side of a whole number."""

both_versions = pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])
each_channels = pytest.mark.parametrize("channels", [1, 3])


@pytest.fixture(scope="module")
def colors() -> Images:
    """A quarter of a million colours, without the decoder's part in it."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)).save(file, "PNG")
    return {"colours": file.getvalue()}


@both_versions
@each_channels
def test_of_a_pil_image_is_pillows(version: Any, channels: int, colors: Images, device: str) -> None:
    transform = v1.Compose([version.Grayscale(channels), v1.PILToTensor()])
    assert_as_torchvision(transform, device, images() | colors, bound=EXACT)


@both_versions
@each_channels
def test_of_a_uint8_tensor_is_torchvisions(version: Any, channels: int, colors: Images, device: str) -> None:
    transform = v1.Compose([v1.PILToTensor(), version.Grayscale(channels)])
    assert_as_torchvision(transform, device, images() | colors, bound=NEARLY_EXACT)


@both_versions
@each_channels
@pytest.mark.parametrize("scale", [True, False])
def test_of_a_float_tensor_keeps_fractions(version: Any, channels: int, scale: bool, device: str) -> None:
    to_float = [v2.ToImage(), v2.ToDtype(torch.float32, scale=scale)]
    assert_as_torchvision(v1.Compose([*to_float, version.Grayscale(channels)]), device, bound=EXACT)
    normalized = v1.Compose([*to_float, v2.Normalize([0.1, 0.2, 0.3], [2, 3, 4]), version.Grayscale(channels)])
    assert_as_torchvision(normalized, device, bound=EXACT)


@both_versions
@each_channels
def test_of_a_grey_image(version: Any, channels: int, device: str) -> None:
    pil = v1.Compose([version.Grayscale(1), version.Grayscale(channels), v1.PILToTensor()])
    assert_as_torchvision(pil, device, bound=EXACT)
    # The v1 class leaves a grey tensor at one channel, whatever it is asked for; the shapes are compared too.
    tensor = v1.Compose([v1.PILToTensor(), version.Grayscale(1), version.Grayscale(channels)])
    assert_as_torchvision(tensor, device, bound=NEARLY_EXACT)


@both_versions
@each_channels
def test_among_other_steps(version: Any, channels: int, device: str) -> None:
    transform = v1.Compose(
        [
            version.RandomHorizontalFlip(),
            version.Grayscale(channels),
            version.RandomVerticalFlip(),
            version.CenterCrop(70),
            v1.ToTensor(),
            version.RandomHorizontalFlip(),
            version.Normalize([0.5], [0.25]),
        ]
    )
    assert_as_torchvision(transform, device, bound=EXACT)


def test_a_normalisation_for_three_channels_does_not_fit_one() -> None:
    with pytest.raises(UnsupportedTransformError, match=r"Normalize: mean has 3 values for images of 1 channels"):
        plan_for(v1.Compose([v1.Grayscale(), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.5] * 3)]))


@both_versions
def test_channels_other_than_1_and_3_are_refused(version: Any) -> None:
    with pytest.raises(
        UnsupportedTransformError, match=r"Grayscale: num_output_channels=2 is not allowed; 1 and 3 are"
    ):
        plan_for(v1.Compose([version.Grayscale(2), v1.ToTensor()]))
