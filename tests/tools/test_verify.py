"""``proxyloader verify`` finds what is damaged, and nothing else."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ..odd_formats import encoded
from .command import main

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
    root = tmp_path / "set"
    assert main(["make-dataset", str(root), "--images", str(IMAGES), "--size", "240x180", "--processes", "1"]) == 0
    paths = sorted(map(str, root.rglob("*.jpg")))
    chosen = random.Random(1).sample(paths, EACH * len(DAMAGE))
    kinds = {}
    for path, (kind, damage) in zip(chosen, EACH * list(DAMAGE.values())):
        Path(path).write_bytes(damage(Path(path).read_bytes()))
        kinds[path] = kind
    return root, kinds


Verified = Callable[..., dict[str, str]]


@pytest.fixture
def verified(capsys: pytest.CaptureFixture[str]) -> Verified:
    """Kind of each file of a folder that the command names, by path, in its order."""

    def verified(folder: Path, processes: int = 1, said: str = "") -> dict[str, str]:
        status = main(["verify", str(folder), "--processes", str(processes)])
        out, err = capsys.readouterr()
        found = dict(re.findall(r"^(/.*?): (\w+): \S.*$", out, re.MULTILINE))
        assert (status, err) == (bool(found), "") and re.search(said, out)
        return found

    return verified


def test_all_damaged_files_are_found_and_no_others_and_all_are_counted(
    damaged: tuple[Path, dict[str, str]], verified: Verified
) -> None:
    root, expected = damaged
    for processes in (1, 2):
        found = verified(root, processes, r"sound +40 (.|\n)*truncated +8 ")
        assert found == expected and list(found) == sorted(expected)
    for path in expected:
        os.remove(path)
    assert verified(root) == {}


def test_images_beside_the_classes_are_left_out_as_image_folder_does(tmp_path: Path, verified: Verified) -> None:
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "bad.jpg", tmp_path / "a" / "bad.jpg"):
        path.write_bytes(b"no image")
    assert verified(tmp_path) == {str(tmp_path / "a" / "bad.jpg"): "foreign"}


def test_images_of_other_kinds_are_sound(tmp_path: Path, verified: Verified) -> None:
    for name, format in (("a.png", "PNG"), ("b.webp", "WEBP"), ("c.JPEG", "JPEG"), ("e.jpg", "MPO")):
        (tmp_path / name).write_bytes(encoded(BLANK, format))
    Image.new("CMYK", (40, 40)).save(tmp_path / "f.jpg")
    Image.new("L", (40, 40)).save(tmp_path / "g.jpg", progressive=True)
    (tmp_path / "h.jpg").write_bytes(encoded(BLANK, "JPEG") + b"more")
    Image.fromarray(np.full((40, 40), 200, np.uint16)).save(tmp_path / "i.png")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "features.h5").write_text("no image either, with a suffix that Pillow knows")
    assert verified(tmp_path) == {}


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32"])
def test_values_that_convert_makes_white_are_named(tmp_path: Path, dtype: str, verified: Verified) -> None:
    path = tmp_path / "deep.tif"
    Image.fromarray((np.arange(64 * 64).reshape(64, 64) * 16).astype(dtype)).save(path)
    with Image.open(path) as image:
        assert image.convert("RGB").getpixel((20, 0)) == (255, 255, 255)
    said = rf"{path}: clipped: values from 0(.0)? to 65520(.0)? in mode"
    assert verified(tmp_path, said=said) == {str(path): "clipped"}


def test_what_is_no_readable_image_is_named_with_the_reason(tmp_path: Path, verified: Verified) -> None:
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a.png").write_bytes(encoded(Image.effect_noise((40, 30), 64), "PNG")[:-300])
    (tmp_path / "._a.png").write_bytes(bytes.fromhex("0005160700020000") + b"Mac OS X        " + bytes(60))
    os.mkfifo(tmp_path / "pipe.jpg")
    expected = {"a.png": "truncated", "._a.png": "foreign", "gone.jpg": "unreadable", "pipe.jpg": "unreadable"}
    said = r"/gone.jpg: unreadable: No such file or directory"
    assert verified(tmp_path, 2, said) == {f"{tmp_path}/{name}": kind for name, kind in expected.items()}


def test_a_fault_of_the_machine_is_not_called_damage(tmp_path: Path, verified: Verified) -> None:
    path = tmp_path / "a.jpg"
    path.symlink_to("/proc/self/mem")  # EIO: nothing is mapped at its start
    said = "unreadable: Input/output error. The file may be intact"
    assert verified(tmp_path, said=said) == {str(path): "unreadable"}


def test_what_is_not_possible_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("empty", " has no files with the suffix of an image"),
        ("no", ": No such file or directory"),
    ):
        assert main(["verify", str(tmp_path / name)]) == 1
        assert f"{tmp_path / name}{message}" in capsys.readouterr().err
