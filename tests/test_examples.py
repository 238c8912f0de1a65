"""Every script in ``examples/`` runs as a user runs it: in a process of its own, on a small data set."""

from __future__ import annotations

import difflib
import functools
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from proxyloader.make_dataset import make_dataset

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py"))
STOCK, SWAPPED = "train_torchvision.py", "train_proxyloader.py"
TRAIN = "{data} --arch resnet18 --size 64 --epochs 1 --batch-size 16 --workers 1 --lr 1e-4 --out {out}"

COMMANDS = {
    STOCK: TRAIN,
    SWAPPED: TRAIN,
}
"""Script -> the arguments that it is run with. ``{data}`` holds train/ and val/, ``{out}`` is the run's own folder."""

LEFT_IN_OUT = {
    STOCK: {"last.pt", "best.pt"},
    SWAPPED: {"last.pt", "best.pt"},
}
"""Script -> the files that it is to leave in ``{out}``."""


@dataclass(frozen=True)
class Run:
    """How a script ended, and the folder it wrote to."""

    status: int
    stdout: str
    stderr: str
    out: Path

    def checkpoint(self) -> dict[str, Any]:
        return dict(torch.load(self.out / "last.pt", map_location="cpu", weights_only=True))

    def loss(self, epoch: str) -> float:
        found = re.search(rf"epoch {epoch}: loss ([\d.]+),", self.stdout)
        assert found, f"no loss of epoch {epoch} in {self.stdout!r}"
        return float(found[1])


def run(script: str, arguments: str, data: Path, out: Path) -> Run:
    command = [sys.executable, str(EXAMPLES / script), *(part.format(data=data, out=out) for part in arguments.split())]
    # One thread: the nets are tiny, and threads that wait for each other on busy cores take far longer.
    path = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr, out)


def assert_ran_well(done: Run) -> None:
    assert done.status == 0, f"exit status {done.status}\n{done.stdout}\n{done.stderr}"
    ours = re.findall(r".*/(?:examples|proxyloader)/\S+\.py:\d+: \w*Warning:.*", done.stderr)
    assert not ours, ours


@pytest.fixture(scope="module")
def folder_of_runs() -> Iterator[Path]:
    """Goes when the module is done: a checkpoint of a ResNet-18 is 90 MB."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def data(folder_of_runs: Path) -> Path:
    """64 and 24 small photographs of 4 classes, in train/ and val/."""
    for part, images, seed in (("train", 64, 0), ("val", 24, 1)):
        make_dataset(
            folder_of_runs / "data" / part,
            images=images,
            size=(96, 72),
            classes=4,
            seed=seed,
            processes=1,
            progress=False,
        )
    return folder_of_runs / "data"


@pytest.fixture(scope="module")
def finished(data: Path, folder_of_runs: Path) -> Callable[[str], Run]:
    """Runs a script with its row of ``COMMANDS``, once for all tests that ask."""

    @functools.cache
    def finish(script: str) -> Run:
        return run(script, COMMANDS[script], data, folder_of_runs / Path(script).stem)

    return finish


def test_the_table_has_a_row_for_every_script_in_the_folder() -> None:
    assert SCRIPTS == sorted(COMMANDS) == sorted(LEFT_IN_OUT)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_runs_and_leaves_its_files(script: str, finished: Callable[[str], Run]) -> None:
    done = finished(script)
    assert_ran_well(done)
    left = {path.name for path in done.out.iterdir()} if done.out.exists() else set()
    assert left == LEFT_IN_OUT[script]


def test_the_two_scripts_differ_in_the_import_line_alone() -> None:
    stock, swapped = ((EXAMPLES / script).read_text().splitlines() for script in (STOCK, SWAPPED))
    changes = [line for line in difflib.ndiff(stock, swapped) if line[0] in "-+"]
    assert changes == ["- from torch.utils.data import DataLoader", "+ from proxyloader import DataLoader"]


def test_the_readme_shows_the_difference_as_it_is() -> None:
    stock = (EXAMPLES / STOCK).read_text().splitlines()
    number = stock.index("from torch.utils.data import DataLoader") + 1
    assert f"\n{number}c{number}\n" in (EXAMPLES / "README.md").read_text()


def test_the_readme_names_every_script() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert [script for script in SCRIPTS if script not in text] == []


@pytest.mark.slow
def test_both_scripts_train_on_the_same_batches(finished: Callable[[str], Run]) -> None:
    stock, swapped = finished(STOCK), finished(SWAPPED)
    assert swapped.loss("1/1") == pytest.approx(stock.loss("1/1"), abs=0.01)
    # The loss of a fresh net says little about its images. The statistics of its first layer tell them apart:
    # 0.01 after rounding of pixels, 0.2 after the same images in other crops.
    theirs, ours = (done.checkpoint()["model"]["bn1.running_mean"] for done in (stock, swapped))
    assert (ours - theirs).norm() < 0.04 * theirs.norm()


@pytest.mark.slow
def test_resume_goes_on_behind_the_last_epoch(finished: Callable[[str], Run], data: Path, folder_of_runs: Path) -> None:
    first = finished(SWAPPED)
    out = shutil.copytree(first.out, folder_of_runs / "resumed")
    done = run(SWAPPED, COMMANDS[SWAPPED] + " --epochs 2 --resume", data, out)
    assert_ran_well(done)
    assert "epoch 2/2:" in done.stdout and "epoch 1/2:" not in done.stdout
    before, after = first.checkpoint(), done.checkpoint()
    steps = 64 // 16
    assert (before["epoch"], after["epoch"]) == (1, 2)
    assert (before["scheduler"]["last_epoch"], after["scheduler"]["last_epoch"]) == (steps, 2 * steps)
    assert after["best"] >= before["best"]
    assert after["model"]["bn1.num_batches_tracked"] == 2 * steps


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param("{out}", "out/train: no such folder", id="a missing folder"),
        pytest.param("{data} --resume --out {out}", "last.pt: no checkpoint to resume from", id="nothing to resume"),
        pytest.param("{data} --batch-size 65", "64 images are less than one batch", id="a batch larger than the data"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: str, said: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "--arch resnet18 --workers 0 " + arguments.format(data=data, out=tmp_path / "out")
    monkeypatch.setattr(sys, "argv", [SWAPPED, *arguments.split()])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # the script's own setting ends with the test
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / SWAPPED), run_name="__main__")
    message = ended.value.code  # Python writes a text to stderr, and exits with 1
    assert isinstance(message, str) and said in message and "\n" not in message


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_half_precision_and_channels_last_on_a_gpu(device: str, data: Path, folder_of_runs: Path) -> None:
    done = run(SWAPPED, f"{TRAIN} --amp float16 --channels-last", data, folder_of_runs / "half")
    assert_ran_well(done)
    assert f"resnet18 on {device}" in done.stdout
    assert 0 < done.loss("1/1") < 3
    assert done.checkpoint()["scaler"]["scale"] > 0
