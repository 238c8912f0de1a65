"""Which images stay encoded and which Pillow decodes."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import UnidentifiedImageError
from torchvision.datasets.folder import default_loader

from proxyloader import ImageError
from proxyloader.data import encoded_image
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.make_dataset import photograph

from ..odd_formats import ODD_FORMATS, encoded
from ..outcomes import raises

PHOTO = photograph(0, size=(90, 61))
JPEG = encoded(PHOTO, "JPEG")
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


NO_FORMAT = "not in an image format that Pillow recognizes"
NO_IMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), NO_FORMAT),
    "a full device": (lambda path: path.symlink_to("/dev/full"), NO_FORMAT),
    "a directory": (Path.mkdir, "Is a directory"),
    "10 GB of nothing": (sparse(b"", 10 << 30), f"10737418240 bytes, {NO_FORMAT}"),
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
