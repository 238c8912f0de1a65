"""The synthetic data set: same bytes every time, readable by ImageFolder, made once, never over another's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import proxyloader.tools.synthetic.dataset as module
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from proxyloader.make_dataset import MANIFEST, UNFINISHED, make_dataset, photograph

from ..limits import WAIT_S

SMALL = (48, 36)


def make_small(root: Path, **arguments: Any) -> Path:
    return make_dataset(root, **{"images": 12, "size": SMALL, "classes": 3, "processes": 1, **arguments})


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        width, height = image.size
    return width, height


class TestWhatIsWritten:
    def test_image_folder_reads_it_with_the_classes_in_order(self, tmp_path: Path) -> None:
        folder = ImageFolder(str(make_small(tmp_path, images=14, classes=4)))
        assert folder.classes == ["class_000", "class_001", "class_002", "class_003"]
        assert len(folder) == 14
        assert all(image.mode == "RGB" for image, _ in folder)

    def test_progressive_ones_are_as_many_as_asked_for_and_show_the_same(self, tmp_path: Path) -> None:
        usual, both = make_small(tmp_path / "usual"), make_small(tmp_path / "both", progressive=0.5)
        progressive = []
        for path in usual.rglob("*.jpg"):
            with Image.open(path) as one, Image.open(both / path.relative_to(usual)) as other:
                assert "progressive" not in one.info
                progressive.append("progressive" in other.info)
                np.testing.assert_array_equal(one, other)
        assert 2 <= sum(progressive) <= 10 and "progressive" not in (usual / MANIFEST).read_text()

    def test_labels_are_dealt_round_robin(self, tmp_path: Path) -> None:
        folder = ImageFolder(str(make_small(tmp_path, images=14, classes=4)))
        assert Counter(folder.targets) == {0: 4, 1: 4, 2: 3, 3: 3}
        assert {int(Path(path).stem[-6:]) % 4 == label for path, label in folder.samples} == {True}

    def test_a_class_without_a_photograph_has_no_folder(self, tmp_path: Path) -> None:
        root = make_small(tmp_path, images=2, classes=5)
        assert ImageFolder(str(root)).classes == ["class_000", "class_001"]

    def test_photographs_weigh_about_110_kb_at_the_default_size(self, tmp_path: Path) -> None:
        root = make_dataset(tmp_path / "set", images=12, processes=1)
        sizes_kb = [path.stat().st_size / 1000 for path in root.rglob("*.jpg")]
        assert len(sizes_kb) == 12
        assert 90 < np.mean(sizes_kb) < 125
        assert min(sizes_kb) > 50
        assert max(sizes_kb) < 200

    def test_photographs_are_420_jpegs(self, tmp_path: Path) -> None:
        for path in make_small(tmp_path).rglob("*.jpg"):
            with Image.open(path) as image:
                assert image.format == "JPEG"
                assert [component[1:3] for component in image.layer] == [(2, 2), (1, 1), (1, 1)]

    def test_several_shapes_and_most_of_the_size_asked_for(self, tmp_path: Path) -> None:
        root = make_small(tmp_path, images=120, size=(60, 40))
        shapes = Counter(size_of(path) for path in root.rglob("*.jpg"))
        assert shapes.most_common(1)[0][0] == (60, 40)
        assert 0.45 < shapes[60, 40] / 120 < 0.75
        assert shapes[40, 60] > 5
        assert sum(count for (width, height), count in shapes.items() if width == height) > 3
        assert len(shapes) > 8
        assert all(0.85 * 40 < side < 1.15 * 60 for shape in shapes for side in shape)

    def test_the_shape_says_nothing_of_the_class(self, tmp_path: Path) -> None:
        root = make_small(tmp_path, images=160, size=(12, 8), classes=4)
        for folder in sorted(root.glob("class_*")):
            assert len({size_of(path) for path in folder.iterdir()}) > 3

    def test_nothing_is_shown_where_stderr_is_no_terminal(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        make_small(tmp_path)
        assert capfd.readouterr() == ("", "")


class TestSameBytes:
    def test_any_number_of_processes_writes_the_same_bytes(self, tmp_path: Path) -> None:
        one = make_small(tmp_path / "one")
        two = make_small(tmp_path / "two", processes=2)
        assert contents(one) == contents(two)
        assert len(contents(one)) == 12 + 1

    def test_a_larger_set_begins_with_the_same_files(self, tmp_path: Path) -> None:
        small = contents(make_small(tmp_path / "small"))
        large = contents(make_small(tmp_path / "large", images=20))
        assert {name for name in small if large.get(name) != small[name]} == {MANIFEST}


class TestMakesItOnce:
    def test_the_same_arguments_again_write_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_small(tmp_path)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        monkeypatch.setattr(module, "photograph", None)
        assert make_small(tmp_path, processes=2, progress=False) == tmp_path
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    def test_the_manifest_says_how_it_was_made(self, tmp_path: Path) -> None:
        manifest = json.loads((make_small(tmp_path, seed=4) / MANIFEST).read_text())
        assert manifest["made_by"] == "proxyloader.make_dataset"
        expected = {"images": 12, "size": [48, 36], "classes": 3, "seed": 4}
        assert {key: manifest[key] for key in expected} == expected

    def test_an_interrupted_one_is_completed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(index: int, **arguments: Any) -> Image.Image:
            if index == 5:
                raise KeyboardInterrupt
            return photograph(index, **arguments)

        root = tmp_path / "interrupted"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, "photograph", interrupted)
            make_small(root)
        assert (root / UNFINISHED).exists()
        assert not (root / MANIFEST).exists()
        written = {path: path.stat().st_mtime_ns for path in root.rglob("*.jpg")}
        assert len(written) == 5
        make_small(root)
        assert contents(root) == contents(make_small(tmp_path / "whole"))
        assert {path: path.stat().st_mtime_ns for path in written} == written

    def test_nothing_but_images_and_the_manifest_is_left(self, tmp_path: Path) -> None:
        assert {Path(name).suffix for name in contents(make_small(tmp_path))} == {".jpg", ".json"}

    def test_an_empty_folder_and_missing_parents_are_fine(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        for root in (tmp_path / "empty", tmp_path / "a" / "b"):
            assert (make_small(root) / MANIFEST).exists()


class TestRefusals:
    def test_a_set_made_with_other_arguments_is_kept_and_both_are_named(self, tmp_path: Path) -> None:
        before = contents(make_small(tmp_path))
        with pytest.raises(FileExistsError, match=r"holds a data set with images=12, seed=0, and images=13, seed=7 is"):
            make_small(tmp_path, images=13, seed=7)
        assert contents(tmp_path) == before

    def test_an_unfinished_set_with_other_arguments_is_kept(self, tmp_path: Path) -> None:
        make_small(tmp_path)
        os.replace(tmp_path / MANIFEST, tmp_path / UNFINISHED)
        with pytest.raises(FileExistsError, match=r"an unfinished data set with classes=3, and classes=4 is asked for"):
            make_small(tmp_path, classes=4)

    def test_somebody_elses_files_are_kept_and_named(self, tmp_path: Path) -> None:
        (tmp_path / "holiday.jpg").write_bytes(b"mine")
        with pytest.raises(FileExistsError, match=r"files that make_dataset did not write \(holiday.jpg\)"):
            make_small(tmp_path)
        assert contents(tmp_path) == {"holiday.jpg": b"mine"}

    @pytest.mark.parametrize("text", ["{", "[]", '{"images": 12}', "\xff"], ids=repr)
    def test_somebody_elses_manifest_is_kept(self, tmp_path: Path, text: str) -> None:
        (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
        with pytest.raises(FileExistsError, match=r"did not write .* Give another folder$"):
            make_small(tmp_path)

    def test_a_file_where_the_folder_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(FileExistsError, match=r"is a file"):
            make_small(tmp_path / "file")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"images": 0}, r"images=0: there must be at least 1"),
            ({"classes": 0}, r"classes=0: there must be at least 1"),
            ({"size": (7, 100)}, r"size=\(7, 100\): must be \(width, height\), each at least 8 px"),
            ({"size": (100, 7)}, r"each at least 8 px"),
            ({"seed": -1}, r"seed=-1: must be 0 or more"),
            ({"processes": 0}, r"processes=0: there must be at least 1"),
        ],
        ids=str,
    )
    def test_an_argument_out_of_range_writes_nothing(
        self, tmp_path: Path, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            make_small(tmp_path / "set", **arguments)
        assert not (tmp_path / "set").exists()

    def test_a_script_without_a_main_guard_is_told_what_to_do(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "from proxyloader.make_dataset import make_dataset\n"
            f"make_dataset({str(tmp_path / 'set')!r}, images=4, size=(16, 16), processes=2)\n"
        )
        package = Path(module.__file__).parents[3]
        run = subprocess.run(
            [sys.executable, script],
            env={**os.environ, "PYTHONPATH": str(package)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert run.returncode == 1
        assert 'without `if __name__ == "__main__":`, or from stdin? Then use processes=1' in run.stderr
