"""Rotations, affine and perspective warps of PIL images. ``tests/kernels/test_operations.py`` has those of tensors."""

from __future__ import annotations

from typing import Any

import pytest
from torchvision.transforms import InterpolationMode, v2

from ..compare import assert_alike, both_versions, composed, lossless
from ..plans import has_plan

each_interpolation = pytest.mark.parametrize(
    "interpolation", [InterpolationMode.NEAREST, InterpolationMode.BILINEAR], ids=lambda mode: mode.value
)
WARPS: dict[str, tuple[str, dict[str, Any]]] = {
    "rotation": ("RandomRotation", {"degrees": 180}),
    "rotation that expands": ("RandomRotation", {"degrees": (20, 70), "expand": True}),
    "rotation about a point": ("RandomRotation", {"degrees": 30, "center": (3, 5)}),
    "and it expands": ("RandomRotation", {"degrees": 170, "center": (3, 5), "expand": True}),
    "affine, degrees": ("RandomAffine", {"degrees": 40}),
    "affine, translate": ("RandomAffine", {"degrees": 0, "translate": (0.3, 0.2)}),
    "affine, scale": ("RandomAffine", {"degrees": 0, "scale": (0.5, 1.7)}),
    "affine, one scale": ("RandomAffine", {"degrees": 0, "scale": (0.75, 0.75), "center": (3, 9)}),
    "affine, shear": ("RandomAffine", {"degrees": 0, "shear": (-20, 30, 5, 25)}),
    "affine, all": ("RandomAffine", {"degrees": 20, "translate": (0.1, 0.1), "scale": (0.8, 1.2), "shear": 10,
                                     "center": (9, 9)}),
    "perspective": ("RandomPerspective", {"distortion_scale": 0.6, "p": 0.8}),
}  # fmt: skip
WITH_A_SURFACE = ("landscape", "portrait", "small", "tiny", "large")
"""torchvision's perspective of a line of pixels has no solution: what it returns is noise."""


@both_versions
@each_interpolation
@pytest.mark.parametrize(("name", "arguments"), WARPS.values(), ids=WARPS)
@pytest.mark.parametrize("fill", [0, 100.6, (250, 20, 130), None], ids=str)
def test_pixels(
    version: Any, interpolation: InterpolationMode, name: str, arguments: Any, fill: Any, device: str
) -> None:
    transform = composed("pil", getattr(version, name)(interpolation=interpolation, fill=fill, **arguments))
    files = lossless(*WITH_A_SURFACE, *(() if name == "RandomPerspective" else ("one pixel high", "one pixel wide")))
    assert_alike(transform, device, files, times=2)


@both_versions
@each_interpolation
def test_of_a_grey_image_and_among_other_steps(version: Any, interpolation: InterpolationMode, device: str) -> None:
    how: Any = {"interpolation": interpolation, "fill": 255}
    warps = [version.RandomRotation(40, **how, expand=True), version.RandomPerspective(0.4, 0.5, **how)]
    steps = [version.RandomHorizontalFlip(), *warps, version.RandomVerticalFlip(), version.CenterCrop(60)]
    assert_alike(composed("pil", version.Grayscale(), *steps), device, lossless(*WITH_A_SURFACE))


@both_versions
@each_interpolation
@pytest.mark.parametrize("expand", [False, True], ids=["", "expand"])
@pytest.mark.parametrize("angle", [0, 45, 90, 180, 270, -90, 450])
def test_by_right_angles_and_between(
    version: Any, interpolation: InterpolationMode, expand: bool, angle: int, device: str
) -> None:
    rotate = version.RandomRotation((angle, angle), interpolation, expand=expand)
    assert_alike(composed("pil", rotate), device, lossless())


def test_tensors_of_any_size_are_transposed_by_v2_if_it_expands(device: str) -> None:
    transform = composed("uint8", v2.RandomRotation((90, 90), expand=True))
    assert_alike(transform, device, lossless())


@both_versions
@pytest.mark.parametrize("fill", [(1, 2), "red", 300, -1], ids=str)
def test_fills_that_no_pixel_can_have_have_no_plan(version: Any, fill: Any) -> None:
    rotate = version.RandomRotation(9)
    rotate.fill = fill
    assert not has_plan(composed("pil", rotate))
