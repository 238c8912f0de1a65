"""Small batches that a GPU decodes together in one run, with the kernels emulated on a CPU, and on a GPU."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali import Pipeline
from PIL import Image
from torch.utils.data import DataLoader as StockLoader, Dataset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader

from ..hostile_jpegs import HUFFMAN, with_bytes
from ..limits import PATIENCE
from ..outcomes import outcomes
from ..undecoded import unchecked

EACH = 4
BREAK_TABLES = with_bytes(HUFFMAN, slice(1, 17), b"\xff" * 16)  # no decoder accepts these
CLOSE = {"cpu": 0.0, "cuda": 3 / 255}
"""Bound on the mean difference of an image. The engines of a GPU are not exact; another image differs by more."""


@pytest.fixture(autouse=True)
def _emulated(device: str, request: pytest.FixtureRequest) -> None:
    if device == "cpu":
        request.getfixturevalue("emulated_gpu")


class Numbered(Dataset[Any]):
    """Crops of photographs, with their numbers. ``count`` in a sample: a clip. Damaged in ``bad``."""

    def __init__(self, folder: ImageFolder, count: int = 1, bad: tuple[int, ...] = ()) -> None:
        self.paths, self.count, self.bad = [path for path, _ in folder.samples], count, bad
        self.transform = v1.Compose([v1.Resize(64), v1.RandomCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor()])
        self.loader = folder.loader

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        paths = [self.paths[(index + k) % len(self)] for k in range(self.count)]
        is_bad = index in self.bad
        images = [unchecked(each, BREAK_TABLES) if is_bad else self.loader(each) for each in paths]
        frames = [self.transform(image) for image in images]
        return (torch.stack(frames) if self.count > 1 else frames[0]), index


def runs(loader: Any) -> int:
    return sum(queue.runs_started for queue in loader._servers.queues.values())


def after_start(loader: Any) -> Any:
    """Return an iterator whose workers have read all that they may."""
    batches = iter(loader)
    first = next(batches)
    time.sleep(0.5 * PATIENCE)
    return itertools.chain([first], batches)


def assert_same(theirs: Any, ours: Any, device: str) -> None:
    assert torch.equal(theirs[1], ours[1])
    assert theirs[0].shape == ours[0].shape and theirs[0].dtype == ours[0].dtype
    for expected, image in zip(theirs[0].flatten(0, -4), ours[0].cpu().flatten(0, -4), strict=True):
        assert (expected - image).abs().mean().item() <= CLOSE[device]


def make(dataset: Any, device: str, **options: Any) -> list[Any]:
    """torch's loader and ours, which shuffle alike."""
    options = {"batch_size": EACH, "shuffle": True, **options}
    kinds = StockLoader, functools.partial(DataLoader, device=device)
    return [kind(dataset, generator=torch.Generator().manual_seed(3), **options) for kind in kinds]


def epochs_are_the_same(stock: Any, ours: Any, device: str, walk: Callable[[Any], Any] = iter) -> None:
    for _ in range(2):
        for pair in zip(stock, walk(ours), strict=True):
            assert_same(*pair, device)


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_are_ready_share_runs(folder: ImageFolder, device: str, persistent: bool) -> None:
    stock, ours = make(Numbered(folder), device, num_workers=2, prefetch_factor=6, persistent_workers=persistent)
    epochs_are_the_same(stock, ours, device, after_start)
    assert runs(ours) < 2 * len(stock)


def test_a_run_has_all_images_of_a_batch_of_clips(folder: ImageFolder, device: str) -> None:
    stock, ours = make(Numbered(folder, 5), device, num_workers=1)
    epochs_are_the_same(stock, ours, device)
    assert runs(ours) <= 2 * len(stock)


def test_a_broken_loop_leaves_nothing_in_the_next_epoch(folder: ImageFolder, device: str) -> None:
    stock, ours = make(Numbered(folder), device, num_workers=2, prefetch_factor=6, persistent_workers=True)
    for stop in (1, 2, 5, 7):
        theirs, mine = iter(stock), after_start(ours)
        for _ in range(stop):
            assert_same(next(theirs), next(mine), device)
    epochs_are_the_same(stock, ours, device)


def test_loaders_of_one_decoder_take_turns(folder: ImageFolder, device: str) -> None:
    (stock, ours), (other_stock, other) = (
        make(Numbered(folder), device, num_workers=1, prefetch_factor=8) for _ in range(2)
    )
    fast, slow = after_start(ours), after_start(other)
    theirs, other_theirs = iter(stock), iter(other_stock)
    for number in range(len(stock)):
        assert_same(next(theirs), next(fast), device)
        if number % 3 == 0:
            assert_same(next(other_theirs), next(slow), device)
    assert list(ours._servers.queues.values()) == list(other._servers.queues.values())


def test_an_epoch_resumes_within_a_run(folder: ImageFolder, device: str) -> None:
    dataset, how = Numbered(folder), dict(batch_size=EACH, num_workers=2, prefetch_factor=6, device=device)
    whole = list(DataLoader(dataset, seed=5, shuffle=True, **how))
    loader = DataLoader(dataset, seed=5, shuffle=True, **how)
    batches = after_start(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    resumed = DataLoader(dataset, seed=5, shuffle=True, **how)
    resumed.load_state_dict(state)
    for (images, numbers), (others, other_numbers) in zip(whole[4:], resumed, strict=True):
        assert torch.equal(numbers, other_numbers) and torch.equal(images, others)


@pytest.mark.parametrize("kind", [("raise", 1), ("skip", 1), ("skip", 2)])
def test_an_image_that_does_not_decode_fails_its_batch_alone(folder: ImageFolder, device: str, kind: Any) -> None:
    bad, (on_error, count) = 14, kind
    how: dict[str, Any] = dict(batch_size=EACH, num_workers=2, prefetch_factor=6, device=device)
    loader = DataLoader(Numbered(folder, count, bad=(bad,)), on_error=on_error, **how)
    found = outcomes(after_start(loader))
    if on_error == "raise":
        del found[bad // EACH + 1 :]
        assert found.pop().index == bad
    expected = [k for k in range(len(folder)) if k != bad and (on_error == "skip" or k < bad - bad % EACH)]
    assert [k for _, numbers in found for k in numbers.tolist()] == expected


class Failing:
    """Raises an error once, in a call for a run of several batches. The first run of a GPU is always that large."""

    def __init__(self, error: Exception, get_size: Callable[..., int], function: Any, is_after: bool = True) -> None:
        self.error, self.get_size, self.function, self.is_after = error, get_size, function, is_after
        self.calls, self.has_raised = 0, False

    def __get__(self, pipeline: Any, owner: Any) -> Any:
        return functools.partial(self, pipeline)

    def __call__(self, pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.function(pipeline, *args, **kwargs) if self.is_after else None
        self.calls += 1
        if self.calls > 1 and not self.has_raised and self.get_size(*(args if result is None else result)) > EACH:
            self.has_raised = True
            raise self.error
        return result if self.is_after else self.function(pipeline, *args, **kwargs)


@pytest.mark.parametrize(
    "failure",
    [("outputs", KeyError), ("feed_input", KeyError), ("outputs", MemoryError)],
    ids=["of a run", "of its submission", "without memory"],
)
def test_an_error_is_that_of_one_batch_and_without_memory_for_a_run_its_batches_are_repeated_alone(
    folder: ImageFolder, device: str, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, kind = failure
    error = kind("of a signal handler, or of DALI")
    get_size = (lambda *outputs: len(outputs[0])) if where == "outputs" else lambda name, batch: len(batch)
    failing = Failing(error, get_size, getattr(Pipeline, where), is_after=where == "outputs")
    monkeypatch.setattr(Pipeline, where, failing)
    stock, ours = make(Numbered(folder), device, shuffle=False, num_workers=1, prefetch_factor=8)
    found = outcomes(after_start(ours))
    assert failing.has_raised and found.count(error) == (kind is KeyError) and len(found) == len(stock)
    for expected, batch in zip(stock, found):
        if batch is not error:
            assert_same(expected, batch, device)


def test_batches_of_too_many_images_do_not_share_runs(folder: ImageFolder, device: str) -> None:
    stock, ours = make(Numbered(folder, 9), device, num_workers=2, prefetch_factor=6)  # eight have 288
    epochs_are_the_same(stock, ours, device, after_start)


@pytest.mark.parametrize("size", [None, 0])
def test_a_batch_sampler_need_not_know_its_size(folder: ImageFolder, device: str, size: int | None) -> None:
    class Growing(list[Any]):
        batch_size = size

    sampler = Growing([[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]])
    stock, ours = (kind(Numbered(folder), batch_sampler=sampler) for kind in (StockLoader, DataLoader))
    assert [numbers.tolist() for _, numbers in ours] == [numbers.tolist() for _, numbers in stock]


def test_large_images_do_not_share_runs(tmp_path: Path, device: str) -> None:
    (tmp_path / "set" / "plain").mkdir(parents=True)
    for number in range(8):
        Image.new("RGB", (5000, 4000), (30 * number, 90, 160)).save(tmp_path / "set" / "plain" / f"{number}.jpg")
    dataset = ImageFolder(str(tmp_path / "set"), v1.Compose([v1.CenterCrop(32), v1.ToTensor()]))
    stock, ours = make(dataset, device, batch_size=2, num_workers=1, prefetch_factor=4)
    epochs_are_the_same(stock, ours, device, after_start)
    assert runs(ours) == 2 * len(stock)
