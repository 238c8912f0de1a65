"""What a loader's state brings back beside the order: states of datasets, iterators and samplers, of before the first
batch and of an epoch's end. The contract is that of torchdata's StatefulDataLoader."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler, get_worker_info
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader

from ..numbered import read_numbers, spell_dataset

WORKERS = pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), (2, False), (2, True)], ids=["0", "2", "2 persistent"]
)


class Counting(Dataset[Any]):
    """Counts what it was asked for, in each worker by itself."""

    def __init__(self, size: int = 20) -> None:
        self.size, self.asked = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.asked += 1
        return index, self.asked

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


class Counter:
    """An iterator with a state: the samples of one worker, and how many came in all."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def of_this_worker() -> list[int]:
    """Some workers have more than others."""
    info = get_worker_info()
    return list(range(15)) if info is None else list(range(100 * info.id, 100 * info.id + 5 + 6 * info.id))


class OfIterators(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return Counter(of_this_worker())


class Generating(IterableDataset[Any]):
    """The dataset has the state, also of how many times it was gone through."""

    def __init__(self) -> None:
        self.at = self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = of_this_worker()
        while self.at < len(numbers):
            self.at += 1
            yield numbers[self.at - 1], self.epochs
        self.at, self.epochs = 0, self.epochs + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epochs = state["at"], state["epochs"]


class Itself(IterableDataset[int]):
    """Its own iterator."""

    def __init__(self) -> None:
        self.numbers: list[int] | None = None
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.numbers is None:
            self.numbers = of_this_worker()
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    state_dict = Counter.state_dict  # type: ignore[assignment]
    load_state_dict = Counter.load_state_dict  # type: ignore[assignment]


KINDS = {
    "map": Counting,
    "iterators": OfIterators,
    "iterable": Generating,
    "its own iterator": Itself,
}


def told(batch: Any) -> Any:
    return [each.tolist() for each in batch] if isinstance(batch, (list, tuple)) else batch.tolist()


@WORKERS
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_a_dataset_or_iterator_with_a_state_goes_on_from_it_in_each_worker(
    kind: Any, workers: int, persistent: bool, stop: int
) -> None:
    def made() -> Any:
        return DataLoader(kind(), 3, num_workers=workers, persistent_workers=persistent, device="cpu")

    loader = made()
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    left = list(map(told, batches))
    resumed = made()
    resumed.load_state_dict(state)
    assert list(map(told, resumed)) == left
    again = made()  # a state of a loader that has gone on is a state, too
    again.load_state_dict(state)
    batches = iter(again)
    if left:
        first = told(next(batches))
        third = made()
        third.load_state_dict(pickle.loads(pickle.dumps(again.state_dict())))
        assert [first, *map(told, third)] == left


@WORKERS
@pytest.mark.parametrize("kind", [Counting, OfIterators, Generating], ids=["map", "iterators", "iterable"])
def test_after_the_last_batch_the_dataset_goes_on_as_it_would_have(kind: Any, workers: int, persistent: bool) -> None:
    def made() -> Any:
        return DataLoader(kind(), 3, num_workers=workers, persistent_workers=persistent, device="cpu")

    loader = made()
    list(loader)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    following = [list(map(told, loader)) for _ in range(2)]
    resumed = made()
    resumed.load_state_dict(state)
    assert [list(map(told, resumed)) for _ in range(2)] == following


def test_the_state_of_a_dataset_without_workers_is_the_users_own() -> None:
    dataset = Counting()
    loader: Any = DataLoader(dataset, 4, device="cpu")
    next(iter(loader))
    assert dataset.asked == 4
    other = Counting()
    resumed: Any = DataLoader(other, 4, device="cpu")
    resumed.load_state_dict(loader.state_dict())
    assert told(next(iter(resumed))) == [[4, 5, 6, 7], [5, 6, 7, 8]] and other.asked == 8


def test_the_states_of_datasets_are_refused_by_another_number_of_workers() -> None:
    loader: Any = DataLoader(Counting(), 3, num_workers=2, device="cpu")
    next(iter(loader))
    with pytest.raises(ValueError, match=r"num_workers=2, and this loader has 1, .* a state of its own.*set_epoch"):
        DataLoader(Counting(), 3, num_workers=1, device="cpu").load_state_dict(loader.state_dict())


class StatefulFolder(ImageFolder):
    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return *super().__getitem__(index), self.asked

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


@WORKERS
def test_a_dataset_of_images_goes_on_from_its_state(tmp_path: Path, workers: int, persistent: bool) -> None:
    root = spell_dataset(tmp_path / "set", 20)

    def made() -> Any:
        dataset = StatefulFolder(root, transforms.ToTensor())
        return DataLoader(dataset, 3, num_workers=workers, persistent_workers=persistent, device="cpu")

    loader = made()
    batches = iter(loader)
    list(itertools.islice(batches, 3))
    state = loader.state_dict()
    left = [(read_numbers(images, white=1.0), asked.tolist()) for images, _, asked in batches]
    resumed = made()
    resumed.load_state_dict(state)
    assert [(read_numbers(images, white=1.0), asked.tolist()) for images, _, asked in resumed] == left


# --- the order -------------------------------------------------------------------------------------------------------


def order(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


@WORKERS
@pytest.mark.parametrize("with_generator", [False, True], ids=["", "generator"])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_between_epochs_a_state_brings_back_the_next_epochs_order(
    workers: int, persistent: bool, with_generator: bool, epochs: int
) -> None:
    def made(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed) if with_generator else None
        shuffled = dict(shuffle=True, generator=generator, num_workers=workers, persistent_workers=persistent)
        return DataLoader(list(range(40)), 7, device="cpu", **shuffled)  # type: ignore[arg-type]

    torch.manual_seed(2)
    loader = made(3)
    for _ in range(epochs):
        order(loader)
    state, torchs = pickle.loads(pickle.dumps(loader.state_dict())), torch.get_rng_state()
    following = [order(loader) for _ in range(3)]
    torch.manual_seed(5)
    resumed = made(4)
    resumed.load_state_dict(state)
    assert order(resumed) == following[0]
    torch.set_rng_state(torchs)  # as checkpoints bring it back, too
    resumed = made(4)
    resumed.load_state_dict(state)
    assert [order(resumed) for _ in range(3)] == following


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


@pytest.mark.parametrize("with_generator", [False, True], ids=["", "generator"])
def test_between_epochs_a_state_brings_back_what_new_workers_draw(with_generator: bool) -> None:
    def made(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed) if with_generator else None
        return DataLoader(Drawing(), 4, num_workers=2, generator=generator, device="cpu")

    torch.manual_seed(2)
    loader = made(3)
    list(loader)
    state = loader.state_dict()
    following = torch.cat(list(loader))
    torch.manual_seed(5)
    resumed = made(4)
    resumed.load_state_dict(state)
    assert torch.equal(torch.cat(list(resumed)), following)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffle", "generator", "sampler", "distributed"])
def test_a_state_between_iter_and_the_first_batch_holds_this_epochs_order(
    kind: str, workers: int, seed: int | None
) -> None:
    data = list(range(40))

    def made(number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        distributed = DistributedSampler(data, 1, 0, shuffle=True)  # type: ignore[arg-type, var-annotated]
        distributed.set_epoch(number)
        arguments: dict[str, Any] = {
            "shuffle": {"shuffle": True},
            "generator": {"shuffle": True, "generator": generator},
            "sampler": {"sampler": RandomSampler(data, generator=generator)},
            "distributed": {"sampler": distributed},
        }[kind]
        return DataLoader(data, 7, num_workers=workers, seed=seed, device="cpu", **arguments)

    torch.manual_seed(2)
    loader = made(3)
    batches = iter(loader)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    torch.manual_seed(9) if workers else None  # nothing more is drawn here for workers
    whole = order(batches)
    torch.manual_seed(5)
    resumed = made(4)
    resumed.load_state_dict(state)
    assert order(resumed) == whole


def test_set_epoch_after_an_epoch_is_what_the_state_says() -> None:
    loader: Any = DataLoader(list(range(8)), 4, shuffle=True, seed=1, device="cpu")
    list(loader)
    loader.set_epoch(7)
    assert loader.state_dict()["epoch"] == 7
