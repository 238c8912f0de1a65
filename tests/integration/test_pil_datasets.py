"""Datasets that open their images with Pillow: DALI decodes them, and batches and errors are the stock loader's."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchvision import datasets, transforms

import proxyloader
from proxyloader.data.lazy_image import encoded_in

from .test_same_batches import TRAIN, assert_same

pytestmark = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 11, reason="Pillow 10 decodes at once")


def by_path(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def in_a_block(path: Path) -> Image.Image:
    with path.open("rb") as file, Image.open(file) as image:
        return image.convert("RGB")


def as_opened(path: Path) -> Image.Image:
    return Image.open(path)


def from_bytes(path: Path) -> Image.Image:
    return Image.open(io.BytesIO(path.read_bytes())).convert("RGB")


def transposed(path: Path) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(path)).convert("RGB")


def cropped(path: Path) -> Image.Image:
    return by_path(path).crop((0, 0, 100, 90))


ENCODED = [by_path, in_a_block, as_opened, from_bytes, transposed]


class Photographs(Dataset[Any]):
    """Gives an image, its index, and whether it was handed to the transform as its file."""

    def __init__(self, root: Path, open_image: Callable[[Path], Image.Image] = by_path, transform: Any = TRAIN) -> None:
        self.paths = sorted(root.glob("*/*.jpg"))
        self.open_image, self.transform = open_image, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = self.open_image(self.paths[index])
        return self.transform(image), (index, int(encoded_in(image) is not None))


class Cached(Photographs):
    """Keeps its images."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.images: dict[int, Image.Image] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.images:
            self.images[index] = by_path(self.paths[index])
        image = self.images[index]
        return self.transform(image), (index, int(encoded_in(image) is not None))


class InThreads(Photographs):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        with ThreadPoolExecutor(4) as threads:
            images = list(threads.map(lambda index: by_path(self.paths[index]), indices))
        return [(self.transform(image), (index, 1)) for image, index in zip(images, indices)]


class Stream(IterableDataset[Any]):
    def __init__(self, root: Path) -> None:
        self.photographs = Photographs(root)
        self.transform = TRAIN

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id if info else 0, 24, info.num_workers if info else 1):
            image = by_path(self.photographs.paths[index])
            yield self.transform(image), (index, int(encoded_in(image) is not None))


def batches(loader_class: Any, dataset: Any, epochs: int = 1, **arguments: Any) -> list[tuple[Any, Any, Any]]:
    torch.manual_seed(17)
    loader = loader_class(dataset, 10, **arguments)
    return [(images.cpu(), *rest) for _ in range(epochs) for images, rest in loader]


def compare(dataset: Any, device: str, epochs: int = 1, context: str | None = None, **arguments: Any) -> list[int]:
    """Return, for each sample of ours, whether it was handed on as its file.

    Args:
        context: in which our workers start.
    """
    started = {"multiprocessing_context": context} if context else {}
    ours = batches(proxyloader.DataLoader, dataset, epochs, device=device, **arguments, **started)
    stock = batches(StockLoader, dataset, epochs, **arguments)
    assert_same([batch[:2] for batch in ours], [batch[:2] for batch in stock])
    assert not any(flag for _, _, flags in stock for flag in flags) or isinstance(dataset, InThreads)
    return [int(flag) for _, _, flags in ours for flag in flags]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("open_image", ENCODED, ids=lambda function: function.__name__)
def test_images_that_are_only_opened_are_decoded_by_dali(
    photos: Path, open_image: Any, workers: int, device: str
) -> None:
    assert all(compare(Photographs(photos, open_image), device, num_workers=workers, shuffle=True))


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_may_be_started_in_any_way(photos: Path, context: str, device: str) -> None:
    assert all(compare(Photographs(photos), device, context=context, num_workers=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_images_whose_pixels_are_used_are_decoded_by_pillow(photos: Path, workers: int, device: str) -> None:
    assert not any(compare(Photographs(photos, cropped), device, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Cached, InThreads, Stream])
def test_a_dataset_may_do_so_in_its_own_way(photos: Path, kind: Any, workers: int, device: str) -> None:
    persistent = {"persistent_workers": True} if workers else {}
    found = compare(kind(photos), device, epochs=2, num_workers=workers, **persistent)
    assert all(found) or (kind is InThreads and not workers)


class LeavesOut(Photographs):
    """Takes the first image in place of one that cannot be read."""

    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(index)
        except OSError:
            return super().__getitem__(0)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_catches_the_error_of_a_damaged_file_does(
    photos: Path, tmp_path: Path, workers: int, device: str
) -> None:
    (tmp_path / "a").mkdir()
    for number, path in enumerate(sorted(photos.glob("*/*.jpg"))[:20]):
        data = path.read_bytes()
        kept = {3: 0, 5: 60, 7: len(data) // 2, 9: len(data) - 2}.get(number, len(data))
        (tmp_path / "a" / f"{number:02}.jpg").write_bytes(data[:kept])
    compare(LeavesOut(tmp_path), device, num_workers=workers)


def test_an_image_of_another_loader_or_of_none_is_pillows(photos: Path) -> None:
    dataset = Photographs(photos)
    next(iter(proxyloader.DataLoader(dataset, 4, device="cpu")))
    with Image.open(dataset.paths[0]) as image:
        assert type(image).__module__ == "PIL.JpegImagePlugin"


def food101(root: Path, photos: list[Path]) -> Any:
    folder = root / "food-101"
    names = [f"{'apple_pie' if number % 2 else 'waffles'}/{number}" for number in range(len(photos))]
    for name, path in zip(names, photos):
        target = folder / "images" / f"{name}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (folder / "meta").mkdir()
    by_class = {kind: [name for name in names if name.startswith(kind)] for kind in ("apple_pie", "waffles")}
    (folder / "meta" / "train.json").write_text(json.dumps(by_class))
    return datasets.Food101(str(root), transform=TRAIN)


def pets(root: Path, photos: list[Path]) -> Any:
    folder = root / "oxford-iiit-pet"
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    lines = []
    for number, path in enumerate(photos):
        (folder / "images" / f"a_{number}.jpg").write_bytes(path.read_bytes())
        lines.append(f"a_{number} {number % 2 + 1} 1 1")
    (folder / "annotations" / "trainval.txt").write_text("\n".join(lines))
    return datasets.OxfordIIITPet(str(root), transform=TRAIN)


def euro_sat(root: Path, photos: list[Path]) -> Any:
    for number, path in enumerate(photos):
        target = root / "eurosat" / "2750" / f"class{number % 2}" / f"{number}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return datasets.EuroSAT(str(root), transform=TRAIN)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [food101, pets, euro_sat], ids=lambda function: function.__name__)
def test_torchvisions_datasets_are_decoded_by_dali(
    photos: Path, tmp_path: Path, make: Any, workers: int, device: str
) -> None:
    dataset = make(tmp_path, sorted(photos.glob("*/*.jpg"))[:20])
    found = [
        [(images.cpu(), labels) for images, labels in loader]
        for loader in (
            proxyloader.DataLoader(dataset, 5, num_workers=workers, device=device),
            StockLoader(dataset, 5, num_workers=workers),
        )
        for _ in [torch.manual_seed(3)]
    ]
    assert_same(*found)


def test_transforms_without_chance_come_out_as_the_folders(photos: Path) -> None:
    """Pixels are those of ``ImageFolder``, whose files travel encoded, to the bit."""
    transform = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
    own = proxyloader.DataLoader(Photographs(photos, transform=transform), 48, device="cpu", num_workers=2)
    folder = proxyloader.DataLoader(datasets.ImageFolder(str(photos), transform), 48, device="cpu", num_workers=2)
    (images, _), (theirs, _) = next(iter(own)), next(iter(folder))
    assert np.array_equal(images.numpy(), theirs.numpy())
