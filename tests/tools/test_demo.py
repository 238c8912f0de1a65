"""The demo, run as a user runs it, on few images; where the tools keep photographs, and write their results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader

from proxyloader import DataLoader

from .. import scripts
from ..compare import engines_decode
from ..limits import WAIT_S
from .command import SCRIPT, main

TITLES = ["Decoded on", "Images", "Transform", "Both loaders", "Backend", "Speed", "Labels", "Pixels", "Contact sheet"]
GPUS = torch.cuda.device_count()
SMALL = ("--images", "20", "--batch-size", "8", "--workers", "0")


def lines_of(out: str) -> dict[str, str]:
    """Title -> text, without those that have none."""
    return {line[:15].rstrip(): line[15:] for line in out.splitlines() if line[:15].strip()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "proxyloader"


def test_the_whole_of_it(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, device: str
) -> None:
    sheet = tmp_path / "sheet.png"
    options = ("--images", "40", "--batch-size", "16", "--workers", "1", "--device", device)
    assert main(["demo", "--data", str(photos), *options, "--out", str(sheet)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and not caplog.records
    said = lines_of(out)
    assert list(said) == [*TITLES, "Next"]
    assert ("with a GPU, images are decoded on it" in said["Decoded on"]) == (device == "cpu")
    assert said["Images"] == f"40 of {photos}"
    assert said["Both loaders"] == "batch_size=16, num_workers=1, persistent_workers=True, shuffle=True, the same seed"
    speeds = re.findall(r"([\d,]+) images/s \([\d,]+ to [\d,]+\) +(torch.utils.data|proxyloader).DataLoader", out)
    assert [name for _, name in speeds] == ["torch.utils.data", "proxyloader"]
    assert said["Labels"] == "all equal; 40 images compared"
    most = 1 if device == "cpu" or engines_decode() else 2
    assert re.fullmatch(
        rf"differ by 0\.\d\d on average, [0-{most}]\.\d at the 99.9th percentile, \d+ at most, "
        r"of 255 levels \(worst batch\)",
        said["Pixels"],
    )
    assert said["Contact sheet"].startswith(f"{sheet}: torch's images, proxyloader's, and their differences")
    assert said["Backend"].startswith(f"DALI on {device}: Crop, ")
    with Image.open(sheet) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        assert image.size == (2 + 8 * 226, 2 + 3 * 226)


def test_it_makes_its_images_once_and_keeps_them_in_the_cache_below_the_home_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cache = tmp_path / "home" / ".cache" / "proxyloader"
    assert main(["demo", *SMALL]) == 0
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.jpg")}
    assert len(made) == 20
    assert main(["demo", *SMALL]) == 0
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.jpg")} == made
    said, (folder,) = lines_of(capsys.readouterr().out), cache.glob("demo-*")
    assert said["Images"] == f"20 of {folder}"
    assert folder.name == f"demo-v{json.loads((folder / 'dataset.json').read_text())['format']}-20"
    assert (cache / "demo.png").exists()


STD = 0.229, 0.224, 0.225


@pytest.mark.parametrize(
    ("brighter", "rows", "label"),
    [(0.02, 224, 0), (0.05, 2, 0), (0.0, 0, 1)],
    ids=["the mean", "the percentile", "labels"],
)
def test_a_loader_that_breaks_the_promise_is_named_and_ends_with_exit_status_1(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path,
    brighter: float, rows: int, label: int,
) -> None:  # fmt: skip
    def off(loader: Any) -> Iterator[Any]:
        """Other pixels in the first rows of all images, or other labels."""
        for images, labels in StockLoader(loader.dataset, loader.batch_size, shuffle=True):
            images[:, :, :rows] += brighter
            yield images, labels + label

    monkeypatch.setattr(DataLoader, "__iter__", off)
    assert main(["demo", "--data", str(photos), *SMALL]) == 1
    said = lines_of(capsys.readouterr().out)
    documented = "expected equal labels, and at most 0.5 on average and 2.0 at the 99.9th percentile."
    assert said["FAILED"].startswith(documented)
    assert said["Labels"].startswith("NOT EQUAL" if label else "all equal")
    with Image.open(cache / "demo.png") as sheet:  # its third row shows differences, 32 times as bright
        shown = sheet.getpixel((2, 2 + 2 * 226))
    assert shown == tuple(round(32 * 255 * brighter * std) for std in STD)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "gpu"), "Expected one of cpu, cuda, "),
        (("--device", "cuda:64"), f"device='cuda:64', but the number of CUDA devices is {GPUS}. "),
        (("--out", "/nowhere/at/all.png"), "/nowhere/at/all.png: No such file or directory"),
        (("--out", "/proc"), "/proc: Is a directory"),
        (("--data", "/nowhere"), "/nowhere: No such file or directory"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_option_that_cannot_be_is_an_error(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "old.png").write_text("content")
    for sheet in ("new.png", "old.png"):
        assert main(["demo", "--out", str(tmp_path / sheet), *options]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"proxyloader: error: {message}") and err.count("\n") == 1
    assert not list(cache.glob("demo-*"))
    assert [path.name for path in tmp_path.glob("*.png")] == ["old.png"]
    assert (tmp_path / "old.png").read_text() == "content"


@pytest.mark.parametrize("content", [slice(0, 8), slice(0, 2000)], ids=["no image", "cut off"])
def test_a_file_that_is_no_image_is_named_in_one_line(
    content: slice, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = next(photos.rglob("*.jpg")).read_bytes()
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "good.jpg").write_bytes(good)
    (tmp_path / "data" / "a" / "bad.jpg").write_bytes(good[content])
    assert main(["demo", "--data", str(tmp_path / "data"), *SMALL]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("proxyloader: error: dataset[0]: ") and "bad.jpg" in line


@pytest.mark.parametrize("blocked", ["cache", "cache/proxyloader"])
def test_without_dali_it_says_that_the_loader_is_torchs_and_without_a_cache_it_takes_a_temporary_folder(
    photos: Path, tmp_path: Path, blocked: str
) -> None:
    (tmp_path / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / blocked).write_text("a file")
    folders = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    script = f"import sys; sys.modules['nvidia.dali'] = None; {SCRIPT}"
    done = scripts.run(script, "demo", "--data", photos, *SMALL, environment=folders, timeout_s=2 * WAIT_S)
    assert done.returncode == 0, done.stderr
    said = lines_of(done.stdout)
    assert said["Backend"].startswith("torch: ")
    assert said["Pixels"].startswith("differ by 0.00 on average, 0.0 at the 99.9th percentile, 0 at most")
    assert re.match(rf"{tmp_path}/proxyloader-\w+/demo.png: ", said["Contact sheet"])
