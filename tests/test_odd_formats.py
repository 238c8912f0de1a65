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
    "JPEG CMYK": ("cmyk.jpg", "cmyk_without_adobe.jpg", "ycck.jpg"),
    "JPEG RGB": (
        *("rgb.jpg", "progressive.jpg", "444.jpg", "422.jpg", "orientation_6.jpg", "thumbnail.jpg"),
        *("zeros_behind.jpg", "restart_intervals.jpg"),
    ),
    "JPEG L": ("grey.jpg",),
    "MPO RGB": ("two_pictures.jpg",),
    "GIF P": ("gif.jpg",),
    "PNG RGB": ("png.jpg", "rgb.png"),
    "PNG P": ("palette.png", "palette_transparent.png"),
    "PNG RGBA": ("rgba.png",),
    "PNG LA": ("grey_alpha.png",),
    "PNG I": ("grey_16_bit.png",),
    "PNG 1": ("1_bit.png",),
    "TIFF RGB": ("rgb.tif",),
    "WEBP RGB": ("lossy.webp", "lossless.webp"),
    "BMP RGB": ("rgb.bmp",),
    "PPM RGB": ("rgb.ppm",),
    "PPM L": ("grey.pgm",),
}
"""Format and mode, and the names of files without ``odd_``."""

LOSSLESS = {name for name in ODD_FORMATS if not name.endswith(".jpg") and "palette" not in name and "lossy" not in name}


def as_array(image: Image.Image) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.asarray(image.convert("RGB")).astype(np.int16)


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return photograph(2, size=(101, 67))


def test_their_names_are_known_here_and_to_image_folder() -> None:
    assert {f"odd_{name}" for names in HOW_PILLOW_SEES.values() for name in names} == set(ODD_FORMATS)
    assert all(name.lower().endswith(IMG_EXTENSIONS) for name in ODD_FORMATS)


@pytest.mark.parametrize("name", ODD_FORMATS)
def test_pillow_reads_it_as_what_it_says_it_is_and_sees_the_picture(name: str, picture: Image.Image) -> None:
    mode = "1" if "1_bit" in name else "L" if "grey" in name else "RGB"
    with Image.open(io.BytesIO(ODD_FORMATS[name](picture))) as image:
        seen = f"{image.format} {image.mode.replace('I;16', 'I')}"  # as which Pillow opened it until version 10
        assert name.removeprefix("odd_") in HOW_PILLOW_SEES[seen]
        assert image.size == picture.size
        if name == "odd_grey_16_bit.png":  # Pillow cuts it off at 255 on the way to RGB
            return
        error = np.abs(as_array(image) - as_array(picture.convert(mode)))
    assert error.max() == 0 if name in LOSSLESS else error.mean() < 8


def test_what_is_odd_is_in_the_file(picture: Image.Image) -> None:
    files = {name: ODD_FORMATS[name](picture) for name in ODD_FORMATS}
    opened = {name: Image.open(io.BytesIO(data)) for name, data in files.items()}
    levels = np.asarray(opened["odd_grey_16_bit.png"])
    assert np.array_equal(levels, np.asarray(picture.convert("L")).astype(np.uint16) * 251)  # which uses both bytes
    markers = {name: opened[f"odd_{name}.jpg"].info.get("adobe_transform") for name in ("cmyk", "ycck", "rgb")}
    assert markers == {"cmyk": 0, "ycck": 2, "rgb": 0} and b"Adobe" not in files["odd_cmyk_without_adobe.jpg"]
    assert all(np.asarray(opened[f"odd_{name}.jpg"].getchannel("K")).mean() > 10 for name in ("cmyk", "ycck"))
    sampled = {name: opened[f"odd_{name}.jpg"].layer[0][1:3] for name in ("444", "422", "progressive")}
    assert sampled == {"444": (1, 1), "422": (2, 1), "progressive": (2, 2)}
    assert [name for name, image in opened.items() if "progressive" in image.info] == ["odd_progressive.jpg"]
    assert opened["odd_orientation_6.jpg"].getexif()[ExifTags.Base.Orientation] == 6
    assert files["odd_zeros_behind.jpg"].endswith(b"\xff\xd9" + bytes(64))
    restarts = files["odd_restart_intervals.jpg"]
    assert all(marker in restarts for marker in (b"\xff\xdd\x00\x04\x00\x05", b"\xff\xd0", b"\xff\xd1"))


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
