"""The odd formats: Pillow reads each as what its name says, torchvision's ImageFolder takes them all."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from proxyloader.make_dataset import photograph

from .odd_formats import ODD_FORMATS

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
    "odd_grey_16_bit.png": ("PNG", "I"),
    "odd_1_bit.png": ("PNG", "1"),
    "odd_rgb.tif": ("TIFF", "RGB"),
    "odd_lossy.webp": ("WEBP", "RGB"),
    "odd_lossless.webp": ("WEBP", "RGB"),
    "odd_rgb.bmp": ("BMP", "RGB"),
    "odd_rgb.ppm": ("PPM", "RGB"),
    "odd_grey.pgm": ("PPM", "L"),
}
LOSSLESS = {name for name in ODD_FORMATS if not name.endswith(".jpg") and "palette" not in name and "lossy" not in name}


def as_array(image: Image.Image) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.asarray(image.convert("RGB")).astype(np.int16)


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return photograph(2, size=(101, 67))


def test_the_tests_know_all_of_them() -> None:
    assert set(HOW_PILLOW_SEES) == set(ODD_FORMATS)


@pytest.mark.parametrize("name", ODD_FORMATS)
def test_pillow_reads_it_as_what_it_says_it_is_and_sees_the_picture(name: str, picture: Image.Image) -> None:
    mode = "1" if "1_bit" in name else "L" if "grey" in name else "RGB"
    with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
        seen = image.format, image.mode.replace("I;16", "I")  # as which Pillow opened it until version 10
        assert seen == HOW_PILLOW_SEES[name]
        assert image.size == picture.size
        if name == "odd_grey_16_bit.png":  # Pillow cuts it off at 255 on the way to RGB
            return
        error = np.abs(as_array(image) - as_array(picture.convert(mode)))
    assert error.max() == 0 if name in LOSSLESS else error.mean() < 8


def test_grey_of_16_bits_uses_both_bytes(picture: Image.Image) -> None:
    with Image.open(io.BytesIO(ODD_FORMATS["odd_grey_16_bit.png"](picture))) as image:
        levels = np.asarray(image)
    assert np.array_equal(levels, np.asarray(picture.convert("L")).astype(np.uint16) * 251)


def test_image_folder_takes_their_names() -> None:
    assert all(name.startswith("odd_") and name.lower().endswith(IMG_EXTENSIONS) for name in ODD_FORMATS)


@pytest.mark.parametrize(("name", "transform"), [("odd_cmyk.jpg", 0), ("odd_ycck.jpg", 2), ("odd_rgb.jpg", 0)])
def test_adobe_marker(name: str, transform: int, picture: Image.Image) -> None:
    with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
        assert image.info["adobe_transform"] == transform


def test_cmyk_without_adobe_has_no_marker(picture: Image.Image) -> None:
    assert b"Adobe" not in ODD_FORMATS["odd_cmyk_without_adobe.jpg"](picture)


@pytest.mark.parametrize("name", ["odd_cmyk.jpg", "odd_ycck.jpg"])
def test_black_ink_is_used(name: str, picture: Image.Image) -> None:
    with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
        assert np.asarray(image.getchannel("K")).mean() > 10


@pytest.mark.parametrize(
    ("name", "factors"), [("odd_444.jpg", (1, 1)), ("odd_422.jpg", (2, 1)), ("odd_progressive.jpg", (2, 2))]
)
def test_chroma_subsampling(name: str, factors: tuple[int, int], picture: Image.Image) -> None:
    with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
        assert image.layer[0][1:3] == factors
        assert ("progressive" in image.info) == (name == "odd_progressive.jpg")


def test_orientation_is_in_the_exif_and_not_in_the_pixels(picture: Image.Image) -> None:
    with Image.open(io.BytesIO(ODD_FORMATS["odd_orientation_6.jpg"](picture))) as image:
        assert image.getexif()[ExifTags.Base.Orientation] == 6
        assert image.size == picture.size


def test_thumbnail_is_a_jpeg_of_another_size_before_the_picture() -> None:
    data = ODD_FORMATS["odd_thumbnail.jpg"](photograph(0, size=(320, 240)))
    with Image.open(io.BytesIO(data)) as image:
        directory = image.getexif().get_ifd(ExifTags.IFD.IFD1)
    start = data.index(b"II*\0") + directory[ExifTags.Base.JpegIFOffset]
    thumbnail = data[start : start + directory[ExifTags.Base.JpegIFByteCount]]
    with Image.open(io.BytesIO(thumbnail)) as image:
        image.load()
        assert image.size == (160, 120)
    assert data.count(b"\xff\xc0\x00\x11\x08") == 2


def test_zeros_stand_behind_the_end(picture: Image.Image) -> None:
    assert ODD_FORMATS["odd_zeros_behind.jpg"](picture).endswith(b"\xff\xd9" + bytes(64))


def test_restart_intervals_are_declared_and_used(picture: Image.Image) -> None:
    data = ODD_FORMATS["odd_restart_intervals.jpg"](picture)
    assert b"\xff\xdd\x00\x04\x00\x05" in data
    assert b"\xff\xd0" in data and b"\xff\xd1" in data
