"""timm's transforms: what ``create_transform`` makes is translated, or refused by name."""

from __future__ import annotations

import importlib.util
import inspect
import random
import re
import subprocess
import sys
from typing import Any

import pytest
import timm
import timm.data
import torch
from PIL import Image
from timm.data import create_transform
from timm.data import random_erasing as timm_erasing
from timm.data import transforms as timm_transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F
from torchvision.transforms import transforms as v1

from proxyloader import UnsupportedTransformError, explain
from proxyloader.tools.cli import main
from proxyloader.transforms.plan import ParamRow
from proxyloader.transforms.registry import RULES, plan_for
from proxyloader.transforms.timm import RandomErasing, RandomInterpolation
from proxyloader.transforms.unsupported import REFUSED_TIMM

from ..compare import (
    BICUBIC,
    BILINEAR,
    EXACT,
    Bound,
    Images,
    assert_alike,
    composed,
    generator_states,
    images,
    lossless,
    seed_all,
)

RESIZED = Bound(0.3, 4, 16)
"""A resize, bilinear or bicubic, is a level off here and there, and colours make more of that."""

AUGMENTED = Bound(0.5, 12, 255)
"""As RESIZED; and where images are equalized or solarised, a level becomes many."""

MEAN, STD = (0.5, 0.4, 0.6), (0.2, 0.3, 0.25)


def files() -> Images:
    """Of pictures with a surface: what is made of a line of pixels is enlarged by hundreds."""
    return images("landscape", "portrait", "small", "large", "grey", "4:2:2", "PNG")


def training(**settings: Any) -> Any:
    return create_transform(input_size=64, is_training=True, **settings)


def evaluation(**settings: Any) -> Any:
    return create_transform(**{"input_size": 64, "is_training": False} | settings)


class TestTraining:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"interpolation": "random"},
            {"interpolation": "bicubic", "scale": (0.3, 1.0), "ratio": (0.5, 2.0)},
            {"no_aug": True},
            {"no_aug": True, "interpolation": "bicubic", "normalize": False},
            {"hflip": 0.0, "vflip": 0.7, "mean": MEAN, "std": STD},
            {"color_jitter": (0.3, 0.2, 0.4, 0.1), "hflip": 1.0},
            {"color_jitter": 0.4, "color_jitter_prob": 0.6, "grayscale_prob": 0.3, "gaussian_blur_prob": 0.5},
            {"color_jitter": None, "use_prefetcher": True},
            {"color_jitter": None, "normalize": False},
            {"train_crop_mode": "rkrc", "color_jitter": None},
            {"train_crop_mode": "rkrr", "color_jitter": None, "interpolation": "random"},
            {"train_crop_mode": "rkrr", "scale": (0.5, 1.5), "ratio": (0.5, 2.0), "color_jitter": None},
            {"re_prob": 0.7, "re_mode": "const", "re_count": 3, "color_jitter": None},
            {"re_prob": 0.7, "re_mode": "rand", "re_count": 2, "color_jitter": None},
            {"re_prob": 0.7, "re_mode": "pixel", "re_count": 3, "color_jitter": None},
        ],
        ids=str,
    )
    def test_gives_the_same_pixels(self, settings: dict[str, Any], device: str) -> None:
        assert_alike(training(**settings), device, files(), bound=RESIZED, times=3)

    @pytest.mark.parametrize("interpolation", ["random", "bilinear"])
    @pytest.mark.parametrize(
        "policy",
        ["rand-m9-mstd0.5", "rand-m7-mstd0.5-inc1", "rand-m6-n3-t3aw-inc1", "original", "3a", "augmix-m5-w4-d2"],
    )
    def test_with_automatic_augmentation(self, policy: str, interpolation: str, device: str) -> None:
        transform = training(auto_augment=policy, interpolation=interpolation, re_prob=0.3, re_mode="pixel")
        assert_alike(transform, device, files(), bound=AUGMENTED, times=4)

    def test_of_another_shape(self, device: str) -> None:
        transform = create_transform((3, 48, 96), is_training=True, interpolation="random", color_jitter=None)
        assert plan_for(transform).output.size == (48, 96)
        assert_alike(transform, device, files(), bound=RESIZED)


class TestEvaluation:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"interpolation": "bicubic", "crop_pct": 0.95},
            {"crop_mode": "squash", "crop_pct": 1.0},
            {"crop_mode": "border", "crop_pct": 1.0},
            {"crop_mode": "border", "crop_pct": 0.8, "interpolation": "bicubic", "mean": MEAN, "std": STD},
            {"crop_mode": "border", "interpolation": "random"},
            {"input_size": (3, 48, 96)},
            {"crop_border_pixels": 4},
            {"use_prefetcher": True},
            {"normalize": False},
        ],
        ids=str,
    )
    def test_gives_the_same_pixels(self, settings: dict[str, Any], device: str) -> None:
        assert_alike(evaluation(**settings), device, files(), bound=RESIZED)

    def test_ends_as_the_settings_say(self) -> None:
        assert plan_for(evaluation()).output.dtype == "float32"
        for setting in "use_prefetcher", "normalize":
            assert plan_for(evaluation(**{setting: setting == "use_prefetcher"})).output.dtype == "uint8"


class TestEachClass:
    @pytest.mark.parametrize("size", [20, (30, 200), 700], ids=str)
    @pytest.mark.parametrize("fill", [0, (9, 90, 200)], ids=str)
    @pytest.mark.parametrize("name", ["CenterCropOrPad", "RandomCropOrPad"])
    def test_crops_and_pads_with_a_constant(self, name: str, size: Any, fill: Any, device: str) -> None:
        transform = composed("pil", getattr(timm_transforms, name)(size, fill=fill))
        assert_alike(transform, device, lossless(), times=2)

    @pytest.mark.parametrize("size", [20, (200, 130), (31, 230)], ids=str)
    @pytest.mark.parametrize("name", ["CenterCropOrPad", "RandomCropOrPad"])
    def test_crops_and_pads_with_a_reflection(self, name: str, size: Any, device: str) -> None:
        transform = composed("pil", getattr(timm_transforms, name)(size, padding_mode="reflect"))
        assert_alike(transform, device, lossless("landscape", "portrait", "4:2:2"), times=3)

    def test_reflects_a_line_that_is_cropped_along_it_pads_at_random_and_trims(self, device: str) -> None:
        transform = composed("pil", timm_transforms.CenterCropOrPad((1, 40), padding_mode="reflect"))
        assert_alike(transform, device, lossless("one pixel high"))
        transform = composed("pil", timm_transforms.RandomPad((140, 150), fill=7), timm_transforms.TrimBorder(3))
        assert_alike(transform, device, lossless(), times=3)

    def test_a_reflection_of_a_reflection_and_what_is_trimmed_to_nothing_are_errors(self) -> None:
        plan = plan_for(composed("pil", timm_transforms.CenterCropOrPad(40, padding_mode="reflect")))
        assert plan.sample_params(15, 40).tolist() == [-12, 0, 40, 40]
        with pytest.raises(ValueError, match=r"size \(13, 40\) .* to \(40, 40\) would reflect it more than once"):
            plan.sample_params(13, 40)
        with pytest.raises(ValueError, match=r"an image of size \(18, 40\) .* leaves no pixels"):
            plan_for(composed("pil", timm_transforms.TrimBorder(9))).sample_params(18, 40)

    @pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
    def test_resizes_by_every_interpolation(self, interpolation: str, device: str) -> None:
        transform = composed("pil", timm_transforms.RandomResizedCropAndInterpolation(32, interpolation=interpolation))
        bounds = {"nearest": EXACT, "bilinear": BILINEAR, "bicubic": BICUBIC, "lanczos": Bound(0.1, 2, 12)}
        assert_alike(transform, device, lossless("landscape", "portrait", "4:2:2"), bound=bounds[interpolation])

    def test_converts(self, device: str) -> None:
        for each in timm_transforms.ToTensor(), timm_transforms.ToTensor(torch.uint8), timm_transforms.MaybeToTensor():
            assert_alike(v1.Compose([each]), device, lossless("small", "grey"))
        tensors = [
            timm_transforms.MaybePILToTensor(),
            timm_transforms.MaybeToTensor(),
            timm_transforms.MaybePILToTensor(),
        ]
        assert_alike(v1.Compose(tensors), device, lossless("small", "grey"))

    @pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
    @pytest.mark.parametrize("counts", [(1, 1), (2, 5)], ids=str)
    def test_erases(self, mode: str, counts: Any, device: str) -> None:
        low, high = counts
        erase = timm_erasing.RandomErasing(0.8, mode=mode, min_count=low, max_count=high, device="cpu")
        transform = v1.Compose([v1.ToTensor(), erase, v1.RandomHorizontalFlip()])
        assert_alike(transform, device, lossless(), times=4)

    def test_erases_boxes_of_no_pixels_and_whole_levels_with_zeros(self, device: str) -> None:
        """Of a small image, a share of a small area rounds to nothing."""
        erase = timm_erasing.RandomErasing(1.0, min_area=0.001, max_area=0.02, mode="pixel", max_count=2, device="cpu")
        transform = v1.Compose([v1.ToTensor(), erase])
        assert_alike(transform, device, lossless("tiny", "one pixel high"), times=20)
        transform = v1.Compose([v1.PILToTensor(), timm_erasing.RandomErasing(0.8, device="cpu")])
        assert_alike(transform, device, lossless(), times=2)


# --- draws -----------------------------------------------------------------------------------------------------------

IMAGES = 500
SIZES = [(40, 31), (31, 40), (100, 75), (224, 160), (70, 90)]
"""(width, height)"""


def without_size_between(row: list[float]) -> list[float]:
    """A resize at the end has the size between its passes before the one that comes out."""
    return row[:-4] + row[-2:]


class TestDraws:
    """Boxes, sizes and interpolations are timm's, and the generators go on from the same state."""

    def compare(
        self, transform: Any, monkeypatch: pytest.MonkeyPatch, name: str, numbers: Any, drawn: Any = list
    ) -> int:
        """Hold rows to what torchvision's function of this name is called with; returns how many differ."""
        called: list[list[float]] = []
        monkeypatch.setattr(F, name, lambda image, *given, **_: called.append(numbers(*given)) or image)
        plan = plan_for(composed("pil", transform))
        states = []
        seed_all(5)
        for k in range(IMAGES):
            transform(Image.new("RGB", SIZES[k % len(SIZES)]))
            states.append(generator_states())
        assert len(called) == IMAGES
        seed_all(5)
        for k, (wanted, state) in enumerate(zip(called, states)):
            width, height = SIZES[k % len(SIZES)]
            assert drawn(plan.sample_params(height, width).tolist()) == wanted, k
            assert generator_states() == state, f"image {k} left a generator in another state"
        return len(set(map(tuple, called)))

    @pytest.mark.parametrize("scale", [(0.08, 1.0), (0.5, 3.0)], ids=str)
    def test_of_random_resized_crops(self, scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        transform = timm_transforms.RandomResizedCropAndInterpolation(24, scale, interpolation="random")

        def row(top: int, left: int, height: int, width: int, size: Any, mode: Any) -> list[float]:
            return [top, left, height, width, mode is InterpolationMode.BICUBIC, *size]

        assert self.compare(transform, monkeypatch, "resized_crop", row, without_size_between) > 200

    def test_of_resizes_that_keep_the_ratio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        transform = timm_transforms.ResizeKeepRatio(
            (40, 60), 0.3, "random", random_scale_prob=0.5, random_scale_area=True, random_aspect_prob=0.5
        )

        def row(size: Any, mode: Any) -> list[float]:
            return [mode is InterpolationMode.BICUBIC, *size]

        assert self.compare(transform, monkeypatch, "resize", row, without_size_between) > 50

    def test_of_random_crops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        transform = timm_transforms.RandomCropOrPad((20, 30))
        assert self.compare(transform, monkeypatch, "crop", lambda *box: list(box)) > 200

    @pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
    def test_of_erasing(self, mode: str) -> None:
        transform = timm_erasing.RandomErasing(0.6, mode=mode, max_count=3, device="cpu")
        step = plan_for(v1.Compose([v1.ToTensor(), transform])).steps[-1]
        assert isinstance(step, RandomErasing)
        stock, states, counts = [], [], set()
        seed_all(5)
        for k in range(IMAGES):
            stock.append(transform(torch.full((3, *SIZES[k % len(SIZES)][::-1]), 9.0)))
            states.append(generator_states())
        seed_all(5)
        for k, (wanted, state) in enumerate(zip(stock, states)):
            width, height = SIZES[k % len(SIZES)]
            row = plan_row(step, (height, width))
            assert generator_states() == state
            image = torch.full((3, height, width), 9.0)
            boxes = [box for box in row if box[2]]
            counts.add(len(boxes))
            for top, left, high, wide, values in boxes:
                image[:, top : top + high, left : left + wide] = values
            assert torch.equal(image, wanted)
        assert counts == {0, 1, 2, 3}


def plan_row(step: RandomErasing, size: tuple[int, int]) -> list[tuple[int, int, int, int, torch.Tensor]]:
    """The boxes that a step draws, and what comes there."""
    row = ParamRow()
    step.sample_params(size, row)
    arrays = row.packed()[len(row) :]
    assert len(row) == step.num_params
    each, found = step.step.branches[1][0].num_params, []
    for start in range(1, len(row), each) if row[0] else []:
        top, left, height, width = (int(value) for value in row[start : start + 4])
        values = torch.zeros((3, 1, 1))
        if step.mode == "rand":
            values = torch.tensor(row[start + 4 : start + each]).reshape(3, 1, 1)
        elif step.mode == "pixel" and height:
            first = int(row[start + 4]) * ParamRow.BLOCK
            pixels = arrays[first : first + 3 * height * width].reshape(height, width, 3)
            values = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
        found.append((top, left, height, width, values))
    return found


# --- refusals --------------------------------------------------------------------------------------------------------

MODULES = (
    *("auto_augment", "mixup", "naflex_mixup", "naflex_random_erasing", "naflex_transforms", "random_erasing"),
    *("target_transforms", "transforms"),
)
OF_TENSORFLOW = {"TfPreprocessTransform"}
NEWER_THAN_THE_OLDEST_TIMM = {"MultiLabelTarget"}


def public_classes() -> dict[str, type]:
    """Of the modules of timm that have transforms, and what mixes batches."""
    found: dict[str, type] = {}
    for module_name in MODULES:
        if importlib.util.find_spec(f"timm.data.{module_name}") is None:  # of an older timm
            continue
        module = importlib.import_module(f"timm.data.{module_name}")
        for name, cls in vars(module).items():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                found[name] = cls
    return found


def refused(transform: Any) -> UnsupportedTransformError:
    with pytest.raises(UnsupportedTransformError) as caught:
        plan_for(transform)
    return caught.value


class MyRandomErasing(timm_erasing.RandomErasing):
    """A subclass may do anything."""


class TestRefusals:
    def test_every_class_of_timm_is_translated_or_refused_with_a_reason(self) -> None:
        plan_for(evaluation())  # so that timm's rules are there
        in_neither = [n for n, cls in public_classes().items() if cls not in RULES and n not in REFUSED_TIMM]
        assert not in_neither, (
            f"timm {timm.__version__} has transforms that proxyloader says nothing of: {in_neither}. Give each a rule "
            "(@rule in proxyloader/transforms/timm.py), or a reason in REFUSED_TIMM (refusals.py)"
        )
        assert not {cls.__name__ for cls in RULES if cls.__module__.startswith("timm.")} & REFUSED_TIMM.keys()

    def test_every_name_of_the_table_is_one_of_timms(self) -> None:
        assert REFUSED_TIMM.keys() - public_classes().keys() <= OF_TENSORFLOW | NEWER_THAN_THE_OLDEST_TIMM

    @pytest.mark.parametrize(
        ("name", "cls"), [(name, cls) for name, cls in public_classes().items() if name in REFUSED_TIMM]
    )
    def test_a_class_of_the_table_is_refused_with_its_reason(self, name: str, cls: type) -> None:
        error = refused(v1.Compose([v1.Pad(1), cls.__new__(cls)]))
        assert (error.position, error.transform) == ("transform.transforms[1]", f"{cls.__module__}.{name}")
        assert (error.code, error.reason) == ("unsupported-class", REFUSED_TIMM[name])

    @pytest.mark.parametrize(("name", "reason"), REFUSED_TIMM.items(), ids=REFUSED_TIMM)
    def test_a_reason_says_why_and_then_what_to_do(self, name: str, reason: str) -> None:
        why, what_to_do = reason.split(". ", 1)
        assert why[0].islower() or why.startswith("TensorFlow")
        assert what_to_do[0].isupper() and not reason.endswith(".")
        assert re.search(r"Use|Put|Call it|Leave it", what_to_do)

    def test_numpy_tuples_naflex_patches_interpolations_without_an_equal_and_classes_of_ones_own(self) -> None:
        pictures = [Image.new("RGB", (5, 4), color) for color in ("red", "navy")]
        collate = torch.utils.data.default_collate
        numpy, instead = timm_transforms.ToNumpy(), timm_transforms.MaybePILToTensor()
        assert torch.equal(collate([*map(numpy, pictures)]), collate([*map(instead, pictures)]))
        assert "Use MaybePILToTensor() instead" in refused(v1.Compose([numpy])).reason
        separate = training(separate=True)
        error = refused(separate)
        assert (error.code, error.position, error.transform) == ("no-transform", "transform", "builtins.tuple")
        assert plan_for(v1.Compose(list(separate))).output.dtype == "float32"
        error = refused(training(naflex=True))
        assert (error.code, error.position) == ("unsupported-class", "transform.transforms[0]")
        assert error.transform == "timm.data.naflex_transforms.RandomResizedCropToSequence"
        assert refused(evaluation(patchify=True)).transform == "timm.data.naflex_transforms.Patchify"
        error = refused(training(interpolation="box"))
        assert (error.position, error.argument) == ("transform.transforms[0]", "interpolation")
        assert error.transform == "timm.data.transforms.RandomResizedCropAndInterpolation"
        error = refused(v1.Compose([v1.ToTensor(), MyRandomErasing(device="cpu")]))
        assert error.code == "subclass" and "Use RandomErasing itself" in error.reason

    @pytest.mark.parametrize(
        "transform",
        [
            timm_transforms.RandomResizedCropAndInterpolation(9),
            timm_transforms.ResizeKeepRatio(9),
            timm_transforms.CenterCropOrPad(9),
            timm_transforms.RandomPad((9, 9)),
            timm_transforms.TrimBorder(1),
        ],
        ids=lambda transform: type(transform).__name__,
    )
    def test_after_the_conversion(self, transform: Any) -> None:
        error = refused(v1.Compose([v1.ToTensor(), transform]))
        assert (error.code, error.position) == ("wrong-place", "transform.transforms[1]")

    @pytest.mark.parametrize(
        ("transforms", "code", "argument"),
        [
            ([timm_erasing.RandomErasing(device="cpu")], "wrong-place", ""),
            ([v1.ToTensor(), timm_erasing.RandomErasing()], "unsupported-argument", "device"),
            ([v1.PILToTensor(), timm_erasing.RandomErasing(mode="pixel", device="cpu")], "wrong-place", "mode"),
            ([timm_transforms.CenterCropOrPad(9, padding_mode="edge")], "unsupported-argument", "padding_mode"),
            ([v1.ToTensor(), timm_transforms.ToTensor()], "wrong-place", ""),
            ([timm_transforms.ToTensor(torch.float16)], "unsupported-argument", "dtype"),
        ],
        ids=["erasing a PIL image", "erasing on a GPU", "noise in bytes", "padding", "twice", "half"],
    )
    def test_of_what_has_no_equal(self, transforms: Any, code: str, argument: str) -> None:
        error = refused(v1.Compose(transforms))
        assert (error.code, error.argument) == (code, argument)
        assert error.position == f"transform.transforms[{len(transforms) - 1}]"


class TestExplanation:
    def test_names_classes_as_users_write_them_and_says_how_close_they_are(self) -> None:
        crop, _, erase, *_ = (
            row
            for row in explain(training(interpolation="random", re_prob=0.3, re_mode="rand", color_jitter=None)).rows
            if row.drawn
        )
        assert crop.transform.startswith("timm.data.transforms.RandomResizedCropAndInterpolation(size=(64, 64)")
        assert crop.drawn == (
            "top, left, height, width: RandomResizedCropAndInterpolation.get_params; interpolation: random.choice"
        )
        assert crop.operators is not None and {"split", "resize", "merge"} <= set(crop.operators)
        assert erase.transform == "timm.data.random_erasing.RandomErasing(p=0.3, mode=rand, count=(1, 1))"
        assert erase.drawn.endswith("number of boxes, top, left, height, width, color of each: RandomErasing._erase")
        rows = explain(training(auto_augment="rand-m9-mstd0.5-inc1", interpolation="random")).rows
        (row,) = (row for row in rows if "RandAugment" in row.transform)
        assert row.drawn == "operations, magnitudes, interpolations: RandAugment.__call__"
        assert "BicubicAffine: mean 0.01" in row.closeness and "Equalize: mean 0.5" in row.closeness

    @pytest.mark.parametrize("policy", ["original", "augmix-m3", "3a"])
    def test_of_every_augmentation_is_given(self, policy: str) -> None:
        assert not explain(training(auto_augment=policy)).refused

    def test_of_a_name_on_the_command_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", "timm.data.transforms_factory:create_transform"]) == 0
        printed = capsys.readouterr().out
        assert "timm.data.transforms.MaybeToTensor()" in printed.replace("\n", "") or "MaybeToTensor" in printed


def test_timm_is_imported_for_its_own_transforms_only() -> None:
    script = (
        "import sys; from torchvision import transforms as v1; from proxyloader import compile_transforms, explain;"
        "compile_transforms(v1.Compose([v1.RandomResizedCrop(9), v1.ToTensor()])); explain(v1.Lambda(len));"
        "assert 'timm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_a_timm_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from proxyloader.transforms import registry

    def import_module(name: str, package: str) -> None:
        raise ImportError("cannot import name 'ResizeKeepRatio'", name="timm.data.transforms")

    monkeypatch.setattr(registry.importlib, "import_module", import_module)
    registry.load_timm_rules.cache_clear()
    try:
        error = refused(timm_transforms.MaybeToTensor())
        assert "timm 1.0.16 or newer is required" in error.reason
    finally:
        registry.load_timm_rules.cache_clear()


def test_one_interpolation_is_not_drawn() -> None:
    """timm draws among several only."""
    for interpolation, drawn in ("bilinear", False), ("random", True):
        (step,) = plan_for(composed("pil", timm_transforms.ResizeKeepRatio(9, interpolation=interpolation))).steps[:1]
        assert isinstance(step, RandomInterpolation) == drawn
        before = random.getstate()
        step.sample_params((20, 30), ParamRow())
        assert (random.getstate() != before) == drawn
