"""What stays encoded and what Pillow decodes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxyloader import EncodedImage, ImageError, InputError, sample
from proxyloader.odd_formats import ODD_FORMATS
from proxyloader.photograph import photograph

PHOTO = photograph(0, size=(90, 61))
STAY_ENCODED = {
    "odd_422.jpg",
    "odd_444.jpg",
    "odd_grey.jpg",
    "odd_orientation_6.jpg",
    "odd_progressive.jpg",
    "odd_restart_intervals.jpg",
    "odd_thumbnail.jpg",
    "odd_two_pictures.jpg",
    "odd_zeros_behind.jpg",
}


@pytest.mark.parametrize("name", ODD_FORMATS)
def test_an_image_has_the_size_and_pixels_that_pillow_gives_it(name: str) -> None:
    data = ODD_FORMATS[name](PHOTO)
    image = EncodedImage.from_bytes(data, name)
    theirs = Image.open(io.BytesIO(data)).convert("RGB")
    assert (image.width, image.height) == theirs.size
    ours = Image.open(io.BytesIO(image.data)).convert("RGB")
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))


def test_jpegs_that_dali_decodes_as_pillow_does_stay_encoded_and_all_else_does_not() -> None:
    encoded = {name for name, encode in ODD_FORMATS.items() if EncodedImage.from_bytes(encode(PHOTO)).data[:2] != b"P6"}
    assert encoded == STAY_ENCODED


def plain_jpeg(image: Image.Image = PHOTO) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize(("size", "encoded"), [((8, 8), True), ((7, 90), False), ((90, 1), False)])
def test_slivers_are_decoded_by_pillow(size: tuple[int, int], encoded: bool) -> None:
    image = EncodedImage.from_bytes(plain_jpeg(PHOTO.resize(size)))
    assert (image.width, image.height) == size and image.data.startswith(b"\xff\xd8") == encoded


def test_random_damage_to_a_header_raises_nothing_but_an_image_error() -> None:
    generator, data = np.random.default_rng(0), plain_jpeg()
    for _ in range(300):
        damaged = bytearray(data)
        for at in generator.integers(2, 700, 4):
            damaged[at] = generator.integers(256)
        try:
            image = EncodedImage.from_bytes(bytes(damaged), "damaged.jpg")
        except ImageError as error:
            assert "damaged.jpg" in str(error)
        else:
            assert image.height > 0 and image.width > 0


def test_a_picture_of_another_mode_than_rgb_says_how_to_convert_it() -> None:
    with pytest.raises(InputError, match=r"the mode is 'L'.*image.convert\('RGB'\)"):
        EncodedImage.from_pil(PHOTO.convert("L"))


def test_an_image_that_is_not_decoded_is_converted_to_rgb_alone_and_the_file_is_not_to_blame() -> None:
    image = EncodedImage.from_pil(PHOTO, "a.png")
    assert image.convert("RGB") is image
    with pytest.raises(InputError, match=r"a.png: it is not decoded yet.*'L'.*torch.utils.data.DataLoader"):
        image.convert("L")


def test_a_picture_of_more_bytes_than_dali_counts_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "large.png")
    monkeypatch.setattr(sample, "MOST_PIXEL_BYTES", 3 * 61 * 90 - 1)
    with pytest.raises(ImageError, match=r"large.png: 90 x 61 pixels are 16470 bytes, and DALI takes 16469"):
        EncodedImage.open(tmp_path / "large.png")
    PHOTO.save(tmp_path / "large.jpg")
    assert EncodedImage.open(tmp_path / "large.jpg").height == 61


def test_a_decompression_bomb_says_how_it_may_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ImageError, match="bomb.png: it could be a decompression bomb.*Give the loader max_pixels"):
        EncodedImage.open(tmp_path / "bomb.png")


def test_an_image_shows_its_size_and_not_its_bytes(tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "a.jpg")
    image = EncodedImage.open(tmp_path / "a.jpg")
    assert repr(image) == f"EncodedImage(height=61, width=90, path='{tmp_path / 'a.jpg'}')"
