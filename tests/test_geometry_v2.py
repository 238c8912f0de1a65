"""Sizes that are drawn, images on larger canvases, and the filters beyond bicubic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from proxyloader import EncodedImage, UnsupportedTransformError, compile_transforms
from proxyloader.transforms.registry import plan_for

from .compare import BILINEAR, EXACT, LARGE_BILINEAR, Bound, Images, assert_as_torchvision, images, jpeg_of

LANCZOS = Bound(0.3, 1, 20)
"""As BICUBIC, with more overshoots for Pillow to cut off between its passes."""

NOT_THIN = ("one pixel high", "one pixel wide")
"""Images of which nothing is left where their longer edge is made short; torchvision raises there, too."""

both_versions = pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])

BEFORE = {
    "a PIL image": [],
    "a uint8 tensor": [v2.ToImage()],
    "a float tensor": [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],
}
of_each_kind = pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)


def composed(before: list[Any], *transforms: Any) -> v1.Compose:
    """Ends in a tensor, whatever it begins with."""
    return v1.Compose([*before, *transforms, v2.ToImage()])


def many(*names: str, times: int = 4) -> Images:
    """Each image several times, as each time something else is drawn."""
    return {f"{name} {k}": data for name, data in images(*names).items() for k in range(times)}


def assert_draws_as(transform: Any, params_of: Any, height: int, width: int, columns: slice) -> None:
    """200 draws are those of torchvision's ``make_params``, from the same states of the generator."""
    plan = plan_for(composed([], transform))
    for seed in range(200):
        torch.manual_seed(seed)
        expected = params_of(transform.make_params([torch.empty((3, height, width))]))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert tuple(plan.draw(height, width)[columns]) == tuple(expected)
        assert torch.equal(torch.get_rng_state(), state)


class TestRandomZoomOut:
    @of_each_kind
    def test_is_exact(self, before: list[Any], device: str) -> None:
        transform = composed(before, v2.RandomZoomOut(p=0.7), v2.RandomHorizontalFlip())
        files = images(but=("large",)) | many("small", times=8)
        assert_as_torchvision(transform, device, files, bound=EXACT)

    @pytest.mark.parametrize("fill", [7, (10, 200, 30)], ids=str)
    def test_fills_the_canvas(self, fill: Any, device: str) -> None:
        transform = composed([], v2.RandomZoomOut(fill, (1.1, 2.5), p=1))
        assert_as_torchvision(transform, device, many("landscape", "tiny", "one pixel wide"), bound=EXACT)

    def test_the_next_step_sees_the_canvas(self, device: str) -> None:
        transform = composed([], v2.RandomZoomOut((9, 8, 7), (1, 2)), v2.RandomCrop(9, pad_if_needed=True))
        assert_as_torchvision(transform, device, many("small", "tiny", times=10), bound=EXACT)

    def test_a_range_of_one_number_leaves_the_image(self, device: str) -> None:
        transform = composed([], v2.RandomZoomOut(side_range=(1, 1), p=1))
        assert_as_torchvision(transform, device, images("small"), bound=EXACT)


class TestRandomSizes:
    SIZES = {
        "RandomResize": v2.RandomResize(20, 60),
        "RandomShortestSize": v2.RandomShortestSize([20, 40, 70], 90),
        "RandomShortestSize without a bound": v2.RandomShortestSize(33),
        "ScaleJitter": v2.ScaleJitter((90, 110), (0.3, 1.1)),
    }
    each = pytest.mark.parametrize("transform", SIZES.values(), ids=SIZES)

    @each
    @pytest.mark.parametrize(("height", "width"), [(375, 500), (50, 31), (7, 9)], ids=str)
    def test_are_torchvisions(self, transform: Any, height: int, width: int) -> None:
        def new_size(params: dict[str, Any]) -> Any:
            size = params["size"]
            if len(size) == 2:
                return size
            return v1.Resize(size[0])(torch.empty((3, height, width), device="meta")).shape[1:]

        assert_draws_as(transform, new_size, height, width, slice(0, 2))

    @each
    @of_each_kind
    def test_pixels(self, transform: Any, before: list[Any], device: str) -> None:
        files = images(but=(*NOT_THIN, "large")) | many("small", "portrait")
        bound = EXACT if before is BEFORE["a float tensor"] else BILINEAR
        assert_as_torchvision(composed(before, transform, v2.RandomVerticalFlip()), device, files, bound=bound)

    def test_all_large_ones_are_as_large_resizes(self, device: str) -> None:
        transform = composed([], v2.RandomShortestSize([130, 180], 300))
        assert_as_torchvision(transform, device, images("landscape", "large", "PNG"), bound=LARGE_BILINEAR)

    def test_nearest(self, device: str) -> None:
        transform = composed([], v2.RandomShortestSize(128, interpolation=InterpolationMode.NEAREST))
        files = {"square": jpeg_of((100, 100)), "another": jpeg_of((91, 91))}
        assert_as_torchvision(transform, device, files, bound=EXACT)

    def test_an_image_of_which_nothing_would_be_left_is_an_error_as_in_torchvision(self) -> None:
        compiled = compile_transforms(composed([], v2.ScaleJitter((20, 20), (0.1, 0.2))))
        thin = EncodedImage.from_bytes(images("one pixel high")["one pixel high"])
        with pytest.raises(ValueError, match=r"1 x 64 \(height x width\) would be resized to \(0, [123]\)"):
            compiled(thin)

    def test_a_range_without_a_size_is_refused(self) -> None:
        with pytest.raises(UnsupportedTransformError, match=r"v2\.RandomResize: no size can be drawn from min_size=30"):
            plan_for(composed([], v2.RandomResize(30, 30)))

    @pytest.mark.parametrize("interpolation", ["box", "hamming"])
    def test_what_resize_refuses_they_refuse(self, interpolation: str) -> None:
        for make in (lambda how: v2.RandomResize(9, 12, how), lambda how: v2.ScaleJitter((9, 9), interpolation=how)):
            with pytest.raises(UnsupportedTransformError, match=f"interpolation '{interpolation}' is not translated"):
                plan_for(composed([], make(InterpolationMode(interpolation))))

    @each
    def test_leave_no_size_behind(self, transform: Any) -> None:
        assert plan_for(composed([], v2.CenterCrop(50), transform)).output.size is None


class TestLanczos:
    @both_versions
    @pytest.mark.parametrize("size", [24, (40, 50), (130, 200)], ids=str)
    def test_resize(self, version: Any, size: Any, device: str) -> None:
        transform = composed([], version.Resize(size, InterpolationMode.LANCZOS))
        files = images(but=(*NOT_THIN, "large") if size == 24 else ("large",))
        assert_as_torchvision(transform, device, files, bound=LANCZOS)

    @both_versions
    def test_of_a_large_image(self, version: Any, device: str) -> None:
        transform = composed([], version.RandomResizedCrop(200, interpolation=InterpolationMode.LANCZOS))
        assert_as_torchvision(transform, device, many("large", times=3), bound=LANCZOS)

    @both_versions
    def test_of_a_tensor_is_refused(self, version: Any) -> None:
        expected = "Resize: interpolation 'lanczos' on a tensor .* put the resize before the conversion to a tensor"
        with pytest.raises(UnsupportedTransformError, match=expected):
            plan_for(composed([v1.PILToTensor()], version.Resize(9, InterpolationMode.LANCZOS)))
