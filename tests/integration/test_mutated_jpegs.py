"""JPEGs with changed segments: a dataset gets the pixels, or the class of error, that it gets from the stock loader."""

from __future__ import annotations

import functools
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import PIL
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset
from torchvision.transforms import PILToTensor

from proxyloader import DataLoader
from proxyloader.make_dataset import photograph

from ..hostile_jpegs import DC_FIRST, DC_LAST, HALVES, JFIF, progressive, two_pictures, without
from ..jpeg_writer import Scan, segment, write_jpeg
from ..tiers import by_default
from ..undecoded import get_encoded

pytestmark = [
    pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 11, reason="Pillow 10 decodes at once"),
    pytest.mark.filterwarnings("ignore"),
]

PHOTO = photograph(0, size=(48, 40))
BATCH = 128


def saved(image: Image.Image = PHOTO, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def exif(thumbnail: bytes = b"") -> bytes:
    content = Image.Exif()
    content[0x010F], content[0x0128], content[0x011A], content[0x011B] = "Maker", 2, 300.0, 300.0
    return content.tobytes() + thumbnail


def with_photoshop(data: bytes) -> bytes:
    resolution = b"8BIM\x03\xed\0\0\0\0\0\x10" + b"\0\x48\0\0\0\1\0\1" * 2
    return data[:2] + segment(0xED, b"Photoshop 3.0\0" + resolution + b"8BIM\x04\x04\0\0\0\0\0\2ab") + data[2:]


def as_ycck(data: bytes) -> bytes:
    at = data.index(b"Adobe")
    return data[: at + 11] + b"\2" + data[at + 12 :]


SOURCES: dict[str, Callable[[], bytes]] = {
    "4:2:0": saved,
    "4:2:2": functools.partial(saved, subsampling="4:2:2"),
    "4:4:4": functools.partial(saved, subsampling="4:4:4"),
    "4:4:0": lambda: write_jpeg(PHOTO, sampling=((1, 2), (1, 1), (1, 1))),
    "4:1:1": lambda: write_jpeg(PHOTO, sampling=((4, 1), (1, 1), (1, 1))),
    "optimised tables": functools.partial(saved, optimize=True),
    "restart markers": functools.partial(saved, restart_marker_blocks=2),
    "16-bit quantisation": lambda: write_jpeg(PHOTO, frame=0xC1, quantisation=[4] * 60 + [300] * 4),
    "three scans": lambda: write_jpeg(PHOTO, scans=(Scan((0,)), Scan((1,)), Scan((2,)))),
    "progressive": functools.partial(saved, progressive=True),
    "progressive of 6 scans": lambda: progressive(DC_FIRST, DC_LAST, *HALVES)(saved()),
    "grey": lambda: saved(PHOTO.convert("L")),
    "grey, progressive": lambda: saved(PHOTO.convert("L"), progressive=True),
    "CMYK": lambda: saved(PHOTO.convert("CMYK")),
    "YCCK": lambda: as_ycck(saved(PHOTO.convert("CMYK"))),
    "RGB": functools.partial(saved, keep_rgb=True),
    "density": functools.partial(saved, dpi=(72, 72)),
    "EXIF behind JFIF": functools.partial(saved, exif=exif()),
    "EXIF and a thumbnail": lambda: without(JFIF)(saved(exif=exif(saved(PHOTO.resize((16, 12)), quality=20)))),
    "ICC profile": functools.partial(saved, icc_profile=bytes(range(64))),
    "Photoshop": lambda: with_photoshop(saved(comment=b"a comment")),
    "two pictures": lambda: two_pictures(saved()),
}


def segments_of(data: bytes) -> Iterator[tuple[int, int]]:
    """The places of all segments of a JPEG, of those between its scans, too: start and end."""
    at = 2
    while at + 4 <= len(data):
        if data[at] == 0xFF and data[at + 1] not in (0, 0xFF) and not 0xD0 <= data[at + 1] <= 0xD9:
            end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            yield at, end
            at = end
        else:
            at += 1


def mutations(data: bytes, rng: random.Random, share: float) -> Iterator[tuple[str, bytes]]:
    """The kind of change, and what the file becomes. ``share`` of the bytes of a segment are changed."""
    places = list(segments_of(data))
    for number, (start, end) in enumerate(places):
        marker = data[start + 1]
        name = f"{marker:02X}"
        for at in range(start, end):
            if at >= start + 5 and rng.random() > share:
                continue
            values = {0, 255, data[at] ^ 1, (data[at] + 16) & 255, rng.randrange(256)} - {data[at]}
            for value in sorted(values) if at < start + 24 or share == 1 else rng.sample(sorted(values), 1):
                yield f"{name} changed", data[:at] + bytes([value]) + data[at + 1 :]
        yield f"{name} removed", data[:start] + data[end:]
        yield f"{name} repeated", data[:end] + data[start:end] + data[end:]
        yield f"{name} first", data[:2] + data[start:end] + data[2:start] + data[end:]
        if number + 1 < len(places) and places[number + 1][0] == end:
            after = places[number + 1][1]
            yield f"{name} swapped", data[:start] + data[end:after] + data[start:end] + data[after:]
        size = end - start - 4
        for left in sorted({0, 1, 5, 7, 11, size // 2, size - 1}):
            if 0 <= left < size:
                yield f"{name} cut", data[:start] + segment(marker, data[start + 4 : start + 4 + left]) + data[end:]
                yield f"{name} cut, not its length", data[: start + 4 + left] + data[end:]
        yield f"{name} longer", data[:start] + segment(marker, data[start + 4 : end] + b"\1") + data[end:]
        yield "file cut", data[: rng.randrange(start, end)]
        yield "file cut", data[:end]
    first = places[-1][1]
    for _ in range(int(40 * share)):
        at = rng.randrange(first, len(data))
        yield "scan changed", data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        yield "file cut", data[: rng.randrange(len(data))]
        yield "scan cut", data[:at] + b"\xff\xd9"
        yield "scan shorter", data[:at] + data[min(at + 9, len(data) - 2) :]


class Catching(Dataset[Any]):
    """Opens each file as most datasets do, and gives the class of the error, if there is one."""

    def __init__(self, files: list[bytes]) -> None:
        self.files, self.late = files, [False] * len(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        try:
            image = Image.open(io.BytesIO(self.files[index])).convert("RGB")
            self.late[index] = get_encoded(image) is not None
            return "", PILToTensor()(image), float(torch.rand(1))
        except Exception as error:
            return type(error).__name__, None, float(torch.rand(1))


def compare(source: str, share: float) -> tuple[Counter[str], list[str]]:
    """Return how many files have each outcome, and what differs from the stock loader."""
    data, rng = SOURCES[source](), random.Random(source)
    kinds, files = zip(("whole", data), *mutations(data, rng, share))
    dataset = Catching(list(files))
    found = []
    loader = DataLoader(dataset, BATCH, collate_fn=list, device="cpu")
    for each in (StockLoader(dataset, BATCH, collate_fn=list), loader):
        torch.manual_seed(0)
        found.append([sample for batch in each for sample in batch])
    stock, ours = found
    assert len(ours) == len(stock)
    by_dali = loader.stats().images_by_dali  # torchvision is as fast for one image of a batch
    assert sum(dataset.late) - len(loader) <= by_dali <= sum(dataset.late)
    counts, wrong = Counter[str](), []
    for number, ((error, pixels, drawn), (their_error, their_pixels, theirs)) in enumerate(zip(ours, stock)):
        late = dataset.late[number]
        counts[error or ("decoded late" if late else "decoded by Pillow")] += 1
        same = error == their_error and drawn == theirs
        if not same or (not error and not torch.equal(pixels, their_pixels)):
            wrong.append(
                f"{source}, {number}, {kinds[number]}: {error or 'works'}, stock {their_error or 'works'}, {late=}"
            )
    return counts, wrong


@pytest.mark.parametrize("share", by_default({"some": 0.04, "all": 1}, "some"))
@pytest.mark.parametrize("source", SOURCES)
def test_a_mutated_jpeg_is_what_it_is_with_the_stock_loader(source: str, share: float) -> None:
    counts, wrong = compare(source, share)
    assert not wrong, f"{len(wrong)} of {counts.total()}: {wrong[:20]}"
    assert len(counts) >= 2 and counts.total() > (100 if share < 1 else 10_000 // len(SOURCES))
