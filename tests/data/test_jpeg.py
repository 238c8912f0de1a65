"""JPEG headers, scans and integrity checks; which images stay encoded, and which Pillow decodes.

``tests/integration`` has odd, hostile and mutated JPEGs.
"""

from __future__ import annotations

import io
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, UnidentifiedImageError
from torchvision.datasets.folder import default_loader

from proxyloader import ImageError
from proxyloader.data import encoded_image
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.jpeg import JpegHeader, find_damage, read_jpeg_header, read_scans
from proxyloader.workers.fetch import checking

from ..compare import picture
from ..jpeg_writer import segment
from ..odd_formats import ODD_FORMATS, encoded
from ..outcomes import raises

LARGE, PHOTO = (picture(0, size) for size in ((290, 161), (90, 61)))
JPEG = encoded(PHOTO, "JPEG")


def header_of(data: bytes) -> JpegHeader:
    header = read_jpeg_header(data)
    assert header is not None
    return header


def stays_encoded(data: bytes) -> bool:
    return EncodedImage.from_jpeg(data) is not None


def test_a_header_is_read_with_any_segments_before_the_frame_unless_it_is_truncated() -> None:
    data = JPEG
    comment = b"\xff\xfe\x00\x08\xff\xc0xyzw"  # looks like a frame inside
    fill = b"\xff\xff\xff"
    for more in (b"", comment, fill, fill + comment * 3):
        header = read_jpeg_header(data[:2] + more + data[2:])
        assert header is not None and (header.height, header.width, header.matches_pillow) == (61, 90, True)
    assert not any(read_jpeg_header(data[:length]) for length in (0, 1, 2, 3, 4, 10, 20, 150, 300))


@pytest.mark.parametrize("is_progressive", [False, True])
def test_the_end_behind_the_scans_is_found(is_progressive: bool) -> None:
    data = encoded(PHOTO, "JPEG", progressive=is_progressive)
    header = header_of(data)
    assert header.matches_pillow and header.is_progressive == is_progressive
    for behind in (b"", b"\xff\xd8\xff", data, bytes(1000)):
        found = read_scans(data + behind, header)
        assert found is not None and found.end == len(data)


def test_a_file_without_its_end_or_its_last_scan_is_decoded_by_pillow() -> None:
    cut = JPEG[:-2]
    assert read_scans(cut, header_of(cut)) is None and not stays_encoded(cut)
    data = encoded(PHOTO, "JPEG", progressive=True)
    last = data.rfind(b"\xff\xda")
    assert read_scans(data[:last] + b"\xff\xd9", header_of(data)) is None
    assert Image.open(io.BytesIO(data[:last] + b"\xff\xd9")).convert("RGB").size == (90, 61)


# --- see NOTE [ Damaged scans ] --------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "4:2:0": {},
    "4:4:4": {"subsampling": "4:4:4"},
    "restart markers": {"restart_marker_blocks": 3},
    "optimized tables": {"optimize": True},
    "progressive": {"progressive": True},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_damaged_jpeg_is_decoded_by_pillow(options: dict[str, Any]) -> None:
    data = encoded(LARGE, "JPEG", **options)
    middle = len(data) // 2
    assert not find_damage(data) and stays_encoded(data)
    damaged = {
        "truncated": data[:middle],
        "a byte short": data[:-1],
        "a lost block": data[:middle] + bytes(2048) + data[middle + 2048 :],
        "another file's block": data[:middle] + bytes(range(255, -1, -1)) * 2 + data[middle + 512 :],
    }
    assert {name: stays_encoded(each) for name, each in damaged.items()} == dict.fromkeys(damaged, False)
    assert find_damage(data[:middle] + b"\xff\xd9")


def test_zeros_are_searched_for_only_before_a_gpu_and_runs_of_zeros_may_be_valid() -> None:
    data = encoded(LARGE, "JPEG")
    lost = data[: len(data) // 2] + bytes(2048) + data[len(data) // 2 + 2048 :]
    assert not stays_encoded(lost)
    with checking(None, []):
        assert stays_encoded(lost)
    plain = encoded(Image.new("RGB", (2000, 2000)), "JPEG", optimize=True)
    assert bytes(64) in plain and stays_encoded(plain)


# --- see NOTE [ Headers that DALI cannot parse ] ----------------------------------------------------------------------


@pytest.mark.parametrize("marker", [0x00, 0x01, 0xBF, 0xC6, 0xC8, 0xD0, 0xD8, 0xD9, 0xDC, 0xDE, 0xF0, 0xFD])
def test_an_invalid_marker_before_the_scans_and_a_second_frame_are_left_to_pillow(marker: int) -> None:
    data = JPEG
    frame = data[data.find(b"\xff\xc0") + 4 :][:15]
    assert read_jpeg_header(data[:2] + segment(marker, frame if marker == 0xC6 else b"12345678") + data[2:]) is None


# --- which images stay encoded ---------------------------------------------------------------------------------------

STAY_ENCODED = {
    *("odd_422.jpg", "odd_444.jpg", "odd_grey.jpg", "odd_orientation_6.jpg", "odd_progressive.jpg"),
    *("odd_restart_intervals.jpg", "odd_thumbnail.jpg", "odd_two_pictures.jpg", "odd_zeros_behind.jpg"),
}


@pytest.mark.parametrize("name", ODD_FORMATS)
def test_an_image_has_the_size_and_pixels_that_pillow_gives_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JPEGs that DALI decodes as Pillow does stay encoded, unless they are larger than what is read of a file."""
    data, path = ODD_FORMATS[name](PHOTO), tmp_path / name
    path.write_bytes(data)
    theirs = default_loader(str(path))
    for most in (1 << 20, len(data) - 1, 3000, 100):
        monkeypatch.setattr(encoded_image, "MAX_READ_BYTES", most)
        for image in (EncodedImage.open(path), EncodedImage.from_bytes(data, name)):
            assert (image.width, image.height) == theirs.size
            assert np.array_equal(np.asarray(image.decoded()), np.asarray(theirs))
            assert image.data.startswith(b"P6") or len(image.data) <= most
            assert most < 1 << 20 or image.data.startswith(b"P6") == (name not in STAY_ENCODED)


@pytest.mark.parametrize(("size", "stays"), [((8, 8), True), ((7, 90), False), ((90, 1), False)])
def test_slivers_are_decoded_by_pillow(size: tuple[int, int], stays: bool) -> None:
    image = EncodedImage.from_bytes(encoded(PHOTO.resize(size), "JPEG"))
    assert (image.width, image.height) == size and image.data.startswith(b"\xff\xd8") == stays


def test_a_picture_of_more_bytes_than_dali_counts_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "large.png")
    monkeypatch.setattr(encoded_image, "MAX_PIXEL_BYTES", 3 * 61 * 90 - 1)
    with raises(ImageError, code="too-large", path=str(tmp_path / "large.png")):
        EncodedImage.open(tmp_path / "large.png")
    PHOTO.save(tmp_path / "large.jpg")
    image = EncodedImage.open(tmp_path / "large.jpg")
    assert repr(image) == f"EncodedImage(height=61, width=90, path='{tmp_path / 'large.jpg'}')"


def sparse(start: bytes, size: int) -> Callable[[Path], None]:
    """A file that begins so, and goes on with zeros."""

    def make(path: Path) -> None:
        path.write_bytes(start)
        os.truncate(path, size)

    return make


NO_FORMAT = "cannot identify image file"
NO_IMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), NO_FORMAT),
    "10 GB of nothing": (sparse(b"", 10 << 30), rf"{NO_FORMAT} \(10737418240 bytes\)"),
    "a large archive": (sparse(b"PK\3\4", 10 << 30), NO_FORMAT),
    "a large archive of tar": (sparse(bytes(257) + b"ustar\00000", 10 << 30), NO_FORMAT),
    "a file that does not say its size": (lambda path: path.symlink_to("/proc/self/status"), NO_FORMAT),
    "an empty file that does not say its size": (lambda path: path.symlink_to("/proc/self/task/none"), "No such file"),
}


@pytest.mark.parametrize("name", NO_IMAGES)
def test_files_that_are_no_images_are_refused_without_being_read_to_the_end(name: str, tmp_path: Path) -> None:
    make, reason = NO_IMAGES[name]
    path = tmp_path / "a.jpg"
    make(path)
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match=reason) as caught:
            EncodedImage.open(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * encoded_image.MAX_READ_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    with pytest.raises((OSError, UnidentifiedImageError)):
        default_loader(str(path))


BEHIND = {
    "some megabytes of zeros": sparse(JPEG, 5 << 20),
    "a film": lambda path: path.write_bytes(JPEG + np.random.default_rng(0).bytes(5 << 20)),
    "another picture": lambda path: path.write_bytes(JPEG * 2 + b"\0"),
}


@pytest.mark.parametrize("name", BEHIND)
def test_data_behind_a_jpeg_is_dropped(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    BEHIND[name](path)
    image = EncodedImage.open(path)
    assert image.data == JPEG
    assert np.array_equal(np.asarray(image.decoded()), np.asarray(default_loader(str(path))))
    assert EncodedImage.from_bytes(path.read_bytes()).data == JPEG


def test_pillow_reads_a_jpeg_without_an_end_as_far_as_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    sparse(JPEG[:1000], 10 << 30)(path)
    assert np.array_equal(np.asarray(EncodedImage.open(path).decoded()), np.asarray(default_loader(str(path))))


# --- the odd formats of these tests ----------------------------------------------------------------------------------


def test_what_is_odd_is_in_the_file() -> None:
    files = {name: ODD_FORMATS[name](PHOTO) for name in ODD_FORMATS}
    opened = {name: Image.open(io.BytesIO(data)) for name, data in files.items()}
    levels = np.asarray(opened["odd_grey_16_bit.png"])
    assert np.array_equal(levels, np.asarray(PHOTO.convert("L")).astype(np.uint16) * 251)  # which uses both bytes
    markers = {name: opened[f"odd_{name}.jpg"].info.get("adobe_transform") for name in ("cmyk", "ycck", "rgb")}
    assert markers == {"cmyk": 0, "ycck": 2, "rgb": 0} and b"Adobe" not in files["odd_cmyk_without_adobe.jpg"]
    assert all(np.asarray(opened[f"odd_{name}.jpg"].getchannel("K")).mean() > 10 for name in ("cmyk", "ycck"))
    assert files["odd_thumbnail.jpg"].count(b"\xff\xc0\x00\x11\x08") == 2
    sampled = {name: opened[f"odd_{name}.jpg"].layer[0][1:3] for name in ("444", "422", "progressive")}
    assert sampled == {"444": (1, 1), "422": (2, 1), "progressive": (2, 2)}
    assert [name for name, image in opened.items() if "progressive" in image.info] == ["odd_progressive.jpg"]
    assert opened["odd_orientation_6.jpg"].getexif()[ExifTags.Base.Orientation] == 6
    assert files["odd_zeros_behind.jpg"].endswith(b"\xff\xd9" + bytes(64))
    restarts = files["odd_restart_intervals.jpg"]
    assert all(marker in restarts for marker in (b"\xff\xdd\x00\x04\x00\x05", b"\xff\xd0", b"\xff\xd1"))
