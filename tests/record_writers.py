"""Small data sets in formats that DALI reads, without the libraries of TensorFlow and Caffe.

``samples`` are those of an ``ImageFolder``: (path, label) each.
"""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import lmdb

Samples = list[tuple[str, int]]


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
    with lmdb.open(str(folder), map_size=1 << 30) as database, database.begin(write=True) as transaction:
        for at, (image, label) in enumerate(samples):
            transaction.put(f"{at:08}".encode(), field(4, Path(image).read_bytes()) + field(5, label) + encoded)
