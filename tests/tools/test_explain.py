"""What `explain` says of a transform: every part, what is drawn, the operators of the graph that runs, each refusal."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import models
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

import proxyloader
from proxyloader import explain
from proxyloader.dali.api import _name_in_fn
from proxyloader.dali.build import PipelineOptions, build_pipeline
from proxyloader.data.compiled_transform import compile_transforms, find_compiled
from proxyloader.tools.cli import main
from proxyloader.tools.explain import find
from proxyloader.transforms.registry import CONTAINERS, RULES, plan_for

from ..compare import generator_states

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TABLE = Path(__file__).parents[2] / "docs" / "transform_table.py"
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)


def training(version: Any) -> Any:
    return version.Compose(
        [version.RandomResizedCrop(224), version.RandomHorizontalFlip(), v1.ToTensor(), version.Normalize(MEAN, STD)]
    )


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU images are not decoded by parts, so the operators are others. A test with a ``device`` sees to it."""
    if "device" not in request.fixturenames:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class TestRows:
    def test_of_the_usual_training_transform(self) -> None:
        crop, flip, to_tensor, normalize, output = explain(training(v1)).rows
        assert [row.position for row in (crop, flip, to_tensor, normalize, output)] == [
            *(f"transform.transforms[{k}]" for k in range(4)),
            "output",
        ]
        assert crop.transform.startswith("RandomResizedCrop(size=(224, 224), scale=(0.08, 1.0)")
        assert crop.drawn == "top, left, height, width: RandomResizedCrop.get_params"
        assert crop.operators == ("decoders.image_slice", "resize")
        assert crop.closeness.startswith("Resize: mean 0.2, 99.9% within 6, all within 16 (ties round up")
        assert (flip.transform, flip.drawn) == ("RandomHorizontalFlip(p=0.5)", "apply: torch.rand(1) < 0.5")
        assert (flip.operators, to_tensor.operators) == ((), ())  # put off
        assert normalize.operators == ("crop_mirror_normalize",)
        assert (flip.closeness, to_tensor.drawn, normalize.closeness) == ("exact", "", "exact")
        assert (output.transform, output.operators) == ("float32 (3, 224, 224)", ())
        assert explain(training(v1)).refused == ()

    def test_of_containers_come_before_those_of_what_they_hold(self) -> None:
        inner = v2.RandomChoice([v2.RandomRotation(9), v2.Compose([v2.RandomGrayscale(), v2.RandomInvert()])])
        rows = explain(v2.Compose([v2.RandomApply([inner, v2.RandomVerticalFlip()], p=0.3), v2.ToImage()])).rows
        assert [(row.position.removeprefix("transform.transforms[0]"), row.drawn) for row in rows[:-2]] == [
            ("", "apply: torch.rand(1) < 0.3"),
            (".transforms[0]", "choice: torch.multinomial"),
            (".transforms[0].transforms[0]", "angle: RandomRotation.get_params"),
            (".transforms[0].transforms[1].transforms[0]", "apply: torch.rand(1) < 0.1"),
            (".transforms[0].transforms[1].transforms[1]", "apply: torch.rand(1) < 0.5"),
            (".transforms[1]", "apply: torch.rand(1) < 0.5"),
        ]
        assert [row.transform for row in rows[:2]] == ["v2.RandomApply", "v2.RandomChoice"]
        assert rows[0].operators == ("decoders.image", "split", "merge")
        assert rows[1].operators == ("split", "merge")
        assert rows[5].operators == ("flip",)

    def test_name_all_that_is_drawn_and_all_steps_that_are_equally_close(self) -> None:
        jitter, perspective, _, _ = explain(
            v1.Compose([v1.ColorJitter(0.1, 0.1, 0.1, 0.1), v1.RandomPerspective(p=0.3), v1.ToTensor()])
        ).rows
        assert jitter.closeness.startswith("Contrast, Saturation: mean 0.005, ") and "; Hue: " in jitter.closeness
        assert perspective.drawn == "apply: torch.rand(1) < 0.3; corners: RandomPerspective.get_params"

    def test_of_a_preset_and_of_one_transform(self) -> None:
        preset, output = explain(models.ResNet50_Weights.IMAGENET1K_V2.transforms()).rows
        assert preset.transform.startswith("ImageClassification( crop_size=[224] resize_size=[232] mean=")
        assert preset.operators == ("decoders.image", "resize", "slice", "crop_mirror_normalize")
        assert output.operators == ()
        assert [row.operators for row in explain(v1.PILToTensor()).rows] == [(), ("decoders.image", "transpose")]


class TestRefusals:
    def test_stand_among_all_other_rows(self) -> None:
        steps = [v1.RandomResizedCrop(9), v1.Lambda(len), v1.RandomHorizontalFlip(), v1.ToTensor(), v2.MixUp()]
        steps.append(TO_FLOAT)
        explanation = explain(v1.Compose(steps))
        assert [bool(row.refusal) for row in explanation.rows] == [False, True, False, False, True, False]
        assert explanation.refused == (explanation.rows[1], explanation.rows[4])
        assert explanation.rows[1].refusal.startswith("it calls a Python function, which DALI operators cannot ")
        assert "resize" in (explanation.rows[0].operators or ())

    def test_are_those_that_the_loader_raises(self) -> None:
        transform = v1.Compose([v1.RandomApply([v1.Pad(1), v1.Pad(1, padding_mode="edge")]), v1.ToPILImage()])
        first, *_ = explain(transform).refused
        with pytest.raises(proxyloader.UnsupportedTransformError) as caught:
            plan_for(transform)
        assert str(caught.value) == f"{first.position}: Pad: {first.refusal}"

    def test_of_a_container_keep_its_parts_and_say_where_a_transform_ends_with_a_pil_image(self) -> None:
        rows = explain(v1.Compose([v1.RandomApply([v1.RandomInvert(), v1.ToTensor()])])).rows
        assert rows[0].refusal.startswith("its output is random in kind, dtype or channels")
        assert [row.refusal for row in rows[1:]] == ["", ""]
        (row,) = explain(v1.Compose([v1.RandomHorizontalFlip()])).refused
        assert (row.position, row.transform) == ("output", "a PIL image")
        assert "Add transforms.ToTensor()" in row.refusal

    @pytest.mark.parametrize("transform", [v1.Compose([]), None, 3, [], v1.ToTensor, len, v1.Lambda(len)], ids=repr)
    def test_are_never_raised(self, transform: Any) -> None:
        assert explain(transform).refused


AFTER = {
    "ConvertImageDtype": [v1.PILToTensor()],
    "GaussianNoise": [v1.ToTensor()],
    "Normalize": [v1.ToTensor()],
    "RandomErasing": [v1.ToTensor()],
}


def classes_of_torchvision() -> list[type]:
    return [cls for cls in [*RULES, *CONTAINERS] if cls.__module__.startswith("torchvision.")]


@functools.cache
def arguments() -> dict[str, dict[str, Any]]:
    """Of the classes that cannot be made without."""
    pytest.importorskip("timm")
    found: dict[str, dict[str, Any]] = runpy.run_path(str(TABLE))["ARGUMENTS"]
    return found


def instances(name: str) -> list[Any]:
    """A transform of each class of this name, from a PIL image to a tensor."""
    classes = [cls for cls in classes_of_torchvision() if cls.__name__ == name]
    made = [cls(**arguments().get(name, {})) for cls in classes]
    return [v1.Compose([*AFTER.get(name, []), each, v2.ToImage()]) for each in made]


@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
@pytest.mark.parametrize("name", sorted({cls.__name__ for cls in classes_of_torchvision()}))
def test_it_says_that_numbers_are_drawn_where_they_are_and_of_which_class(name: str) -> None:
    for transform in instances(name):
        before = generator_states()
        plan_for(transform).sample_params(300, 400)
        drawn = "".join(row.drawn for row in explain(transform).rows)
        assert bool(drawn) == (generator_states() != before)
        assert not drawn or "torch." in drawn or "random." in drawn or name in drawn


class TestOperators:
    @pytest.mark.parametrize(
        "transform",
        [
            training(v1),
            v2.Compose([v2.ToImage(), v2.RandomResizedCrop(24), v2.RandAugment(), TO_FLOAT]),
            v1.Compose([v1.RandomHorizontalFlip(), v1.CenterCrop(9), v1.Grayscale(), v1.PILToTensor()]),
            v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD), v1.RandomVerticalFlip()]),
            v1.Compose([v1.RandomApply([v1.ColorJitter(0.1), v1.RandomHorizontalFlip()]), v1.ToTensor()]),
            v2.Compose(
                [v2.RandomRotation(3, InterpolationMode.BILINEAR), v2.RandomPerspective(), v2.ColorJitter(0.1, hue=0.1)]
                + [v2.RandomEqualize(), v2.RandomPosterize(3), v2.RandomAdjustSharpness(2), v2.ToImage()]
            ),
            models.ResNet50_Weights.IMAGENET1K_V2.transforms(),
            v1.ToTensor(),
        ],
        ids=["v1", "v2", "geometry", "floats", "container", "colours and warps", "preset", "one"],
    )
    def test_are_those_of_the_pipeline(self, transform: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
        said = {name for row in explain(transform).rows for name in row.operators or ()}
        pipeline = build_pipeline(plan_for(transform), PipelineOptions(2, None if device == "cpu" else 0))
        there = {_name_in_fn(getattr(type(node._op), "schema_name", "ExternalSource")) for node in pipeline._ops}
        assert said <= there
        # What works on drawn numbers and constants alone is no operator of an image's.
        unsaid = "external_source subscript cast arithmetic reshape cat split constant"
        assert there - said <= {*unsaid.split()}

    def test_are_not_known_where_dali_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in [name for name in sys.modules if name.startswith(("nvidia.dali", "proxyloader.dali."))]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, "nvidia.dali", None)
        explanation = explain(v1.Compose([v1.RandomApply([v1.Pad(1)]), v1.ToTensor()]))
        assert {row.operators for row in explanation.rows} == {None}
        assert "DALI is missing" in str(explanation)


class TwoViews:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> list[Any]:
        return [self.transform(image), self.transform(image)]


class TestText:
    def test_is_a_table_of_120_characters_that_holds_everything_and_cuts_what_is_long(self) -> None:
        text = str(explain(v1.Compose([v1.RandomResizedCrop(224), v1.Lambda(len), v1.ToTensor()])))
        assert max(map(len, text.splitlines())) <= 120
        words = " ".join(text.replace("│", " ").split())
        said = "transform.transforms[1]", "decoders.image_slice", "none of its own", "1 part(s) are not translated"
        assert all(each in words for each in said)
        row, *_ = explain(v1.Compose([v1.Normalize([0.5] * 99, [0.5] * 99)])).rows
        assert len(row.transform) == 120 and row.transform.endswith("0.5, 0...")

    def test_says_that_an_object_calls_its_transforms_itself_and_that_there_is_no_transform(self) -> None:
        text = str(explain(TwoViews(training(v1))))
        assert "TwoViews calls its transforms itself; each call gives an image." in " ".join(text.split())
        without = "No transform: DataLoader loads such a dataset as torch.utils.data.DataLoader does."
        assert str(explain(None)).endswith(without)


MODULE = """
import argparse
import functools
from torchvision import models, transforms

transform = transforms.Compose([transforms.Resize(32), transforms.ToTensor()])
refused = transforms.Compose([transforms.Lambda(len), transforms.ToTensor()])
weights = models.ResNet18_Weights.DEFAULT

def make(size=32):
    return transforms.Compose([transforms.Resize(size), transforms.ToTensor()])

def needs(size):
    return make(size)

partial = functools.partial(needs, 32)

class Preset:
    def __init__(self):
        self.transforms = transform
    def __call__(self, image):
        return self.transforms(image)

class Holder:
    inner = Preset()

def broken():
    raise KeyError("inside")

def command_line():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=32)
    return make(parser.parse_args().size)

def ends():
    raise SystemExit(3)

if __name__ == "__main__":
    guarded = transform
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module `explained` in the current directory."""
    (tmp_path / "explained.py").write_text(MODULE)
    (tmp_path / "explained_fails.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("explained", "explained_fails"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "explained"


class TestNames:
    @pytest.mark.parametrize("name", ["transform", "make", "partial", "Preset", "Holder.inner", "command_line"])
    def test_of_a_transform_in_a_module_or_of_what_makes_one(self, module: str, name: str) -> None:
        expected = plan_for(v1.Compose([v1.Resize(32), v1.ToTensor()]))
        for spelled in (f"{module}:{name}", f"{module}.py:{name}"):
            assert [each.plan for each in find_compiled(compile_transforms(find(spelled)))] == [expected]

    @pytest.mark.parametrize(
        "name", ["resnet18", "ResNet18_Weights.IMAGENET1K_V1", "ResNet18_Weights.DEFAULT", "explained:weights"]
    )
    def test_of_weights(self, module: str, name: str) -> None:
        assert plan_for(find(name)) == plan_for(models.ResNet18_Weights.IMAGENET1K_V1.transforms())

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("resnet51", "torchvision has no model or weights 'resnet51'. Did you mean resnet50 or "),
            ("ResNet50_Weights.V2", "no model or weights 'ResNet50_Weights.V2'. Did you mean ResNet50_Weights."),
            ("???", "no model or weights '???'. Name your own as module:attribute"),
            ("explaind:transform", "importing 'explaind' failed with ModuleNotFoundError: No module named 'explaind'"),
            (
                "explained_fails:transform",
                "importing 'explained_fails' failed with ZeroDivisionError: division by zero",
            ),
            ("explained:transfrom", "'explained' has no attribute 'transfrom'. Did you mean transform"),
            ("explained:guarded", 'It must be at module level, not below `if __name__ == "__main__":`'),
            ("os:path", "os:path is a module, not a transform. Name one in it, such as os:path.transform"),
            ("explained:", "name must be module:attribute, such as train:transform, got 'explained:'"),
            (":transform", "name must be module:attribute, such as train:transform, got ':transform'"),
            (
                "explained:needs",
                "calling needs() failed with TypeError: needs() missing 1 required positional argument",
            ),
            ("explained:ends", "calling ends() exited with 3. Code that runs a script"),
            ("explained:broken", "calling broken() failed with KeyError: 'inside'"),
        ],
    )
    def test_that_stand_for_nothing_say_so_in_one_line(
        self, module: str, name: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["explain", name]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("proxyloader: error: ") and message in err


@pytest.mark.parametrize("name", ["transform", "refused"])
def test_the_command_prints_the_table_and_its_status_says_whether_something_is_refused(
    module: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    explanation = explain(find(f"explained:{name}"))
    assert main(["explain", f"explained:{name}"]) == len(explanation.refused) == (name == "refused")
    out, err = capsys.readouterr()
    assert err == "" and all(row.position in out for row in explanation.rows)
    assert ("It is translated." in out, "1 part(s) are not translated" in out) == (name != "refused", name == "refused")
