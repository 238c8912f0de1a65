"""JPEG headers, scans and soundness; the odd, the hostile and the mutated ones are in tests/integration."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import PILToTensor

from proxyloader.dali.api import __version__ as dali_version
from proxyloader.dali.build import PipelineOptions, build_pipeline
from proxyloader.dali.run_queue import RunQueue
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.jpeg import JpegHeader, find_damage, read_jpeg_header, read_scans
from proxyloader.errors import PipelineError
from proxyloader.make_dataset import photograph
from proxyloader.transforms.registry import plan_for
from proxyloader.workers.scan_checks import checking

from ..hostile_jpegs import HOSTILE_JPEGS
from ..jpeg_writer import segment


def jpeg(image: Image.Image | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image or photograph(0, size=(290, 161))).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def plain_jpeg(**options: bool) -> bytes:
    return jpeg(photograph(0, size=(90, 61)), **options)


def header_of(data: bytes) -> JpegHeader:
    header = read_jpeg_header(data)
    assert header is not None
    return header


def stays_encoded(data: bytes) -> bool:
    return EncodedImage.of_jpeg(data) is not None


def test_a_header_is_read_whatever_segments_stand_before_the_frame_unless_it_is_cut_off() -> None:
    data = plain_jpeg()
    comment = b"\xff\xfe\x00\x08\xff\xc0xyzw"  # looks like a frame inside
    fill = b"\xff\xff\xff"
    for more in (b"", comment, fill, fill + comment * 3):
        header = read_jpeg_header(data[:2] + more + data[2:])
        assert header is not None and (header.height, header.width, header.matches_pillow) == (61, 90, True)
    assert not any(read_jpeg_header(data[:length]) for length in (0, 1, 2, 3, 4, 10, 20, 150, 300))


@pytest.mark.parametrize(("options", "scans"), [({}, 1), ({"progressive": True}, 10)], ids=["baseline", "progressive"])
def test_scans_are_counted(options: dict[str, bool], scans: int) -> None:
    data = plain_jpeg(**options)
    header = header_of(data)
    assert header.matches_pillow and header.is_progressive == (scans > 1)
    for behind in (b"", b"\xff\xd8\xff", data, bytes(1000)):
        found = read_scans(data + behind, header)
        assert found is not None and found[:2] == (scans, len(data))


def test_a_file_without_its_end_or_its_last_scan_is_left_to_pillow() -> None:
    cut = plain_jpeg()[:-2]
    assert read_scans(cut, header_of(cut)) is None and not stays_encoded(cut)
    data = plain_jpeg(progressive=True)
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
def test_a_damaged_jpeg_is_left_to_pillow(options: dict[str, Any]) -> None:
    data = jpeg(**options)
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


def test_zeros_are_searched_for_before_a_gpu_alone_and_a_run_may_be_sound() -> None:
    data = jpeg()
    lost = data[: len(data) // 2] + bytes(2048) + data[len(data) // 2 + 2048 :]
    assert not stays_encoded(lost)
    with checking(None, []):
        assert stays_encoded(lost)
    plain = jpeg(Image.new("RGB", (2000, 2000)), optimize=True)
    assert bytes(64) in plain and stays_encoded(plain)


@pytest.mark.parametrize("name", HOSTILE_JPEGS)
def test_a_jpeg_that_pillow_refuses_is_left_to_it(name: str) -> None:
    data = HOSTILE_JPEGS[name](jpeg())
    try:
        Image.open(io.BytesIO(data)).load()
    except Image.DecompressionBombError:
        pass  # its size is refused when it is opened
    except OSError:
        assert not stays_encoded(data)


# --- see NOTE [ Headers that DALI cannot parse ] ---------------------------------------------------------------------

HEADER_BYTES = plain_jpeg().find(b"\xff\xda") + 14


@pytest.mark.parametrize("marker", [0x00, 0x01, 0xBF, 0xC6, 0xC8, 0xD0, 0xD8, 0xD9, 0xDC, 0xDE, 0xF0, 0xFD])
def test_a_marker_that_has_no_business_before_the_scans_and_a_second_frame_are_left_to_pillow(marker: int) -> None:
    data = plain_jpeg()
    frame = data[data.find(b"\xff\xc0") + 4 :][:15]
    assert read_jpeg_header(data[:2] + segment(marker, frame if marker == 0xC6 else b"12345678") + data[2:]) is None


Change = tuple[int, str, int]
"""Where in the header, what, and a byte."""

changes = st.lists(
    st.tuples(
        st.integers(2, HEADER_BYTES),
        st.sampled_from(["replace", "insert", "remove"]),
        st.sampled_from([0x00, 0xFF]) | st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


class Dali:
    """DALI's decoder, of one image at a time, where it cannot do harm."""

    server: RunQueue | None = None

    def parses(self, data: bytes) -> bool:
        """Whether it comes as far as to the pixels."""
        if self.server is None:
            self.server = RunQueue(build_pipeline(plan_for(PILToTensor()), PipelineOptions(1, num_threads=1)))
        try:
            self.server.collect(self.server.submit([[np.frombuffer(data, np.uint8)]]))
        except PipelineError as error:
            self.server = None
            return "nvImageCodec failure" not in str(error)
        return True


@pytest.fixture(scope="module")
def dali() -> object:
    dali = Dali()
    yield dali
    dali.server = None


def test_dali_says_when_it_cannot_parse(dali: Dali) -> None:
    data = plain_jpeg()
    assert dali.parses(data)
    if not dali_version.startswith("1."):  # which took it
        assert not dali.parses(data[:2] + segment(0x00, b"12345678") + data[2:])
    tables = data.find(b"\xff\xc4")
    assert dali.parses(data[: tables + 5] + b"\xff" * 16 + data[tables + 21 :]), "it fails, but later"


@given(progressive=st.booleans(), changed=changes)
@settings(max_examples=1000)
def test_dali_can_parse_what_is_not_left_to_pillow(dali: Dali, progressive: bool, changed: list[Change]) -> None:
    data = plain_jpeg(progressive=progressive)
    for at, what, byte in changed:
        data = data[:at] + (b"" if what == "remove" else bytes([byte])) + data[at + (what != "insert") :]
    image = EncodedImage.of_jpeg(data)
    if image is not None and image.height * image.width < 1 << 20:
        assert dali.parses(image.data)
