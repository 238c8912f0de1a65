"""A JPEG encoder for what Pillow's cannot write: any sampling factors, any scans, wide tables. Slow, and small."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Blocks = NDArray[np.int64]  # (rows, columns, 64), quantised, in zigzag order

START, END = b"\xff\xd8", b"\xff\xd9"
_SIDES = np.arange(8)
_DCT = np.cos((2 * _SIDES + 1) * _SIDES[:, None] * np.pi / 16) / 2
_DCT[0] /= np.sqrt(2)
_ZIGZAG = sorted(range(64), key=lambda k: (k // 8 + k % 8, (k // 8, k % 8)[(k // 8 + k % 8) % 2 == 0]))

END_OF_BLOCK, SIXTEEN_ZEROS = 0x00, 0xF0
_DC_SYMBOLS = bytes(range(12))
_AC_SYMBOLS = bytes([END_OF_BLOCK, SIXTEEN_ZEROS, *(run << 4 | size for run in range(16) for size in range(1, 11))])
# All codes of a table are of one length, which needs no statistics: 4 bits for DC, 8 for AC.
HUFFMAN_TABLES = {
    0x00: bytes([0, 0, 0, 12] + [0] * 12) + _DC_SYMBOLS,
    0x10: bytes([0] * 7 + [162] + [0] * 8) + _AC_SYMBOLS,
}


@dataclass(frozen=True)
class Scan:
    """One scan: of which components, which coefficients of the zigzag, which bits (as in ITU T.81, B.2.3)."""

    components: tuple[int, ...] = (0, 1, 2)
    first: int = 0
    last: int = 63
    bit_before: int = 0
    bit: int = 0


Factors = tuple[tuple[int, int], ...]


def write_jpeg(
    image: Image.Image,
    *,
    sampling: Factors = ((2, 2), (1, 1), (1, 1)),
    scans: Sequence[Scan] = (),
    frame: int = 0xC0,
    restart_blocks: int = 0,
    bits: int = 8,
    quantisation: Sequence[int] = (4,) * 64,
    between: bytes = b"",
) -> bytes:
    """Encode an image; grey where one pair of factors is given, else YCbCr.

    Args:
        sampling: (horizontal, vertical) factors of each component.
        scans: one of all components where none is given.
        frame: the marker's code: 0xC0 baseline, 0xC1 extended, 0xC2 progressive.
        restart_blocks: MCUs between restart markers; 0: none.
        bits: of a sample, 8 or 12.
        quantisation: for 8 bits, in zigzag order; written with 16 bits where one is above 255.
        between: put before each scan but the first.
    """
    planes = image.convert("YCbCr" if len(sampling) == 3 else "L").split()
    most = max(h for h, _ in sampling), max(v for _, v in sampling)
    blocks = [_blocks_of(plane, factors, most, np.asarray(quantisation)) for plane, factors in zip(planes, sampling)]
    sizes = [_size_of(image.size, factors, most) for factors in sampling]
    scale = 1 << (bits - 8)
    wide = max(quantisation) * scale > 255
    data = START + segment(
        0xDB, bytes([16 * wide]) + struct.pack(">64H" if wide else "64B", *(scale * step for step in quantisation))
    )
    components = b"".join(bytes([k + 1, h << 4 | v, 0]) for k, (h, v) in enumerate(sampling))
    data += segment(frame, struct.pack(">BHHB", bits, image.height, image.width, len(sampling)) + components)
    data += b"".join(segment(0xC4, bytes([kind]) + table) for kind, table in HUFFMAN_TABLES.items())
    if restart_blocks:
        data += segment(0xDD, struct.pack(">H", restart_blocks))
    for k, scan in enumerate(scans or [Scan(tuple(range(len(sampling))))]):
        data += (between if k else b"") + scan_header(scan)
        units = _units(scan, blocks, sampling, sizes)
        data += _entropy_coded(scan, units, restart_blocks, len(sampling))
    return data + END


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def scan_header(scan: Scan) -> bytes:
    components = b"".join(bytes([component + 1, 0]) for component in scan.components)
    bits = scan.bit_before << 4 | scan.bit
    return segment(0xDA, bytes([len(scan.components)]) + components + bytes([scan.first, scan.last, bits]))


def _size_of(size: tuple[int, int], factors: tuple[int, int], most: tuple[int, int]) -> tuple[int, int]:
    """(width, height) of a component in pixels."""
    return -(-size[0] * factors[0] // most[0]), -(-size[1] * factors[1] // most[1])


def _blocks_of(
    plane: Image.Image, factors: tuple[int, int], most: tuple[int, int], quantisation: NDArray[Any]
) -> Blocks:
    """All blocks of a component, those that fill its last MCU included."""
    width, height = _size_of(plane.size, factors, most)
    values = np.asarray(plane.resize((width, height), Image.Resampling.BOX), np.float64) - 128
    columns, rows = (factors[k] * -(-plane.size[k] // (8 * most[k])) for k in range(2))
    values = np.pad(values, ((0, 8 * rows - height), (0, 8 * columns - width)), "edge")
    tiles = values.reshape(rows, 8, columns, 8).transpose(0, 2, 1, 3)
    coefficients = (_DCT @ tiles @ _DCT.T).reshape(rows, columns, 64)[:, :, _ZIGZAG]
    blocks: Blocks = np.rint(coefficients / quantisation).astype(np.int64)
    return blocks


def _units(
    scan: Scan, blocks: Sequence[Blocks], sampling: Factors, sizes: Sequence[tuple[int, int]]
) -> Iterator[list[tuple[int, NDArray[np.int64]]]]:
    """The MCUs of a scan: (component, block) each. A scan of one component has a block each, and no filling."""
    if len(scan.components) == 1:
        (component,) = scan.components
        width, height = sizes[component]
        for row in range(-(-height // 8)):
            for column in range(-(-width // 8)):
                yield [(component, blocks[component][row, column])]
        return
    rows, columns = blocks[0].shape[0] // sampling[0][1], blocks[0].shape[1] // sampling[0][0]
    for row in range(rows):
        for column in range(columns):
            yield [
                (component, blocks[component][row * v + y, column * h + x])
                for component in scan.components
                for h, v in [sampling[component]]
                for y in range(v)
                for x in range(h)
            ]


def _entropy_coded(
    scan: Scan, units: Iterable[list[tuple[int, NDArray[np.int64]]]], restart_blocks: int, components: int
) -> bytes:
    data, bits, before = b"", "", [0] * components
    for k, unit in enumerate(units):
        if restart_blocks and k and k % restart_blocks == 0:
            data += _stuffed(bits) + bytes([0xFF, 0xD0 + (k // restart_blocks - 1) % 8])
            bits, before = "", [0] * components
        for component, block in unit:
            bits += _coded(scan, block, before, component)
    return data + _stuffed(bits)


def _coded(scan: Scan, block: NDArray[np.int64], before: list[int], component: int) -> str:
    bits = ""
    if scan.first == 0 and scan.bit_before:
        bits = str(int(block[0]) >> scan.bit & 1)
    elif scan.first == 0:
        level = int(block[0]) >> scan.bit
        bits = _number(lambda symbol: f"{symbol:04b}", 0, level - before[component])
        before[component] = level
    band = block[max(scan.first, 1) : scan.last + 1].tolist()
    run = 0
    for level in band:
        level = (abs(level) >> scan.bit) * (1 if level > 0 else -1)
        if level == 0:
            run += 1
            continue
        bits += _ac_code(SIXTEEN_ZEROS) * (run // 16) + _number(_ac_code, run % 16, level)
        run = 0
    return bits + (_ac_code(END_OF_BLOCK) if run else "")


def _ac_code(symbol: int) -> str:
    return f"{_AC_SYMBOLS.index(symbol):08b}"


def _number(code: Callable[[int], str], run: int, level: int) -> str:
    size = abs(level).bit_length()
    value = level if level > 0 else level + (1 << size) - 1
    return code(run << 4 | size) + (f"{value:0{size}b}" if size else "")


def _stuffed(bits: str) -> bytes:
    bits += "1" * (-len(bits) % 8)
    return bytes(int(bits[k : k + 8], 2) for k in range(0, len(bits), 8)).replace(b"\xff", b"\xff\0")
