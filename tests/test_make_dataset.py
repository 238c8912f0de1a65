"""The synthetic data set: same bytes every time, readable by ImageFolder, weighs like photographs, can be learned."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, pil_loader

import proxyloader.make_dataset as module
from proxyloader.make_dataset import MANIFEST, ODD_FORMATS, UNFINISHED, make_dataset, photograph

SMALL = (48, 36)


def make_small(root: Path, **arguments: Any) -> Path:
    return make_dataset(root, **{"images": 12, "size": SMALL, "classes": 3, "processes": 1, **arguments})


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        width, height = image.size
    return width, height


def as_array(image: Image.Image) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.asarray(image.convert("RGB")).astype(np.int16)


class TestWhatIsWritten:
    def test_image_folder_reads_it_with_the_classes_in_order(self, tmp_path: Path) -> None:
        folder = ImageFolder(str(make_small(tmp_path, images=14, classes=4)))
        assert folder.classes == ["class_000", "class_001", "class_002", "class_003"]
        assert len(folder) == 14
        assert all(image.mode == "RGB" for image, _ in folder)

    def test_labels_are_dealt_round_robin(self, tmp_path: Path) -> None:
        folder = ImageFolder(str(make_small(tmp_path, images=14, classes=4)))
        assert Counter(folder.targets) == {0: 4, 1: 4, 2: 3, 3: 3}
        assert {int(Path(path).stem[-6:]) % 4 == label for path, label in folder.samples} == {True}

    def test_a_class_without_a_photograph_has_no_folder(self, tmp_path: Path) -> None:
        root = make_small(tmp_path, images=2, classes=5, odd_formats=True)
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
        one = make_small(tmp_path / "one", odd_formats=True)
        two = make_small(tmp_path / "two", odd_formats=True, processes=2)
        assert contents(one) == contents(two)
        assert len(contents(one)) == 12 + len(ODD_FORMATS) + 1

    def test_a_larger_set_begins_with_the_same_files(self, tmp_path: Path) -> None:
        small = contents(make_small(tmp_path / "small", odd_formats=True))
        large = contents(make_small(tmp_path / "large", odd_formats=True, images=20))
        assert {name for name in small if large.get(name) != small[name]} == {MANIFEST}

    def test_another_seed_makes_other_pictures(self) -> None:
        assert photograph(0, size=SMALL, seed=1).tobytes() != photograph(0, size=SMALL, seed=2).tobytes()

    def test_no_two_pictures_are_alike(self) -> None:
        assert len({photograph(index, size=SMALL, label=0).tobytes() for index in range(30)}) == 30

    def test_a_picture_does_not_depend_on_those_made_before(self) -> None:
        before = photograph(7, size=SMALL).tobytes()
        photograph(8, size=(300, 600), seed=5)
        assert photograph(7, size=SMALL).tobytes() == before


class TestPhotograph:
    @pytest.mark.parametrize("size", [(8, 8), (9, 33), (500, 375), (11, 700), (1100, 20)], ids=str)
    def test_has_exactly_the_size_asked_for(self, size: tuple[int, int]) -> None:
        image = photograph(3, size=size)
        assert (image.size, image.mode) == (size, "RGB")

    def test_its_label_is_dealt_by_its_index_unless_given(self) -> None:
        dealt = photograph(13, size=SMALL, classes=10).tobytes()
        assert dealt == photograph(13, size=SMALL, classes=10, label=3).tobytes()
        assert dealt != photograph(13, size=SMALL, classes=10, label=4).tobytes()

    def test_uses_the_whole_range_of_brightness_and_rarely_clips(self) -> None:
        levels = np.stack([as_array(photograph(index, size=(250, 190))).mean(axis=2) for index in range(10)])
        assert np.percentile(levels, 2) < 50
        assert np.percentile(levels, 98) > 200
        assert np.mean((levels == 0) | (levels == 255)) < 0.02

    def test_its_spectrum_falls_as_a_photographs_does_and_white_noise_does_not(self) -> None:
        power = np.zeros((256, 129))
        for index in range(8):
            grey = np.asarray(photograph(index, size=(256, 256)).convert("L"), np.float64)
            window = np.outer(np.hanning(256), np.hanning(256))
            power += np.abs(np.fft.rfft2((grey - grey.mean()) * window)) ** 2
        radius = np.hypot(np.fft.fftfreq(256)[:, None], np.fft.rfftfreq(256)[None, :]) * 256
        octaves = [power[(radius >= low) & (radius < 2 * low)].mean() for low in (4, 8, 16, 32, 64)]
        slope = np.polyfit(np.arange(5), np.log2(octaves), 1)[0]
        assert -3 < slope < -1.2  # photographs: power about 1 / f**2; white noise: 0

    def test_the_class_can_be_learned_from_a_few_pixels(self) -> None:
        def pixels(indices: range) -> np.ndarray[Any, np.dtype[np.float64]]:
            pictures = (photograph(index, size=(64, 48)).convert("YCbCr").resize((8, 8)) for index in indices)
            return np.stack([np.asarray(picture, np.float64)[..., 1:].ravel() for picture in pictures])

        means = pixels(range(300)).reshape(30, 10, -1).mean(axis=0)
        test = pixels(range(300, 400))
        found = ((test[:, None] - means[None]) ** 2).sum(axis=2).argmin(axis=1)
        accuracy = np.mean(found == np.arange(100) % 10)
        assert accuracy > 0.5  # chance is 0.1


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
        expected = {"images": 12, "size": [48, 36], "classes": 3, "seed": 4, "odd_formats": False}
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
        with pytest.raises(FileExistsError, match=r"1 entries that make_dataset did not write \(holiday.jpg\)"):
            make_small(tmp_path)
        assert contents(tmp_path) == {"holiday.jpg": b"mine"}

    @pytest.mark.parametrize("text", ["{", "[]", '{"images": 12}', "\xff"], ids=repr)
    def test_somebody_elses_manifest_is_kept(self, tmp_path: Path, text: str) -> None:
        (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
        with pytest.raises(FileExistsError, match=r"Give another folder, or delete this one"):
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
        # The module without its package, which takes seconds to import in each process.
        script.write_text(
            f"import sys; sys.path.insert(0, {str(Path(module.__file__).parent)!r}); import make_dataset\n"
            f"make_dataset.make_dataset({str(tmp_path / 'set')!r}, images=4, size=(16, 16), processes=2)\n"
        )
        run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 1
        assert 'without `if __name__ == "__main__":`, or from stdin? Then use processes=1' in run.stderr


HOW_PILLOW_SEES = {
    "odd_cmyk.jpg": ("JPEG", "CMYK"),
    "odd_cmyk_without_adobe.jpg": ("JPEG", "CMYK"),
    "odd_ycck.jpg": ("JPEG", "CMYK"),
    "odd_rgb.jpg": ("JPEG", "RGB"),
    "odd_grey.jpg": ("JPEG", "L"),
    "odd_progressive.jpg": ("JPEG", "RGB"),
    "odd_444.jpg": ("JPEG", "RGB"),
    "odd_422.jpg": ("JPEG", "RGB"),
    "odd_orientation_6.jpg": ("JPEG", "RGB"),
    "odd_thumbnail.jpg": ("JPEG", "RGB"),
    "odd_zeros_behind.jpg": ("JPEG", "RGB"),
    "odd_restart_intervals.jpg": ("JPEG", "RGB"),
    "odd_two_pictures.jpg": ("MPO", "RGB"),
    "odd_gif.jpg": ("GIF", "P"),
    "odd_png.jpg": ("PNG", "RGB"),
    "odd_rgb.png": ("PNG", "RGB"),
    "odd_palette.png": ("PNG", "P"),
    "odd_palette_transparent.png": ("PNG", "P"),
    "odd_rgba.png": ("PNG", "RGBA"),
    "odd_grey_alpha.png": ("PNG", "LA"),
    "odd_grey_16_bit.png": ("PNG", "I;16"),
    "odd_1_bit.png": ("PNG", "1"),
    "odd_rgb.tif": ("TIFF", "RGB"),
    "odd_lossy.webp": ("WEBP", "RGB"),
    "odd_lossless.webp": ("WEBP", "RGB"),
    "odd_rgb.bmp": ("BMP", "RGB"),
    "odd_rgb.ppm": ("PPM", "RGB"),
    "odd_grey.pgm": ("PPM", "L"),
}
LOSSLESS = {name for name in ODD_FORMATS if not name.endswith(".jpg") and "palette" not in name and "lossy" not in name}


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return photograph(2, size=(101, 67))


class TestOddFormats:
    def test_the_tests_know_all_of_them(self) -> None:
        assert set(HOW_PILLOW_SEES) == set(ODD_FORMATS)

    @pytest.mark.parametrize("name", ODD_FORMATS)
    def test_pillow_reads_it_as_what_it_says_it_is(self, name: str, picture: Image.Image) -> None:
        with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
            assert (image.format, image.mode) == HOW_PILLOW_SEES[name]
            assert image.size == picture.size

    @pytest.mark.parametrize("name", sorted(ODD_FORMATS.keys() - {"odd_grey_16_bit.png"}))
    def test_it_shows_the_picture(self, name: str, picture: Image.Image) -> None:
        mode = "1" if "1_bit" in name else "L" if "grey" in name else "RGB"
        with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
            error = np.abs(as_array(image) - as_array(picture.convert(mode)))
        assert error.max() == 0 if name in LOSSLESS else error.mean() < 8

    def test_grey_of_16_bits_uses_both_bytes(self, picture: Image.Image) -> None:
        with Image.open(io.BytesIO(ODD_FORMATS["odd_grey_16_bit.png"](picture))) as image:
            levels = np.asarray(image)
        assert np.array_equal(levels, np.asarray(picture.convert("L")).astype(np.uint16) * 251)

    @pytest.mark.parametrize("name", ODD_FORMATS)
    def test_image_folder_takes_its_name(self, name: str) -> None:
        assert name.startswith("odd_")
        assert name.lower().endswith(IMG_EXTENSIONS)

    def test_they_are_spread_over_the_classes_and_load_as_rgb(self, tmp_path: Path) -> None:
        root = make_small(tmp_path, odd_formats=True)
        odd = [(Path(path), label) for path, label in ImageFolder(str(root)).samples if "odd_" in path]
        assert {path.name for path, _ in odd} == set(ODD_FORMATS)
        assert max(Counter(label for _, label in odd).values()) <= len(ODD_FORMATS) // 3 + 1
        for path, _ in odd:
            assert pil_loader(str(path)).mode == "RGB"

    @pytest.mark.parametrize(("name", "transform"), [("odd_cmyk.jpg", 0), ("odd_ycck.jpg", 2), ("odd_rgb.jpg", 0)])
    def test_adobe_marker(self, name: str, transform: int, picture: Image.Image) -> None:
        with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
            assert image.info["adobe_transform"] == transform

    def test_cmyk_without_adobe_has_no_marker(self, picture: Image.Image) -> None:
        assert b"Adobe" not in ODD_FORMATS["odd_cmyk_without_adobe.jpg"](picture)

    @pytest.mark.parametrize("name", ["odd_cmyk.jpg", "odd_ycck.jpg"])
    def test_black_ink_is_used(self, name: str, picture: Image.Image) -> None:
        with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
            assert np.asarray(image.getchannel("K")).mean() > 10

    @pytest.mark.parametrize(
        ("name", "factors"), [("odd_444.jpg", (1, 1)), ("odd_422.jpg", (2, 1)), ("odd_progressive.jpg", (2, 2))]
    )
    def test_chroma_subsampling(self, name: str, factors: tuple[int, int], picture: Image.Image) -> None:
        with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
            assert image.layer[0][1:3] == factors
            assert ("progressive" in image.info) == (name == "odd_progressive.jpg")

    def test_orientation_is_in_the_exif_and_not_in_the_pixels(self, picture: Image.Image) -> None:
        with Image.open(io.BytesIO(ODD_FORMATS["odd_orientation_6.jpg"](picture))) as image:
            assert image.getexif()[ExifTags.Base.Orientation] == 6
            assert image.size == picture.size

    def test_thumbnail_is_a_jpeg_of_another_size_before_the_picture(self) -> None:
        data = ODD_FORMATS["odd_thumbnail.jpg"](photograph(0, size=(320, 240)))
        with Image.open(io.BytesIO(data)) as image:
            directory = image.getexif().get_ifd(ExifTags.IFD.IFD1)
        start = data.index(b"II*\0") + directory[ExifTags.Base.JpegIFOffset]
        thumbnail = data[start : start + directory[ExifTags.Base.JpegIFByteCount]]
        with Image.open(io.BytesIO(thumbnail)) as image:
            image.load()
            assert image.size == (160, 120)
        assert data.count(b"\xff\xc0\x00\x11\x08") == 2

    def test_zeros_stand_behind_the_end(self, picture: Image.Image) -> None:
        assert ODD_FORMATS["odd_zeros_behind.jpg"](picture).endswith(b"\xff\xd9" + bytes(64))

    def test_restart_intervals_are_declared_and_used(self, picture: Image.Image) -> None:
        data = ODD_FORMATS["odd_restart_intervals.jpg"](picture)
        assert b"\xff\xdd\x00\x04\x00\x05" in data
        assert b"\xff\xd0" in data and b"\xff\xd1" in data
