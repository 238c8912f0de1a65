"""Datasets that keep what they opened, and loaders inside of datasets: whatever becomes of it, pictures are right."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Subset

from proxyloader import DataLoader

from ..faults import Spelled
from ..numbered import read_numbers
from ..outcomes import outcomes
from .roads import BATCH, PICTURES, TRANSFORM, assert_pictures_match


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
        assert (
            all(torch.equal(image, pictures[0][number]) for number, image in pictures[2].items())
            and len(pictures[2]) == PICTURES
        )


# --- a loader in a dataset -------------------------------------------------------------------------------------------


class AsStream(IterableDataset[Any]):
    def __init__(self, pictures: Any) -> None:
        self.pictures, self.transform = pictures, TRANSFORM

    def __iter__(self) -> Any:
        for index in range(len(self.pictures)):
            path, _ = self.pictures.dataset.samples[self.pictures.indices[index]]
            yield self.transform(self.pictures.dataset.loader(path)), self.pictures.indices[index]


class Nested(Pictures):
    """Each sample is looked up in a batch of a loader of its own."""

    as_stream: bool

    def __getitem__(self, index: int) -> Any:
        neighbours: Any = Subset(Pictures(Path(self.root)), [index, (index + 1) % len(self)])
        dataset = AsStream(neighbours) if self.as_stream else neighbours
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
