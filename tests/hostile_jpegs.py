"""Unusual, damaged and malicious JPEGs, made from a good one: what a data set from the web may hold.

``HOSTILE_JPEGS`` is the table. Its functions take the bytes of a plain JPEG as Pillow writes it.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from .jpeg_writer import END, START, Scan, segment, write_jpeg
from .odd_formats import ODD_FORMATS, encoded

Change = Callable[[bytes], bytes]

FRAME, FRAME_PROGRESSIVE = 0xC0, 0xC2
HUFFMAN, QUANTISATION, SCAN, RESTARTS, COMMENT = 0xC4, 0xDB, 0xDA, 0xDD, 0xFE
JFIF, ICC, ADOBE = 0xE0, 0xE2, 0xEE
LONGEST_CONTENT_BYTES = 0xFFFF - 2

Segment = tuple[int, bytes]  # marker and content, without the length


def parts(data: bytes) -> tuple[list[Segment], bytes]:
    """The segments of a plain JPEG up to its scan's header, and what follows, the end marker included."""
    at = 2
    segments: list[Segment] = []
    while not segments or segments[-1][0] != SCAN:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        segments.append((data[at + 1], data[at + 4 : at + 2 + length]))
        at += 2 + length
    return segments, data[at:]


def joined(segments: list[Segment], scan: bytes) -> bytes:
    return START + b"".join(segment(*part) for part in segments) + scan


def decoded(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        rgb: Image.Image = image.convert("RGB")
        return rgb


def saved(data: bytes, format: str = "JPEG", **options: Any) -> bytes:
    """The picture, written again by Pillow."""
    return encoded(decoded(data), format, **options)


# --- ways to change one, as functions that make functions of bytes ---------------------------------------------------


def written(**options: Any) -> Change:
    return lambda data: write_jpeg(decoded(data), **options)


def sampled(*factors: tuple[int, int]) -> Change:
    return written(sampling=factors)


def changed(
    segments: Callable[[list[Segment]], list[Segment]], scan: Callable[[bytes], bytes] = lambda scan: scan
) -> Change:
    """Change the segments, and what follows the scan's header."""

    def change(data: bytes) -> bytes:
        found, rest = parts(data)
        return joined(segments(found), scan(rest))

    return change


def without(marker: int) -> Change:
    return changed(lambda segments: [part for part in segments if part[0] != marker])


def with_segments(*added: Segment, before: int | None = None) -> Change:
    """Put segments before the first one of this marker, or right after the start."""

    def put(segments: list[Segment]) -> list[Segment]:
        at = next((k for k, part in enumerate(segments) if part[0] == before), 0)
        return [*segments[:at], *added, *segments[at:]]

    return changed(put)


def with_content(marker: int, content: Callable[[bytearray], None]) -> Change:
    """Change the content of the first segment of this marker in place."""

    def put(segments: list[Segment]) -> list[Segment]:
        at = next(k for k, part in enumerate(segments) if part[0] == marker)
        own = bytearray(segments[at][1])
        content(own)
        return [*segments[:at], (marker, bytes(own)), *segments[at + 1 :]]

    return changed(put)


def with_bytes(marker: int, where: slice, values: bytes) -> Change:
    """Put bytes in the place of others in the content of the first segment of this marker."""
    return with_content(marker, lambda content: content.__setitem__(where, values))


def with_byte(marker: int, at: int, value: int) -> Change:
    return with_bytes(marker, slice(at, at + 1), bytes([value]))


def with_marker(marker: int, another: int) -> Change:
    return changed(lambda segments: [(another if found == marker else found, own) for found, own in segments])


with_scan = functools.partial(changed, list)
"""Change what follows the scan's header."""


def within_scan(data: bytes) -> Change:
    return with_scan(lambda scan: scan[: len(scan) // 2] + data + scan[len(scan) // 2 :])


def behind_scan(data: bytes) -> Change:
    return with_scan(lambda scan: scan[:-2] + data + END)


def declaring(width: int | None = None, height: int | None = None) -> Change:
    def put(content: bytearray) -> None:
        found_height, found_width = struct.unpack_from(">HH", content, 1)
        struct.pack_into(">HH", content, 1, found_height if height is None else height, width or found_width)

    return with_content(FRAME, put)


def scaled(width: float = 1, height: float = 1) -> Change:
    """Declare another size than the scan was made for."""

    def change(data: bytes) -> bytes:
        image = decoded(data)
        return declaring(round(image.width * width), round(image.height * height))(data)

    return change


def painted(width: int, height: int) -> Change:
    """The picture in another size, honestly."""

    return lambda data: encoded(decoded(data).resize((width, height)), "JPEG", quality=90)


def chain(*changes: Change) -> Change:
    return lambda data: functools.reduce(lambda changed, change: change(changed), changes, data)


# --- progressive ones ------------------------------------------------------------------------------------------------

DC_FIRST, DC_LAST = Scan(last=0, bit=1), Scan(last=0, bit_before=1)
BANDS = tuple(Scan((component,), band, band) for band in range(1, 64) for component in range(3))
HALVES = tuple(Scan((component,), *band) for band in [(1, 5), (6, 63)] for component in range(3))


WIDE = (*[4] * 60, *[300] * 4)
"""A quantisation table that takes 16 bits."""


def progressive(*scans: Scan, **options: Any) -> Change:
    return written(frame=FRAME_PROGRESSIVE, scans=scans, **options)


def with_restarts(of: Callable[[list[int]], list[int]]) -> Change:
    """Restart markers, by their numbers, changed."""

    def change(data: bytes) -> bytes:
        segments, scan = parts(write_jpeg(decoded(data), restart_blocks=2))
        pieces, numbers, at = [], [], 0
        for k in range(len(scan) - 1):
            if scan[k] == 0xFF and 0xD0 <= scan[k + 1] <= 0xD7:
                pieces.append(scan[at:k])
                numbers.append(scan[k + 1] - 0xD0)
                at = k + 2
        marks = [bytes([0xFF, 0xD0 + number]) if number >= 0 else b"" for number in of(numbers)]
        return joined(segments, b"".join(piece + mark for piece, mark in zip(pieces, marks)) + scan[at:])

    return change


# --- other places ----------------------------------------------------------------------------------------------------


def filled(data: bytes) -> bytes:
    """Fill bytes before every marker (ITU T.81, B.1.1.2)."""
    segments, scan = parts(data)
    head = START + b"".join(b"\xff" * (k + 1) + segment(*part) for k, part in enumerate(segments))
    return head + scan[: -len(END)] + b"\xff" * 5 + END


def commented(data: bytes) -> bytes:
    """Comments between all segments, which look like frames, scans and ends inside."""
    segments, scan = parts(data)
    comment = COMMENT, b"\xff\xc0\x00\x11\x08\x00\x01\x00\x01\x03\xff\xda\xff\xd9"
    return joined([part for found in segments for part in (comment, found)], scan)


def inside_a_jfif_extension(data: bytes) -> bytes:
    """A JFXX thumbnail, a whole JPEG in an APP0 segment behind the JFIF's own."""
    thumbnail = b"JFXX\0\x10" + painted(24, 16)(data)
    segments, scan = parts(data)
    return joined([segments[0], (JFIF, thumbnail), *segments[1:]], scan)


def two_pictures(data: bytes) -> bytes:
    return ODD_FORMATS["odd_two_pictures.jpg"](decoded(data))


def with_flipped_bits(data: bytes, seed: int) -> bytes:
    """Three bits of the scans, at places that the seed says: what a bad disk or network leaves."""
    generator, changed = np.random.default_rng(seed), bytearray(data)
    for at in generator.integers(_first_scan(data), len(data) - len(END), 3):
        changed[at] ^= 1 << int(generator.integers(8))
    return bytes(changed)


def with_other_bytes(data: bytes, seed: int, first: int | None = None) -> bytes:
    """Three bytes of the scans, or from ``first`` on, one of them FF, so that it begins a marker."""
    generator, changed = np.random.default_rng(seed), bytearray(data)
    places = generator.integers(_first_scan(data) if first is None else first, len(data) - len(END), 3)
    for at, value in zip(places, (0xFF, *generator.integers(256, size=2))):
        changed[at] = value
    return bytes(changed)


def with_a_lost_sector(data: bytes, seed: int) -> bytes:
    """512 bytes of the scans, or a third of them, become noise."""
    generator, changed, first = np.random.default_rng(seed), bytearray(data), _first_scan(data)
    size = min(512, (len(data) - first) // 3)
    at = int(generator.integers(first, len(data) - len(END) - size))
    changed[at : at + size] = generator.bytes(size)
    return bytes(changed)


def _first_scan(data: bytes) -> int:
    at = data.index(b"\xff\xda")
    return at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")


DAMAGES: dict[str, Callable[[bytes, int], bytes]] = {
    "flipped bits": with_flipped_bits,
    "other bytes": with_other_bytes,
    "other bytes anywhere": functools.partial(with_other_bytes, first=len(START)),
    "a lost sector": with_a_lost_sector,
}
"""Ways to damage a JPEG at random."""


def components_named(names: bytes) -> Change:
    return chain(with_bytes(FRAME, slice(6, 15, 3), names), with_bytes(SCAN, slice(1, 7, 2), names))


def with_adobe(transform: bytes, *after: Segment, before: int = FRAME) -> Change:
    return with_segments((ADOBE, b"Adobe\0\x64\0\0\0\0" + transform), *after, before=before)


SOUND: dict[str, Change] = {
    "plain": lambda data: data,
    "4:1:1": sampled((4, 1), (1, 1), (1, 1)),
    "4:4:0": sampled((1, 2), (1, 1), (1, 1)),
    "4:1:0": sampled((4, 2), (1, 1), (1, 1)),
    "4:4:1": sampled((1, 4), (1, 1), (1, 1)),
    "3x1": sampled((3, 1), (1, 1), (1, 1)),
    "1x3": sampled((1, 3), (1, 1), (1, 1)),
    "4:4:4 written as 2x1 each": sampled((2, 1), (2, 1), (2, 1)),
    "4:2:2 written as 2x2 and 1x2": sampled((2, 2), (1, 2), (1, 2)),
    "luma smaller than chroma": sampled((1, 1), (2, 2), (2, 2)),
    "each chroma sampled differently": sampled((2, 2), (2, 1), (1, 2)),
    "only red chroma sampled down": sampled((2, 2), (2, 2), (1, 1)),
    "grey with factors 2x2": sampled((2, 2)),
    "grey with factors 4x1": sampled((4, 1)),
    "three scans": written(scans=(Scan((0,)), Scan((1,)), Scan((2,)))),
    "three scans, luma last": written(scans=(Scan((1,)), Scan((2,)), Scan((0,)))),
    "luma alone, chroma together": written(scans=(Scan((0,)), Scan((1, 2)))),
    "three scans of 4:1:1": written(
        sampling=((4, 1), (1, 1), (1, 1)), scans=(Scan((0,)), Scan((1,)), Scan((2,))), restart_blocks=3
    ),
    "three scans with comments between": written(
        scans=(Scan((0,)), Scan((1,)), Scan((2,))), between=segment(COMMENT, b"\xff\xd9\xff\xda") * 2
    ),
    "restart markers": written(restart_blocks=2),
    "a restart marker behind every block": written(restart_blocks=1),
    "a restart interval longer than the picture": written(restart_blocks=60_000),
    "wide quantisation table in an extended frame": written(frame=0xC1, quantisation=WIDE),
    "wide quantisation table in a baseline frame": written(quantisation=WIDE),
    "wide quantisation table in a progressive frame": progressive(DC_FIRST, DC_LAST, *HALVES, quantisation=WIDE),
    "progressive, 6 scans": progressive(DC_FIRST, DC_LAST, *HALVES),
    "progressive, 191 scans": progressive(DC_FIRST, DC_LAST, *BANDS),
    "progressive, 4:1:1, restart markers": progressive(
        DC_FIRST, DC_LAST, *HALVES, sampling=((4, 1), (1, 1), (1, 1)), restart_blocks=4
    ),
    "progressive with comments between scans": progressive(
        DC_FIRST, DC_LAST, *HALVES, between=segment(COMMENT, b"\xff\xd9\xff\xda")
    ),
    "progressive grey": progressive(Scan((0,), last=0), Scan((0,), 1, 63), sampling=((1, 1),)),
    "segments of the greatest length": with_segments(
        *((0xE1 + k, bytes(LONGEST_CONTENT_BYTES)) for k in range(5)),
        (COMMENT, b"\xff\xd9" * (2**15 - 2)),
        before=FRAME,
    ),
    "a segment of the least length": with_segments((0xE5, b""), (COMMENT, b""), before=FRAME),
    # In three segments, the first two of which are as long as can be.
    "150 KB of ICC profile": lambda data: saved(
        data, quality=93, icc_profile=bytes(k * k % 251 for k in range(150_000))
    ),
    "comments everywhere": commented,
    "fill bytes everywhere": filled,
    "a thumbnail of another size": lambda data: ODD_FORMATS["odd_thumbnail.jpg"](decoded(data)),
    "a thumbnail in a JFIF extension": inside_a_jfif_extension,
    "two pictures (MPO)": two_pictures,
    "another JPEG behind": lambda data: data + painted(200, 120)(data),
    "text behind": lambda data: data + b"<html>" * 50,
    "FF behind": lambda data: data + b"\xff" * 100,
    "a start behind": lambda data: data + START + b"\xff\xe0",
    "no JFIF marker": without(JFIF),
    "tables in one segment each": lambda data: saved(data, optimize=True, quality=93),
    "restarts declared twice": with_segments((RESTARTS, b"\0\5"), (RESTARTS, b"\0\0"), before=FRAME),
    "a thousand comments": with_segments(*[(COMMENT, b"x")] * 1000, before=FRAME),
    "RGB named components behind JFIF": components_named(b"RGB"),
    "components named 0, 1, 2": chain(without(JFIF), components_named(b"\0\1\2")),
    "components named 34, 35, 36": chain(without(JFIF), components_named(b"\x22\x23\x24")),
    "Adobe 1": with_adobe(b"\1"),
    "Adobe 0 behind JFIF": with_adobe(b"\0"),
    "Adobe 0 without JFIF": chain(without(JFIF), with_adobe(b"\0")),
    "Adobe 2 with three components": chain(without(JFIF), with_adobe(b"\2")),
    "an Adobe marker of 11 bytes": chain(without(JFIF), with_adobe(b"")),
    "an Adobe marker behind the frame": chain(without(JFIF), with_adobe(b"\0", before=SCAN)),
    "a JFIF marker behind Adobe 0": chain(without(JFIF), with_adobe(b"\0", (JFIF, b"JFIF\0\1\1\0\0\1\0\1\0\0"))),
    "1 x 1": painted(1, 1),
    "8 x 8": painted(8, 8),
    "65,500 x 1": painted(65_500, 1),
    "65,500 x 8": painted(65_500, 8),
    "8 x 65,500": painted(8, 65_500),
    "a PNG": lambda data: saved(data, "PNG"),
    "a JPEG in a TIFF": lambda data: saved(data, "TIFF", compression="jpeg"),
    "a JPEG in a PNG's name": lambda data: data,
}
"""What a decoder that follows the standard shows as Pillow does, to rounding."""

OTHER_FRAMES = {
    "progressive": 0xC2, "lossless": 0xC3, "differential": 0xC5, "hierarchical progressive": 0xC6,
    "hierarchical lossless": 0xC7, "reserved": 0xC8, "arithmetic": 0xC9, "progressive arithmetic": 0xCA,
    "lossless arithmetic": 0xCB, "hierarchical arithmetic": 0xCD, "JPEG-LS": 0xF7,
}  # fmt: skip

DAMAGED: dict[str, Change] = {
    "3x1 with chroma 2x1, a fraction": sampled((3, 1), (2, 1), (1, 1)),
    "12 blocks in a unit": sampled((2, 2), (2, 2), (2, 2)),
    "unknown markers before the frame": with_segments((0xF0, b"JPG0"), (0xE9, b"?"), before=FRAME),
    "progressive of a DC scan only": progressive(Scan(last=0)),
    "progressive without the last bit of DC": progressive(DC_FIRST, *HALVES),
    "progressive without the last bands": progressive(DC_FIRST, DC_LAST, *HALVES[:3]),
    "progressive without chroma's AC": progressive(DC_FIRST, DC_LAST, HALVES[0], HALVES[3]),
    "progressive with AC before DC": progressive(*HALVES, Scan(last=0)),
    "progressive with its DC twice": progressive(Scan(last=0), Scan(last=0), *HALVES),
    "progressive with its bands twice": progressive(Scan(last=0), *HALVES, *HALVES),
    "progressive with a band of 5 to 4": progressive(Scan(last=0), Scan((0,), 5, 4)),
    "progressive with a band to 64": progressive(Scan(last=0), Scan((0,), 1, 64)),
    "progressive with AC of all components": progressive(Scan(last=0), Scan(first=1)),
    "two scans for three components": written(scans=(Scan((0,)), Scan((1,)))),
    "three scans, one of them twice": written(scans=(Scan((0,)), Scan((0,)), Scan((1,)), Scan((2,)))),
    "the whole scan twice": written(scans=(Scan(), Scan())),
    "restart markers out of order": with_restarts(lambda numbers: [numbers[1], numbers[0], *numbers[2:]]),
    "restart markers all 0": with_restarts(lambda numbers: [0] * len(numbers)),
    "restart markers backwards": with_restarts(lambda numbers: numbers[::-1]),
    "a restart marker missing": with_restarts(lambda numbers: [-1 if k == 3 else n for k, n in enumerate(numbers)]),
    "restart markers missing": with_restarts(lambda numbers: [-1] * len(numbers)),
    "restart markers that are not declared": chain(written(restart_blocks=2), without(RESTARTS)),
    "restart markers at half of what is declared": chain(written(restart_blocks=2), with_byte(RESTARTS, 1, 4)),
    "restart markers declared and not there": with_segments((RESTARTS, b"\0\3"), before=FRAME),
    "height 0 (DNL)": chain(declaring(height=0), behind_scan(segment(0xDC, b"\0\x2d"))),
    "height 0 and no DNL": declaring(height=0),
    "DNL of another height": behind_scan(segment(0xDC, b"\0\x20")),
    "two starts": lambda data: START + data,
    "declares twice the height": scaled(height=2),
    "declares half the height": scaled(height=0.5),
    "declares twice the width": scaled(width=2),
    "declares half the width": scaled(width=0.5),
    "declares another shape": scaled(width=0.5, height=2),
    "declares 1 x 1": declaring(1, 1),
    "declares 65,535 x 8": declaring(65_535, 8),
    "declares 65,501 x 8": declaring(65_501, 8),
    "declares 60,000 x 60,000": declaring(60_000, 60_000),
    "no Huffman tables": without(HUFFMAN),
    "no Huffman tables, and those not the usual": chain(written(), without(HUFFMAN)),
    "impossible Huffman codes": with_bytes(HUFFMAN, slice(1, 17), b"\xff" * 16),
    "Huffman table without codes": with_bytes(HUFFMAN, slice(1, 17), bytes(16)),
    "Huffman table behind its scan's need": with_byte(SCAN, 2, 0x22),
    "Huffman table number 9": with_byte(HUFFMAN, 0, 0x09),
    "quantisation table number 9": with_byte(QUANTISATION, 0, 0x09),
    "quantisation table of zeros": with_bytes(QUANTISATION, slice(1, 65), bytes(64)),
    "quantisation table that is not there": with_byte(FRAME, 8, 3),
    "two frames": with_segments((FRAME, b"\x08\0\x10\0\x10\1\1\x11\0"), before=FRAME),
    "no scan": lambda data: joined(parts(data)[0][:-1], END),
    "a scan of nothing": with_scan(lambda scan: END),
    "an end in the middle": within_scan(END),
    "cut, with an end": with_scan(lambda scan: scan[: len(scan) // 2] + END),
    "cut, with an end and zeros": with_scan(lambda scan: scan[: len(scan) // 2] + END + bytes(99)),
    "no end": with_scan(lambda scan: scan[:-2]),
    "cut": with_scan(lambda scan: scan[: len(scan) // 2]),
    "a hole in the scan": with_scan(lambda scan: scan[: len(scan) // 3] + scan[len(scan) // 2 :]),
    "zeros in the scan": with_scan(lambda scan: scan[: len(scan) // 3] + bytes(50) + scan[len(scan) // 3 + 50 :]),
    "FF in the scan": with_scan(lambda scan: scan[: len(scan) // 3] + b"\xff" * 50 + scan[len(scan) // 3 + 50 :]),
    "a comment in the scan": within_scan(segment(COMMENT, b"xyz")),
    "a frame in the scan": within_scan(segment(FRAME, b"\x08\0\x10\0\x10\1\1\x11\0")),
    "a comment of length 0 behind the scan": behind_scan(b"\xff\xfe\0\0"),
    "broken tables behind the scan": behind_scan(segment(HUFFMAN, b"\0" + b"\xff" * 16)),
    "a comment behind the scan": behind_scan(segment(COMMENT, b"The end.")),
    "junk between segments": lambda data: data[:20] + b"junk" + data[20:],
    "a segment of length 0": lambda data: data[:20] + b"\xff\xe5\0\0" + data[20:],
    "a segment beyond the end": lambda data: data[:20] + b"\xff\xe5\xff\xff" + data[20:],
    "no components": with_bytes(FRAME, slice(5, None), b"\0"),
    "five components": with_bytes(FRAME, slice(5, None), b"\5" + b"\1\x11\0" * 5),
    "a component named twice": with_byte(FRAME, 12, 1),
    "a scan of an unknown component": with_byte(SCAN, 3, 77),
    "a scan of a component twice": with_byte(SCAN, 3, 1),
    "sampling factors 0": with_byte(FRAME, 7, 0x00),
    "sampling factors 5x5": with_byte(FRAME, 7, 0x55),
    "sampling factors 4x4": with_byte(FRAME, 7, 0x44),
    "sampling factors of another file": with_byte(FRAME, 7, 0x21),
    "12 bits, extended": written(frame=0xC1, bits=12),
    "12 bits, progressive": progressive(DC_FIRST, DC_LAST, *HALVES, bits=12),
    "8 bits declared as 12": with_byte(FRAME, 0, 12),
    "8 bits declared as 16": with_byte(FRAME, 0, 16),
    "8 bits declared as 12, progressive": chain(with_byte(FRAME, 0, 12), with_marker(FRAME, FRAME_PROGRESSIVE)),
    **{f"baseline declared as {name}": with_marker(FRAME, marker) for name, marker in OTHER_FRAMES.items()},
    "progressive declared as baseline": lambda data: progressive(DC_FIRST, DC_LAST, *HALVES)(data).replace(
        b"\xff\xc2\0\x11", b"\xff\xc0\0\x11"
    ),
    "a HEIC without content": lambda data: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + data[2:],
    "a WebP that is a JPEG": lambda data: b"RIFF\x40\0\0\0WEBPVP8 " + data,
}
"""What is broken: a decoder shows as much as it can, or nothing. The rule is Pillow's verdict."""

HOSTILE_JPEGS: dict[str, Change] = SOUND | DAMAGED
