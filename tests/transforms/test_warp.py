"""Rotations, affine and perspective warps: each pixel is fetched from where Pillow or torch fetch it from."""

from __future__ import annotations

from typing import Any

import numpy as np
import nvidia.dali
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from proxyloader import UnsupportedTransformError
from proxyloader.transforms.registry import plan_for

from ..compare import BILINEAR, Bound, Images, assert_alike, both_versions, composed, each_kind, lossless, png_of
from ..outcomes import raises

NEAREST_OF_PIL = Bound(0.02, 0, 255)
"""Pillow counts in 65536ths of a pixel, and so does the matrix that DALI gets. But float32 holds less than those from
256 pixels on, where a place in some thousands falls on the other side of a border."""

NEAREST_OF_TENSORS = Bound(0.05, 4, 255)
"""As NEAREST_OF_PIL; and torch's own float32 places are rounded in several steps, so one in 2000 is another pixel's."""

IN_32NDS = int(nvidia.dali.__version__.split(".")[0]) < 2
"""Older DALIs tell apart no finer places between two pixels, in perspective warps on a CPU."""

BLENDED = Bound(0.15, 4, 255) if IN_32NDS else Bound(0.02, 1, 255)
"""A level where torch or Pillow round otherwise; and at the edge of the image the pixels for which the last bit decides
whether their place is inside."""

BLENDED_FLOATS = Bound(0.15, 6, 32) if IN_32NDS else Bound(0.02, 0.3, 4)
"""torch normalises places to -1..1 and back, which moves them by some 1e-5 of a pixel."""

each_interpolation = pytest.mark.parametrize(
    "interpolation", [InterpolationMode.NEAREST, InterpolationMode.BILINEAR], ids=lambda mode: mode.value
)
each_warp = pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("RandomRotation", {"degrees": 180}, id="rotation"),
        pytest.param("RandomRotation", {"degrees": (20, 70), "expand": True}, id="rotation that expands"),
        pytest.param("RandomRotation", {"degrees": 30, "center": (3, 5)}, id="rotation about a point"),
        pytest.param(
            "RandomRotation", {"degrees": 170, "center": (3, 5), "expand": True}, id="about a point, and it expands"
        ),
        pytest.param("RandomAffine", {"degrees": 40}, id="affine, degrees"),
        pytest.param("RandomAffine", {"degrees": 0, "translate": (0.3, 0.2)}, id="affine, translate"),
        pytest.param("RandomAffine", {"degrees": 0, "scale": (0.5, 1.7)}, id="affine, scale"),
        pytest.param("RandomAffine", {"degrees": 0, "shear": (-20, 30, 5, 25)}, id="affine, shear"),
        pytest.param(
            "RandomAffine",
            {"degrees": 20, "translate": (0.1, 0.1), "scale": (0.8, 1.2), "shear": 10, "center": (9, 9)},
            id="affine, all",
        ),
        pytest.param("RandomPerspective", {"distortion_scale": 0.6, "p": 0.8}, id="perspective"),
    ],
)
WITH_A_SURFACE = ("landscape", "portrait", "small", "tiny", "large", "4:2:2")
"""torchvision's perspective of a line of pixels has no solution: what it returns is noise."""


def bound_of(kind: str, interpolation: InterpolationMode) -> Bound:
    if interpolation == InterpolationMode.NEAREST:
        return NEAREST_OF_PIL if kind == "pil" else NEAREST_OF_TENSORS
    return BLENDED_FLOATS if kind == "float" else BLENDED


class TestPixels:
    @both_versions
    @each_kind
    @each_interpolation
    @each_warp
    def test_are_torchvisions(
        self, version: Any, kind: str, interpolation: InterpolationMode, name: str, arguments: Any, device: str
    ) -> None:
        transform = composed(kind, getattr(version, name)(interpolation=interpolation, **arguments))
        files = lossless(
            *WITH_A_SURFACE, *(() if name == "RandomPerspective" else ("one pixel high", "one pixel wide"))
        )
        assert_alike(transform, device, files, bound=bound_of(kind, interpolation), times=2)

    @both_versions
    @each_kind
    @each_interpolation
    @pytest.mark.parametrize("fill", [100.6, (250, 20, 130), None], ids=str)
    @pytest.mark.parametrize("name", ["RandomRotation", "RandomPerspective"])
    def test_around_the_image_are_the_fill(
        self, version: Any, kind: str, interpolation: InterpolationMode, fill: Any, name: str, device: str
    ) -> None:
        if kind == "float" and fill is not None:
            fill = tuple(value / 255 for value in fill) if isinstance(fill, tuple) else fill / 255
        arguments = {} if name == "RandomPerspective" else {"degrees": (10, 80)}
        transform = composed(kind, getattr(version, name)(**arguments, interpolation=interpolation, fill=fill))
        files = lossless("portrait", "small", "tiny", "4:2:2")
        assert_alike(transform, device, files, bound=bound_of(kind, interpolation), times=2)

    @both_versions
    @each_kind
    @each_interpolation
    def test_of_a_grey_image(self, version: Any, kind: str, interpolation: InterpolationMode, device: str) -> None:
        how: Any = {"interpolation": interpolation, "fill": 1 if kind == "float" else 255}
        warps = [version.RandomRotation(40, **how), version.RandomPerspective(0.4, 0.5, **how)]
        transform = composed(kind, version.Grayscale(), *warps)
        bound = bound_of(kind, interpolation)
        assert_alike(transform, device, lossless(*WITH_A_SURFACE), bound=bound)

    @both_versions
    @each_kind
    def test_after_and_before_other_steps(self, version: Any, kind: str, device: str) -> None:
        transform = composed(
            kind,
            version.RandomHorizontalFlip(),
            version.RandomAffine(20, interpolation=InterpolationMode.BILINEAR),
            version.RandomHorizontalFlip(),
            version.RandomRotation(20, interpolation=InterpolationMode.BILINEAR, expand=True),
            version.RandomVerticalFlip(),
            version.CenterCrop(60),
        )
        bound = (
            BLENDED_FLOATS if kind == "float" else Bound(0.15, 4, 255) if IN_32NDS else Bound(0.02, 2, 255)
        )  # a level at each
        assert_alike(transform, device, lossless(), bound=bound)


class TestRightAngles:
    """By quarters of a circle Pillow and v2 transpose, where that fits; v1 warps tensors."""

    @both_versions
    @each_kind
    @each_interpolation
    @pytest.mark.parametrize("expand", [False, True], ids=["", "expand"])
    @pytest.mark.parametrize("angle", [0, 90, 180, 270, -90, 450])
    def test_of_pil_images_and_of_tensors_of_even_sides(
        self, version: Any, kind: str, interpolation: InterpolationMode, expand: bool, angle: int, device: str
    ) -> None:
        rotate = version.RandomRotation((angle, angle), interpolation, expand=expand)
        assert_alike(composed(kind, *([] if kind == "pil" else [version.CenterCrop((40, 60))]), rotate), device)

    @pytest.mark.parametrize("kind", ["uint8", "float"])
    @pytest.mark.parametrize("angle", [90, 270])
    def test_of_tensors_of_any_size_with_v2_and_expand(self, kind: str, angle: int, device: str) -> None:
        transform = composed(kind, v2.RandomRotation((angle, angle), expand=True))
        assert_alike(transform, device, lossless())

    @both_versions
    @pytest.mark.parametrize("angle", [30, 45, 60])
    def test_between_right_angles_take_few_pixels_from_a_border(self, version: Any, angle: int, device: str) -> None:
        transform = composed("uint8", version.RandomRotation((angle, angle)))
        assert_alike(transform, device, lossless(*WITH_A_SURFACE), bound=NEAREST_OF_TENSORS)

    @both_versions
    @pytest.mark.parametrize("kind", ["uint8", "float"])
    @pytest.mark.parametrize("expand", [False, True], ids=["", "expand"])
    def test_of_tensors_of_any_size_by_blending(self, version: Any, kind: str, expand: bool, device: str) -> None:
        transform = composed(kind, version.RandomRotation((90, 90), InterpolationMode.BILINEAR, expand=expand))
        assert_alike(transform, device, lossless(), bound=BILINEAR if kind == "uint8" else BLENDED_FLOATS)


def boards(*sizes: tuple[int, int]) -> Images:
    """Boards of black and white pixels, (width, height), where each pixel that is another one's is seen."""
    files = {}
    for width, height in sizes:
        white = np.add.outer(np.arange(height), np.arange(width)) % 2 * 255
        picture = np.stack([white, 255 - white, white], 2).astype(np.uint8)
        files[f"{width} x {height}"] = png_of(Image.fromarray(picture))
    return files


class TestNearestOfPil:
    BOARDS = boards((64, 64), (63, 64), (65, 65), (225, 224), (500, 375))

    @both_versions
    @pytest.mark.parametrize(
        "arguments",
        [
            *({"scale": (scale, scale)} for scale in (0.5, 0.75, 0.8, 2, 3)),
            {"scale": (0.8, 0.8), "translate": (0.3, 0.4), "fill": (9, 99, 255)},
            {"scale": (0.3, 3), "translate": (1, 1), "fill": 77},
            {"scale": (0.5, 0.5), "center": (3, 100), "shear": (0, 0)},
            {"translate": (0.3, 0.4), "fill": None},
        ],
        ids=str,
    )
    def test_is_exact_where_nothing_is_turned_or_sheared(self, version: Any, arguments: Any, device: str) -> None:
        transform = composed("pil", version.RandomAffine(0, **arguments))
        assert_alike(transform, device, lossless() | self.BOARDS, times=2)

    @both_versions
    def test_of_a_grey_image_is_exact_likewise(self, version: Any, device: str) -> None:
        transform = composed("pil", version.Grayscale(), version.RandomAffine(0, scale=(0.75, 0.75), fill=200))
        assert_alike(transform, device, lossless("grey", "tiny"))

    @both_versions
    @pytest.mark.parametrize("arguments", [(45,), (30,), (90,), (0, None, None, 45)], ids=str)
    def test_takes_few_other_pixels_of_a_board(self, version: Any, arguments: Any, device: str) -> None:
        degrees, *others = arguments
        transform = composed("pil", version.RandomAffine((degrees, degrees), *others))
        assert_alike(transform, device, self.BOARDS, bound=Bound(0.6, 255, 255))


class TestRefusals:
    @both_versions
    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            pytest.param("RandomRotation", {"degrees": (90, 90)}, id="a quarter turn"),
            pytest.param("RandomAffine", {"degrees": (270, 270)}, id="a quarter turn, affine"),
            pytest.param("RandomAffine", {"degrees": 0, "scale": (0.5, 0.5)}, id="half the size"),
            pytest.param("RandomAffine", {"degrees": 0, "shear": (45, 45, 45, 45)}, id="sheared by the diagonal"),
        ],
    )
    def test_of_what_takes_all_pixels_of_a_tensor_from_between_two(
        self, version: Any, name: str, arguments: Any, device: str
    ) -> None:
        transform = getattr(version, name)(**arguments)
        with raises(UnsupportedTransformError, argument="interpolation", position="transform.transforms[1]"):
            plan_for(composed("uint8", transform))
        plan_for(composed("uint8", getattr(version, name)(**arguments, interpolation=InterpolationMode.BILINEAR)))
        assert_alike(composed("pil", transform), device, lossless("large", "tiny"), bound=NEAREST_OF_PIL)

    @both_versions
    def test_of_what_takes_whole_lines_of_a_pil_image_from_its_edge(self, version: Any, device: str) -> None:
        shrunk = version.RandomAffine(0, scale=(0.8, 0.8), interpolation=InterpolationMode.BILINEAR)
        with raises(UnsupportedTransformError, argument="interpolation", position="transform.transforms[1]"):
            plan_for(composed("pil", version.CenterCrop(65), shrunk))
        assert_alike(composed("pil", version.CenterCrop(66), shrunk), device, lossless("large"), bound=BLENDED)
        on_a_tensor = composed("uint8", version.CenterCrop(65), shrunk)
        assert_alike(on_a_tensor, device, lossless("large"), bound=Bound(0.1, 1, 255))

    @both_versions
    @pytest.mark.parametrize("fill", [(1, 2), "red", 300, -1], ids=str)
    def test_of_fills_that_no_pixel_can_have(self, version: Any, fill: Any) -> None:
        rotate = version.RandomRotation(9)
        rotate.fill = fill
        with raises(UnsupportedTransformError, code="unsupported-argument", argument="fill"):
            plan_for(composed("pil", rotate))
