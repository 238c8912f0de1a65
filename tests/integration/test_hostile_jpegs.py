"""Unusual, damaged and malicious images are what Pillow makes of them, or an error that names them; nothing else."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, ImageError
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.make_dataset import photograph
from proxyloader.tools.verify import check_file

from ..hostile_jpegs import DAMAGES, HOSTILE_JPEGS, SOUND
from ..numbered import numbered_image, read_numbers
from ..odd_formats import ODD_FORMATS
from ..outcomes import outcomes

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
    file = io.BytesIO()
    photograph(0, size=(67, 45)).save(file, "JPEG", quality=93, subsampling=subsampling, **options)
    return file.getvalue()


@functools.cache
def content(case: str) -> bytes:
    if case in OTHERS:
        return OTHERS[case]()
    return FILES[case].read_bytes() if case in FILES else HOSTILE_JPEGS[case](plain())


def pixels_by_pillow(data: bytes) -> Pixels | None:
    """None where Pillow raises."""
    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        return transforms.functional.pil_to_tensor(image.convert("RGB"))
    return None


def folder_of(root: Path, files: Sequence[tuple[str, bytes]], transform: Any, kind: type = ImageFolder) -> ImageFolder:
    """A data set of (suffix, content) each, in this order."""
    (root / "class").mkdir(parents=True)
    for number, (suffix, data) in enumerate(files):
        (root / "class" / f"{number:05d}{suffix}").write_bytes(data)
    dataset = kind(str(root), transform, is_valid_file=lambda path: True)
    assert isinstance(dataset, ImageFolder) and len(dataset) == len(files)
    return dataset


@functools.cache
def spelled(number: int) -> bytes:
    file = io.BytesIO()
    numbered_image(number).save(file, "JPEG", quality=90)
    return file.getvalue()


def index_of(case: str) -> int:
    return CASES.index(case) * 2 * BATCH + ODD


Walked = tuple[ImageFolder, list[Any]]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Walked]:
    """Walks one epoch of all cases, each among pictures that spell their number; once for each way to walk."""

    @functools.cache
    def walk_all(workers: int, device: str) -> Walked:
        odd = {index_of(case): (SUFFIXES.get(case, Path(case).suffix or ".jpg"), content(case)) for case in CASES}
        files = [odd.get(number) or (".jpg", spelled(number)) for number in range(2 * BATCH * len(CASES))]
        dataset = folder_of(tmp_path_factory.mktemp("hostile") / "set", files, transforms.PILToTensor())
        return dataset, outcomes(DataLoader(dataset, BATCH, num_workers=workers, collate_fn=list, device=device))

    return walk_all


def numbers_of(images: Sequence[Pixels]) -> list[int]:
    return read_numbers(torch.stack(list(images)), white=255)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_image_is_pillows_or_an_error(walked: Callable[[int, str], Walked], case: str, workers: int) -> None:
    assert_as_pillow(*walked(workers, "cpu"), case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("workers", [0, 2])
def test_hostile_images_on_a_gpu_are_pillows_or_errors(
    walked: Callable[[int, str], Walked], workers: int, device: str
) -> None:
    """All in one test: each process that has a part of them would walk the whole epoch."""
    wrong = {}
    for case in CASES:
        try:
            assert_as_pillow(*walked(workers, device), case, device)
        except AssertionError as error:
            wrong[case] = str(error)
    assert not wrong


def assert_as_pillow(dataset: ImageFolder, batches: list[Any], case: str, device: str) -> None:
    index = index_of(case)
    assert len(batches) == 2 * len(CASES)
    found, after = batches[index // BATCH : index // BATCH + 2]
    start = index // BATCH * BATCH
    assert numbers_of([image for image, _ in after]) == list(range(start + BATCH, start + 2 * BATCH))
    theirs = pixels_by_pillow(content(case))
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


def crop_by_pillow(dataset: CroppedByIndex, index: int) -> Pixels | None:
    with contextlib.suppress(Exception):
        image: Pixels = dataset[index][0]
        return image
    return None


def is_shown_otherwise(path: str) -> bool:
    """Without a marker out of place, a GPU shows damage inside a scan in its own way: docs/errors.md."""
    return check_file(path).kind == "damaged" and EncodedImage.from_jpeg(Path(path).read_bytes()) is not None


def compare_one_by_one(
    root: Path, files: Sequence[bytes], is_cropped: bool, device: str, gpu_levels: float = 0.5
) -> tuple[list[str], int]:
    """Load each file whole or cropped, in batches of one, and compare with Pillow.

    On a GPU, a picture may be ``gpu_levels`` further off in the mean.

    Returns:
        What is wrong, by the number of the file, and how many images raised the error that they should.
    """
    wrong, refused = [], 0
    transform, kind = (CROP, CroppedByIndex) if is_cropped else (transforms.PILToTensor(), ImageFolder)
    dataset = folder_of(root, [(".jpg", data) for data in files], transform, kind)
    found = outcomes(DataLoader(dataset, 1, num_workers=2, device=device))
    assert len(found) == len(dataset)
    for index, (ours, data) in enumerate(zip(found, files)):
        path = dataset.samples[index][0]
        their = crop_by_pillow(dataset, index) if is_cropped else pixels_by_pillow(data)
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
            if levels.mean() > allowed and not (device == "cuda" and is_shown_otherwise(path)):
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


ANY_FORMAT = {name: functools.partial(encode, photograph(0, size=(40, 30))) for name, encode in ODD_FORMATS.items()} | {
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
