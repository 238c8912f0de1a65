"""With a seed the batches are the same whatever brings them; and a loop goes on where a checkpoint left it."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from proxyloader import DataLoader, ProxyServer, pipelines

from ..compare import generator_states, seed_all
from .roads import Mapped, Stream, read_bytes

TRAIN = transforms.Compose(
    [transforms.RandomResizedCrop((24, 32)), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


class Noisy(ImageFolder):
    """Draws from every generator that datasets draw from; each sample is (image, label, index, draws)."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label, index, torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


@pytest.fixture
def noisy(photos: Path) -> Noisy:
    return Noisy(str(photos), TRAIN)


Batches = list[list[torch.Tensor]]


def cpu(batches: Any) -> Batches:
    return [[part.cpu() for part in batch] for batch in batches]


def loader_of(dataset: Any, workers: int = 0, seed: int | None = 5, **arguments: Any) -> Any:
    how: dict[str, Any] = {"shuffle": True, "device": "cpu"} | arguments
    return DataLoader(dataset, 7, num_workers=workers, seed=seed, **how)


def orders(batches: Any) -> list[list[int]]:
    return [batch[2].tolist() for batch in batches]


def same(ours: Batches, theirs: Batches) -> bool:
    return len(ours) == len(theirs) and all(all(map(torch.equal, a, b)) for a, b in zip(ours, theirs))


FORKSERVER = pytest.param(2, "forkserver", marks=pytest.mark.exhaustive)  # whose workers get what spawned ones get


@pytest.mark.parametrize(("workers", "method"), [(1, "fork"), (3, "fork"), FORKSERVER, (1, "spawn")])
def test_any_workers_give_the_same_batches(noisy: Noisy, workers: int, method: str, device: str) -> None:
    torch.manual_seed(1)
    loader = loader_of(noisy, device=device)
    first, second = expected = [cpu(loader) for _ in range(2)]
    torch.manual_seed(2)  # which must not matter
    how = {"multiprocessing_context": method, "persistent_workers": True}
    loader = loader_of(noisy, workers, device=device, **how)
    assert all(same(cpu(loader), epoch) for epoch in expected)
    assert orders(first) != orders(second)


def test_a_samples_draws_depend_on_seed_epoch_and_index_alone(noisy: Noisy) -> None:
    def epochs(seed: int, **arguments: Any) -> dict[tuple[int, int], tuple[Any, Any]]:
        loader = DataLoader(noisy, device="cpu", seed=seed, **arguments)
        return {
            (epoch, int(i)): (image, draw)
            for epoch in range(2)
            for images, _, indices, draws in loader
            for image, i, draw in zip(images, indices, draws)
        }

    a = epochs(1, batch_size=5, shuffle=True, num_workers=2)
    b = epochs(1, batch_size=48, num_workers=1)
    c = epochs(1, batch_sampler=BatchSampler(RandomSampler(range(48)), 11, False))
    other = epochs(2, batch_size=48)
    for key, (image, draw) in a.items():
        assert all(torch.equal(image, same[key][0]) and torch.equal(draw, same[key][1]) for same in (b, c))
        assert not torch.equal(draw, other[key][1])
    for of_a_generator in torch.stack([draw for _, draw in a.values()]).T:
        assert len(of_a_generator.unique()) == 96


def test_the_users_generators_are_left_alone(noisy: Noisy) -> None:
    torch.manual_seed(1)
    before = generator_states()
    for workers in (0, 1):
        list(loader_of(noisy, workers))
    assert generator_states() == before


class MixUp:
    def __call__(self, samples: list[Any]) -> Any:
        images, labels, indices, draws = default_collate(samples)
        order, share = torch.randperm(len(images)), float(np.random.beta(1.0, 1.0))
        return share * images + (1 - share) * images[order], labels, indices, draws


V2 = [v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


@pytest.mark.parametrize("transform", [TRAIN, v2.Compose(V2), None], ids=["v1", "v2", "a hand-written pipeline"])
def test_a_collate_fn_that_draws_follows_the_seed_too(noisy: Noisy, transform: Any, device: str) -> None:
    noisy.transform, found, server = transform, [], None
    of_seven: Any = {"batch_size": 7, "num_threads": 1, "device_id": 0 if device == "cuda" else None}
    for workers in (0, 2):
        seed_all(workers)  # the user's own generators, which must not matter
        how: dict[str, Any] = {"device": device}
        if transform is None:
            server = ProxyServer(pipelines.validation("proxy", **of_seven, resize=40, size=32))
            noisy.transform, noisy.loader, how = server.proxy, read_bytes, {"device": None, "server": server}
        found.append(cpu(loader_of(noisy, workers, collate_fn=MixUp(), **how)))
    assert same(*found)


def drawing() -> Mapped:
    return Mapped(lambda index: float(torch.rand(())), range(25))


def stream_of(dataset: ImageFolder) -> Stream:
    return Stream([path for path, _ in dataset.samples], dataset.transform, pil_loader)


@pytest.mark.parametrize(
    ("kind", "workers", "after"),
    [(drawing, 2, 1), (drawing, 0, 2), (Stream, 0, 0), (Stream, 2, 2)],
    ids=["no images", "no images, no workers", "stream", "stream, workers"],
)
def test_other_datasets_resume_too(noisy: Noisy, kind: Any, workers: int, after: int) -> None:
    dataset = drawing() if kind is drawing else stream_of(noisy)
    how = {"shuffle": kind is drawing}
    whole = cpu(loader_of(dataset, workers, **how))
    assert kind is Stream or same(cpu(loader_of(dataset, after, **how)), whole)
    begun, resumed = loader_of(dataset, workers, **how), loader_of(dataset, after, **how)
    list(itertools.islice(begun, 3))
    resumed.load_state_dict(begun.state_dict())
    assert same(cpu(resumed), whole[3:])


class DrawnStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]) for _ in range(20))


@pytest.mark.parametrize("stop", [0, 2])
def test_what_persistent_workers_draw_for_a_stream_depends_on_seed_and_epoch_alone(stop: int) -> None:
    fresh, begun, resumed = (loader_of(DrawnStream(), 2, shuffle=None, persistent_workers=k > 0) for k in range(3))
    first, second, third = (torch.cat(list(fresh)) for _ in range(3))
    assert not torch.equal(first, second)
    assert torch.equal(torch.cat(list(begun)), first)
    batches = iter(begun)
    passed = sum(len(next(batches)) for _ in range(stop))
    resumed.load_state_dict(begun.state_dict())
    assert torch.equal(torch.cat(list(resumed)), second[passed:])
    assert torch.equal(torch.cat(list(resumed)), third)


def test_the_state_of_a_stream_or_of_a_dataset_is_refused_by_another_number_of_workers(noisy: Noisy) -> None:
    refused = r"num_workers=2, but this loader has num_workers=1.*its own state.* loader\.set_epoch\(state"
    for dataset in (Counting(), stream_of(noisy)):
        begun, other = (loader_of(dataset, workers, shuffle=None) for workers in (2, 1))
        next(iter(begun))
        with pytest.raises(ValueError, match=refused):
            other.load_state_dict(begun.state_dict())
    list(begun)
    other.load_state_dict(begun.state_dict())  # of whole epochs
    assert sum(len(numbers) for _, numbers in other) == 48


@pytest.mark.parametrize("stop", [0, 1, 4, 6])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 3)], ids=["0 to 2", "2 to 0", "1 to 3"])
def test_a_resumed_epoch_has_exactly_the_batches_that_were_left_and_so_do_the_next(
    noisy: Noisy, before: int, after: int, stop: int, tmp_path: Path, device: str
) -> None:
    whole, begun, resumed = (loader_of(noisy, workers, device=device) for workers in (0, before, after))
    epochs = [cpu(whole) for _ in range(3)]
    cpu(begun)
    batches = iter(begun)
    assert same(cpu(itertools.islice(batches, stop)), epochs[1][:stop])
    torch.save(begun.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.state_dict()["batches"] == stop
    assert same(cpu(resumed), epochs[1][stop:]) and same(cpu(resumed), epochs[2])
    assert same(cpu(batches), epochs[1][stop:])  # who was asked for its state is not disturbed


def test_a_state_out_of_order_is_refused_in_the_middle_of_an_epoch_only(noisy: Noisy) -> None:
    loader = DataLoader(noisy, 7, num_workers=2, in_order=False, device="cpu")
    assert loader.state_dict()["batches"] == 0
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="in_order=False the remaining batches"):
        loader.state_dict()
    list(batches)
    assert loader.state_dict()["epoch"] == 1


# --- what a state brings back beside the order; the contract is that of torchdata's StatefulDataLoader ---------------


WORKERS = pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), (2, False), (2, True)], ids=["0", "2", "2 persistent"]
)


class Counting(Dataset[Any]):
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


class Itself(Counter, IterableDataset[int]):
    def __init__(self) -> None:
        super().__init__([])

    def __next__(self) -> int:
        self.numbers = self.numbers or of_this_worker()
        return super().__next__()


class StatefulFolder(ImageFolder):
    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return *super().__getitem__(index), self.asked

    state_dict = Counting.state_dict
    load_state_dict = Counting.load_state_dict


KINDS: dict[str, Callable[[Path], Any]] = {
    "map": lambda _: Counting(),
    "iterators": lambda _: OfIterators(),
    "iterable": lambda _: Generating(),
    "its own iterator": lambda _: Itself(),
    "images": lambda root: StatefulFolder(str(root), transforms.ToTensor()),
}


def through(kind: Any, state: Any) -> Any:
    return kind.loads(kind.dumps(state))


def told(batch: Any) -> Any:
    return [each.tolist() for each in batch] if isinstance(batch, (list, tuple)) else batch.tolist()


@WORKERS
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_datasets_and_iterators_go_on_from_their_state(
    spelled_root: Path, kind: Any, workers: int, persistent: bool, stop: int
) -> None:
    def made(state: Any = None) -> Any:
        loader = DataLoader(kind(spelled_root), 3, num_workers=workers, persistent_workers=persistent, device="cpu")
        if state is not None:
            loader.load_state_dict(state)
        return loader

    loader = made()
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    state = through(json, loader.state_dict())
    left = list(map(told, batches))
    assert list(map(told, made(state))) == left
    again = made(state)  # a state of a loader that has gone on is a state, too
    for first in map(told, itertools.islice(again, 1)):
        assert [first, *map(told, made(through(pickle, again.state_dict())))] == left


@WORKERS
@pytest.mark.parametrize("kind", [Counting, OfIterators, Generating], ids=["map", "iterators", "iterable"])
def test_after_the_last_batch_the_dataset_goes_on_as_it_would_have(kind: Any, workers: int, persistent: bool) -> None:
    loader, resumed = (
        DataLoader(kind(), 3, num_workers=workers, persistent_workers=persistent, device="cpu") for _ in range(2)
    )
    list(loader)
    state = through(pickle, loader.state_dict())
    following = [list(map(told, loader)) for _ in range(2)]
    resumed.load_state_dict(state)
    assert [list(map(told, resumed)) for _ in range(2)] == following


# --- the order -------------------------------------------------------------------------------------------------------


def by_batch(batches: Any) -> list[list[int]]:
    return [np.ravel(batch).tolist() for batch in batches]


def order(batches: Any) -> list[int]:
    return [number for batch in by_batch(batches) for number in batch]


class OwnBatchSampler(BatchSampler): ...


DATA: Any = list(range(40))


def ordered_by(kind: str, number: int, **arguments: Any) -> Any:
    """A loader whose order is drawn from a generator with this seed, or from torch's."""
    generator = torch.Generator().manual_seed(number)
    sampler = RandomSampler(DATA, generator=generator)
    distributed: Any = DistributedSampler(DATA, 1, 0, shuffle=True)
    distributed.set_epoch(number)
    order: dict[str, Any] = {
        "shuffle": {"batch_size": 7, "shuffle": True},
        "generator": {"batch_size": 7, "shuffle": True, "generator": generator},
        "sampler": {"batch_size": 7, "sampler": sampler},
        "batch sampler": {"batch_sampler": BatchSampler(sampler, 7, False)},
        "distributed": {"batch_size": 7, "sampler": distributed},
        "with replacement": {"batch_size": 7, "sampler": RandomSampler(DATA, replacement=True, num_samples=50)},
        "weighted": {"batch_size": 7, "sampler": WeightedRandomSampler([1.0] * 40, 31)},
        "a random subset": {"batch_size": 7, "sampler": SubsetRandomSampler(range(3, 40))},
        "a list": {"batch_size": 6, "sampler": list(range(0, 40, 2))},
        "own class": {"batch_sampler": OwnBatchSampler(RandomSampler(DATA), 7, False)},
        "a list of batches": {"batch_sampler": [[1, 2], [3], [4, 5, 6], [7, 8]]},
        "no batches": {"batch_size": None, "shuffle": True},
    }[kind]
    return DataLoader(DATA, device="cpu", **order, **arguments)


@WORKERS
@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("kind", ["shuffle", "generator", "sampler", "batch sampler"])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_between_epochs_a_state_brings_back_the_next_epochs_order(
    workers: int, persistent: bool, seed: int | None, kind: str, epochs: int
) -> None:
    def made(number: int) -> Any:
        return ordered_by(kind, number, seed=seed, num_workers=workers, persistent_workers=persistent)

    torch.manual_seed(2)
    loader = made(3)
    for _ in range(epochs):
        order(loader)
    state, torchs = through(pickle, loader.state_dict()), torch.get_rng_state()
    following = [order(loader) for _ in range(3)]
    torch.manual_seed(5)
    resumed, another = made(4), made(4)
    resumed.load_state_dict(state)
    assert order(resumed) == following[0]
    torch.set_rng_state(torchs)  # as checkpoints bring it back, too
    another.load_state_dict(state)
    assert [order(another) for _ in range(3)] == following


@pytest.mark.parametrize("with_generator", [False, True], ids=["", "generator"])
def test_between_epochs_a_state_brings_back_what_new_workers_draw(with_generator: bool) -> None:
    def made(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed) if with_generator else None
        return DataLoader(drawing(), 4, num_workers=2, generator=generator, device="cpu")

    torch.manual_seed(2)
    loader = made(3)
    list(loader)
    state = loader.state_dict()
    following = torch.cat(list(loader))
    torch.manual_seed(5)
    resumed = made(4)
    resumed.load_state_dict(state)
    assert torch.equal(torch.cat(list(resumed)), following)


OTHERS = ["with replacement", "weighted", "a random subset", "a list", "own class", "a list of batches", "no batches"]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffle", "generator", "sampler", "distributed", *OTHERS])
def test_a_state_inside_an_epoch_holds_its_order(kind: str, workers: int, seed: int | None) -> None:
    for stop in (0, 1, 3):  # 0 is between iter() and the first batch
        whole, loader, resumed = (ordered_by(kind, k, seed=seed, num_workers=workers) for k in (3, 3, 4))
        torch.manual_seed(2)
        expected = by_batch(whole)
        torch.manual_seed(2)
        batches = iter(loader)
        assert by_batch(itertools.islice(batches, stop)) == expected[:stop]
        state = through(pickle, loader.state_dict())
        torch.manual_seed(9) if workers else None  # nothing more is drawn here for workers
        assert by_batch(batches) == expected[stop:] != []
        torch.manual_seed(5)
        resumed.load_state_dict(state)
        assert by_batch(resumed) == expected[stop:]
