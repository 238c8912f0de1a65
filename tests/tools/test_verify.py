"""``proxyloader verify`` finds what is damaged, and nothing else."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxyloader.make_dataset import make_dataset, photograph
from proxyloader.tools import cli
from proxyloader.tools.verify import Finding, verify

from ..odd_formats import encoded

IMAGES = 60
BLANK = Image.new("RGB", (9, 9))
EACH = 2


def overwritten(block: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[: len(data) // 2] + block + data[len(data) // 2 + len(block) :]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "cut in the middle": ("truncated", lambda data: data[: len(data) // 2]),
    "cut in its header": ("truncated", lambda data: data[:200]),
    "without its last bytes": ("truncated", lambda data: data[:-2]),
    "empty": ("truncated", lambda data: b""),
    "a page of a website": ("foreign", lambda data: b"<html>404 Not Found</html>"),
    "a PNG": ("foreign", lambda data: encoded(BLANK, "PNG")),
    "a lost block": ("damaged", overwritten(bytes(4096))),
    "another file's block": ("damaged", overwritten(bytes(random.Random(0).choices(range(255), k=2048)))),
    "a block missing": ("damaged", lambda data: data[: len(data) // 2] + data[len(data) // 2 + 1024 :]),
    "cut, and ended as a JPEG": ("damaged", lambda data: data[: len(data) // 2] + b"\xff\xd9"),
}


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder of photographs, each tenth of them damaged, and the kind of each damaged file by its path."""
    root = make_dataset(tmp_path / "set", images=IMAGES, size=(240, 180), processes=1, progress=False)
    paths = sorted(map(str, root.rglob("*.jpg")))
    chosen = random.Random(1).sample(paths, EACH * len(DAMAGE))
    kinds = {}
    for path, (kind, damage) in zip(chosen, EACH * list(DAMAGE.values())):
        Path(path).write_bytes(damage(Path(path).read_bytes()))
        kinds[path] = kind
    return root, kinds


def kinds_of(findings: list[Finding]) -> dict[str, str]:
    return {finding.path: finding.kind for finding in findings}


@pytest.mark.parametrize("processes", [1, 2])
def test_all_damaged_files_are_found_and_no_others(damaged: tuple[Path, dict[str, str]], processes: int) -> None:
    root, expected = damaged
    found = verify(root, processes=processes)
    assert kinds_of(found) == expected and all(finding.reason for finding in found)
    assert [finding.path for finding in found] == sorted(expected)


def test_the_command_writes_the_sound_paths_and_a_copy_without_the_others(
    damaged: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, kinds = damaged
    options = ("--processes", "1", "--sound", str(root.parent / "sound.txt"), "--copy", str(root.parent / "copy"))
    assert cli.main(["verify", str(root), *options]) == 1
    out = capsys.readouterr().out
    assert out.count(f"{root}/") == len(kinds) and re.search(r"truncated +8 ", out) and re.search(r"sound +40 ", out)
    sound = sorted(path for path in map(str, root.rglob("*.jpg")) if path not in kinds)
    assert (root.parent / "sound.txt").read_text().splitlines() == sound
    copies = sorted((root.parent / "copy").rglob("*.*"))
    assert [root / path.relative_to(root.parent / "copy") for path in copies] == list(map(Path, sound))
    assert all(os.path.samefile(copy, path) for copy, path in zip(copies, sound))
    assert cli.main(["verify", str(root.parent / "copy"), "--processes", "1"]) == 0


def test_images_beside_the_classes_are_left_out_as_image_folder_does(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "bad.jpg", tmp_path / "a" / "bad.jpg"):
        path.write_bytes(b"no image")
    assert kinds_of(verify(tmp_path, processes=1)) == {str(tmp_path / "a" / "bad.jpg"): "foreign"}


def test_images_of_other_kinds_are_sound(tmp_path: Path) -> None:
    for name, format in (("a.png", "PNG"), ("b.webp", "WEBP"), ("c.JPEG", "JPEG"), ("e.jpg", "MPO")):
        (tmp_path / name).write_bytes(encoded(BLANK, format))
    Image.new("CMYK", (40, 40)).save(tmp_path / "f.jpg")
    Image.new("L", (40, 40)).save(tmp_path / "g.jpg", progressive=True)
    (tmp_path / "h.jpg").write_bytes(encoded(BLANK, "JPEG") + b"more")
    Image.fromarray(np.full((40, 40), 200, np.uint16)).save(tmp_path / "i.png")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "features.h5").write_text("no image either, with a suffix that Pillow knows")
    assert verify(tmp_path, processes=1) == []


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32"])
def test_values_that_convert_makes_white_are_named(
    tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.tif"
    Image.fromarray((np.arange(64 * 64).reshape(64, 64) * 16).astype(dtype)).save(path)
    with Image.open(path) as image:
        assert image.convert("RGB").getpixel((20, 0)) == (255, 255, 255)
    assert kinds_of(verify(tmp_path, processes=1)) == {str(path): "clipped"}
    assert re.search(rf"{path}: clipped: values from 0(.0)? to 65520(.0)? in mode", capsys.readouterr().out)


def test_what_is_no_readable_image_is_named_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a.png").write_bytes(encoded(photograph(0, size=(40, 30)), "PNG")[:1500])
    (tmp_path / "._a.png").write_bytes(bytes.fromhex("0005160700020000") + b"Mac OS X        " + bytes(60))
    os.mkfifo(tmp_path / "pipe.jpg")
    found = {"a.png": "truncated", "._a.png": "foreign", "gone.jpg": "unreadable", "pipe.jpg": "unreadable"}
    assert kinds_of(verify(tmp_path)) == {f"{tmp_path}/{name}": kind for name, kind in found.items()}
    out = capsys.readouterr().out
    assert f"{tmp_path}/gone.jpg: unreadable: No such file or directory" in out
    assert "macOS metadata of another file (AppleDouble)" in out


def test_a_fault_of_the_machine_is_not_called_damage(damaged: tuple[Path, dict[str, str]]) -> None:
    _, kinds = damaged
    script = f"""
import resource
from proxyloader.tools.verify import check_file
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
print(check_file({min(kinds)!r}))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "kind='unreadable', reason='Too many open files. The file may be intact" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{root}/empty"], "{root}/empty has no files with the suffix of an image"),
        (["{root}/missing"], "{root}/missing: No such file or directory"),
        (["{root}", "--copy", "{root}/copy"], "{root}/copy: the copy must be outside of {root}"),
        (["{root}/full", "--copy", "{root}/other"], "{root}/other is not empty"),
        (["{root}/full", "--sound", "{root}/missing/sound.txt"], "{root}/missing/sound.txt: No such file or directory"),
    ],
)
def test_what_is_not_possible_is_said(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("empty", "full", "other"):
        (tmp_path / folder).mkdir()
    for folder in ("full", "other"):
        (tmp_path / folder / "a.png").write_bytes(encoded(BLANK, "PNG"))
    assert cli.main(["verify", *(each.format(root=tmp_path) for each in arguments)]) == 1
    assert message.format(root=tmp_path) in capsys.readouterr().err
