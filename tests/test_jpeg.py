"""What a JPEG says of itself, read from its markers; odd_formats and the hostile ones are in tests/integration."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from proxyloader.jpeg import read_jpeg_header
from proxyloader.photograph import photograph


def plain_jpeg(**options: bool) -> bytes:
    buffer = io.BytesIO()
    photograph(0, size=(90, 61)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def test_a_header_is_read_whatever_segments_stand_before_the_frame() -> None:
    data = plain_jpeg()
    comment = b"\xff\xfe\x00\x08\xff\xc0xyzw"  # looks like a frame inside
    fill = b"\xff\xff\xff"
    for more in (b"", comment, fill, fill + comment * 3):
        header = read_jpeg_header(data[:2] + more + data[2:])
        assert header is not None and (header.height, header.width, header.as_pillow) == (61, 90, True)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 10, 20, 150, 300])
def test_a_header_that_is_cut_off_is_none(length: int) -> None:
    assert read_jpeg_header(plain_jpeg()[:length]) is None


def test_a_scan_without_an_end_is_left_to_pillow() -> None:
    header = read_jpeg_header(plain_jpeg()[:-2])
    assert header is not None and not header.as_pillow


@pytest.mark.parametrize(("options", "scans"), [({}, 1), ({"progressive": True}, 10)], ids=["baseline", "progressive"])
def test_scans_are_counted(options: dict[str, bool], scans: int) -> None:
    header = read_jpeg_header(plain_jpeg(**options))
    assert header is not None and header.as_pillow and header.scans == scans


def test_a_progressive_file_without_its_last_scan_is_left_to_pillow() -> None:
    data = plain_jpeg(progressive=True)
    last = data.rfind(b"\xff\xda")
    header = read_jpeg_header(data[:last] + b"\xff\xd9")
    assert header is not None and not header.as_pillow
    assert Image.open(io.BytesIO(data[:last] + b"\xff\xd9")).convert("RGB").size == (90, 61)
