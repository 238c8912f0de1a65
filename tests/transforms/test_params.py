"""What is drawn: the operations that torchvision does, in its order, with its numbers to the last bit of float32; and
torch's generator, and Python's, go on from the same state."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms
import torchvision.transforms.functional as F1
import torchvision.transforms.v2.functional as F2
from PIL import Image
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2
from torchvision.transforms import transforms as v1

from proxyloader.transforms import color, geometry, warp
from proxyloader.transforms.params import bernoulli
from proxyloader.transforms.plan import Step
from proxyloader.transforms.registry import plan_for

from ..compare import Done, taken

IMAGES = 200
SIZES = [(40, 31), (31, 40), (100, 75), (224, 160), (7, 9)]
"""(width, height)"""

COLORS = {
    "adjust_brightness": color.Brightness,
    "adjust_contrast": color.Contrast,
    "adjust_saturation": color.Saturation,
    "adjust_hue": color.Hue,
    "adjust_sharpness": color.Sharpness,
    "autocontrast": color.Autocontrast,
    "equalize": color.Equalize,
    "invert": color.Invert,
    "permute_channels": color.ChannelOrder,
    "posterize": color.Posterize,
    "solarize": color.Solarize,
}
"""torchvision's functionals, and the step that does the same."""

FLIPS = {Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM}

both_versions = pytest.mark.parametrize("version", [torchvision.transforms, v2], ids=["v1", "v2"])
bilinear: Any = {"interpolation": InterpolationMode.BILINEAR}
"""What is nearest is brought to Pillow's fixed-point numbers first; ``test_warp.py`` holds that to Pillow's pixels."""


def numbers_of(kind: type[Step], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, ...]:
    values = [*args, *kwargs.values()]
    if kind is color.Hue:  # Pillow adds whole levels to a byte
        return (float(int(values[0] * 255) % 256),)
    if kind is color.Solarize:  # levels are whole
        return (float(math.ceil(values[0])),)
    if kind is color.ChannelOrder:
        return tuple(map(float, values[0]))
    return tuple(map(float, values))


@contextlib.contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Done]]:
    """What torchvision does to PIL images: each operation is written down in place of being done."""
    done: list[Done] = []

    def recorder(kind: type[Step]) -> Callable[..., Any]:
        def write_down(image: Any, *args: Any, **kwargs: Any) -> Any:
            done.append((kind, numbers_of(kind, args, kwargs)))
            return image

        return write_down

    def transform(image: Image.Image, size: Any, method: Any, data: Any, *_: Any, **__: Any) -> Image.Image:
        numbers = tuple(map(float, data))
        if method == Image.Transform.AFFINE:
            done.append((warp.Affine, (float(size[1]), float(size[0]), *numbers)))
        else:
            done.append((warp.Perspective, numbers))
        return image.resize(size, Image.Resampling.NEAREST)

    transpose, call_kernel = Image.Image.transpose, v2.Transform._call_kernel

    def flip(image: Image.Image, method: Image.Transpose) -> Image.Image:
        if method in FLIPS:
            done.append((geometry.Flip, (1.0,)))
        return transpose(image, method)

    def call(self: Any, functional: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
        ours = functional.__name__ == "write_down"
        return functional(image, *args, **kwargs) if ours else call_kernel(self, functional, image, *args, **kwargs)

    with monkeypatch.context() as patch:
        for name, kind in COLORS.items():
            for module in (F1, F2):
                if hasattr(module, name):
                    patch.setattr(module, name, recorder(kind))
        patch.setattr(v2.Transform, "_call_kernel", call)
        patch.setattr(Image.Image, "transform", transform)
        patch.setattr(Image.Image, "transpose", flip)
        yield done


def nothing(done: Done) -> bool:
    """torchvision leaves these out, or may."""
    kind, numbers = done
    return (kind is warp.Affine and numbers[2:] == (1, 0, 0, 0, 1, 0)) or (kind is geometry.Flip and numbers == (0,))


def assert_draws_as_torchvision(transform: Any, monkeypatch: pytest.MonkeyPatch, *also: type[Step]) -> list[Done]:
    """The same operations and states for images of several sizes; of ``also``, the numbers are not looked at.

    Returns:
        All that was done.
    """
    everything: list[Done] = []
    plan = plan_for(v1.Compose([transform, v1.PILToTensor()]))
    pictures = [Image.new("RGB", size, "olive") for size in SIZES]
    states = []
    torch.manual_seed(7)
    random.seed(7)
    with recording(monkeypatch) as done:
        for k in range(IMAGES):
            transform(pictures[k % len(pictures)])
            states.append((len(done), torch.get_rng_state(), random.getstate()))
    torch.manual_seed(7)
    random.seed(7)
    start = 0
    for k, (end, state, python_state) in enumerate(states):
        width, height = SIZES[k % len(SIZES)]
        row = plan.sample_params(height, width)
        assert torch.equal(torch.get_rng_state(), state), f"image {k} left the generator in another state"
        assert random.getstate() == python_state, f"image {k} left Python's generator in another state"
        wanted = [(kind, tuple(np.array(numbers, np.float32))) for kind, numbers in done[start:end]]
        found = [each for each in taken(plan.steps[:-1], row) if each[0] not in also]
        assert [each for each in found if not nothing(each)] == [each for each in wanted if not nothing(each)], k
        everything += found
        start = end
    return everything


def kinds_in(done: list[Done]) -> set[type[Step]]:
    return {kind for kind, _ in done}


class TestColors:
    @both_versions
    @pytest.mark.parametrize(
        "arguments",
        [(0.4, 0.4, 0.4, 0.5), (0.4,), (0, 0.4), (0, 0, 0.4), (0, 0, 0, 0.4), ((0.5, 0.5), 0, (0, 3), 0)],
        ids=["all", "brightness", "contrast", "saturation", "hue", "given ranges"],
    )
    def test_color_jitter(self, version: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        done = assert_draws_as_torchvision(version.ColorJitter(*arguments), monkeypatch)
        assert len(done) == IMAGES * sum(value != 0 for value in arguments)

    @pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
    def test_random_photometric_distort(self, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
        done = assert_draws_as_torchvision(v2.RandomPhotometricDistort(p=p), monkeypatch)
        assert len(kinds_in(done)) == (5 if p else 0)

    def test_random_channel_permutation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done = assert_draws_as_torchvision(v2.RandomChannelPermutation(), monkeypatch)
        assert len(set(done)) == 6

    @both_versions
    @pytest.mark.parametrize("p", [0, 0.3, 1])
    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("RandomInvert", ()),
            ("RandomPosterize", (3,)),
            ("RandomSolarize", (99.5,)),
            ("RandomAdjustSharpness", (1.7,)),
            ("RandomAutocontrast", ()),
            ("RandomEqualize", ()),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_done_or_not(
        self, version: Any, name: str, arguments: Any, p: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = assert_draws_as_torchvision(getattr(version, name)(*arguments, p=p), monkeypatch)
        assert abs(len(done) - p * IMAGES) < IMAGES / 10


class TestWarps:
    @both_versions
    @pytest.mark.parametrize("expand", [False, True], ids=["", "expand"])
    @pytest.mark.parametrize("center", [None, (3, 5)], ids=["", "center"])
    def test_random_rotation(self, version: Any, expand: bool, center: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        transform = version.RandomRotation((-170, 180), expand=expand, center=center, **bilinear)
        assert len(assert_draws_as_torchvision(transform, monkeypatch)) == IMAGES

    @both_versions
    @pytest.mark.parametrize(
        "arguments",
        [
            {"degrees": 30},
            {"degrees": 0, "translate": (0.2, 0.3)},
            {"degrees": 0, "scale": (0.5, 1.7)},
            {"degrees": 0, "shear": 20},
            {"degrees": 0, "shear": (-10, 20, 5, 30)},
            {"degrees": (5, 50), "translate": (0.5, 0), "scale": (0.9, 1.1), "shear": (3, 4), "center": (3, 5)},
        ],
        ids=["degrees", "translate", "scale", "shear along x", "shear along both", "all"],
    )
    def test_random_affine(self, version: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        transform = version.RandomAffine(**arguments, **bilinear)
        assert len(assert_draws_as_torchvision(transform, monkeypatch)) == IMAGES

    @both_versions
    @pytest.mark.parametrize(("distortion_scale", "p"), [(0.5, 0.5), (1.0, 1.0), (0.2, 0.1)])
    def test_random_perspective(
        self, version: Any, distortion_scale: float, p: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = assert_draws_as_torchvision(version.RandomPerspective(distortion_scale, p), monkeypatch)
        assert abs(len(done) - p * IMAGES) < IMAGES / 10


class TestChoices:
    @both_versions
    @pytest.mark.parametrize("p", [0, 0.3, 1])
    def test_random_apply(self, version: Any, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
        transform = version.RandomApply([version.ColorJitter(0.3, 0.3), version.RandomRotation(9, **bilinear)], p)
        assert abs(len(assert_draws_as_torchvision(transform, monkeypatch)) - 3 * p * IMAGES) < 3 * IMAGES / 10

    @both_versions
    @pytest.mark.parametrize("p", [None, [3, 0, 1]], ids=["", "p"])
    def test_random_choice(self, version: Any, p: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        branches = [version.ColorJitter(0.3, 0.3), version.RandomInvert(0.3), version.RandomAffine(9, **bilinear)]
        done = assert_draws_as_torchvision(version.RandomChoice(branches, p), monkeypatch)
        assert len(kinds_in(done)) == (4 if p is None else 3)

    @both_versions
    def test_random_order(self, version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        flip, jitter = version.RandomHorizontalFlip(), version.ColorJitter(0.3, 0.3)
        turn = version.RandomRotation(20, expand=True, **bilinear)
        done = assert_draws_as_torchvision(version.RandomOrder([flip, jitter, turn]), monkeypatch)
        assert len(kinds_in(done)) == 4

    @both_versions
    def test_nested(self, version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = version.RandomOrder([version.RandomInvert(), version.RandomAffine(9, **bilinear)])
        middle = version.RandomApply([inner, version.ColorJitter(0.2)], 0.7)
        transform = version.RandomChoice([middle, version.Compose([version.RandomPosterize(3), middle])])
        assert len(kinds_in(assert_draws_as_torchvision(transform, monkeypatch))) == 4

    @both_versions
    def test_around_what_changes_the_size(self, version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        crop = version.RandomCrop((20, 30), pad_if_needed=True)
        turn = version.RandomRotation(30, expand=True, **bilinear)
        transform = version.Compose(
            [version.RandomChoice([crop, turn]), version.RandomAffine(0, (0.5, 0.5), **bilinear)]
        )
        assert_draws_as_torchvision(transform, monkeypatch, geometry.Crop)


class TestAutomatic:
    @both_versions
    @pytest.mark.parametrize("policy", AutoAugmentPolicy, ids=lambda policy: policy.value)
    def test_auto_augment(self, version: Any, policy: AutoAugmentPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        done = assert_draws_as_torchvision(version.AutoAugment(policy, **bilinear), monkeypatch)
        assert len(kinds_in(done)) >= 6

    @both_versions
    @pytest.mark.parametrize("arguments", [(), (3, 15), (0,), (1, 30), (2, 4, 11)], ids=str)
    def test_rand_augment(self, version: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        done = assert_draws_as_torchvision(version.RandAugment(*arguments, **bilinear), monkeypatch)
        assert len(kinds_in(done)) == (0 if arguments == (0,) else 9)

    @both_versions
    @pytest.mark.parametrize("bins", [31, 5])
    def test_trivial_augment_wide(self, version: Any, bins: int, monkeypatch: pytest.MonkeyPatch) -> None:
        done = assert_draws_as_torchvision(version.TrivialAugmentWide(bins, **bilinear), monkeypatch)
        assert len(kinds_in(done)) == 9


def test_a_chance_is_compared_as_torch_does() -> None:
    """With ``p`` just the number that is drawn, and its neighbours in float64 and float32."""
    for seed in range(200):
        torch.manual_seed(seed)
        drawn = torch.rand(1).item()
        near = [math.nextafter(drawn, side) for side in (0, 1)]
        near += [float(np.nextafter(np.float32(drawn), np.float32(side))) for side in (0, 1)]
        for p in (drawn, *near, 0.0, 0.1, 0.5, 0.9, 1.0):
            torch.manual_seed(seed)
            wanted, state = bool(torch.rand(1) < p), torch.get_rng_state()
            torch.manual_seed(seed)
            assert bernoulli(p) == wanted, (seed, p)
            assert torch.equal(torch.get_rng_state(), state)
