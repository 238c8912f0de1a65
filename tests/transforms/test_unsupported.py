"""What is not translated: every class of torchvision is known, and each refusal says why and what to do."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from typing import Any

import pytest
import timm
import timm.data
import torch
import torchvision.transforms
from PIL import Image
from torchvision import tv_tensors
from torchvision.datasets import FakeData
from torchvision.transforms import InterpolationMode, _presets, autoaugment, v2
from torchvision.transforms import transforms as v1
from torchvision.transforms._presets import ObjectDetection, SemanticSegmentation

from proxyloader import UnsupportedTransformError, compile_transforms
from proxyloader.data.placeholders import Proxy
from proxyloader.make_dataset import photograph
from proxyloader.transforms.registry import COMPOSES, CONTAINERS, RULES, plan_for
from proxyloader.transforms.unsupported import REFUSED, REFUSED_TIMM

NOT_TRANSFORMS = {"AutoAugmentPolicy", "InterpolationMode", "Transform"}

NEWER_THAN_THE_OLDEST_TORCHVISION = {"ClampKeyPoints", "SanitizeKeyPoints", "SetClampingMode"}
OF_TORCH = {"Sequential"}


def public_classes() -> dict[str, type]:
    """Of torchvision's transforms and of the presets that its weights carry, by the name that messages use."""
    places = {"": torchvision.transforms, "v2.": v2, "presets.": _presets}
    return {
        prefix + name: cls
        for prefix, module in places.items()
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and cls.__module__.startswith("torchvision.") and name not in NOT_TRANSFORMS
    }


def classes_of_timm() -> dict[str, type]:
    """Of its modules that have transforms, and what mixes batches, likewise."""
    parts = "auto_augment mixup naflex_mixup naflex_random_erasing naflex_transforms random_erasing target_transforms"
    names = [f"timm.data.{part}" for part in (*parts.split(), "transforms")]
    modules = [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]  # an older timm's
    return {
        f"{cls.__module__}.{name}": cls
        for module in modules
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and cls.__module__ == module.__name__
    }


TABLES = {
    "torchvision": (public_classes(), REFUSED, OF_TORCH | NEWER_THAN_THE_OLDEST_TORCHVISION),
    "timm": (classes_of_timm(), REFUSED_TIMM, {"TfPreprocessTransform", "MultiLabelTarget"}),
}
"""Of each library: its classes, the reasons why some are refused, and the names of reasons that may not be there."""


def refused(transform: Any) -> UnsupportedTransformError:
    with pytest.raises(UnsupportedTransformError) as caught:
        compile_transforms(transform)
    return caught.value


class MyResize(v1.Resize):
    """A subclass may do anything."""


class MyCompose(v1.Compose):
    """Also this one."""


class RandomGamma:
    def __call__(self, image: Any) -> Any:
        return image


class MyRandomHorizontalFlip(RandomGamma): ...


class RandomResizedCropAndMore(RandomGamma): ...


class Denoise(RandomGamma): ...


class NotCallable:
    transforms = v1.Compose([v1.ToTensor()])


class Preset:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = v1.Compose([*transforms])

    def __call__(self, image: Any) -> Any:
        return self.transforms(image)


def a_function(image: Any) -> Any:
    return image


class TestTables:
    @pytest.mark.parametrize(("classes", "reasons", "others"), TABLES.values(), ids=TABLES)
    def test_every_class_is_translated_or_refused_with_a_reason_and_no_other(
        self, classes: dict[str, type], reasons: dict[str, str], others: set[str]
    ) -> None:
        plan_for(v1.Compose([timm.data.transforms.ToTensor()]))  # so that timm's rules are there
        translated = {*COMPOSES, *CONTAINERS, *RULES} & {*classes.values()}
        in_neither = [name for name, cls in classes.items() if cls not in translated and cls.__name__ not in reasons]
        assert not in_neither, (
            f"torchvision {torchvision.__version__} or timm {timm.__version__} has transforms that proxyloader says "
            f"nothing of: {in_neither}. Give each a rule (@rule in proxyloader/transforms/), or a reason in "
            "unsupported.py"
        )
        in_both = {cls.__name__ for cls in translated} & reasons.keys()
        assert not in_both, f"there are rules for {in_both} now, so unsupported.py need not name them"
        assert reasons.keys() - {cls.__name__ for cls in classes.values()} <= others

    @pytest.mark.parametrize(
        ("name", "cls", "reason"),
        [
            (name, cls, reasons[cls.__name__])
            for classes, reasons, _ in TABLES.values()
            for name, cls in classes.items()
            if cls.__name__ in reasons
        ],
    )
    def test_a_class_of_the_table_is_refused_with_its_reason(self, name: str, cls: type, reason: str) -> None:
        error = refused(v1.Compose([v1.Pad(1), cls.__new__(cls)]))
        assert (error.position, error.transform) == ("transform.transforms[1]", name.removeprefix("presets."))
        assert (error.code, error.reason) == ("unsupported-class", reason)

    @pytest.mark.parametrize(("name", "reason"), [*REFUSED.items(), *REFUSED_TIMM.items()])
    def test_a_reason_says_why_and_then_what_to_do(self, name: str, reason: str) -> None:
        why, what_to_do = reason.split(". ", 1)
        assert why[0].islower() or why.startswith("TensorFlow")
        assert what_to_do[0].isupper() and not reason.endswith(".")
        assert re.search(r"Leave|Remove|Use|Call it|Put", what_to_do)


class TestAdvice:
    """What a refusal advises does what was meant."""

    def test_in_place_of_the_presets_of_detectors_and_segmentation(self) -> None:
        picture, preset = photograph(1, size=(50, 40)), SemanticSegmentation(resize_size=20)
        assert "Use ToTensor()" in refused(ObjectDetection()).reason
        assert torch.equal(ObjectDetection()(picture), v1.ToTensor()(picture))
        spelled = v1.Compose([v1.Resize(20), v1.ToTensor(), v1.Normalize(preset.mean, preset.std)])
        assert "Use Resize, ToTensor and Normalize" in refused(preset).reason
        torch.testing.assert_close(preset(picture), spelled(picture), rtol=0, atol=1e-6)
        assert plan_for(spelled).output.size is None

    def test_in_place_of_a_sequential_and_without_the_way_back_to_a_pil_image(self) -> None:
        sequential = torch.nn.Sequential(v2.Pad(1), v2.PILToTensor())
        assert "Put the transforms into a Compose" in refused(sequential).reason
        picture = Image.new("RGB", (5, 4), "red")
        assert torch.equal(sequential(picture), v1.Compose(list(sequential))(picture))
        assert plan_for(v1.Compose(list(sequential))).steps
        error = refused(v1.Compose([v1.ToTensor(), v1.ToPILImage()]))
        assert "before the conversion, and remove this" in error.reason
        assert plan_for(v1.Compose([v1.ToTensor()])).steps


class TestOwnCode:
    @pytest.mark.parametrize(
        ("transform", "code", "advice"),
        [
            (MyRandomHorizontalFlip(), "unsupported-class", "Use RandomHorizontalFlip, if "),
            (RandomResizedCropAndMore(), "unsupported-class", "Use RandomResizedCrop, if "),
            (MyResize(9), "subclass", "Use Resize itself"),
            (MyCompose([]), "subclass", "Use Compose itself"),
            (Denoise(), "unsupported-class", ". docs/transforms.md lists the supported"),
            (RandomGamma(), "unsupported-class", ". docs/transforms.md lists the supported"),
            (a_function, "unsupported-class", "translated. If it calls transforms, put them into a Compose"),
            (lambda image: image, "unsupported-class", "put them into a Compose"),
            (functools.partial(a_function), "unsupported-class", "put them into a Compose"),
            (v1.ToTensor, "no-transform", "ToTensor(...)"),
            (NotCallable(), "no-transform", "Remove it"),
            ([v1.ToTensor()], "no-transform", "into a Compose"),
            (FakeData(1), "no-transform", "Use its .transform"),
            (Proxy("a key", ("images",), 1), "unsupported-class", "transform=server.proxy"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_is_refused_with_the_next_best_thing(self, transform: Any, code: str, advice: str) -> None:
        error = refused(transform)
        assert error.code == code and advice in error.reason

    @pytest.mark.parametrize("transform", [Denoise(), a_function, lambda image: image, MyRandomHorizontalFlip()])
    def test_is_refused_in_a_few_words(self, transform: Any) -> None:
        reason = refused(transform).reason
        assert "in the workers (translate=True, the default), or apply it to the batches" in reason
        assert len(reason) < 400
        assert "docs/transforms.md" in reason or isinstance(transform, MyRandomHorizontalFlip)


class TestPosition:
    @pytest.mark.parametrize(
        ("transform", "position", "name"),
        [
            (v1.Lambda(a_function), "transform", "Lambda"),
            (v1.Compose([v1.ToTensor(), v1.ToPILImage()]), "transform.transforms[1]", "ToPILImage"),
            (v2.Compose([v2.ToImage(), v2.ToPILImage()]), "transform.transforms[1]", "v2.ToPILImage"),
            (
                v1.Compose([v1.ToTensor(), v1.Compose([v1.Pad(1), v1.Compose([v2.ToPILImage()])])]),
                "transform.transforms[1].transforms[1].transforms[0]",
                "v2.ToPILImage",
            ),
            (Preset(v1.Pad(1), v1.ToPILImage()), "transform.transforms.transforms[1]", "ToPILImage"),
            (v1.RandomApply([v1.Pad(1), v1.ToPILImage()]), "transform.transforms[1]", "ToPILImage"),
            (
                v2.RandomChoice([v2.Compose([v2.ToPILImage()])]),
                "transform.transforms[0].transforms[0]",
                "v2.ToPILImage",
            ),
            (v2.RandomOrder([v2.Pad(1), v2.ToPILImage()]), "transform.transforms[1]", "v2.ToPILImage"),
            (v1.Compose([a_function]), "transform.transforms[0]", f"{__name__}.a_function"),
            (v1.Compose([lambda image: image]), "transform.transforms[0]", f"{__name__}.TestPosition.<lambda>"),
            (v1.Compose([MyResize(9)]), "transform.transforms[0]", f"{__name__}.MyResize"),
            (v1.Compose([v1.ToTensor]), "transform.transforms[0]", "ToTensor"),
            ([v1.ToTensor()], "transform", "builtins.list"),
        ],
    )
    def test_is_named_with_the_class(self, transform: Any, position: str, name: str) -> None:
        error = refused(transform)
        assert (error.position, error.transform) == (position, name)
        assert str(error) == f"{position}: {name}: {error.reason}"

    def test_is_that_of_what_a_rule_refuses_of_the_first_fault_and_of_a_container_by_chance(self) -> None:
        error = refused(v1.Compose([v1.Pad(1), v2.Compose([v2.Pad(2, padding_mode="reflect")])]))
        assert (error.position, error.transform) == ("transform.transforms[1].transforms[0]", "v2.Pad")
        assert (error.code, error.argument) == ("unsupported-argument", "padding_mode")
        assert str(error) == f"{error.position}: {error.transform}: {error.reason}"
        assert isinstance(error := refused(v1.Compose([v1.ToPILImage(), v1.ToPILImage()])), ValueError)
        assert error.position == "transform.transforms[0]"
        error = refused(v1.Compose([v1.RandomApply([v1.ToTensor()])]))
        assert (error.code, error.position, error.transform) == ("chance", "transform.transforms[0]", "RandomApply")


AUTOMATIC = ("AutoAugment", "RandAugment", "TrivialAugmentWide")
PIL, LEVELS, GREY = [], [v1.PILToTensor()], [v1.Grayscale()]
LEVEL_FLOATS, FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32)], [*LEVELS, v1.ConvertImageDtype(torch.float32)]
HAMMING, BOX, BICUBIC, LANCZOS = map(InterpolationMode, ("hamming", "box", "bicubic", "lanczos"))
PLACE, SETTING = "wrong-place", "unsupported-argument"
OTHER_DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int16)

OF_BOTH_VERSIONS: list[tuple[str, tuple[Any, ...], dict[str, Any], list[Any], str, str]] = [
    *((name, (), {}, before, PLACE, "") for name in (*AUTOMATIC, "AugMix") for before in (FLOATS, LEVEL_FLOATS)),
    *((name, (), {"interpolation": BICUBIC}, PIL, SETTING, "interpolation") for name in (*AUTOMATIC, "AugMix")),
    *(
        (name, (9,), {"interpolation": BICUBIC}, PIL, SETTING, "interpolation")
        for name in ("RandomRotation", "RandomAffine")
    ),
    ("RandomPerspective", (), {"interpolation": BICUBIC}, PIL, SETTING, "interpolation"),
    ("RandomPosterize", (3,), {}, FLOATS, PLACE, ""),
    ("RandomEqualize", (), {}, FLOATS, PLACE, ""),
    *(
        ("RandomPosterize", (bits,), {}, before, "invalid", "bits")
        for bits, before in ((9, PIL), (0, PIL), (-1, LEVELS))
    ),
    ("RandomSolarize", (100,), {}, FLOATS, "invalid", "threshold"),
    ("RandomSolarize", (256,), {}, LEVELS, "invalid", "threshold"),
    ("RandomAdjustSharpness", (-1,), {}, LEVELS, "invalid", "sharpness_factor"),
    ("Grayscale", (2,), {}, PIL, "invalid", "num_output_channels"),
    ("Normalize", ([0.5] * 3, [0.5] * 3), {}, [*GREY, v1.ToTensor()], "invalid", "mean"),
    *(("Normalize", ([0.5] * 3, [0.5] * 3), {}, before, PLACE, "") for before in (PIL, LEVELS)),
    ("Normalize", ([0.5] * 2, [0.5] * 3), {}, FLOATS, "invalid", "mean"),
    *(("Normalize", ([0.5] * 3, std), {}, FLOATS, "invalid", "std") for std in ([1.0] * 4, [1, 0, 1])),
    *(("ConvertImageDtype", (dtype,), {}, LEVELS, SETTING, "dtype") for dtype in OTHER_DTYPES),
    ("Resize", (9, HAMMING), {}, PIL, SETTING, "interpolation"),
    ("Resize", (9,), {"interpolation": 4}, PIL, SETTING, "interpolation"),
    ("Resize", (9,), {"max_size": 9}, PIL, "invalid", "max_size"),
    ("Resize", ((9, 9),), {"max_size": 20}, PIL, "invalid", "max_size"),
    ("Resize", (9, BICUBIC), {"antialias": False}, LEVELS, SETTING, "antialias"),
    ("Resize", (9, LANCZOS), {}, LEVELS, PLACE, "interpolation"),
    ("RandomResizedCrop", (9,), {"interpolation": BOX}, PIL, SETTING, "interpolation"),
    *(("Pad", (2,), {"padding_mode": mode}, PIL, SETTING, "padding_mode") for mode in ("edge", "reflect", "symmetric")),
    *(
        ("RandomCrop", (9,), {"padding": 2, "padding_mode": mode}, PIL, SETTING, "padding_mode")
        for mode in ("edge", "reflect", "symmetric")
    ),
    *(("Pad", (2,), {"fill": fill}, PIL, SETTING, "fill") for fill in (300, -1, (0, 0, 256))),
    *(("RandAugment", (), {"fill": fill}, PIL, SETTING, "fill") for fill in ([1, 2], 300)),
]
"""A class, its arguments, what is before it, and how it is refused."""


@pytest.mark.parametrize(
    ("before", "transform", "code", "argument"),
    [
        *(
            (before, getattr(version, name)(*given, **named), code, argument)
            for version in (torchvision.transforms, v2)
            for name, given, named, before, code, argument in OF_BOTH_VERSIONS
        ),
        *((PIL, v2.Pad(2, fill=fill), SETTING, "fill") for fill in ((1, 2), {"others": 3}, True)),
        *((FLOATS, each, PLACE, "") for each in (v1.ToTensor(), v1.PILToTensor())),
        (PIL, v1.ConvertImageDtype(torch.float32), PLACE, ""),
        (FLOATS, v2.ToDtype(torch.uint8, scale=True), SETTING, "dtype"),
        (LEVELS, v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}), SETTING, "dtype"),
        *((LEVELS, v2.ToDtype(dtype, scale=True), SETTING, "dtype") for dtype in OTHER_DTYPES),
        (LEVELS, v1.Pad(2, fill=(1, 2, 3)), "invalid", "fill"),
        (LEVELS, v1.RandomCrop(9, padding=2, fill=(1, 2, 3)), "invalid", "fill"),
        (LEVELS, v2.RandomErasing(value="random"), PLACE, "value"),
        (PIL, v1.RandomErasing(), PLACE, ""),
        (LEVELS, v1.RandomErasing(value=300), SETTING, "value"),
        (LEVELS, v2.RandomErasing(value=(1, 2)), SETTING, "value"),
        (GREY, v2.RandomPhotometricDistort(), PLACE, ""),
        (GREY, v2.RandomChannelPermutation(), PLACE, ""),
        (PIL, v2.RandomResize(30, 30), "invalid", "min_size"),
        *((PIL, v2.RandomResize(9, 12, how), SETTING, "interpolation") for how in (BOX, HAMMING)),
        *((PIL, v2.ScaleJitter((9, 9), interpolation=how), SETTING, "interpolation") for how in (BOX, HAMMING)),
        (PIL, v1.RandomApply([v1.ToTensor()]), "chance", ""),
        (PIL, v2.RandomChoice([v2.Grayscale(), v2.Pad(1)]), "chance", ""),
        (PIL, v1.RandomChoice([v1.PILToTensor(), v1.ToTensor()]), "chance", ""),
        (PIL, v2.RandomOrder([v2.ToImage(), v2.Pad(1)]), "chance", ""),
        (PIL, v1.RandomChoice([v1.Pad(1), v1.Pad(2)], p=[1]), "invalid", "p"),
        (PIL, v1.RandomChoice([]), SETTING, "transforms"),
        (PIL, v1.RandomOrder([]), SETTING, "transforms"),
    ],
)
def test_what_has_no_equal_is_refused(before: list[Any], transform: Any, code: str, argument: str) -> None:
    error = refused(v1.Compose([v1.Pad(1), *before, transform, v2.ToImage()]))
    assert (error.code, error.argument) == (code, argument)
    assert error.position == f"transform.transforms[{len(before) + 1}]"
    assert error.transform == ("v2." if "v2" in type(transform).__module__ else "") + type(transform).__name__


@pytest.mark.parametrize(
    ("transform", "argument"),
    [
        (v1.CenterCrop(-5), "size"),
        (v2.RandomCrop((3, -5)), "size"),
        (v1.RandomResizedCrop(-4), "size"),
        (v1.Resize((-3, 5)), "size"),
        (v1.Resize(-3), "size"),
        (v2.FiveCrop(-3), "size"),
        (v1.Resize((32.5, 5)), "size"),
        (v1.RandomCrop(30, padding=(3, 9, 1)), "padding"),
        (autoaugment.TrivialAugmentWide(1), "num_magnitude_bins"),
        (v2.RandAugment(num_magnitude_bins=1), "num_magnitude_bins"),
        (v1.CenterCrop("a"), ""),
    ],
    ids=repr,
)
def test_settings_that_torchvision_fails_with_at_an_image_are_refused(transform: Any, argument: str) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)):
        for seed in range(40):  # some fail with some of the numbers that are drawn
            torch.manual_seed(seed)
            v1.Compose([transform, v1.ToTensor()])(Image.new("RGB", (40, 30)))
    error = refused(v1.Compose([transform, v1.ToTensor()]))
    assert (error.code, error.argument, error.position) == ("invalid", argument, "transform.transforms[0]")
