"""What `explain` says of transforms and datasets after it has run them."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import ChainDataset, Dataset
from torchvision import models, tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional, transforms as v1, v2

from proxyloader import explain

from ..compare import generator_states
from ..loader.test_backend import line_of
from .command import main

TRAINING = v1.Compose([v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor()])
STREAM: Any = ChainDataset([])
FLIPPED_FLOATS = v1.Compose([v1.ToTensor(), v1.RandomErasing(), v1.RandomVerticalFlip()])
NO_KERNELS = "the workers: {}: requires CUDA kernels"


def by_hand(image: Image.Image) -> Any:
    if random.random() < 0.5:
        image = ImageOps.mirror(image)
    return functional.to_tensor(image.crop((10, 20, 110, 100))) * 2 - 1


def with_numpy(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.crop((0, 0, 9, 9))).copy())


def at_random(image: Image.Image) -> Any:
    return with_numpy(image) if random.random() < 0.5 else v1.ToTensor()(image)


class TestTransforms:
    def test_of_a_training_transform_it_shows_every_step_with_its_numbers_and_what_runs_it(self) -> None:
        found = explain(TRAINING)
        crop, *others = found.steps
        assert re.fullmatch(r"RandomResizedCrop\(size=\(224, 224\), .*: Crop \d+, \d+, \d+, \d+; Resize 224, 224", crop)
        assert others == ["RandomHorizontalFlip(p=0.5): Flip 1", "ToTensor(): ToTensor; ToFloat"]
        assert (found.pixels, found.on_gpu, found.on_cpu) == ("", "CUDA kernels", "DALI")
        assert (found.output, found.operations) == ("float32 (3, 224, 224) on the device", ())
        assert 0 < found.worker_us < found.stock_us
        assert "Output\n  float32 (3, 224, 224) on the device\n" in str(found) and "Replayed" not in str(found)

    @pytest.mark.parametrize(
        ("transform", "step", "on_cpu"),
        [
            (v1.ColorJitter(0.3), r"ColorJitter\(.*\): Brightness [\d.]+", NO_KERNELS.format("ColorJitter")),
            (v2.RandAugment(num_ops=1), r"RandAugment\(.*\): \w+.*", NO_KERNELS.format("RandAugment")),
            (v1.RandomApply([v1.CenterCrop(9)]), r"RandomApply\(.*\): Crop .*", NO_KERNELS.format("RandomApply")),
            (v1.Resize(200, v1.InterpolationMode.NEAREST), r"Resize\(.*\): \w+.*", NO_KERNELS.format("Resize")),
            (models.ResNet50_Weights.IMAGENET1K_V2.transforms(), r".*: Resize 232, 309; Crop .*", "DALI"),
        ],
    )
    def test_it_says_what_runs_without_a_gpu(self, transform: Any, step: str, on_cpu: str) -> None:
        found = explain(transform)
        assert re.fullmatch(step, found.steps[0])
        assert (found.pixels, found.on_gpu, found.on_cpu) == ("", "CUDA kernels", on_cpu)

    def test_calls_of_pillow_have_lines_and_how_often_they_are_made_and_operations_are_listed(self) -> None:
        found = explain(by_hand)
        mirror, crop, conversion = found.steps
        assert re.fullmatch(rf"{line_of('mirror', by_hand)}: Flip 1 \(in [1-7] of 8 runs\)", mirror)
        assert crop == f"{line_of('crop', by_hand)}: Crop 20, 10, 80, 100"
        assert conversion == "ToTensor(): ToTensor; ToFloat"
        assert found.operations == ("mul", "sub")
        assert (found.on_gpu, found.on_cpu) == ("CUDA kernels", "DALI")

    def test_stacked_crops_use_no_pixels(self) -> None:
        stack = v1.Lambda(lambda crops: torch.stack([v1.ToTensor()(crop) for crop in crops]))
        found = explain(v1.Compose([v1.FiveCrop(32), stack]))
        assert (found.pixels, found.on_gpu, found.output) == (
            "",
            "CUDA kernels",
            "float32 (5, 3, 32, 32) on the device",
        )

    def test_code_that_uses_pixels_is_named_after_what_was_recorded_before(self) -> None:
        found, line = explain(with_numpy), line_of("asarray", with_numpy)
        assert found.steps == (f"{line}: Crop 0, 0, 9, 9",)
        assert found.pixels == f"pixels are used at {line}"
        assert found.on_gpu == found.on_cpu == f"the workers: {found.pixels}"
        assert found.output == "uint8 (9, 9, 3) on the CPU"
        assert explain(at_random).on_gpu.startswith("CUDA kernels; for 3 of 8 images the workers: pixels are used at ")

    @pytest.mark.parametrize(
        ("transform", "pixels"),
        [
            (v1.Lambda(np.asarray), "pixels are used by Lambda"),
            (v2.Compose([v2.CenterCrop(32), v2.ElasticTransform()]), "pixels are used by ElasticTransform"),
            (FLIPPED_FLOATS, "RandomVerticalFlip: no CUDA kernel for Flip after erasing"),
            (lambda image: image.size, "no image is returned"),
        ],
    )
    def test_a_class_without_kernels_is_named(self, transform: Any, pixels: str) -> None:
        assert explain(transform).pixels == pixels

    def test_a_class_that_needs_kernels_is_named_although_its_call_to_pillow_is_recorded(self) -> None:
        assert explain(v2.RandomShortestSize((20,))).on_cpu == NO_KERNELS.format("RandomShortestSize")

    def test_it_leaves_generators_threads_profiler_and_pillow_as_they_were(self) -> None:
        before = generator_states(), torch.get_num_threads(), sys.getprofile(), Image.OPEN["JPEG"]
        explain(v1.RandomHorizontalFlip())
        assert (generator_states(), torch.get_num_threads(), sys.getprofile(), Image.OPEN["JPEG"]) == before

    @pytest.mark.parametrize(
        "wrong", [lambda image, target: image, lambda sample: sample["image"], None, 3, "resnet50", STREAM]
    )
    def test_what_it_does_not_take_is_an_error_that_mentions_datasets(self, wrong: Any) -> None:
        with pytest.raises(TypeError, match="explain the dataset|takes a transform or a map-style dataset, got"):
            explain(wrong)


class Boxes(Dataset[Any]):
    def __init__(self, root: Path, transform: Any) -> None:
        self.files, self.transform = sorted(root.glob("*/*.jpg")), transform

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.files[index]).convert("RGB") if index else Image.new("RGB", (50, 40))
        target = tv_tensors.BoundingBoxes([[1, 2, 9, 8]], format="XYXY", canvas_size=image.size[::-1])  # type: ignore[call-overload]
        return self.transform(image, {"boxes": target})


class TestDatasets:
    def test_of_detection_the_first_sample_with_a_jpeg(self, photos: Path) -> None:
        found = explain(Boxes(photos, v2.Compose([v2.RandomHorizontalFlip(1), v2.Resize((30, 40)), v2.ToImage()])))
        assert [re.split(r"\W", step)[0] for step in found.steps] == ["RandomHorizontalFlip", "Resize", "ToImage"]
        assert (found.pixels, found.on_gpu) == ("", "CUDA kernels")
        assert found.output == "(uint8 (3, 30, 40) on the device, {boxes: int64 (1, 4) on the CPU})"

    def test_of_a_folder_and_of_arrays(self, photos: Path) -> None:
        assert explain(ImageFolder(str(photos), TRAINING)).output == "(float32 (3, 224, 224) on the device, int)"
        no_jpeg = explain([np.zeros((3, 32, 32), np.uint8)] * 3).pixels
        assert re.fullmatch(
            r"none of the samples read \(at most \d+\) opens a JPEG that DALI decodes like Pillow", no_jpeg
        )


MODULE = """
import functools
import numpy
from torchvision import transforms
transform = transforms.Compose([transforms.Resize(32), transforms.ToTensor()])
pixels = transforms.Compose([transforms.Resize(32), numpy.asarray])
class Holder:
    inner = transform
def make(size=32):
    return transform
def function(image):
    return transform(image)
def fails(image):
    return image.nothing
partial = functools.partial(make, 32)
number = 3
if __name__ == "__main__":
    guarded = transform
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `explained` in the current directory."""
    (tmp_path / "explained.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "explained", raising=False)
    path = list(sys.path)
    yield
    sys.path[:] = path


RESIZED = "Resize(size=32"

FAILURES = {
    "resnet50": "the name must be module:attribute, such as train:transform, got 'resnet50'",
    "explaind:transform": "No module named 'explaind'",
    "explained:guarded": 'It must be at module level, not below `if __name__ == "__main__":`',
    "explained:fails": "explained:fails: AttributeError at {}/explained.py:14: ",
    "torchvision.transforms:Resize": "Resize cannot be created: missing a required argument: 'size'",
    "explained:number": "explained:number: TypeError: explain() takes a transform or a map-style dataset, got 3",
}


class TestCommand:
    @pytest.mark.parametrize(
        ("name", "step"),
        [
            *((f"{spelled}:transform", RESIZED) for spelled in ("explained.py", "./explained.py", "{}/explained.py")),
            *((f"explained:{name}", RESIZED) for name in ("make", "function", "partial", "Holder.inner")),
            ("torchvision.models:ResNet18_Weights.DEFAULT.transforms", "Resize 256, 341; Crop "),
        ],
    )
    def test_names_of_a_transform_or_of_what_makes_one_and_of_weights(
        self, name: str, step: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["explain", name.format(Path.cwd())]) == 0
        assert step in capsys.readouterr().out

    @pytest.mark.parametrize(("name", "message"), FAILURES.items(), ids=FAILURES)
    def test_failures_are_one_line(self, name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", name]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("proxyloader: error: ") and message.replace("{}", str(Path.cwd())) in err

    def test_its_status_says_whether_pixels_are_used(self, capsys: pytest.CaptureFixture[str]) -> None:
        for status, name in enumerate(("transform", "pixels")):
            assert main(["explain", f"explained:{name}"]) == status
            out, err = capsys.readouterr()
            assert err == "" and "Resize(size=32" in out and ("the workers" in out) == status
