"""What a program changes between two epochs is in the batches of the next one, as with torch's loader."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, ImageError

TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
RED, BLUE = (255, 0, 0), (0, 0, 255)
FILES = 16
FILE_BYTES = 4096

Made = tuple[Any, Callable[[], Any]]
"""A dataset, and what is changed after the first epoch."""


def jpeg(colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), colour).save(file, "JPEG")
    return file.getvalue().ljust(FILE_BYTES, b"\0")


def make_folder(root: Path, colour: tuple[int, int, int] = RED) -> Path:
    for number in range(FILES):
        path = root / "ab"[number % 2] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(colour))
    return root


def class_folders_are_links(base: Path) -> Made:
    for version, colour in (("v1", RED), ("v2", BLUE)):
        make_folder(base / version, colour)
    (base / "current").symlink_to("v1")
    (base / "root").mkdir()
    for name in "ab":
        (base / "root" / name).symlink_to(f"../current/{name}")

    def switch() -> None:
        (base / "new").symlink_to("v2")
        (base / "new").replace(base / "current")

    return ImageFolder(str(base / "root"), TRANSFORM), switch


def samples_are_outside_of_the_root(base: Path) -> Made:
    dataset = ImageFolder(str(make_folder(base / "a_root_with_a_long_name")), TRANSFORM)
    make_folder(base / "x")
    make_folder(base / "y", BLUE)
    dataset.samples = [(path.replace("a_root_with_a_long_name", "x"), label) for path, label in dataset.samples]

    def swap() -> None:
        (base / "x").rename(base / "old")
        (base / "y").rename(base / "x")

    return dataset, swap


def files_are_written_through_a_mapping(base: Path) -> Made:
    dataset = ImageFolder(str(make_folder(base)), TRANSFORM)
    maps = []
    for path, _ in dataset.samples:
        with open(path, "r+b") as file:
            maps.append(mmap.mmap(file.fileno(), FILE_BYTES))
        maps[-1][:] = jpeg(RED)  # which leaves its pages dirty

    def write() -> None:
        for each in maps:
            each[:] = jpeg(BLUE)

    return dataset, write


def labels_are_in_shared_memory(base: Path) -> Made:
    dataset = ImageFolder(str(make_folder(base)), TRANSFORM)
    labels = torch.zeros(FILES, dtype=torch.long).share_memory_()
    dataset.samples = [(path, label) for (path, _), label in zip(dataset.samples, labels)]
    return dataset, lambda: labels.fill_(7)


def indices_are_in_shared_memory(base: Path) -> Made:
    chosen = torch.arange(FILES // 2).share_memory_()
    return Subset(ImageFolder(str(make_folder(base)), TRANSFORM), list(chosen)), lambda: chosen.add_(FILES // 2)


CHANGES = [
    *(class_folders_are_links, samples_are_outside_of_the_root, files_are_written_through_a_mapping),
    *(labels_are_in_shared_memory, indices_are_in_shared_memory),
]


@pytest.mark.parametrize("make", CHANGES)
def test_the_next_epoch_sees_what_was_changed(make: Callable[[Path], Made], tmp_path: Path) -> None:
    def epochs(kind: Any) -> list[Any]:
        dataset, change = make(tmp_path / kind.__module__)
        torch.manual_seed(2)
        loader, told = kind(dataset, 2, shuffle=True, num_workers=2, persistent_workers=True), []
        for epoch in range(2):
            for images, labels in loader:
                told.append((bool(images[:, 2].mean() > images[:, 0].mean()), labels.tolist()))
            time.sleep(0.2)  # in which a worker could read ahead
            if epoch == 0:
                change()
        return told

    assert epochs(DataLoader) == epochs(torch.utils.data.DataLoader)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_that_is_repaired_between_two_epochs_is_read_anew(tmp_path: Path, on_error: Any) -> None:
    dataset = ImageFolder(str(make_folder(tmp_path)), TRANSFORM)
    bad = Path(dataset.samples[5][0])
    bad.write_bytes(b"no picture")
    arguments: Any = dict(num_workers=2, persistent_workers=True, on_error=on_error, seed=3, device="cpu")
    loader = DataLoader(dataset, FILES, shuffle=True, **arguments)
    with contextlib.suppress(ImageError):
        list(loader)
    assert loader.errors.total == 1
    bad.write_bytes(jpeg(RED))
    assert sum(len(labels) for _, labels in loader) == FILES
    assert loader.errors.total == 1


class Noted(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        os.write(self.notes, b".")
        return super().__getitem__(index)


def test_workers_get_no_request_before_the_epoch_is_asked_for(tmp_path: Path) -> None:
    dataset = Noted(str(make_folder(tmp_path / "photos")), TRANSFORM)
    with open(tmp_path / "notes", "ab", buffering=0) as notes:
        dataset.notes = notes.fileno()
        loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=True, device="cpu")
        for epoch in (1, 2):
            assert len(list(loader)) == FILES // 2
            time.sleep(0.2)
            assert (tmp_path / "notes").stat().st_size == epoch * FILES
