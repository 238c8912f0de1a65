"""``make_dataset``: the same bytes every time, readable by ImageFolder, made once, never over someone else's files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from proxyloader.make_dataset import MANIFEST, make_dataset, photograph

from .. import scripts
from ..limits import WAIT_S

SMALL = (48, 36)


def make_small(root: Path, **arguments: Any) -> Path:
    return make_dataset(root, **{"images": 12, "size": SMALL, "classes": 3, "processes": 1, **arguments})


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_image_folder_reads_it_with_labels_in_turns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = ImageFolder(str(make_small(tmp_path, images=14, classes=4)))
    assert folder.classes == ["class_000", "class_001", "class_002", "class_003"]
    assert Counter(folder.targets) == {0: 4, 1: 4, 2: 3, 3: 3}
    assert all(int(Path(path).stem[-6:]) % 4 == label for path, label in folder.samples)
    assert {Path(name).suffix for name in contents(tmp_path)} == {".jpg", ".json"}
    assert capfd.readouterr() == ("", "")  # no progress bar where stderr is no terminal
    few = make_small(tmp_path / "few", images=2, classes=5)
    assert ImageFolder(str(few)).classes == ["class_000", "class_001"]  # a class without a photograph has no folder


def test_progressive_ones_show_the_same(tmp_path: Path) -> None:
    usual, both = make_small(tmp_path / "usual"), make_small(tmp_path / "both", progressive=0.5)
    progressive = []
    for path in usual.rglob("*.jpg"):
        with Image.open(path) as one, Image.open(both / path.relative_to(usual)) as other:
            assert "progressive" not in one.info and [part[1:3] for part in one.layer] == [(2, 2), (1, 1), (1, 1)]
            progressive.append("progressive" in other.info)
            np.testing.assert_array_equal(one, other)
    assert 2 <= sum(progressive) <= 10


def test_photographs_take_about_100_kb_at_the_default_size(tmp_path: Path) -> None:
    sizes_kb = [len(data) / 1000 for data in contents(make_dataset(tmp_path / "set", images=12, processes=1)).values()]
    assert len(sizes_kb) == 13 and 85 < sum(sizes_kb) / 12 < 115
    assert sorted(sizes_kb)[1] > 50 and max(sizes_kb) < 200


def test_most_have_the_size_asked_for_and_others_several_shapes(tmp_path: Path) -> None:
    root = make_small(tmp_path, images=160, size=(60, 40), classes=4)
    shapes = Counter(image.size for image, _ in ImageFolder(str(root)))
    assert shapes.most_common(1)[0][0] == (60, 40) and 0.45 < shapes[60, 40] / 160 < 0.75
    assert shapes[40, 60] > 5 and shapes[50, 50] > 3 and len(shapes) > 8
    assert all(0.85 * 40 < side < 1.15 * 60 for shape in shapes for side in shape)


def test_any_number_of_processes_writes_the_same_bytes_and_larger_sets_begin_alike(tmp_path: Path) -> None:
    one, two = contents(make_small(tmp_path / "one")), contents(make_small(tmp_path / "two", processes=2))
    more = contents(make_small(tmp_path / "more", images=20))
    assert one == two and {name for name in one if more[name] != one[name]} == {MANIFEST}


def test_the_same_arguments_again_write_nothing_but_what_an_interrupted_one_lacks(tmp_path: Path) -> None:
    whole, root = make_small(tmp_path / "whole"), make_small(tmp_path / "a" / "interrupted")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert make_small(root, processes=2) == tmp_path / "a" / "interrupted"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    for path in sorted(root.rglob("*.jpg"))[5:]:
        path.unlink()
    written = {path: path.stat().st_mtime_ns for path in root.rglob("*.jpg")}
    assert len(written) == 5
    make_small(root)
    assert contents(root) == contents(whole)
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_a_set_made_with_other_arguments_is_kept(tmp_path: Path) -> None:
    before = contents(make_small(tmp_path))
    with pytest.raises(FileExistsError, match=r"contains a dataset with other arguments: .*'images': 12, "):
        make_small(tmp_path, images=13, seed=7)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"images": 12}', "\xff"], ids=repr)
@pytest.mark.parametrize("name", ["holiday.jpg", MANIFEST])
def test_files_of_someone_else_are_kept(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=rf"contains other files \({name}\); choose another folder"):
        make_small(tmp_path)
    assert contents(tmp_path) == before
    with pytest.raises(FileExistsError, match="File exists"):
        make_small(tmp_path / name)


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from proxyloader.make_dataset import make_dataset\n"
        f"make_dataset({str(tmp_path / 'set')!r}, images=4, size=(16, 16), processes=2)\n"
    )
    done = scripts.run(script, timeout_s=WAIT_S, afresh=True)
    assert done.returncode == 1
    assert 'Scripts need `if __name__ == "__main__":`; from stdin, use processes=1' in done.stderr


# --- photographs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (9, 33), (500, 375), (11, 700), (1100, 20)], ids=str)
def test_a_photograph_has_the_size_asked_for(size: tuple[int, int]) -> None:
    image = photograph(3, size=size)
    assert (image.size, image.mode) == (size, "RGB")


def test_a_photograph_follows_from_its_arguments_alone() -> None:
    before = photograph(13, size=SMALL)
    photograph(8, size=(300, 600), seed=5)
    assert photograph(13, size=SMALL) == before
    others = [photograph(13, size=SMALL, classes=9), photograph(13, size=SMALL, seed=1), photograph(14, size=SMALL)]
    assert before not in others


def test_the_class_can_be_learned_from_a_few_pixels() -> None:
    def pixels(indices: range) -> np.ndarray[Any, np.dtype[np.float64]]:
        pictures = (photograph(index, size=(64, 48)).convert("YCbCr").resize((8, 8)) for index in indices)
        return np.stack([np.asarray(picture, np.float64)[..., 1:].ravel() for picture in pictures])

    means = pixels(range(300)).reshape(30, 10, -1).mean(axis=0)
    test = pixels(range(300, 400))
    found = ((test[:, None] - means[None]) ** 2).sum(axis=2).argmin(axis=1)
    assert np.mean(found == np.arange(100) % 10) > 0.5  # chance is 0.1
