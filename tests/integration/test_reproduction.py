"""With a seed the batches are the same whatever brings them; and a loop goes on where a checkpoint left it."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from proxyloader import DataLoader, EncodedImage, ProxyServer, pipelines
from proxyloader._random_state import preserve_rng, seed_generators

from .. import scripts
from ..limits import WAIT_S
from .roads import read_bytes

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


def same(ours: Batches, theirs: Batches) -> bool:
    return len(ours) == len(theirs) and all(all(map(torch.equal, a, b)) for a, b in zip(ours, theirs))


@pytest.mark.parametrize(("workers", "method"), [(1, "fork"), (3, "fork"), (2, "forkserver"), (1, "spawn")])
def test_any_number_of_workers_and_any_start_method_gives_the_same_batches(
    noisy: Noisy, workers: int, method: str, device: str
) -> None:
    def epochs(**arguments: Any) -> list[Batches]:
        loader = DataLoader(noisy, 7, shuffle=True, seed=5, device=device, **arguments)
        return [cpu(loader) for _ in range(2)]

    torch.manual_seed(1)
    expected = epochs()
    torch.manual_seed(2)  # which must not matter
    found = epochs(num_workers=workers, multiprocessing_context=method, persistent_workers=True)
    assert all(map(same, found, expected))
    first, second = expected
    assert [batch[2].tolist() for batch in first] != [batch[2].tolist() for batch in second]


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
    assert len({tuple(draw.tolist()) for _, draw in a.values()}) == 96


def test_the_users_generators_are_left_alone(noisy: Noisy) -> None:
    def states() -> Any:
        return torch.get_rng_state(), np.random.get_state()[1], random.getstate()

    torch.manual_seed(1)
    before = states()
    for workers in (0, 1):
        list(DataLoader(noisy, 7, shuffle=True, num_workers=workers, seed=5, device="cpu"))
    after = states()
    assert torch.equal(before[0], after[0]) and np.array_equal(before[1], after[1]) and before[2] == after[2]


class MixUp:
    """A collate_fn that draws."""

    def __call__(self, samples: list[Any]) -> Any:
        images, labels, indices, draws = default_collate(samples)
        order, share = torch.randperm(len(images)), float(np.random.beta(1.0, 1.0))
        return share * images + (1 - share) * images[order], labels, indices, draws


def test_a_collate_fn_that_draws_follows_the_seed_too(noisy: Noisy, device: str) -> None:
    found = []
    for workers in (0, 2):
        seed_generators(workers)  # the user's own, which must not matter
        loader = DataLoader(noisy, 7, shuffle=True, num_workers=workers, seed=5, collate_fn=MixUp(), device=device)
        found.append(cpu(loader))
    assert same(*found)


def test_a_collate_fn_behind_a_hand_written_pipeline_follows_the_seed_too(photos: Path, device: str) -> None:
    found = []
    for workers in (0, 2):
        seed_generators(workers)
        pipeline = pipelines.validation(
            "proxy", batch_size=7, num_threads=1, device_id=0 if device == "cuda" else None, resize=40, size=32
        )
        with ProxyServer(pipeline) as server:
            dataset = Noisy(str(photos), server.proxy, loader=read_bytes)
            loader = DataLoader(dataset, 7, num_workers=workers, seed=5, collate_fn=MixUp(), server=server)
            found.append(cpu(loader))
    assert same(*found)


class Plain(torch.utils.data.Dataset[Any]):
    """No images, and draws all the same."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(3)


def test_a_dataset_without_images_follows_the_seed_and_resumes_too() -> None:
    def loader(workers: int) -> Any:
        return DataLoader(Plain(), 3, shuffle=True, num_workers=workers, seed=5)

    whole = cpu(loader(0))
    assert same(cpu(loader(2)), whole)
    begun = loader(2)
    list(itertools.islice(begun, 3))
    resumed = loader(1)
    resumed.load_state_dict(begun.state_dict())
    assert same(cpu(resumed), whole[3:])


def through_a_file(state: dict[str, Any], tmp_path: Path) -> Any:
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize("stop", [0, 1, 4, 6])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 3)], ids=["0 to 2", "2 to 0", "1 to 3"])
def test_a_resumed_epoch_has_exactly_the_batches_that_were_left_and_so_do_the_next(
    noisy: Noisy, before: int, after: int, stop: int, tmp_path: Path, device: str
) -> None:
    def loader(workers: int) -> Any:
        return DataLoader(noisy, 7, shuffle=True, num_workers=workers, seed=5, device=device)

    whole = loader(0)
    epochs = [cpu(whole) for _ in range(3)]
    begun = loader(before)
    cpu(begun)
    batches = iter(begun)
    assert same(cpu(itertools.islice(batches, stop)), epochs[1][:stop])
    state = through_a_file(begun.state_dict(), tmp_path)
    resumed = loader(after)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["batches"] == stop
    assert same(cpu(resumed), epochs[1][stop:]) and same(cpu(resumed), epochs[2])
    assert same(cpu(batches), epochs[1][stop:])  # who was asked for its state is not disturbed


def test_a_state_after_a_break_is_that_of_the_break(noisy: Noisy) -> None:
    loader = DataLoader(noisy, 7, shuffle=True, num_workers=2, seed=5, device="cpu")
    for at, _ in enumerate(loader):
        if at == 2:
            break
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (0, 3)
    resumed = DataLoader(noisy, 7, shuffle=True, seed=5, device="cpu")
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 4
    assert (resumed.state_dict()["epoch"], resumed.state_dict()["batches"]) == (1, 0)


def test_resuming_twice_in_one_epoch_counts_from_its_start(noisy: Noisy) -> None:
    def loader() -> Any:
        return DataLoader(noisy, 7, shuffle=True, num_workers=1, seed=5, device="cpu")

    whole, state = cpu(loader()), None
    for start in (0, 2, 4, 6):
        resumed = loader()
        if state is not None:
            resumed.load_state_dict(state)
        assert same(cpu(itertools.islice(resumed, 2)), whole[start : start + 2])
        state = resumed.state_dict()


@pytest.mark.parametrize("with_generator", [False, True], ids=["", "generator"])
def test_without_a_seed_the_samples_that_were_left_come_in_their_order(noisy: Noisy, with_generator: bool) -> None:
    def loader(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed) if with_generator else None
        return DataLoader(noisy, 7, shuffle=True, num_workers=1, generator=generator, device="cpu")

    torch.manual_seed(3)
    begun = loader(3)
    batches = iter(begun)
    list(itertools.islice(batches, 3))
    state = begun.state_dict()
    left = [batch[2].tolist() for batch in batches]
    torch.manual_seed(4)
    resumed = loader(4)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert [batch[2].tolist() for batch in resumed] == left


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("of", ["loader", "sampler", "batch sampler"])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_between_epochs_a_state_holds_what_the_next_order_is_drawn_from(
    noisy: Noisy, seed: int | None, of: str, epochs: int
) -> None:
    def loader(seed_of_generator: int) -> Any:
        generator = torch.Generator().manual_seed(seed_of_generator)
        sampler = RandomSampler(noisy, generator=generator)
        samplers: dict[str, Any] = {
            "loader": {"batch_size": 7, "shuffle": True, "generator": generator},
            "sampler": {"batch_size": 7, "sampler": sampler},
            "batch sampler": {"batch_sampler": BatchSampler(sampler, 7, False)},
        }
        return DataLoader(noisy, seed=seed, device="cpu", **samplers[of])

    def order(batches: Any) -> list[int]:
        return [int(number) for batch in batches for number in batch[2]]

    begun = loader(3)
    for _ in range(epochs):
        order(begun)
    state = begun.state_dict()
    following = [order(begun) for _ in range(2)]
    resumed = loader(4)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert [order(resumed) for _ in range(2)] == following


def test_a_state_is_what_it_was_after_it_was_loaded(noisy: Noisy) -> None:
    state = DataLoader(noisy, 7, shuffle=True, device="cpu").state_dict()
    before = pickle.dumps(state)
    loader: Any = DataLoader(noisy, 7, shuffle=True, device="cpu")
    loader.load_state_dict(state)
    next(iter(loader))
    assert pickle.dumps(state) == before


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_with_another_number_of_processes_the_rest_is_shared_anew(noisy: Noisy, before: int, after: int) -> None:
    def loader(ranks: int, rank: int) -> Any:
        sampler: Any = DistributedSampler(noisy, ranks, rank, shuffle=True, seed=2)
        sampler.set_epoch(4)
        return DataLoader(noisy, 4, sampler=sampler, num_workers=1, seed=5, device="cpu")

    whole = {int(i): image for images, _, indices, _ in loader(1, 0) for image, i in zip(images, indices)}
    seen: list[int] = []
    for rank in range(before):
        begun = loader(before, rank)
        seen += [int(i) for _, _, indices, _ in itertools.islice(begun, 2) for i in indices]
    for rank in range(after):
        resumed = loader(after, rank)
        resumed.sampler.set_epoch(0)  # the state knows better
        resumed.load_state_dict(begun.state_dict())
        for images, _, indices, _ in resumed:
            seen += indices.tolist()
            assert all(torch.equal(image, whole[int(i)]) for image, i in zip(images, indices))
    assert {*seen} == {*range(48)} and len(seen) - 48 < after  # each process takes as many


class Stream(IterableDataset[Any]):
    def __init__(self, dataset: ImageFolder) -> None:
        self.paths, self.transform = [path for path, _ in dataset.samples], dataset.transform

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for number, path in enumerate(self.paths):
            if info is None or number % info.num_workers == info.id:
                yield self.transform(EncodedImage.open(path)), torch.tensor(number)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_resumes_with_as_many_workers(noisy: Noisy, workers: int) -> None:
    def loader() -> Any:
        return DataLoader(Stream(noisy), 5, num_workers=workers, seed=5, device="cpu")

    whole = cpu(loader())
    begun = loader()
    list(itertools.islice(begun, 3))
    resumed = loader()
    resumed.load_state_dict(begun.state_dict())
    assert same(cpu(resumed), whole[3:])


def test_a_streams_state_is_refused_by_another_number_of_workers(noisy: Noisy) -> None:
    def loader(workers: int) -> Any:
        return DataLoader(Stream(noisy), 5, num_workers=workers, seed=5, device="cpu")

    begun, other = loader(2), loader(1)
    next(iter(begun))
    with pytest.raises(ValueError, match=r"num_workers=2, and this loader has 1, .* loader\.set_epoch\(state"):
        other.load_state_dict(begun.state_dict())
    list(begun)
    other.load_state_dict(begun.state_dict())  # of whole epochs
    assert len(list(other)) == len(list(loader(1)))


def test_persistent_workers_resume_too(noisy: Noisy) -> None:
    def loader() -> Any:
        return DataLoader(noisy, 7, shuffle=True, num_workers=2, persistent_workers=True, seed=5, device="cpu")

    one = loader()
    epochs = [cpu(one) for _ in range(3)]
    two = loader()
    cpu(two)
    two.load_state_dict({**one.state_dict(), "epoch": 1, "batches": 3, "samples": 21})
    assert same(cpu(two), epochs[1][3:]) and same(cpu(two), epochs[2])


def test_set_epoch_says_which_epoch_comes_next(noisy: Noisy) -> None:
    loader = DataLoader(noisy, 7, shuffle=True, seed=5, device="cpu")
    epochs = [cpu(loader) for _ in range(3)]
    other = DataLoader(noisy, 7, shuffle=True, seed=5, device="cpu")
    other.set_epoch(2)
    assert same(cpu(other), epochs[2])
    other.set_epoch(1)
    assert same(cpu(other), epochs[1]) and same(cpu(other), epochs[2])
    with pytest.raises(ValueError, match="epoch is a whole number, 0 or more"):
        other.set_epoch(-1)


def test_a_state_out_of_order_is_refused_in_the_middle_of_an_epoch_only(noisy: Noisy) -> None:
    loader = DataLoader(noisy, 7, num_workers=2, in_order=False, device="cpu")
    assert loader.state_dict()["batches"] == 0
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="in_order=False .* cannot say which batches"):
        loader.state_dict()
    list(batches)
    assert loader.state_dict()["epoch"] == 1


SCRIPT = """
import sys, torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
from proxyloader import DataLoader

transform = transforms.Compose([transforms.RandomResizedCrop(24), transforms.ToTensor()])
loader = DataLoader(ImageFolder(sys.argv[1], transform), 7, shuffle=True, num_workers=1, seed=5, device="cpu")
if len(sys.argv) > 3:
    loader.load_state_dict(torch.load(sys.argv[3]))
found = []
for at, (images, labels) in enumerate(loader):
    found.append((images, labels))
    if at == 2:
        torch.save(loader.state_dict(), sys.argv[2] + ".state")
torch.save(found, sys.argv[2])
"""


def test_another_process_gets_the_batches_that_were_left(photos: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        scripts.run(SCRIPT, photos, *arguments, timeout_s=WAIT_S).check_returncode()
        return torch.load(arguments[0])

    whole = run(str(tmp_path / "whole"))
    left = run(str(tmp_path / "left"), str(tmp_path / "whole.state"))
    assert len(whole) == 7 and same(left, whole[3:])


def test_the_transforms_of_v2_follow_the_seed(noisy: Noisy) -> None:
    noisy.transform = v2.Compose(
        [v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    )
    found = [cpu(DataLoader(noisy, 7, num_workers=workers, seed=1, device="cpu")) for workers in (0, 2)]
    assert same(*found)


def test_seeds_are_whole_numbers(noisy: Noisy) -> None:
    for seed in (-1, 1.5, "x"):
        with pytest.raises(ValueError, match="seed is a whole number, 0 or more"):
            DataLoader(noisy, seed=seed, device="cpu")  # type: ignore[arg-type]


def test_places_have_nothing_in_common_and_the_generators_come_back() -> None:
    before = torch.rand(1), np.random.rand(), random.random()
    seen = set()
    for place in itertools.product(range(3), range(3), range(10)):
        with preserve_rng():
            seed_generators(*place)
            seen.add((torch.rand(1).item(), np.random.rand(), random.random()))
    assert len(seen) == 90
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    with preserve_rng():
        seed_generators(1)
        torch.rand(5)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected and before
