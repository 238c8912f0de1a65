"""Datasets that catch the error of a damaged file meet it where they do with the stock loader, and draw the same."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, UnidentifiedImageError
from torch.utils.data import DataLoader as StockLoader, Dataset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image

import proxyloader

from ..hostile_jpegs import HUFFMAN, QUANTISATION, saved, with_bytes, without
from ..limits import WAIT_S
from ..outcomes import outcomes
from ..side_by_side import assert_as_torch
from .roads import Mapped, Streamed
from .test_any_dataset import opened

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning", "ignore::DeprecationWarning")

DAMAGED = (3, 8, 9)
IMAGES = 12
EXACT = transforms.Compose([transforms.RandomCrop(96), transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
"""Which DALI does on a CPU, too, and to the bit."""


@pytest.fixture(scope="module")
def paths(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Photographs, three of which have a whole header and an end, and markers between that Pillow refuses."""
    folder, found = tmp_path_factory.mktemp("damaged"), sorted(photos.rglob("*.jpg"))[:IMAGES]
    for index in DAMAGED:
        data = bytearray(found[index].read_bytes())
        at = len(data) // 2
        data[at : at + 40] = b"\xff\xc3" * 20
        found[index] = folder / f"{index}.jpg"
        found[index].write_bytes(data)
        with pytest.raises(OSError, match="broken data stream"):
            Image.open(found[index]).load()
    return found


class Own(Dataset[Any]):
    """Gives noise for a file that it cannot read, and numbers that each generator draws behind the image."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.augment = paths, EXACT
        self.own, self.asked = np.random.default_rng(4), 0

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Any:
        return self.augment(opened(self.paths[index]))

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        drawn = random.random(), np.random.rand(), self.own.random(), self.asked
        try:
            image = self.read(index)
        except (OSError, RuntimeError):  # torchvision raises the latter
            return torch.randint(256, (3, 96, 96), dtype=torch.uint8), torch.tensor([-1, *drawn, random.random()])
        return image, torch.tensor([index, *drawn, float(torch.rand(1))])


class Unconverted(Own):
    """Loads the pixels in a conversion to a tensor: of a file that Pillow tries to load again, it returns no pixels."""

    def read(self, index: int) -> Any:
        image = Image.open(self.paths[index])
        return transforms.functional.pil_to_tensor(image)[:, :96, :96]


class AsTensor(Own):
    def read(self, index: int) -> Any:
        return transforms.functional.vflip(decode_image(str(self.paths[index])))[:, :96, :96]


def opened_or_grey(path: Path) -> Image.Image:
    try:
        return opened(path)
    except OSError:
        return Image.new("RGB", (160, 120), "grey")


class Threads(Own):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        with ThreadPoolExecutor(2) as threads:
            images = list(threads.map(opened_or_grey, [self.paths[index] for index in indices], timeout=WAIT_S))
        return [(self.augment(image), torch.tensor(index)) for image, index in zip(images, indices)]


class Keeping(Own):
    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        self.kept: dict[int, Image.Image] = {}

    def read(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = opened_or_grey(self.paths[index])
        return self.augment(self.kept[index])


class ByLists(Own):
    def __getitem__(self, index: Any) -> Any:
        images, labels = zip(*(super(ByLists, self).__getitem__(each) for each in index))
        return torch.stack(images), torch.stack(labels)


class Folder(ImageFolder):
    """Gives the next image in the place of one that it cannot read."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(str(paths[0].parent.parent), EXACT)
        self.samples = [(str(path), index) for index, path in enumerate(paths)]

    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(index)
        except OSError:
            return self[index + 1]


class Unopened(Own):
    def __getitem__(self, index: int) -> Any:
        return Image.open(self.paths[index]), index


def stream(paths: list[Path]) -> Streamed:
    return Streamed(Own(paths))


class Trusting(Own):
    def __getitem__(self, index: int) -> Any:
        return self.read(index), index


class TrustingTensor(Trusting):
    def read(self, index: int) -> Any:
        return transforms.RandomCrop(96)(decode_image(str(self.paths[index]), mode="RGB"))


def augmented(samples: list[Any]) -> Any:
    found = []
    for image, label in samples:
        try:
            found.append((EXACT(image.convert("RGB")), label))
        except OSError:
            found.append((torch.zeros(3, 96, 96, dtype=torch.uint8), -1))
    return default_collate(found)


HOW: dict[Any, dict[str, Any]] = {
    Own: {"batch_size": 4, "shuffle": True},
    ByLists: {"batch_size": None, "sampler": [[0, 1, 2], [3, 4, 5], [8, 9, 1]]},
    Unopened: {"batch_size": 4, "shuffle": True, "collate_fn": augmented},
    stream: {"batch_size": 4},
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Own, Unconverted, AsTensor, Threads, Keeping, ByLists, Folder, Unopened, stream])
def test_it_meets_the_error_and_draws_as_there(kind: Callable[..., Any], workers: int, paths: list[Path]) -> None:
    assert_as_torch(lambda loader: loader(kind(paths), num_workers=workers, **HOW.get(kind, HOW[Own])))
    if kind is Own:
        seeded = proxyloader.DataLoader(Own(paths), 4, seed=5, num_workers=workers)
        assert [batch[1][:, 0].tolist() for batch in seeded] == [[0, 1, 2, -1], [4, 5, 6, 7], [-1, -1, 10, 11]]


class Exact(ImageFolder):
    """Catches what torchvision's loader raises for each kind of bad file, by its class."""

    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(index)[0], 0
        except FileNotFoundError as error:
            assert (error.filename, error.strerror) == (self.samples[index][0], "No such file or directory")
            reason = 1
        except UnidentifiedImageError:
            reason = 2
        except Image.DecompressionBombError:
            reason = 3
        except OSError:
            reason = 4
        return torch.full((3, 96, 96), reason, dtype=torch.uint8), reason


@pytest.mark.parametrize("workers", [0, 2])
def test_a_class_of_errors_that_torchvisions_loader_raises_is_caught_by_its_name(
    workers: int, photos: Path, tmp_path: Path, pillows_settings: None
) -> None:
    (tmp_path / "a").mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))[:6]):
        shutil.copy(path, tmp_path / "a" / f"{number}.jpg")
    dataset = Exact(str(tmp_path), EXACT)
    missing, text, empty, large, cut = (Path(dataset.samples[index][0]) for index in range(5))
    missing.unlink()
    text.write_text("<html>404</html>")
    empty.write_bytes(b"")
    Image.new("RGB", (2000, 500)).save(large)
    cut.write_bytes(cut.read_bytes()[:3000])
    Image.MAX_IMAGE_PIXELS = 499_999
    stock = [(images, reasons.tolist()) for images, reasons in StockLoader(dataset, 3, num_workers=workers)]
    assert [reasons for _, reasons in stock] == [[1, 2, 2], [3, 4, 0]]
    ours = proxyloader.DataLoader(dataset, 3, num_workers=workers)
    for (images, reasons), (stock_images, stock_reasons) in zip(ours, stock, strict=True):
        assert reasons.tolist() == stock_reasons
        assert torch.equal(images[reasons > 0].cpu(), stock_images[reasons > 0])


# --- a file that stock cannot read takes no random numbers ------------------------------------------------------------


UNCLOSED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Pillow leaves a file open that it cannot decode."""


progressive = functools.partial(saved, progressive=True)
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "no quantisation table": without(QUANTISATION),
    "impossible Huffman table": with_bytes(HUFFMAN, slice(1, 17), b"\xff" * 16),
    "no Huffman table, progressive": lambda data: without(HUFFMAN)(progressive(data)),
    "Huffman table missing between scans": lambda data: (
        data[: data.index(b"\xff\xda")] + progressive(data)[progressive(data).index(b"\xff\xda") :]
    ),
    "no end": lambda data: data[:-2],
    "half of it": lambda data: data[: len(data) // 2],
    "half of it and an end": lambda data: data[: len(data) // 2] + b"\xff\xd9",
    "half of it, progressive": lambda data: progressive(data)[: len(data) // 2],
    "no last scan": lambda data: progressive(data)[: progressive(data).rindex(b"\xff\xda")] + b"\xff\xd9",
    "lost block": lambda data: data[: len(data) // 2] + bytes(600) + data[len(data) // 2 + 600 :],
    "stray markers": lambda data: data[: len(data) // 2] + b"\xff\xc3" * 20 + data[len(data) // 2 :],
    "text": lambda data: b"<html>404</html>",
}


@pytest.fixture(autouse=True)
def files_are_closed() -> Iterator[None]:
    """Pillow leaves files open of which it raises an error. Closed in a later test, they would be a warning there."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def damaged_folder(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each second photograph is damaged, each in another way."""
    root = tmp_path_factory.mktemp("draws")
    (root / "a").mkdir()
    files = [path.read_bytes() for path in sorted(photos.rglob("*.jpg"))[: 2 * len(DAMAGES)]]
    for number, damage in enumerate(DAMAGES.values()):
        (root / "a" / f"{2 * number:03d}.jpg").write_bytes(files[2 * number])
        (root / "a" / f"{2 * number + 1:03d}.jpg").write_bytes(damage(files[2 * number + 1]))
    return root


KINDS: dict[str, Callable[[Path], Any]] = {
    "ImageFolder": lambda root: ImageFolder(str(root), EXACT),
    "of another's loader": lambda root: ImageFolder(str(root), EXACT, loader=opened),
    "RemoteImageFolder": lambda root: proxyloader.RemoteImageFolder(f"file://{root}", EXACT),
    "own": lambda root: Trusting(sorted(root.rglob("*.jpg"))),
    "torchvision.io": lambda root: TrustingTensor(sorted(root.rglob("*.jpg"))),
}


def with_state(batch: Any) -> Any:
    images, labels = batch
    return images.cpu(), labels.tolist(), torch.get_rng_state()


def batches_of(loader: Any) -> list[Any]:
    """The images and the labels of each batch, and the state of torch's generator behind it; or its error."""
    torch.manual_seed(7)
    return outcomes(map(with_state, loader))


def assert_same(ours: list[Any], stock: list[Any]) -> None:
    assert len(ours) == len(stock) and sum(isinstance(each, Exception) for each in stock) < len(stock)
    for place, (batch, their) in enumerate(zip(ours, stock)):
        assert isinstance(batch, type(their)), f"{place}: {batch!r} and {their!r}"
        if not isinstance(their, Exception):
            assert batch[1] == their[1] and torch.equal(batch[0], their[0]), f"{place}: {batch[1]}"
            assert torch.equal(batch[2], their[2]), f"{place}: the generator has another state"


@UNCLOSED
@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_cannot_read_draws_nothing(
    kind: str, workers: int, lenient: bool, damaged_folder: Path, pillows_settings: None
) -> None:
    ImageFile.LOAD_TRUNCATED_IMAGES = lenient
    dataset = KINDS[kind](damaged_folder)
    for batch_size in (1, 3):
        how: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
        stock = batches_of(StockLoader(dataset, **how))
        assert any(isinstance(each, Exception) for each in stock)
        assert_same(batches_of(proxyloader.DataLoader(dataset, device="cpu", **how)), stock)


@UNCLOSED
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_skipped_draws_nothing(kind: str, workers: int, damaged_folder: Path) -> None:
    """What on_error="skip" leaves out is None in the stock loader's samples."""
    dataset = KINDS[kind](damaged_folder)

    def readable(index: int) -> Any:
        with contextlib.suppress(OSError, RuntimeError):
            return dataset[index]

    how: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    all_readable: Any = lambda samples: default_collate([*filter(None, samples)])  # noqa: E731
    stock = batches_of(StockLoader(Mapped(readable, range(len(dataset))), collate_fn=all_readable, **how))
    ours = proxyloader.DataLoader(dataset, on_error="skip", device="cpu", **how)
    assert_same(batches_of(ours), stock)
    assert len(ours.errors) >= len(DAMAGES) - 4
