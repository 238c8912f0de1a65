"""What a program changes in a dataset is in the next batch, or in the next epoch of workers, as with torch's loader.
And what a dataset keeps of a batch stays as it was."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader as StockLoader, IterableDataset, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, ImageError

from ..faults import Spelled
from ..numbered import read_numbers
from ..outcomes import outcomes
from .roads import BATCH, PICTURES, TRANSFORM, Streamed, assert_pictures_match


def transform_to(size: int) -> transforms.Compose:
    return transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()])


def folder(photos: Path) -> ImageFolder:
    return ImageFolder(photos, transform_to(32))


def turn_it(dataset: Any) -> None:
    """By a function, which is not translated."""
    dataset.transform = transforms.Compose([lambda image: image.rotate(180), *transform_to(24).transforms])


def take_the_transform_for_both(dataset: Any) -> None:
    parts = [transforms.Resize((16, 16)), transforms.RandAugment(), transforms.ToTensor()]
    dataset.transforms, dataset.transform = None, transforms.Compose(parts)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "exchange the transform": lambda dataset: setattr(dataset, "transform", transform_to(48)),
    "change its size": lambda dataset: setattr(dataset.transform.transforms[0], "size", (40, 24)),
    "turn it": turn_it,
    "take the transform for both": take_the_transform_for_both,
    "reverse the samples": lambda dataset: setattr(dataset, "samples", dataset.samples[::-1]),
    "reverse them in place": lambda dataset: dataset.samples.reverse(),
}


WHOLES: dict[str, Callable[[Any], Any]] = {
    "the dataset": lambda dataset: dataset,
    "a stream": Streamed,
    "a subset": lambda dataset: Subset(dataset, range(4, 20)),
    "a subset of several": lambda dataset: Subset(ConcatDataset([dataset, dataset]), range(4, 20)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("whole", WHOLES.values(), ids=WHOLES.keys())
def test_a_change_inside_an_epoch_holds_from_the_next_batch_on(
    photos: Path, change: Callable[[Any], None], whole: Callable[[Any], Any], device: str
) -> None:
    found = {}
    for kind, arguments in ((StockLoader, {}), (DataLoader, {"device": device})):
        dataset = folder(photos)
        torch.manual_seed(0)
        batches = iter(kind(whole(dataset), 4, **arguments))
        first = next(batches)
        change(dataset)
        found[kind] = [first, next(batches), next(batches)]
    for (ours, our_labels), (stocks, labels) in zip(found[DataLoader], found[StockLoader]):
        assert ours.shape == stocks.shape and our_labels.tolist() == labels.tolist()
        assert (ours.cpu() - stocks).abs().mean() < 0.01


def test_a_subsets_indices_may_change(photos: Path) -> None:
    subset = Subset(folder(photos), list(range(8)))
    batches: Any = iter(DataLoader(subset, 4, device="cpu"))
    next(batches)
    subset.indices = [0, 1, 2, 3, 20, 21, 22, 23]
    expected = torch.stack([folder(photos)[index][0] for index in (20, 21, 22, 23)])
    assert (next(batches)[0] - expected).abs().mean() < 0.01


class Fed(IterableDataset[Any]):
    """Yields an image for each item of a queue."""

    def __init__(self, root: Path) -> None:
        self.images, self.queue = folder(root), multiprocessing.Queue()  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[Any]:
        return (self.images[index][0] for index in range(12) if self.queue.get())


def test_a_stream_may_wait_for_the_loop(photos: Path) -> None:
    dataset = Fed(photos)
    dataset.queue.put(True)
    for _ in DataLoader(dataset, 1, num_workers=1, device="cpu"):
        dataset.queue.put(True)


# --- between two epochs -----------------------------------------------------------------------------------------------

FILES = 16
Made = tuple[Any, Callable[[], Any]]
"""A dataset, and what is changed after the first epoch."""


def make_folder(root: Path) -> Path:
    for number in range(FILES):
        path = root / "ab"[number % 2] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), "red").save(path)
    return root


def labels_are_in_shared_memory(base: Path) -> Made:
    dataset = ImageFolder(str(make_folder(base)), TRANSFORM)
    labels = torch.zeros(FILES, dtype=torch.long).share_memory_()
    dataset.samples = [(path, label) for (path, _), label in zip(dataset.samples, labels)]
    return dataset, lambda: labels.fill_(7)


def indices_are_in_shared_memory(base: Path) -> Made:
    chosen = torch.arange(FILES // 2).share_memory_()
    return Subset(ImageFolder(str(make_folder(base)), TRANSFORM), list(chosen)), lambda: chosen.add_(FILES // 2)


@pytest.mark.parametrize("make", [labels_are_in_shared_memory, indices_are_in_shared_memory])
def test_the_next_epoch_sees_what_was_changed(make: Callable[[Path], Made], tmp_path: Path) -> None:
    def epochs(kind: Any) -> list[Any]:
        dataset, change = make(tmp_path / kind.__module__)
        torch.manual_seed(2)
        loader, told = kind(dataset, 2, shuffle=True, num_workers=2, persistent_workers=True), []
        for epoch in range(2):
            told += [labels.tolist() for _, labels in loader]
            time.sleep(0.2)  # in which a worker could read ahead
            if epoch == 0:
                change()
        return told

    assert epochs(DataLoader) == epochs(StockLoader)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_that_is_repaired_between_two_epochs_is_read_anew(tmp_path: Path, on_error: Any) -> None:
    dataset = ImageFolder(str(make_folder(tmp_path)), TRANSFORM)
    bad = Path(dataset.samples[5][0])
    whole = bad.read_bytes()
    bad.write_bytes(b"no picture")
    arguments: Any = dict(num_workers=2, persistent_workers=True, on_error=on_error, seed=3, device="cpu")
    loader = DataLoader(dataset, FILES, shuffle=True, **arguments)
    with contextlib.suppress(ImageError):
        list(loader)
    assert loader.errors.total == 1
    bad.write_bytes(whole)
    assert sum(len(labels) for _, labels in loader) == FILES
    assert loader.errors.total == 1


# --- what a dataset keeps, and loaders inside of datasets ------------------------------------------------------------


class Pictures(Spelled):
    """Labels are the pictures' numbers."""

    transform: Any

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), TRANSFORM)

    def __getitem__(self, index: int) -> Any:
        return self.transformed(self.samples[index][0]), index

    def transformed(self, path: str) -> Any:
        return self.transform(self.loader(path))


class KeepsImages(Pictures):
    @functools.cached_property
    def opened(self) -> Callable[[str], Any]:
        return functools.cache(self.loader)

    def transformed(self, path: str) -> Any:
        return self.transform(self.opened(path))


class KeepsImagesAndFails(KeepsImages):
    """Its first batch is an error."""

    failed = False

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if not self.failed:
            self.failed = True
            raise ValueError("the first one")
        return sample


class KeepsSamples(Pictures):
    @functools.cached_property
    def made(self) -> Callable[[str], Any]:
        return functools.cache(super().transformed)

    def transformed(self, path: str) -> Any:
        return self.made(path)


class Forks(Pictures):
    """A child that was forked in the middle of a batch opens pictures while it goes on."""

    asked = 0
    pipes: tuple[int, int] | None = None

    def transformed(self, path: str) -> Any:
        image, self.asked = self.loader(path), self.asked + 1
        if self.pipes is None and self.asked > BATCH + 1:  # as the files of a first batch are read elsewhere
            self.pipes = self._forked()
        if self.pipes is not None:
            os.write(self.pipes[1], b"?")
            os.read(self.pipes[0], 1)
        return self.transform(image)

    def _forked(self) -> tuple[int, int]:
        (answers, answer), (question, questions) = os.pipe(), os.pipe()
        if os.fork():
            return answers, questions
        os.close(questions)
        opened = []
        for number in itertools.count():
            if not os.read(question, 1):
                break
            if number >= 2:  # later than its parent
                opened.append(self.loader(self.samples[number % PICTURES][0]))
            os.write(answer, b"!")
        os._exit(0)


KINDS = [KeepsImages, KeepsImagesAndFails, KeepsSamples, Forks]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_may_keep_what_it_opened(kind: type[Pictures], spelled_root: Path, device: str) -> None:
    loader: DataLoader[Any] = DataLoader(
        kind(spelled_root), BATCH, shuffle=True, num_workers=2, persistent_workers=True, device=device
    )
    found = [outcomes(loader) for _ in range(3)]
    failed = [each for epoch in found for each in epoch if isinstance(each, ValueError)]
    assert len(failed) == (2 if kind is KeepsImagesAndFails else 0)  # one in each worker
    pictures: list[dict[int, torch.Tensor]] = [{} for _ in found]
    count = 0
    for seen, epoch in zip(pictures, found):
        for images, numbers in (each for each in epoch if not isinstance(each, Exception)):
            assert_pictures_match(images, numbers)
            seen.update(zip(numbers.tolist(), images))
            count += len(numbers)
    assert count == 3 * PICTURES - BATCH * len(failed)
    if kind is KeepsSamples:
        assert len(pictures[2]) == PICTURES
        assert all(torch.equal(image, pictures[0][number]) for number, image in pictures[2].items())


# --- a loader in a dataset -------------------------------------------------------------------------------------------


class Nested(Pictures):
    """Each sample is looked up in a batch of a loader of its own."""

    as_stream: bool

    def __getitem__(self, index: int) -> Any:
        neighbours: Any = Subset(Pictures(Path(self.root)), [index, (index + 1) % len(self)])
        dataset = Streamed(neighbours) if self.as_stream else neighbours
        torch.manual_seed(index)
        images, numbers = next(iter(DataLoader(dataset, 2, device="cpu", num_threads=1, seed=3)))
        assert read_numbers(images, white=1.0) == numbers.tolist()
        drawn = torch.rand(1).item()
        sample, number = super().__getitem__(index)
        return sample, number, images[0], drawn


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_may_run_in_another(spelled_root: Path, workers: int, as_stream: bool) -> None:
    Nested.as_stream = as_stream
    dataset = Subset(Nested(spelled_root), range(16))
    arguments = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    ours = list(DataLoader(dataset, BATCH, device="cpu", **arguments))
    assert [number for batch in ours for number in batch[1].tolist()] == list(range(16))
    for images, numbers, inner, drawn in ours:
        assert read_numbers(images, white=1.0) == read_numbers(inner, white=1.0) == numbers.tolist()
        for number, value in zip(numbers.tolist(), drawn.tolist()):
            torch.manual_seed(number)
            assert torch.rand(1).item() == pytest.approx(value), "a loader with a seed leaves torch's numbers alone"
