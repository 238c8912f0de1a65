"""``proxyloader bench --task``: what samples have, with each package, and that targets equal torch's."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets.folder import pil_loader
from torchvision.ops import box_convert, masks_to_boxes

from proxyloader.tools.bench import FRAMES, TASKS, command, runner, tasks
from proxyloader.tools.bench.cases import CASES, FEW, Case, Loops, samples
from proxyloader.tools.bench.config import BenchConfig, Tuning
from proxyloader.tools.cli import main

from .test_bench import ON_CPU, SHORT, SMALL, WARM, no_process_is_left, read_last, setting, warm_start

__all__ = ["no_process_is_left", "warm_start"]  # fixtures

TASK_OF = {pipeline: task for task, pipelines in TASKS.items() for pipeline in pipelines}
SQUARE = (3, 1024, 1024)
SIZES = {"lsj": SQUARE, "lsj-masks": SQUARE, "segmentation": (3, 480, 480), "clips": (16, 3, 224, 224)}
"""Of the images of these pipelines. Those of the others have any size."""


DECODES_WITH_TORCHVISION = pytest.mark.filterwarnings("ignore:.*TorchVision are deprecated:DeprecationWarning")


def of(root: Path, pipeline: str, **changed: Any) -> BenchConfig:
    given: dict[str, Any] = {"task": TASK_OF[pipeline], "added": pipeline, "tuning": Tuning(0, 1), "batch_size": 2}
    return setting(root, **given | changed)


def check_sample(pipeline: str, image: torch.Tensor, target: Any) -> None:
    assert isinstance(image, torch.Tensor) and image.dtype == torch.float32
    assert tuple(image.shape) == SIZES.get(pipeline, tuple(image.shape)) and image.std() > 0.01
    if pipeline == "segmentation":
        assert target.dtype == torch.int64 and tuple(target.shape) == (480, 480)
        assert bool(((target <= 90) | (target == tasks.IGNORED)).all())
    if TASK_OF[pipeline] == "detection":
        limits = torch.tensor([image.shape[-1], image.shape[-2]] * 2)
        boxes = target["boxes"] if pipeline != "detr" else box_convert(target["boxes"], "cxcywh", "xyxy") * limits
        assert boxes.dtype == torch.float32 and target["labels"].dtype == torch.int64
        assert len(boxes) == len(target["labels"]) and bool((boxes[:, 2:] > boxes[:, :2]).all())
        assert bool((boxes > -0.01).all()) and bool((boxes < limits + 0.01).all())
        assert ("masks" in target) == (pipeline == "lsj-masks")
        for box, mask in zip(boxes, target.get("masks", ())):
            assert mask.dtype == torch.uint8 and mask.any()
            # Transformed together: two pixels of 160 become up to 26.
            assert (masks_to_boxes(mask[None])[0] - box).abs().max() < 27


def first_samples(name: str, config: BenchConfig) -> list[tuple[Any, Any]]:
    torch.manual_seed(0)
    random.seed(0)
    batches = list(itertools.islice(next(CASES[name].loops(config)), 2))
    return [sample for images, targets in batches for sample in zip(images, targets)]


@DECODES_WITH_TORCHVISION
@pytest.mark.parametrize("pipeline", tasks.PIPELINES)
@pytest.mark.parametrize("name", ["torch", "kornia"])
def test_samples_keep_what_their_pipeline_promises(photos: Path, name: str, pipeline: str) -> None:
    if name == "kornia" and (pipeline == "ssd" or importlib.util.find_spec("kornia") is None):
        pytest.skip("Kornia is not installed, or has no RandomIoUCrop")
    for image, target in first_samples(name, of(photos, pipeline)):
        check_sample(pipeline, image, target)


@DECODES_WITH_TORCHVISION
@pytest.mark.parametrize("pipeline", ["hflip", "segmentation", "clips"])
@pytest.mark.parametrize("name", ["spdl", "spdl-gpu", "dataloader-rs"])
def test_loaders_with_threads_give_each_sample_once(photos: Path, name: str, pipeline: str) -> None:
    pytest.importorskip(CASES[name].requirement.split("==")[0].replace("-", "_"))
    config = of(photos, pipeline, tuning=Tuning(2))
    loops, expected = CASES[name].loops(config), len(samples(config))
    for _ in range(2):
        found = [sample for images, targets in next(loops) for sample in zip(images, targets)]
        for image, target in found:
            check_sample(pipeline, image, target)
        if pipeline == "hflip":
            assert sorted(target["image_id"] for _, target in found) == list(range(48))
        assert len(found) == expected


def test_a_clip_has_16_frames_with_the_same_crop_and_counts_as_16_images(photos: Path, tmp_path: Path) -> None:
    (clip, *_) = tasks.Clips(str(photos), "clips", pil_loader, None).clips
    for number in range(FRAMES):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{number:02}.jpg").write_bytes(Path(clip[0]).read_bytes())
    ((frames, label),) = first_samples("torch", of(tmp_path, "clips"))
    assert (frames == frames[0]).all() and label == 0
    assert runner._consume((frames[None], label)) == FRAMES and runner._consume(([frames[0]] * 3, None)) == 3


# --- targets ---------------------------------------------------------------------------------------------------------


def test_targets_of_the_first_epoch_are_torchs(photos: Path) -> None:
    found = runner.compare(of(photos, "hflip", case="proxyloader", batch_size=20))
    assert found == {"targets": 48, "targets_differ": 0, "image_difference_max": pytest.approx(0, abs=0.004)}


def test_targets_and_images_that_differ_are_found(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(config: BenchConfig) -> Loops:
        for epoch in CASES["torch"].loops(config):
            images, targets = zip(*[sample for batch in epoch for sample in zip(*batch)])
            targets[3]["boxes"][0, 0] += 0.5
            targets[5]["labels"] = targets[5]["labels"].int()
            del targets[7]["image_id"]
            yield iter([((images[0] + 0.25, images[1][:, 1:], *images[2:]), targets)])

    monkeypatch.setitem(CASES, "changed", Case(changed, ""))
    found = runner.compare(of(photos, "hflip", case="changed", batch_size=48))
    assert found == {"targets": 48, "targets_differ": 4, "image_difference_max": pytest.approx(0.25)}


# --- the command -----------------------------------------------------------------------------------------------------


@WARM
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_it_compares_targets_and_says_what_cannot_run(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(runner, "MIN_TRIAL_S", 0.0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "dataloader_rs" else name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    names = [f"{case} + hflip" for case in ("torch", "proxyloader", "dataloader-rs")] + ["kornia + ssd"]
    out = tmp_path / "bench.jsonl"
    options = ["--data", str(photos), *SMALL[:-2], *ON_CPU, *SHORT, "--out", str(out)]
    assert main(["bench", "--task", "detection", *options, "--only", *names]) == 0
    record, text = read_last(out), capsys.readouterr().out
    assert list(record["cases"]) == names and record["task"] == "detection"
    stock, ours, missing, unable = record["cases"].values()
    assert stock["first_epoch_images_per_s"] > 0 and stock["images_per_s"] > 0 and stock["passes"] >= 1
    assert ours["targets"] == 48 and ours["targets_differ"] == 0 and len(ours["trials"]) == 1
    assert missing["failure"] == "not installed: pip install dataloader-rs==0.2.0"
    assert unable["failure"] == "Kornia has no RandomIoUCrop" and unable["failure"] in text
    (title,) = [line for line in text.splitlines() if "differing targets" in line]
    assert "times torch" in title and "first epoch, images/s" in title
    assert "matplotlib is not installed" in text and not out.with_suffix(".png").exists()


def test_four_workers_are_compared_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(configs: Sequence[BenchConfig], rounds: int, seconds: float) -> dict[str, Any]:
        speeds = {"images_per_s": 80.0, "first_loop_images_per_s": 40.0}
        return {config.name: {"tuning": config.tuning._asdict(), **speeds} for config in configs}

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "compare_targets", lambda config: {"targets_differ": config.tuning.workers})
    options = ["--task", "detection", "--images", "16", "--size", "thumbnails", "--threads", "1", "--workers"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["bench", *options, "8", *ON_CPU, "--seconds", "2", "--out", str(tmp_path / "a.jsonl"), "--only", "torch"]
    assert main([*options, "proxyloader", FEW]) == 1  # as targets differ
    cases = read_last(tmp_path / "a.jsonl")["cases"]
    assert [name.split(" + ")[1] for name in cases] == [each for each in TASKS["detection"] for _ in range(3)]
    assert cases[f"{FEW} + lsj"]["targets_differ"] == 4 and cases["proxyloader + lsj"]["targets_differ"] == 8
    assert {each["workers"] for case in cases.values() for each in (case["tuning"], *case["trials"])} == {4, 8}
    figures = {(name[:5], case["passes"], case["first_epoch_images_per_s"]) for name, case in cases.items()}
    assert figures == {("torch", 10, 40), ("proxy", 20, 40)}
