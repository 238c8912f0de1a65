"""What a JPEG says of itself, read from its markers; odd_formats and the hostile ones are in tests/integration."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import PILToTensor

from proxyloader.dali.api import __version__ as dali_version
from proxyloader.dali.build import PipelineOptions, build_pipeline
from proxyloader.dali.run_queue import RunQueue
from proxyloader.data.jpeg_header import count_scans, read_jpeg_header
from proxyloader.errors import PipelineError
from proxyloader.make_dataset import photograph
from proxyloader.transforms.registry import plan_for

from ..jpeg_writer import segment


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
    data = plain_jpeg()[:-2]
    header = read_jpeg_header(data)
    assert header is not None and count_scans(data, header) == (0, 0)


@pytest.mark.parametrize(("options", "scans"), [({}, 1), ({"progressive": True}, 10)], ids=["baseline", "progressive"])
def test_scans_are_counted(options: dict[str, bool], scans: int) -> None:
    data = plain_jpeg(**options)
    header = read_jpeg_header(data)
    assert header is not None and header.as_pillow and header.is_progressive == (scans > 1)
    for behind in (b"", b"\xff\xd8\xff", data, bytes(1000)):
        assert count_scans(data + behind, header) == (scans, len(data))


def test_a_progressive_file_without_its_last_scan_is_left_to_pillow() -> None:
    data = plain_jpeg(progressive=True)
    last = data.rfind(b"\xff\xda")
    header = read_jpeg_header(data)
    assert header is not None and count_scans(data[:last] + b"\xff\xd9", header) == (0, 0)
    assert Image.open(io.BytesIO(data[:last] + b"\xff\xd9")).convert("RGB").size == (90, 61)


# --- see NOTE [ What DALI cannot parse ] -----------------------------------------------------------------------------

HEADER_BYTES = plain_jpeg().find(b"\xff\xda") + 14


@pytest.mark.parametrize("marker", [0x00, 0x01, 0xBF, 0xC8, 0xD0, 0xD8, 0xD9, 0xDC, 0xDE, 0xF0, 0xFD])
def test_a_marker_that_has_no_business_before_the_scans_is_left_to_pillow(marker: int) -> None:
    data = plain_jpeg()
    assert read_jpeg_header(data[:2] + segment(marker, b"12345678") + data[2:]) is None


def test_two_frames_are_left_to_pillow() -> None:
    data = plain_jpeg()
    frame = segment(0xC6, data[data.find(b"\xff\xc0") + 4 :][:15])
    assert read_jpeg_header(data[:2] + frame + data[2:]) is None


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
    header = read_jpeg_header(data)
    if (
        header is not None
        and header.as_pillow
        and header.height * header.width < 1 << 20
        and any(count_scans(data, header))
    ):
        assert dali.parses(data)
