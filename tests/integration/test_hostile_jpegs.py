"""Unusual, damaged and malicious images are what Pillow makes of them, or an error that names them; nothing else."""

from __future__ import annotations

import contextlib
import functools
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor

from proxyloader import DataLoader, ImageError
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.tools.verify import check_file

from ..compare import picture
from ..hostile_jpegs import (
    DAMAGES,
    DC_FIRST,
    DC_LAST,
    HALVES,
    HOSTILE_JPEGS,
    JFIF,
    SOUND,
    progressive,
    two_pictures,
    without,
)
from ..jpeg_writer import Scan, segment, write_jpeg
from ..numbered import numbered_image, read_numbers
from ..odd_formats import ODD_FORMATS, encoded
from ..outcomes import outcomes
from ..tiers import by_default
from ..undecoded import get_encoded
from .roads import Mapped

FILES = {file.name: file for file in (Path(__file__).parents[1] / "files").iterdir() if file.suffix != ".md"}


AVIF = FILES["avif.avif"].read_bytes()
OTHERS: dict[str, Callable[[], bytes]] = {
    "an AVIF with zeros inside": lambda: AVIF[:280] + bytes(20) + AVIF[300:],
    "a JPEG 2000 that is cut": lambda: FILES["jpeg_2000.jp2"].read_bytes()[:200],
    "a PNG that is cut": lambda: SOUND["a PNG"](plain())[:3000],
    "a TIFF that is cut": lambda: SOUND["a JPEG in a TIFF"](plain())[:1000],
    "a start and no more": lambda: b"\xff\xd8\xff",
}
CASES = [*HOSTILE_JPEGS, *FILES, *OTHERS]
SUFFIXES = {"a JPEG in a PNG's name": ".png", "a JPEG in a TIFF": ".tif"}

PILLOW_DECODES = {
    "1 x 1",
    "65,500 x 1",
    "Adobe 0 behind JFIF",
    "Adobe 0 without JFIF",
    "a JFIF marker behind Adobe 0",
    "a JPEG in a TIFF",
    "a PNG",
    "an Adobe marker behind the frame",
    "grey with factors 2x2",
    "grey with factors 4x1",
    "RGB named components behind JFIF",
}
"""Of the sound ones; all others stay encoded."""

BATCH, ODD = 3, 1
"""Of two batches each, the first holds a hostile image in the middle, the second none."""

ENGINE_LEVELS = 3
"""How far a GPU's decoders may be from Pillow, in levels of 255."""

Pixels = torch.Tensor  # (3, H, W) uint8


@functools.lru_cache(maxsize=8)
def plain(subsampling: str = "4:2:0", **options: Any) -> bytes:
    return encoded(picture(0, (67, 45)), "JPEG", quality=93, subsampling=subsampling, **options)


@functools.cache
def content(case: str) -> bytes:
    if case in OTHERS:
        return OTHERS[case]()
    return FILES[case].read_bytes() if case in FILES else HOSTILE_JPEGS[case](plain())


def folder_of(root: Path, files: Sequence[tuple[str, bytes]], transform: Any, kind: type = ImageFolder) -> ImageFolder:
    (root / "class").mkdir(parents=True)
    for number, (suffix, data) in enumerate(files):
        (root / "class" / f"{number:05d}{suffix}").write_bytes(data)
    dataset = kind(str(root), transform, is_valid_file=lambda path: True)
    assert isinstance(dataset, ImageFolder) and len(dataset) == len(files)
    return dataset


@functools.cache
def spelled(number: int) -> bytes:
    return encoded(numbered_image(number), "JPEG", quality=90)


def index_of(case: str) -> int:
    return CASES.index(case) * 2 * BATCH + ODD


def numbers_of(images: Sequence[Pixels]) -> list[int]:
    return read_numbers(torch.stack(list(images)), white=255)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_hostile_image_is_pillows_or_an_error(tmp_path: Path, workers: int, device: str) -> None:
    """One epoch of all cases, each among pictures that spell their number."""
    odd = {index_of(case): (SUFFIXES.get(case, Path(case).suffix or ".jpg"), content(case)) for case in CASES}
    files = [odd.get(number) or (".jpg", spelled(number)) for number in range(2 * BATCH * len(CASES))]
    dataset, wrong = folder_of(tmp_path / "set", files, transforms.PILToTensor()), {}
    batches = outcomes(DataLoader(dataset, BATCH, num_workers=workers, collate_fn=list, device=device))
    for case in CASES:
        try:
            assert_as_pillow(dataset, batches, case, device)
        except AssertionError as error:
            wrong[case] = str(error)
    assert not wrong


def by_pillow(dataset: ImageFolder, index: int) -> Pixels | None:
    """None where Pillow raises."""
    with contextlib.suppress(Exception):
        image: Pixels = dataset[index][0]
        return image
    return None


def assert_as_pillow(dataset: ImageFolder, batches: list[Any], case: str, device: str) -> None:
    index = index_of(case)
    assert len(batches) == 2 * len(CASES)
    found, after = batches[index // BATCH : index // BATCH + 2]
    start = index // BATCH * BATCH
    assert numbers_of([image for image, _ in after]) == list(range(start + BATCH, start + 2 * BATCH))
    theirs = by_pillow(dataset, index)
    if theirs is None:
        assert case not in SOUND
        assert isinstance(found, ImageError), found
        assert (found.index, found.path) == (index, dataset.samples[index][0])
        return
    assert not isinstance(found, Exception), found
    assert numbers_of([found[0][0], found[2][0]]) == [start, start + 2]
    ours = found[ODD][0].cpu()
    assert ours.shape == theirs.shape
    if device == "cpu":
        assert torch.equal(ours, theirs)
    elif case in SOUND:
        assert (ours.int() - theirs.int()).abs().max() <= ENGINE_LEVELS


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_jpeg_stays_encoded(case: str) -> None:
    assert EncodedImage.from_bytes(content(case)).data.startswith(b"P6") == (case in PILLOW_DECODES)


# --- only a part of an image is decoded -------------------------------------------------------------------------------

CROP = transforms.Compose([transforms.RandomResizedCrop(24, scale=(0.1, 0.4)), transforms.PILToTensor()])
MEAN_LEVELS = 0.5
SILENT_LEVELS = 2
"""In the mean, for damage that libjpeg does not report: nvJPEG and libjpeg each show it in their own way."""


class CroppedByIndex(ImageFolder):
    """Each image has its own crop, whoever asks for it and whatever failed before."""

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return super().__getitem__(index)


def compare_one_by_one(
    root: Path, files: Sequence[bytes], is_cropped: bool, device: str, gpu_levels: float = 0.5
) -> tuple[list[str], int]:
    """What is wrong, by the number of the file, and how many images raised the error that they should."""
    wrong, refused = [], 0
    transform, kind = (CROP, CroppedByIndex) if is_cropped else (transforms.PILToTensor(), ImageFolder)
    dataset = folder_of(root, [(".jpg", data) for data in files], transform, kind)
    found = outcomes(DataLoader(dataset, 1, num_workers=2, device=device))
    assert len(found) == len(dataset)
    for index, ours in enumerate(found):
        path = dataset.samples[index][0]
        their = by_pillow(dataset, index)
        if their is None:
            named = isinstance(ours, ImageError) and (ours.index, ours.path) == (index, path)
            refused += named
            if not named:
                wrong.append(f"{index}: Pillow refuses it, and here it is {type(ours).__name__}")
        elif isinstance(ours, Exception):
            wrong.append(f"{index}: Pillow decodes it, and here it is {ours}")
        elif ours[0][0].shape != their.shape:
            wrong.append(f"{index}: of shape {tuple(ours[0][0].shape)} and not {tuple(their.shape)}")
        else:
            levels = (ours[0][0].cpu().int() - their.int()).abs().float()
            allowed = (MEAN_LEVELS if is_cropped else 0) + (gpu_levels if device == "cuda" else 0)
            # Without a marker out of place, a GPU shows damage inside a scan in its own way: docs/errors.md.
            is_own = device == "cuda" and check_file(path).kind == "damaged"
            if levels.mean() > allowed and not (is_own and EncodedImage.from_jpeg(Path(path).read_bytes())):
                wrong.append(f"{index}: {levels.mean():.1f} levels off in the mean, {levels.max():.0f} at most")
    return wrong, refused


def test_a_crop_of_a_hostile_image_is_the_crop_that_pillow_makes(tmp_path: Path, device: str) -> None:
    cases = [case for case in CASES if " x 65,5" not in case and "65,500 x" not in case]  # as crops they show nothing
    wrong, refused = compare_one_by_one(tmp_path / "set", [content(case) for case in cases], True, device)
    assert not wrong, [f"{cases[int(line.split(':')[0])]}: {line}" for line in wrong]
    assert 0 < refused < len(cases)


# --- damage at random -------------------------------------------------------------------------------------------------

SEEDS = 200
KINDS: dict[str, dict[str, Any]] = {
    "4:2:0": {},
    "4:4:4": {"subsampling": "4:4:4"},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 3},
}


@pytest.mark.parametrize("part", ["whole", "crop"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_jpeg_damaged_at_random_is_pillows_or_an_error(tmp_path: Path, damage: str, part: str, device: str) -> None:
    goods = [plain(**options) for options in KINDS.values()]
    files = [DAMAGES[damage](goods[seed % len(goods)], seed) for seed in range(SEEDS)]
    wrong, refused = compare_one_by_one(tmp_path / "set", files, part == "crop", device, SILENT_LEVELS)
    assert not wrong, f"{len(wrong)} of {SEEDS}: {wrong[:5]}"
    assert 0 < refused < SEEDS


ANY_FORMAT = {name: functools.partial(encode, picture(0, (40, 30))) for name, encode in ODD_FORMATS.items()} | {
    name: file.read_bytes for name, file in FILES.items()
}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", ANY_FORMAT)
def test_a_file_of_any_format_that_is_damaged_at_random_is_an_image_or_an_image_error(name: str) -> None:
    whole = ANY_FORMAT[name]()
    for seed in range(40):
        generator, data = np.random.default_rng(seed), bytearray(whole)
        for at in generator.integers(len(whole) if seed % 2 else min(len(whole), 400), size=4):
            data[at] = generator.choice([0, 1, 0x7F, 0xFF, int(generator.integers(256))])
        try:
            image = EncodedImage.from_bytes(bytes(data), "damaged")
        except ImageError as error:
            assert "damaged" in str(error)
        else:
            assert image.height > 0 and image.width > 0


def test_the_files_are_small_and_all_explained() -> None:
    assert all(file.stat().st_size < 8192 for file in FILES.values())
    assert sum(file.stat().st_size for file in FILES.values()) < 100 * 1024
    explained = (Path(__file__).parents[1] / "files" / "README.md").read_text()
    assert all(f"`{name}`" in explained for name in FILES)


# --- changed segments ------------------------------------------------------------------------------------------------


PHOTO = picture(0, (48, 40))


def saved(image: Image.Image = PHOTO, **options: Any) -> bytes:
    return encoded(image, "JPEG", **options)


def exif() -> bytes:
    content = Image.Exif()
    content[0x010F], content[0x0128], content[0x011A], content[0x011B] = "Maker", 2, 300.0, 300.0
    return content.tobytes()


def with_photoshop(data: bytes) -> bytes:
    resolution = b"8BIM\x03\xed\0\0\0\0\0\x10" + b"\0\x48\0\0\0\1\0\1" * 2
    return data[:2] + segment(0xED, b"Photoshop 3.0\0" + resolution + b"8BIM\x04\x04\0\0\0\0\0\2ab") + data[2:]


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
    "YCCK": lambda: ODD_FORMATS["odd_ycck.jpg"](PHOTO),
    "RGB": functools.partial(saved, keep_rgb=True),
    "density": functools.partial(saved, dpi=(72, 72)),
    "EXIF behind JFIF": functools.partial(saved, exif=exif()),
    "EXIF and a thumbnail": lambda: without(JFIF)(ODD_FORMATS["odd_thumbnail.jpg"](PHOTO)),
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


def compare(source: str, share: float) -> tuple[Counter[str], list[str]]:
    """Return how many files have each outcome, and what differs from the stock loader."""
    data, rng = SOURCES[source](), random.Random(source)
    kinds, files = zip(("whole", data), *mutations(data, rng, share))
    late = [False] * len(files)

    def caught(index: int) -> Any:
        try:
            image = Image.open(io.BytesIO(files[index])).convert("RGB")
            late[index] = get_encoded(image) is not None
            return "", PILToTensor()(image), float(torch.rand(1))
        except Exception as error:
            return type(error).__name__, None, float(torch.rand(1))

    dataset, found = Mapped(caught, range(len(files))), []
    loader = DataLoader(dataset, 128, collate_fn=list, device="cpu")
    for each in (StockLoader(dataset, 128, collate_fn=list), loader):
        torch.manual_seed(0)
        found.append([sample for batch in each for sample in batch])
    stock, ours = found
    assert len(ours) == len(stock)
    by_dali = loader.stats().images_by_dali  # torchvision is as fast for one image of a batch
    assert sum(late) - len(loader) <= by_dali <= sum(late)
    counts, wrong = Counter[str](), []
    for number, ((error, pixels, drawn), (their_error, their_pixels, theirs)) in enumerate(zip(ours, stock)):
        counts[error or ("decoded late" if late[number] else "decoded by Pillow")] += 1
        same = error == their_error and drawn == theirs
        if not same or (not error and not torch.equal(pixels, their_pixels)):
            both = f"{error or 'works'}, stock {their_error or 'works'}"
            wrong.append(f"{source}, {number}, {kinds[number]}: {both}, late={late[number]}")
    return counts, wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", by_default({"some": 0.04, "all": 1}, "some"))
@pytest.mark.parametrize("source", SOURCES)
def test_a_mutated_jpeg_is_what_it_is_with_the_stock_loader(source: str, share: float) -> None:
    counts, wrong = compare(source, share)
    assert not wrong, f"{len(wrong)} of {counts.total()}: {wrong[:20]}"
    assert len(counts) >= 2 and counts.total() > (100 if share < 1 else 10_000 // len(SOURCES))
