"""What `explain` says of a transform: every part, what is drawn, what runs it, each refusal."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from proxyloader.data.compiled_transform import compile_transforms, find_compiled
from torchvision import models
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

import proxyloader
from proxyloader import explain
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


class TestRows:
    def test_of_the_usual_training_transform(self) -> None:
        crop, flip, to_tensor, normalize, output = explain(training(v1)).rows
        assert [row.position for row in (crop, flip, to_tensor, normalize, output)] == [
            *(f"transform.transforms[{k}]" for k in range(4)),
            "output",
        ]
        assert crop.transform.startswith("RandomResizedCrop(size=(224, 224), scale=(0.08, 1.0)")
        assert crop.drawn == "top, left, height, width: RandomResizedCrop.get_params"
        assert (flip.transform, flip.drawn) == ("RandomHorizontalFlip(p=0.5)", "apply: torch.rand(1) < 0.5")
        assert (to_tensor.drawn, normalize.drawn, output.transform) == ("", "", "float32 (3, 224, 224)")
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

    def test_name_all_that_is_drawn(self) -> None:
        _, perspective, _, _ = explain(
            v1.Compose([v1.ColorJitter(0.1, 0.1, 0.1, 0.1), v1.RandomPerspective(p=0.3), v1.ToTensor()])
        ).rows
        assert perspective.drawn == "apply: torch.rand(1) < 0.3; corners: RandomPerspective.get_params"

    def test_of_a_preset_and_of_one_transform(self) -> None:
        preset, output = explain(models.ResNet50_Weights.IMAGENET1K_V2.transforms()).rows
        assert preset.transform.startswith("ImageClassification( crop_size=[224] resize_size=[232] mean=")
        assert output.transform == "float32 (3, 224, 224)"


def said(explanation: Any) -> str:
    """Of the table, without its lines and the breaks of what is long."""
    return " ".join(str(explanation).replace("│", " ").split())


class TestWhatRuns:
    KERNELS, DALI = "On a GPU, CUDA kernels run it", "Without a GPU, DALI runs it"

    def test_is_said_for_both_devices(self) -> None:
        explanation = explain(training(v1))
        assert (explanation.on_gpu, explanation.on_cpu) == ("", "")
        assert self.KERNELS in said(explanation) and self.DALI in said(explanation)
        explanation = explain(v1.Compose([v2.RandAugment(), v1.ToTensor()]))
        assert explanation.on_cpu == "RandAugment: without CUDA kernels, torchvision runs it"
        assert self.KERNELS in said(explanation) and self.DALI not in said(explanation)
        explanation = explain(v1.Compose([v1.ToTensor(), v1.RandomErasing(), v1.RandomHorizontalFlip()]))
        assert explanation.on_gpu == "RandomHorizontalFlip: there is no kernel for Flip after erasing"
        assert self.KERNELS not in said(explanation)


class TestRefusals:
    def test_stand_among_all_other_rows(self) -> None:
        steps = [v1.RandomResizedCrop(9), v1.Lambda(len), v1.RandomHorizontalFlip(), v1.ToTensor(), v2.MixUp()]
        steps.append(TO_FLOAT)
        explanation = explain(v1.Compose(steps))
        assert [bool(row.refusal) for row in explanation.rows] == [False, True, False, False, True, False]
        assert explanation.refused == (explanation.rows[1], explanation.rows[4])
        assert explanation.rows[1].refusal.startswith("it calls a Python function, which kernels cannot run")

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


@pytest.mark.filterwarnings("ignore:The transform `ToTensor")
@pytest.mark.parametrize("name", sorted({cls.__name__ for cls in classes_of_torchvision()}))
def test_it_says_that_numbers_are_drawn_where_they_are_and_of_which_class(name: str) -> None:
    for cls in classes_of_torchvision():
        if cls.__name__ != name:
            continue
        transform = v1.Compose([*AFTER.get(name, []), cls(**arguments().get(name, {})), v2.ToImage()])
        before = generator_states()
        plan_for(transform).sample_params(300, 400)
        drawn = "".join(row.drawn for row in explain(transform).rows)
        assert bool(drawn) == (generator_states() != before)
        assert not drawn or "torch." in drawn or "random." in drawn or name in drawn


class TwoViews:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> list[Any]:
        return [self.transform(image), self.transform(image)]


class TestText:
    def test_is_a_table_of_120_characters_that_holds_everything_and_cuts_what_is_long(self) -> None:
        text = str(explain(v1.Compose([v1.RandomResizedCrop(224), v1.Lambda(len), v1.ToTensor()])))
        assert max(map(len, text.splitlines())) <= 120
        for each in "transform.transforms[1]", "RandomResizedCrop.get_params", "1 part(s) are not translated":
            assert each in " ".join(text.replace("│", " ").split())
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
        for spelled in (f"{module}:{name}", f"{module}.py:{name}", f"{Path.cwd()}/{module}.py:{name}"):
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
