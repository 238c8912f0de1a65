"""``examples/imagenet/train.py`` learns with each backend in any number of processes, and goes on where it stopped."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from . import scripts
from .limits import WAIT_S
from .test_examples import ending, make_parts
from .tiers import by_default

TRAINED_S = 5.6 * WAIT_S
pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).parent.parent / "examples" / "imagenet" / "train.py"
BACKENDS = ("pytorch", "proxy", "dali")

IMAGES, VAL_IMAGES = 320, 128
EPOCHS = 5
SMALL = ["--arch", "resnet18", "--size", "32", "--workers", "1", "--lr", "0.1", "--warmup-epochs", "1"]
TINY = [*SMALL, "--arch", "mobilenet_v3_small", "--workers", "0", "--batch-size", "16", "--ema-decay", "0.9"]

Log = list[dict[str, float]]
Done = subprocess.CompletedProcess[str]


def run(*options: Any, ranks: int = 1, device: str = "cpu") -> Done:
    """Its processes are told of each other as torchrun tells them, and start without its imports.

    Returns:
        What the first one says, and what all write to stderr; the first status that is not 0.
    """
    environment = {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    if ranks == 1:
        return scripts.run(SCRIPT, *options, timeout_s=TRAINED_S, environment=environment)
    done = scripts.run_ranks(SCRIPT, *options, ranks=ranks, timeout_s=TRAINED_S, environment=environment)
    status = next((each.returncode for each in done if each.returncode), 0)
    return subprocess.CompletedProcess(options, status, done[0].stdout, "".join(each.stderr for each in done))


def trained(data: Path, out: Path, *options: Any, **how: Any) -> Log:
    done = run(data, *SMALL, "--out", out, *options, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def learnable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("learnable"), IMAGES, VAL_IMAGES, size=(96, 72))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("small"), 96, 23, size=(64, 48))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes_see_each_image_once_in_an_epoch_and_learn(learnable: Path, tmp_path: Path, backend: str) -> None:
    options = ["--data-backend", backend, "--batch-size", 16, "--epochs", EPOCHS]
    log = trained(learnable, tmp_path, *options, ranks=2)
    assert [line["epoch"] for line in log] == list(range(1, EPOCHS + 1))
    assert {line["images"] for line in log} == {IMAGES} and {line["val_images"] for line in log} == {VAL_IMAGES}
    assert log[-1]["loss"] < log[0]["loss"] - 0.5
    assert log[-1]["top1"] > 40 and log[-1]["top5"] >= log[-1]["top1"]
    assert all(0 <= line["waited"] < 1 and line["images_per_s"] > 0 for line in log)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "backend"),
    by_default({f"{n}-{name}": (n, name) for n in (1, 2, 4) for name in ("proxy", "dali")}, "2-proxy"),
)
def test_a_training_that_was_stopped_in_mid_epoch_ends_as_if_it_had_not_been_with_each_image_seen_once(
    small: Path, tmp_path: Path, ranks: int, backend: str
) -> None:
    # A model with dropout, which draws random numbers of torch's own.
    options = ["--data-backend", backend, "--batch-size", 16 // ranks, "--epochs", 2, "--ema-decay", 0.9]
    options += ["--arch", "mobilenet_v3_small"]
    whole = trained(small, tmp_path / "whole", *options, ranks=ranks)
    part = run(small, *SMALL, "--out", tmp_path / "part", *options, "--max-steps", 4, ranks=ranks)
    assert part.returncode == 0 and not (tmp_path / "part" / "log.jsonl").read_text()
    assert part.stdout == "--max-steps 4: saved after 4 steps of epoch 1\n"
    rest = trained(small, tmp_path / "part", *options, "--resume", ranks=ranks)
    assert (whole[0]["images"], whole[0]["val_images"], rest[0]["images"]) == (96, 23, 96 - 4 * 16)
    for name in ("loss", "images", "val_images", "top1", "top5"):
        assert rest[1][name] == pytest.approx(whole[1][name], abs=1e-3), name
    ends = [torch.load(tmp_path / out / "last.pt", weights_only=True) for out in ("whole", "part")]
    for part in ("model", "ema"):
        assert all(torch.equal(value, ends[1][part][name]) for name, value in ends[0][part].items()), part


def test_the_backend_without_images_trains(small: Path, tmp_path: Path) -> None:
    (line,) = trained(small, tmp_path, "--data-backend", "synthetic", "--batch-size", 16, "--epochs", 1)
    assert line["images"] == 96 and "top1" not in line
    assert list(tmp_path.glob("events.out.tfevents.*"))  # TensorBoard's


def test_a_first_step_that_overflows_leaves_no_trace(small: Path) -> None:
    options = [*SMALL, "--data-backend", "synthetic", "--batch-size", 2, "--amp", "float16"]
    with scripts.command_line(SCRIPT, small, *options):
        example = runpy.run_path(str(SCRIPT))
        trainer = example["Trainer"](example["parse_args"](), example["World"](1, 0, torch.device("cpu")))
    weights = list(trainer.bare.parameters())
    torch.use_deterministic_algorithms(True)  # which fills with NaN what nobody has written yet
    try:
        for gradient in (math.inf, 1.0):
            trainer.scaler.scale(torch.zeros(1))
            for weight in weights:
                weight.grad = torch.full_like(weight, gradient)
            trainer.scaler.step(trainer.optimizer)
            trainer.scaler.update()
    finally:
        torch.use_deterministic_algorithms(False)
    assert trainer.scaler.get_scale() == 65536 / 2
    for weight in weights:
        assert weight.isfinite().all() and trainer.optimizer.state[weight]["momentum_buffer"].isfinite().all()


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["{small}"], {"RANK": "0", "WORLD_SIZE": "2"}, "but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (["{small}"], {"LOCAL_RANK": "x"}, "LOCAL_RANK must be an integer, got 'x'"),
        (["{small}/nowhere"], {}, "nowhere/train: no such folder. `proxyloader make-dataset"),
        (["{small}", "--batch-size", "97"], {}, "fewer than one batch of 97 images for each of 1 processes"),
        (["{small}", "--batch-size", "16", "--resume"], {}, "last.pt: no checkpoint to resume from"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_in_one_line(
    small: Path, tmp_path: Path, options: list[str], environment: dict[str, str], said: str
) -> None:
    data, *rest = [option.format(small=small) for option in options]
    assert said in ending(SCRIPT, data, *SMALL, "--out", tmp_path, *rest, **environment)


@pytest.fixture(scope="module")
def stopped(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that ended in mid-epoch."""
    out = tmp_path_factory.mktemp("stopped")
    assert run(small, *TINY, "--out", out, "--max-steps", 2).returncode == 0
    return out


@pytest.mark.parametrize(
    ("options", "was"),
    [
        (["--arch", "squeezenet1_1"], "--arch mobilenet_v3_small"),
        (["--data-backend", "dali"], "--data-backend proxy"),
        (["--size", "40"], "--size 32"),
        (["--data-backend", "synthetic"], "--data-backend proxy"),
        (["--seed", "1"], "--seed 0"),
        (["--ema-decay", "0.0"], "--ema-decay 0.9"),
        (["--amp", "float16"], "--amp off"),
        (["--auto-augment", "randaugment"], "--auto-augment none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_with_other_options_does_not_resume(small: Path, stopped: Path, options: list[str], was: str) -> None:
    said = ending(SCRIPT, small, *TINY, "--out", stopped, "--resume", *options)
    assert f"last.pt was saved with {was}, but this run has {' '.join(options)}. Use the same options, or start" in said


def test_a_run_of_other_processes_batches_or_images_does_not_resume(small: Path, stopped: Path, tmp_path: Path) -> None:
    state = torch.load(stopped / "last.pt", weights_only=True)
    torch.save(state | {"ranks": 2 * state["ranks"]}, tmp_path / "last.pt")
    said = ending(SCRIPT, small, *TINY, "--out", tmp_path, "--resume")
    assert "last.pt was saved by 2 processes, each with its own state, but there are now 1. Start as many, or" in said
    said = ending(SCRIPT, small, *TINY, "--batch-size", 8, "--out", stopped, "--resume")
    assert "after 2 of 6 steps of an epoch, which now has 12" in said
    data = shutil.copytree(small, tmp_path / "data")
    image = min((data / "train").glob("*/*.jpg"))
    shutil.copy(image, image.with_name("another.jpg"))
    said = ending(SCRIPT, data, *TINY, "--out", stopped, "--resume")
    assert "last.pt: the state was saved with a dataset of 96 samples, but this one has 97" in said


@pytest.mark.parametrize("kept", [0, 1000, 1_000_000, None])
def test_a_damaged_checkpoint_and_one_of_another_script_are_named(
    small: Path, stopped: Path, tmp_path: Path, kept: int | None
) -> None:
    (tmp_path / "last.pt").write_bytes((stopped / "last.pt").read_bytes()[:kept])
    if kept is None:
        torch.save({"model": {}, "epoch": 1}, tmp_path / "last.pt")
    said = ending(SCRIPT, small, *TINY, "--out", tmp_path, "--resume")
    assert f"{tmp_path}/last.pt is not an intact checkpoint of this script" in said
    assert "Start a new run without --resume" in said and "best.pt" not in said
    assert ("(KeyError)" in said) == (kept is None)
    (tmp_path / "best.pt").touch()
    assert "Replace it with best.pt" in ending(SCRIPT, small, *TINY, "--out", tmp_path, "--resume")


def test_the_checkpoint_of_a_run_before_is_left_alone(small: Path, stopped: Path) -> None:
    said = ending(SCRIPT, small, *TINY, "--out", stopped)
    assert f"{stopped}/last.pt belongs to an earlier run. Pass --resume" in said


def test_train_and_val_hold_the_same_classes(small: Path, tmp_path: Path) -> None:
    data = shutil.copytree(small, tmp_path / "data")
    shutil.rmtree(max(path for path in (data / "val").iterdir() if path.is_dir()))
    for backend in BACKENDS:
        said = ending(SCRIPT, data, *TINY, "--data-backend", backend)
        assert said == f"{data}: train/ and val/ differ in classes: {{'class_009'}}"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_was_finished_says_so_and_more_epochs_go_on(small: Path, tmp_path: Path) -> None:
    options = [small, *TINY, "--data-backend", "synthetic", "--out", tmp_path]
    assert "epoch   1: " in run(*options, "--epochs", 1).stdout
    done = run(*options, "--epochs", 1, "--resume")
    assert done.returncode == 0
    assert done.stdout == f"{tmp_path}/last.pt: all 1 epochs are done. Raise --epochs to continue\n"
    assert "epoch   2: " in run(*options, "--epochs", 2, "--resume").stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_processes_without_images_to_validate_wait_for_nobody(small: Path, tmp_path: Path) -> None:
    one_class = min(path for path in (small / "train").iterdir() if path.is_dir())
    for part, images in (("train", 8), ("val", 1)):
        (tmp_path / "data" / part / "class").mkdir(parents=True)
        for image in sorted(one_class.iterdir())[:images]:
            (tmp_path / "data" / part / "class" / image.name).symlink_to(image)
    options = ["--data-backend", "proxy", "--batch-size", 4, "--epochs", 1]
    (line,) = trained(tmp_path / "data", tmp_path / "out", *options, ranks=2)
    assert line["val_images"] == 1
