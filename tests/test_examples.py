"""Every script in ``examples/`` runs as a user runs it: in a process of its own, on a small data set."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
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

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops, _imaging

from proxyloader.make_dataset import make_dataset

from . import scripts
from .limits import WAIT_S
from .tiers import by_default

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py"))
STOCK, SWAPPED = "train_torchvision.py", "train_proxyloader.py"
DATASET, PIPELINE, OPERATOR = "custom_dataset.py", "custom_pipeline.py", "custom_operator.py"
GALLERY, CLASSES, DETERMINISM = "rotation_gallery.py", "class_style_pipeline.py", "determinism.py"
ITERATOR, DETECTION, SEGMENTATION = "dali_iterator.py", "detection.py", "segmentation.py"
IMAGENET = "imagenet/train.py"
FRAMEWORKS = {"jax_training.py": "jax", "tensorflow_training.py": "tensorflow"}
"""Script -> what it imports that may not be installed, and starts threads."""
FIGURES = {DETECTION: "AP", SEGMENTATION: "mIoU"}
"""Script -> the figure that it is to reach, which its docstring states."""
RUN_BY_DEFAULT = SWAPPED, DATASET, PIPELINE, OPERATOR, ITERATOR, *FRAMEWORKS, *FIGURES
OWN = [script for script in SCRIPTS if script not in FRAMEWORKS]
OF_DALI = (PIPELINE, OPERATOR, GALLERY, CLASSES, DETERMINISM, ITERATOR)
TRAIN = "{data} --arch resnet18 --size 64 --epochs 1 --batch-size 16 --workers 1 --lr 1e-4 --out {out}"

CHECKPOINTS = {"last.pt", "best.pt"}

COMMANDS: dict[str, tuple[str, set[str]]] = {
    STOCK: (TRAIN, CHECKPOINTS),
    SWAPPED: (TRAIN, CHECKPOINTS),
    **dict.fromkeys((DATASET, PIPELINE, OPERATOR, CLASSES, *FIGURES), ("--workers 1", set())),
    GALLERY: ("--rows 3 --columns 4 --size 120 --out {out}/gallery.png", {"gallery.png"}),
    DETERMINISM: ("", set()),
    ITERATOR: ("--last-batch partial --batch-size 10", set()),
    **dict.fromkeys(FRAMEWORKS, ("{data}/train --size 32 --epochs 2 --batch-size 16 --workers 1", set())),
    IMAGENET: (
        "{data} --arch resnet18 --size 32 --epochs 1 --batch-size 16 --workers 1 --out {out}",
        {*CHECKPOINTS, "log.jsonl"},
    ),
}
"""Script -> the arguments that it is run with, and the files that it is to leave in ``{out}``.

``{data}`` holds train/ and val/, ``{out}`` is the run's own folder. Scripts that are given no data make their own,
beside the folders of the runs.
"""


@dataclass(frozen=True)
class Run:
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
    # One thread: the nets are tiny, and threads that wait for each other on busy cores take far longer.
    done = scripts.run(
        EXAMPLES / script,
        *(part.format(data=data, out=out) for part in arguments.split()),
        timeout_s=6 * WAIT_S,
        environment={"OMP_NUM_THREADS": "1"},
        cwd=out.parent,
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


def make_parts(root: Path, *images: int, **how: Any) -> Path:
    """So many photographs in train/ and in val/."""
    for seed, (part, count) in enumerate(zip(("train", "val"), images)):
        make_dataset(root / part, images=count, seed=seed, processes=1, progress=False, **how)
    return root


@pytest.fixture(scope="module")
def data(folder_of_runs: Path) -> Path:
    return make_parts(folder_of_runs / "data", 64, 24, size=(96, 72), classes=4)


@pytest.fixture(scope="module")
def finished(data: Path, folder_of_runs: Path) -> Callable[[str], Run]:
    """Runs a script with its row of ``COMMANDS``, once for all tests that ask."""

    @functools.cache
    def finish(script: str) -> Run:
        if script in FRAMEWORKS and importlib.util.find_spec(FRAMEWORKS[script]) is None:
            pytest.skip(f"{FRAMEWORKS[script]} is not installed")
        return run(script, COMMANDS[script][0], data, folder_of_runs / Path(script).stem)

    return finish


def ending(script: Path, *options: Any, **environment: str) -> str:
    """The one line that a script ends with, run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(torch.backends.cudnn, "benchmark", False)  # the script's own setting ends with the call
        with scripts.command_line(script, *options), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    message = ended.value.code  # Python writes a text to stderr, and exits with 1
    assert isinstance(message, str) and "\n" not in message
    return message


def test_table_and_launch_commands_name_the_scripts_that_are_there() -> None:
    assert sorted(COMMANDS) == SCRIPTS
    texts = [(EXAMPLES / name).read_text() for name in ("README.md", *SCRIPTS)]
    named = {name for text in texts for name in re.findall(r"examples/([\w/]+\.(?:py|cc))", text)}
    assert set(SCRIPTS) <= named and all((EXAMPLES / name).is_file() for name in named)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", by_default({script: script for script in SCRIPTS}, *RUN_BY_DEFAULT))
def test_it_runs_and_leaves_its_files_and_reaches_its_figure(script: str, finished: Callable[[str], Run]) -> None:
    done = finished(script)
    assert_ran_well(done)
    left = {path.name for path in done.out.glob("*") if "tfevents" not in path.name}  # those are TensorBoard's
    assert left == COMMANDS[script][1]
    if script in FIGURES:
        (stated,) = re.findall(rf"{FIGURES[script]}\)? reaches at least ([\d.]+),", (EXAMPLES / script).read_text())
        (reached,) = re.findall(rf"^{FIGURES[script]} ([\d.]+)", done.stdout, re.MULTILINE)
        assert float(reached) >= float(stated) > 0.5, done.stdout


def test_the_two_scripts_differ_in_the_import_line_alone_as_the_readme_shows() -> None:
    stock, swapped = ((EXAMPLES / script).read_text().splitlines() for script in (STOCK, SWAPPED))
    changes = [line for line in difflib.ndiff(stock, swapped) if line[0] in "-+"]
    assert changes == ["- from torch.utils.data import DataLoader", "+ from proxyloader import DataLoader"]
    number, text = stock.index(changes[0][2:]) + 1, (EXAMPLES / "README.md").read_text()
    assert f"\n{number}c{number}\n" in text
    unnamed = [path.name for path in EXAMPLES.iterdir() if path.is_file() and f"`{path.name}`" not in text]
    assert unnamed == ["README.md"]


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
    done = run(SWAPPED, COMMANDS[SWAPPED][0] + " --epochs 2 --resume", data, out)
    assert_ran_well(done)
    assert "epoch 2/2:" in done.stdout and "epoch 1/2:" not in done.stdout
    before, after = first.checkpoint(), done.checkpoint()
    steps = 64 // 16
    assert (before["epoch"], after["epoch"]) == (1, 2)
    assert (before["scheduler"]["last_epoch"], after["scheduler"]["last_epoch"]) == (steps, 2 * steps)
    assert after["best"] >= before["best"]
    assert after["model"]["bn1.num_batches_tracked"] == 2 * steps
    again = [*COMMANDS[SWAPPED][0].format(data=data, out=out).split(), "--epochs", "2", "--resume"]
    other = ending(EXAMPLES / SWAPPED, *again, "--arch", "resnet34")
    assert "last.pt is a checkpoint of resnet18. Pass --arch resnet18 or a different --out" in other
    (out / "last.pt").write_text("junk")
    assert "last.pt is not an intact checkpoint of this script" in ending(EXAMPLES / SWAPPED, *again)


# --- the examples of DALI ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dataset_of_ones_own_and_the_class_style_give_the_batches_that_they_are_to(
    finished: Callable[[str], Run],
) -> None:
    said = finished(DATASET).stdout
    rows = re.findall(r"^ +\d  equal   equal   mean ([\d.]+), max \d+$", said, re.MULTILINE)
    assert len(rows) == 4 and all(float(mean) < 0.5 for mean in rows)
    assert said.endswith("pixels differ only by rounding\n")
    said = finished(CLASSES).stdout
    assert len(re.findall(r"^ +\d  \[16, 3, 96, 96\] +[+-]\d\.\d\d  equal   equal$", said, re.MULTILINE)) == 4


@pytest.mark.slow
def test_the_masks_fit_their_pictures_and_mirrored_ones_do_not(finished: Callable[[str], Run]) -> None:
    said = finished(PIPELINE).stdout
    row = r"^ +\d  \[16, 3, 64, 64\] +\[16, 1, 64, 64\] +([\d.]+)% +([\d.]+)% +([\d.]+)%$"
    rows = [[float(share) for share in shares] for shares in re.findall(row, said, re.MULTILINE)]
    assert len(rows) == 4
    for bright, fits, mirrored in rows:
        assert 20 < bright < 80 and mirrored < 90
        assert fits == 100 or (torch.cuda.is_available() and fits > 95)


OWN_CROP = "fn.crop_mirror_normalize(mask, **(shared | {'crop_pos_x': fn.random.uniform(range=(0.0, 1.0))}),"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "before", "after", "said"),
    [
        (DATASET, "seed(args.seed)", "seed(hash(loader_class.__module__))", "batches [1, 2, 3, 4] differ from"),
        (PIPELINE, "fn.crop_mirror_normalize(mask, **shared,", OWN_CROP, "masks agree with their images in only"),
    ],
    ids=[DATASET, PIPELINE],
)
def test_an_example_notices_batches_that_are_wrong(
    script: str, before: str, after: str, said: str, data: Path, folder_of_runs: Path
) -> None:
    text, spoilt = (EXAMPLES / script).read_text(), folder_of_runs / f"spoilt_{script}"
    assert before in text
    spoilt.write_text(text.replace(before, after))
    done = run(str(spoilt), "--workers 0", data, folder_of_runs / "spoilt")
    assert done.status == 1 and said in done.stderr and ("DIFFER" in done.stdout) == (script == DATASET)


@pytest.mark.slow
def test_an_operator_in_python_stretches_every_picture(finished: Callable[[str], Run]) -> None:
    assert_all_stretched(finished(OPERATOR), "python")


@pytest.mark.slow
def test_an_operator_for_numba_gives_the_same(data: Path, folder_of_runs: Path) -> None:
    pytest.importorskip("numba")
    assert_all_stretched(run(OPERATOR, "--workers 1 --operator numba", data, folder_of_runs / "numba"), "numba")


@pytest.mark.slow
def test_a_plugin_is_compiled_and_loaded_as_the_docstring_says(data: Path, folder_of_runs: Path) -> None:
    compiler, headers = shutil.which("g++"), cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("needs g++" if compiler is None else "needs the headers of a CUDA toolkit, which DALI's include")
    docstring = ast.get_docstring(ast.parse((EXAMPLES / OPERATOR).read_text())) or ""
    (command,) = re.findall(r"g\+\+ (?:.*\\\n)*.*", docstring)
    for said, here in (
        ("examples/", f"{EXAMPLES}/"),
        ("/usr/local/cuda/include", str(headers)),
        ("$(python ", f"$({sys.executable} "),
    ):
        assert said in command
        command = command.replace(said, here)
    subprocess.run(["bash", "-c", command], cwd=folder_of_runs, check=True, timeout=2 * WAIT_S)
    done = run(OPERATOR, "--workers 1 --plugin ./libstretch_levels.so", data, folder_of_runs / "plugin")
    assert_all_stretched(done, "plugin")


def assert_all_stretched(done: Run, by: str) -> None:
    assert_ran_well(done)
    rows = re.findall(r"^batch \d: mean levels (\d+) to (\d+), stretched 0 to 255$", done.stdout, re.MULTILINE)
    assert len(rows) == 4 and all(int(low) > 5 and int(high) < 250 for low, high in rows)
    assert f"64 images stretched by {by}, all equal" in done.stdout


def cuda_headers() -> Path | None:
    """Those of a whole toolkit; the packages that torch brings lack some."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        homes.append(str(Path(nvcc).resolve().parent.parent))
    found = [Path(home) / "include" for home in homes if home]
    return next((folder for folder in found if (folder / "crt" / "host_config.h").is_file()), None)


@pytest.mark.slow
def test_the_gallery_shows_the_photographs_turned_by_the_angles_that_are_printed(
    finished: Callable[[str], Run],
) -> None:
    done = finished(GALLERY)
    rows = re.findall(r"^img_\d+\.jpg: rotated by (.*) degrees$", done.stdout, re.MULTILINE)
    angles = [[float(angle) for angle in row.split()] for row in rows]
    assert [len(row) for row in angles] == [4, 4, 4]
    assert len({angle for row in angles for angle in row}) > 8 and all(abs(a) <= 30 for row in angles for a in row)
    size, sheet = 120, Image.open(done.out / "gallery.png")
    for row, degrees in enumerate(angles):
        tops = 16 + 24 + row * (size + 24)
        tiles = [
            sheet.crop((left, tops, left + size, tops + size)) for left in range(16, 16 + 5 * (size + 6), size + 6)
        ]
        for tile, angle in zip(tiles[1:], degrees):
            here, mirrored = (
                ImageChops.difference(tile, tiles[0].rotate(sign * angle, Image.Resampling.BILINEAR))
                for sign in (1, -1)
            )
            assert mean_level(here) < 3
            assert abs(angle) < 5 or mean_level(mirrored) > 3 * mean_level(here)


def mean_level(image: Image.Image) -> float:
    return float(np.asarray(image).mean())


@pytest.mark.slow
def test_the_seed_decides_the_batches_and_the_workers_do_not(finished: Callable[[str], Run]) -> None:
    rows = re.findall(r"^(.*\S) +([0-9a-f]{8})  (yes|no)$", finished(DETERMINISM).stdout, re.MULTILINE)
    prints = {title: fingerprint for title, fingerprint, _ in rows}
    assert [same for *_, same in rows] == ["yes"] * 5 + ["no"] * 3
    assert len(set(list(prints.values())[:5])) == 1 and len(set(prints.values())) == 4


@pytest.mark.slow
def test_dalis_iterator_gives_each_picture_once_in_an_epoch(finished: Callable[[str], Run]) -> None:
    said = finished(ITERATOR).stdout
    assert re.findall(r"^rank 0, epoch (\d): 7 batches, 64 images,", said, re.MULTILINE) == ["1", "2"]
    assert said.endswith("rank 0, validation: images 0 to 63, once each\n")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("policy", "batches"), [("fill", 2), ("drop", 1)])
def test_dalis_iterator_gives_all_processes_as_many_batches(data: Path, policy: str, batches: int) -> None:
    options = [data / "val", "--pipeline", "custom", "--last-batch", policy, "--batch-size", 10, "--epochs", 3]
    done = scripts.run_ranks(EXAMPLES / ITERATOR, *options, ranks=2, timeout_s=6 * WAIT_S, environment={})
    for rank, each in enumerate(done):  # with 12 of 24 pictures
        assert each.returncode == 0, each.stderr
        epochs = re.findall(rf"^rank {rank}, epoch \d: (\d) batches, (\d+) images,", each.stdout, re.MULTILINE)
        assert epochs == 3 * [(str(batches), str(10 * batches))]
        assert f"images {12 * rank} to {12 * rank + 11}, once each" in each.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", FRAMEWORKS)
def test_other_frameworks_learn_from_the_batches(script: str, finished: Callable[[str], Run]) -> None:
    losses = re.findall(r"^epoch \d/2: loss ([\d.]+), [\d.]+%$", finished(script).stdout, re.MULTILINE)
    assert len(losses) == 2 and all(0 < float(loss) < 3 for loss in losses)


OPTIONS = [
    *((script, "--size 0", ">= 1") for script in OWN),
    *((script, "--batch-size 0", ">= 1") for script in OWN if script != GALLERY),
    *((script, "--workers -1", ">= 0") for script in OWN if script not in (GALLERY, DETERMINISM, ITERATOR)),
    *((script, "--seed -1", ">= 0") for script in (*OF_DALI, DATASET, *FIGURES) if script != OPERATOR),
    *((script, "--epochs 0", ">= 1") for script in (STOCK, SWAPPED, IMAGENET, ITERATOR, *FIGURES)),
    *((script, f"--lr {rate}", ">= 0") for script in (STOCK, SWAPPED, *FIGURES) for rate in (-1, "nan", "inf")),
    *((GALLERY, option, ">= 1") for option in ("--rows 0", "--columns 0")),
    *((GALLERY, f"--angle {angle}", ">= 0.1") for angle in (-5, "nan", "inf")),
    (ITERATOR, "--threads 0", ">= 1"),
    (DATASET, "--batches 0", ">= 1"),
    *((IMAGENET, f"--seed {seed}", "in [0, 9223372036854775807]") for seed in (-1, 99999999999999999999)),
    (IMAGENET, "--lr inf", "in [0, 1000]"),
    *((IMAGENET, f"--{option} 0", ">= 1") for option in ("threads", "loss-scale")),
    (IMAGENET, "--loss-scale-growth 1", ">= 1.001"),
    *((IMAGENET, option, "in [0, 1]") for option in ("--momentum 2", "--ema-decay 1.5", "--ema-decay -0.1")),
]
FOLDERS = "odd: train/ and val/ must contain one folder of images per class"

MISTAKES = [
    (SWAPPED, "{out}", "out/train: no such folder"),
    (SWAPPED, "{data} --resume --out {out}", "last.pt: no checkpoint to resume from"),
    (SWAPPED, "{data} --batch-size 65", "64 images are fewer than one batch"),
    (DATASET, "{out}", "out: no such file"),
    (DETECTION, "{out}", "out/train/annotations.json: no such file"),
    (SEGMENTATION, "{out}", "out/train: no files NAME.jpg"),
    (SEGMENTATION, "{odd}", "train: 1 photos have no label map NAME.png, such as here.jpg"),
    (DATASET, "{me}", "the header must contain the columns file,label"),
    (OPERATOR, "--plugin {out}", "out: no such file. See --help"),
    (OPERATOR, "--plugin {me}", "DALI cannot load it"),
    (OPERATOR, "--plugin {library}", "has no operator stretch_levels"),
    *((script, "{out}", "out must contain one folder of images per class") for script in OF_DALI),
    (DETERMINISM, "{data}/train --batch-size 33", "64 images are fewer than two batches"),
    *(
        (script, f"{{data}} {option}", f"{option.split()[0]} must be {allowed}, got")
        for script, option, allowed in OPTIONS
    ),
    *((script, "{data} --batch-size 16 --out {me}", "cannot create the folder: ") for script in (STOCK, SWAPPED)),
    (GALLERY, "{data}/train --out {me}/x.png", "cannot create its folder: "),
    (GALLERY, "{data}/train --out x.bogus", "--out must end in .png"),
    *(
        (script, f"{{odd}}/{folder}", f"{folder} must contain one folder of images per class")
        for script in OF_DALI
        for folder in ("none", "empty")
    ),
    *((script, "{odd}", FOLDERS) for script in (STOCK, SWAPPED, IMAGENET)),
    (IMAGENET, "{odd} --data-backend dali", "odd: train/ and val/ must contain one folder"),
    (DATASET, "{odd}/no_rows.csv", "no_rows.csv: no rows after the header"),
    (DATASET, "{odd}/no_file.csv", "such as 'gone.jpg'"),
    (DATASET, "{odd}/no_label.csv", "such as 'here.jpg'"),
]


@pytest.mark.parametrize(("script", "arguments", "said"), MISTAKES)
def test_a_mistake_is_told_in_one_line(script: str, arguments: str, said: str, data: Path, tmp_path: Path) -> None:
    if script in (STOCK, SWAPPED):
        arguments = "--arch resnet18 --workers 0 " + arguments
    elif script == IMAGENET:
        arguments += " --out {out}"
    library = _imaging.__file__  # a library, and none of DALI's
    arguments = arguments.format(data=data, out=tmp_path / "out", me=__file__, library=library, odd=odd(tmp_path))
    assert said in ending(EXAMPLES / script, *arguments.split())


def odd(root: Path) -> Path:
    """Folders and tables in which something is missing."""
    root = root / "odd"
    for folder in ("none", "empty/class", "train/class", "val/class"):
        (root / folder).mkdir(parents=True)
    for path in ("here.jpg", "train/here.jpg"):
        (root / path).touch()
    for name, rows in (("no_rows", ""), ("no_file", "here.jpg,a\ngone.jpg,b\n"), ("no_label", "here.jpg\n")):
        (root / f"{name}.csv").write_text("file,label\n" + rows)
    return root


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_half_precision_and_channels_last_on_a_gpu(device: str, data: Path, folder_of_runs: Path) -> None:
    done = run(SWAPPED, f"{TRAIN} --amp float16 --channels-last", data, folder_of_runs / "half")
    assert_ran_well(done)
    assert f"resnet18 on {device}" in done.stdout
    assert 0 < done.loss("1/1") < 3
    assert done.checkpoint()["scaler"]["scale"] > 0
