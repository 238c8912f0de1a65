"""A damaged JPEG is told from a sound one: by its structure, or strictly, as libjpeg reads it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.jpeg_header import JpegHeader, read_jpeg_header
from proxyloader.data.jpeg_integrity import ScanChecker, damage_of
from proxyloader.data.jpeg_verdicts import VerdictFile, fingerprint_of
from proxyloader.make_dataset import photograph

from ..hostile_jpegs import HOSTILE_JPEGS


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "proxyloader"


def jpeg(image: Image.Image | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image or photograph(0, size=(290, 161))).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def header_of(data: bytes) -> JpegHeader:
    header = read_jpeg_header(data)
    assert header is not None
    return header


def is_sound(data: bytes, is_strict: bool) -> bool:
    return ScanChecker(is_strict).is_sound(data, header_of(data))


def cut(data: bytes) -> bytes:
    """The scan ends in the middle of the picture, and the file as it should."""
    return data[: len(data) // 2] + b"\xff\xd9"


JPEGS: dict[str, dict[str, Any]] = {
    "4:2:0": {},
    "4:4:4": {"subsampling": "4:4:4"},
    "restart markers": {"restart_marker_blocks": 3},
    "optimized tables": {"optimize": True},
}


@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS)
def test_a_whole_scan_is_told_from_a_damaged_one(options: dict[str, Any]) -> None:
    data = jpeg(**options)
    middle = len(data) // 2
    assert not damage_of(data) and is_sound(data, is_strict=False) and is_sound(data, is_strict=True)
    damaged = {
        "truncated": data[:middle],
        "a byte short": data[:-1],
        "a lost block": data[:middle] + bytes(2048) + data[middle + 2048 :],
        "another file's block": data[:middle] + bytes(range(255, -1, -1)) * 2 + data[middle + 512 :],
    }
    assert {name: is_sound(each, is_strict=False) for name, each in damaged.items()} == dict.fromkeys(damaged, False)
    assert not is_sound(cut(data), is_strict=True) and damage_of(cut(data))


@pytest.mark.parametrize("name", HOSTILE_JPEGS)
def test_a_jpeg_that_pillow_refuses_is_not_sound(name: str) -> None:
    data = HOSTILE_JPEGS[name](jpeg())
    image = EncodedImage.of_jpeg(data, max_pixels=10**12) if data else None
    if image is None or image.header is None or image.header.is_progressive:
        return  # left to Pillow
    try:
        Image.open(io.BytesIO(data)).load()
    except Image.DecompressionBombError:
        pass  # its size is refused when it is opened
    except OSError:
        assert not is_sound(image.data, is_strict=False)


def test_a_picture_with_a_run_of_zeros_is_sound() -> None:
    plain = jpeg(Image.new("RGB", (2000, 2000)), optimize=True)
    assert bytes(64) in plain
    assert is_sound(plain, is_strict=False) and is_sound(plain, is_strict=True)


def test_strict_verdicts_last_and_are_followed_by_all_checks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, damaged = jpeg(), cut(jpeg())
    assert is_sound(damaged, is_strict=False), "its structure is whole"
    assert not cache.exists(), "the default check keeps nothing"
    assert is_sound(whole, is_strict=True) and not is_sound(damaged, is_strict=True)

    def read_again(_: bytes) -> str:
        raise AssertionError("it was read before")

    monkeypatch.setattr("proxyloader.data.jpeg_integrity.damage_of", read_again)
    for is_strict in (True, False):
        assert is_sound(whole, is_strict) and not is_sound(damaged, is_strict)


def test_a_progressive_jpeg_with_a_lost_block_is_damaged_whatever_libjpeg_said() -> None:
    data = jpeg(progressive=True)
    scan = data.rindex(b"\xff\xda") + 40
    lost = data[:scan] + bytes(64) + data[scan + 64 :]
    VerdictFile.of_user(create=True).note(fingerprint_of(lost), is_sound=True)
    assert is_sound(data, is_strict=False) and not is_sound(lost, is_strict=False)


def test_without_a_cache_folder_strict_checks_are_made_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert is_sound(jpeg(), is_strict=True) and not is_sound(cut(jpeg()), is_strict=True)
