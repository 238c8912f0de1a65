"""With a seed the batches are the same whatever brings them; and a loop goes on where a checkpoint left it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from proxyloader import DataLoader, ProxyServer, pipelines

from ..compare import seed_all
from .roads import Stream, read_bytes

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
    """Batches of 7 in a random order."""
    how: dict[str, Any] = {"shuffle": True, "device": "cpu"} | arguments
    return DataLoader(dataset, 7, num_workers=workers, seed=seed, **how)


def orders(batches: Any) -> list[list[int]]:
    return [batch[2].tolist() for batch in batches]


def same(ours: Batches, theirs: Batches) -> bool:
    return len(ours) == len(theirs) and all(all(map(torch.equal, a, b)) for a, b in zip(ours, theirs))


@pytest.mark.parametrize(("workers", "method"), [(1, "fork"), (3, "fork"), (2, "forkserver"), (1, "spawn")])
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
    def states() -> Any:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    torch.manual_seed(1)
    before = states()
    for workers in (0, 1):
        list(loader_of(noisy, workers))
    assert states() == before


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


class Plain(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(3)


def stream_of(dataset: ImageFolder) -> Stream:
    return Stream([path for path, _ in dataset.samples], dataset.transform, pil_loader)


@pytest.mark.parametrize(
    ("kind", "workers", "after"),
    [(Plain, 2, 1), (Plain, 0, 2), (Stream, 0, 0), (Stream, 2, 2)],
    ids=["no images", "no images, no workers", "stream", "stream, workers"],
)
def test_other_datasets_resume_too(noisy: Noisy, kind: Any, workers: int, after: int) -> None:
    dataset = Plain() if kind is Plain else stream_of(noisy)
    how = {"shuffle": kind is Plain}
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


def test_a_streams_state_is_refused_by_another_number_of_workers(noisy: Noisy) -> None:
    begun, other = (loader_of(stream_of(noisy), workers, shuffle=None) for workers in (2, 1))
    next(iter(begun))
    with pytest.raises(ValueError, match=r"num_workers=2, but .* num_workers=1.* loader\.set_epoch\(state"):
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
