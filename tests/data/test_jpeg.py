"""JPEG headers, scans and integrity checks. tests/integration has odd, hostile and mutated JPEGs."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.jpeg import JpegHeader, find_damage, read_jpeg_header, read_scans
from proxyloader.make_dataset import photograph
from proxyloader.workers.fetch import checking

from ..jpeg_writer import segment
from ..odd_formats import encoded

PHOTO, SMALL = (photograph(0, size=size) for size in ((290, 161), (90, 61)))


def header_of(data: bytes) -> JpegHeader:
    header = read_jpeg_header(data)
    assert header is not None
    return header


def stays_encoded(data: bytes) -> bool:
    return EncodedImage.from_jpeg(data) is not None


def test_a_header_is_read_with_any_segments_before_the_frame_unless_it_is_truncated() -> None:
    data = encoded(SMALL, "JPEG")
    comment = b"\xff\xfe\x00\x08\xff\xc0xyzw"  # looks like a frame inside
    fill = b"\xff\xff\xff"
    for more in (b"", comment, fill, fill + comment * 3):
        header = read_jpeg_header(data[:2] + more + data[2:])
        assert header is not None and (header.height, header.width, header.matches_pillow) == (61, 90, True)
    assert not any(read_jpeg_header(data[:length]) for length in (0, 1, 2, 3, 4, 10, 20, 150, 300))


@pytest.mark.parametrize(("options", "scans"), [({}, 1), ({"progressive": True}, 10)], ids=["baseline", "progressive"])
def test_scans_are_counted(options: dict[str, bool], scans: int) -> None:
    data = encoded(SMALL, "JPEG", **options)
    header = header_of(data)
    assert header.matches_pillow and header.is_progressive == (scans > 1)
    for behind in (b"", b"\xff\xd8\xff", data, bytes(1000)):
        found = read_scans(data + behind, header)
        assert found is not None and found[:2] == (scans, len(data))


def test_a_file_without_its_end_or_its_last_scan_is_decoded_by_pillow() -> None:
    cut = encoded(SMALL, "JPEG")[:-2]
    assert read_scans(cut, header_of(cut)) is None and not stays_encoded(cut)
    data = encoded(SMALL, "JPEG", progressive=True)
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
    data = encoded(PHOTO, "JPEG", **options)
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
    data = encoded(PHOTO, "JPEG")
    lost = data[: len(data) // 2] + bytes(2048) + data[len(data) // 2 + 2048 :]
    assert not stays_encoded(lost)
    with checking(None, []):
        assert stays_encoded(lost)
    plain = encoded(Image.new("RGB", (2000, 2000)), "JPEG", optimize=True)
    assert bytes(64) in plain and stays_encoded(plain)


# --- see NOTE [ Headers that DALI cannot parse ] ----------------------------------------------------------------------


@pytest.mark.parametrize("marker", [0x00, 0x01, 0xBF, 0xC6, 0xC8, 0xD0, 0xD8, 0xD9, 0xDC, 0xDE, 0xF0, 0xFD])
def test_an_invalid_marker_before_the_scans_and_a_second_frame_are_left_to_pillow(marker: int) -> None:
    data = encoded(SMALL, "JPEG")
    frame = data[data.find(b"\xff\xc0") + 4 :][:15]
    assert read_jpeg_header(data[:2] + segment(marker, frame if marker == 0xC6 else b"12345678") + data[2:]) is None
