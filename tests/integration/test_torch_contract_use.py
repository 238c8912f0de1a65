"""torch's contract, ways of use: torch's DataLoader and ours, for a dataset whose images DALI decodes, and
for one without images.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, RandomSampler, Subset, TensorDataset, get_worker_info, random_split
from torch.utils.data import DataLoader as StockLoader
from torchvision.datasets import ImageFolder

import proxyloader

from ..numbered import spell_dataset
from ..side_by_side import assert_as_torch, assert_same, epochs, one_epoch, tried, walked
from .test_torch_contract import SAMPLES, TRANSFORM, Make, Numbers, seeded


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spell_dataset(tmp_path_factory.mktemp("spelled") / "set", SAMPLES, classes=3, side_px=32)


@pytest.fixture(params=["pictures", "numbers"])
def make(request: pytest.FixtureRequest, root: Path) -> Make:
    """Makes a dataset, with images or without."""
    return Numbers if request.param == "numbers" else lambda: ImageFolder(str(root), TRANSFORM)


def two_iterators_at_once(loader: Any) -> Any:
    first, second = iter(loader), iter(loader)
    return [next(first), next(second), next(first), next(first), list(second), list(first), torch.get_rng_state()]


def zip_with_itself(loader: Any) -> Any:
    return list(zip(loader, loader)), torch.get_rng_state()


def one_epoch_inside_another(loader: Any) -> Any:
    return [[outer, [inner[1] for inner in loader]] for outer in loader]


def breaks_and_a_whole_epoch(loader: Any) -> Any:
    firsts = []
    for k in range(3):
        for step, batch in enumerate(loader):
            if step == k:
                firsts.append(batch)
                break
    return firsts, epochs(loader)


def deletion_in_mid_epoch(loader: Any) -> Any:
    batches = iter(loader)
    first = next(batches)
    del batches
    return first, walked(loader), torch.get_rng_state()


def next_after_the_end(loader: Any) -> Any:
    batches = iter(loader)
    seen = list(batches)
    ends = [next(batches, "the end") for _ in range(3)]
    return seen, ends, len(batches), iter(batches) is batches, walked(loader)


def lengths_of_iterators(loader: Any) -> Any:
    batches = iter(loader)
    before, _, after = len(batches), next(batches), len(batches)
    return before, after, len(loader), len(list(batches))


def a_pickled_iterator(loader: Any) -> Any:
    return tried(pickle.dumps, iter(loader)).kind


def a_copy(loader: Any) -> Any:
    next(iter(loader))
    return walked(copy.copy(loader)), walked(loader)


def a_deep_copy(loader: Any) -> Any:
    next(iter(loader))
    return walked(copy.deepcopy(loader)), walked(loader)


USES = [
    two_iterators_at_once,
    zip_with_itself,
    one_epoch_inside_another,
    breaks_and_a_whole_epoch,
    deletion_in_mid_epoch,
    next_after_the_end,
    lengths_of_iterators,
    a_pickled_iterator,
    a_copy,
    a_deep_copy,
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__.replace("_", " "))
def test_a_loader_is_used_as_torchs_is(make: Make, use: Any, workers: int) -> None:
    assert_as_torch(lambda loader: loader(make(), 3, shuffle=True, num_workers=workers), use)


@pytest.mark.parametrize("use", [breaks_and_a_whole_epoch, next_after_the_end, lengths_of_iterators])
def test_a_loader_with_persistent_workers_is_used_as_torchs_is(make: Make, use: Any) -> None:
    assert_as_torch(lambda loader: loader(make(), 3, shuffle=True, num_workers=2, persistent_workers=True), use)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_after_a_break_a_generator_is_where_torchs_loader_leaves_it(
    root: Path, replacement: bool, persistent: bool
) -> None:
    """A sampler that draws as it goes, or once more at its end, is asked for more batches ahead here than by torch."""

    def build(loader: Any) -> Any:
        dataset, generator = ImageFolder(str(root), TRANSFORM), torch.Generator().manual_seed(3)
        sampler = RandomSampler(dataset, replacement, 40 if replacement else None, generator)
        return loader(dataset, 2, sampler=sampler, num_workers=2, prefetch_factor=1, persistent_workers=persistent)

    def walk(loader: Any) -> Any:
        found = []
        for taken in (1, 3, 5, 6, 14, 2):
            for step, (_, labels) in enumerate(loader):
                time.sleep(0.02)  # so that others are decoded meanwhile
                found.append(labels)
                if step + 1 == taken:
                    break
            found.append(loader.sampler.generator.get_state())
        return found

    assert_as_torch(build, walk)


@pytest.mark.parametrize("workers", [0, 1])
def test_two_loaders_go_side_by_side(make: Make, workers: int) -> None:
    def build(loader: Any) -> Any:
        return loader(make(), 4, num_workers=workers), loader(make(), 3, shuffle=True, num_workers=workers)

    assert_as_torch(build, lambda pair: [list(zip(*pair)), list(zip(*reversed(pair))), torch.get_rng_state()])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_can_be_inherited_from(make: Make, workers: int) -> None:
    def walk(base: Any, **arguments: Any) -> Any:
        class Twice(base):  # type: ignore[misc]
            def __init__(self, dataset: Any, **more: Any) -> None:
                self.passes = 2
                super().__init__(dataset, batch_size=4, shuffle=True, **more)

            def __iter__(self) -> Iterator[Any]:
                for _ in range(self.passes):
                    yield from super().__iter__()

            def __len__(self) -> int:
                return self.passes * super().__len__()

        torch.manual_seed(17)
        random.seed(17)
        loader = Twice(make(), num_workers=workers, **arguments)
        return len(loader), list(loader), tried(setattr, loader, "batch_size", 1), base[int] is not None

    assert_same(walk(proxyloader.DataLoader, device="cpu"), walk(StockLoader))


def told_by_workers() -> Any:
    info = get_worker_info()
    drawn = torch.initial_seed(), random.random(), float(np.random.random()), os.environ.get("CONTRACT_INIT", "")
    if info is None:
        return drawn
    return *drawn, info.id, info.num_workers, info.seed, type(info.dataset).__name__, torch.get_num_threads()


class AskingFolder(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return *super().__getitem__(index), told_by_workers(), info is None or info.dataset is self


class AskingNumbers(Numbers):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return *super().__getitem__(index), told_by_workers(), info is None or info.dataset is self


def note(worker_id: int) -> None:
    os.environ["CONTRACT_INIT"] = f"{worker_id}{torch.initial_seed()}{told_by_workers()}"


def refuse(worker_id: int) -> None:
    raise LookupError(f"not worker {worker_id}")


@pytest.fixture(params=["pictures", "numbers"])
def asking(request: pytest.FixtureRequest, root: Path) -> Make:
    return AskingNumbers if request.param == "numbers" else lambda: AskingFolder(str(root), TRANSFORM)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_workers_are_told_and_seeded_as_by_torch(asking: Make, workers: int, persistent: bool) -> None:
    arguments: dict[str, Any] = dict(num_workers=workers, worker_init_fn=note, persistent_workers=persistent)
    assert_as_torch(lambda loader: loader(asking(), 2, shuffle=True, **arguments))


def test_a_worker_init_fn_that_raises_is_the_error_of_the_first_batch(make: Make) -> None:
    seen = assert_as_torch(lambda loader: loader(make(), 5, num_workers=1, worker_init_fn=refuse), walked)
    assert seen[0].kind is LookupError


DATASETS: dict[str, Callable[[Any], Any]] = {
    "subset": lambda d: Subset(d, [5, 3, 3, 9]),
    "empty subset": lambda d: Subset(d, []),
    "concatenation": lambda d: ConcatDataset([d, Subset(d, range(2, 6)), d]),
    "random split": lambda d: random_split(d, [0.4, 0.6], seeded())[1],
    "nested": lambda d: Subset(ConcatDataset([Subset(d, range(5)), random_split(d, [6, 7], seeded())[0]]), range(10)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True], ids=["", "shuffled"])
@pytest.mark.parametrize("of", DATASETS.values(), ids=DATASETS)
def test_datasets_made_of_datasets_are_loaded_as_by_torch(make: Make, of: Any, shuffle: bool, workers: int) -> None:
    assert_as_torch(lambda loader: loader(of(make()), 3, shuffle=shuffle, num_workers=workers))


PLAIN: dict[str, Make] = {
    "a list": lambda: list(range(7)),
    "a list of lists of several lengths": lambda: [[1], [2, 3], [4]],
    "an empty list": list,
    "a str": lambda: "abcdefg",
    "a tuple of tuples": lambda: tuple((k, str(k)) for k in range(7)),
    "a dict with numbers as keys": lambda: {k: k * k for k in range(7)},
    "a range": lambda: range(7),
    "an array": lambda: np.arange(14.0).reshape(7, 2),
    "a tensor": lambda: torch.arange(14).reshape(7, 2),
    "a tensor dataset": lambda: TensorDataset(torch.arange(7), torch.eye(7)),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "arguments", [dict(batch_size=3), dict(batch_size=None), dict(batch_size=2, shuffle=True)], ids=str
)
@pytest.mark.parametrize("make_plain", PLAIN.values(), ids=PLAIN)
def test_anything_with_items_is_a_dataset_as_for_torch(make_plain: Make, arguments: Any, workers: int) -> None:
    assert_as_torch(lambda loader: loader(make_plain(), num_workers=workers, **arguments), one_epoch)


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dataset", [None, 5, object(), iter([1])], ids=["None", "a number", "an object", "an iterator"]
)
def test_what_is_no_dataset_to_torch_is_none_here(dataset: Any, workers: int) -> None:
    seen = assert_as_torch(lambda loader: loader(dataset, num_workers=workers), one_epoch)
    assert seen["length"].kind is TypeError


def test_workers_of_a_forkserver_load_numbers_as_by_torch() -> None:
    arguments: dict[str, Any] = dict(num_workers=1, multiprocessing_context="forkserver", shuffle=True)
    assert_as_torch(lambda loader: loader(Numbers(), 4, **arguments), one_epoch)
