"""Small data sets in the formats that DALI's readers take, written from their specifications, without their libraries.

The images are files of a folder, under their labels: ``samples`` as of ``ImageFolder``, (path, label) each.
"""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

Samples = list[tuple[str, int]]

PAGE = 4096
"""Bytes of a page of LMDB."""

NO_PAGE = 2**64 - 1


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, value: bytes | int) -> bytes:
    """One field of a protocol buffer: bytes (or a message), or a whole number."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def write_tfrecord(path: Path, samples: Samples) -> None:
    """tensorflow.Example records, and the index beside them that DALI wants. DALI reads over the checksums."""
    index = []
    with path.open("wb") as file:
        for image, label in samples:
            features = {
                b"image/encoded": field(1, field(1, Path(image).read_bytes())),
                b"image/class/label": field(3, field(1, varint(label))),
            }
            entries = (field(1, field(1, name) + field(2, value)) for name, value in features.items())
            record = field(1, b"".join(entries))
            index.append(f"{file.tell()} {len(record) + 16}\n")
            file.write(struct.pack("<QI", len(record), 0) + record + bytes(4))
    path.with_suffix(".idx").write_text("".join(index))


def write_tar(path: Path, samples: Samples) -> None:
    """Pairs of members, 0000.jpg and 0000.cls, as WebDataset has them."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for at, (image, label) in enumerate(samples):
            for ext, data in (("jpg", Path(image).read_bytes()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{at:04}.{ext}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def write_caffe(folder: Path, samples: Samples) -> None:
    """An LMDB of Caffe's Datum messages: an encoded image and a label each."""
    encoded = field(7, 1)
    write_lmdb(folder, [field(4, Path(image).read_bytes()) + field(5, label) + encoded for image, label in samples])


def write_lmdb(folder: Path, values: list[bytes]) -> None:
    """An LMDB of one leaf page, whose values lie on pages of their own, under the keys 00000000, 00000001, ..."""
    folder.mkdir()
    overflow, nodes, next_page = b"", [], 3
    for at, value in enumerate(values):
        pages = -(-(16 + len(value)) // PAGE)
        overflow += (struct.pack("<QHHI", next_page, 0, 4, pages) + value).ljust(pages * PAGE, b"\0")
        key = f"{at:08}".encode()
        nodes.append(struct.pack("<HHHH", len(value) & 0xFFFF, len(value) >> 16, 1, len(key)) + key)
        nodes[-1] += struct.pack("<Q", next_page)
        next_page += pages
    lower = 16 + 2 * len(nodes)
    upper = PAGE - sum(map(len, nodes))
    assert lower <= upper, "more than one leaf page is needed"
    places = [upper + sum(map(len, nodes[:at])) for at in range(len(nodes))]
    leaf = struct.pack("<QHHHH", 2, 0, 2, lower, upper) + struct.pack(f"<{len(nodes)}H", *places)
    leaf = leaf.ljust(upper, b"\0") + b"".join(nodes)
    unused = struct.pack("<IHHQQQQQ", PAGE, 0, 0, 0, 0, 0, 0, NO_PAGE)
    main = struct.pack("<IHHQQQQQ", 0, 0, 1, 0, 1, next_page - 3, len(values), 2)
    metas = b""
    for page in (0, 1):
        meta = struct.pack("<QHHHH", page, 0, 8, 0, 0) + struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, next_page * PAGE)
        metas += (meta + unused + main + struct.pack("<QQ", next_page - 1, page)).ljust(PAGE, b"\0")
    (folder / "data.mdb").write_bytes(metas + leaf + overflow)
