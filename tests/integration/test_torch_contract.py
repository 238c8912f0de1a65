"""torch's contract, arguments and ways of use: the same checks on torch's DataLoader and on ours, for a dataset whose
images DALI decodes, and for one without images. Samples and streams have a file of their own.
"""

from __future__ import annotations

import copy
import functools
import itertools
import multiprocessing
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
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader as StockLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from torchvision import transforms
from torchvision.datasets import ImageFolder

import proxyloader

from ..numbered import spell_dataset
from ..side_by_side import Failed, assert_as_torch, assert_same, epochs, one_epoch, tried, walked

SAMPLES = 13
TRANSFORM = transforms.Compose([transforms.RandomCrop(28), transforms.ToTensor()])

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spell_dataset(tmp_path_factory.mktemp("spelled") / "set", SAMPLES, classes=3, side_px=32)


class Numbers(Dataset[Any]):
    """Samples without images, of which each draws random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), range(SAMPLES)[index], random.random()


@pytest.fixture(params=["pictures", "numbers"])
def make(request: pytest.FixtureRequest, root: Path) -> Make:
    """Makes a dataset, with images or without, of a class that also derives from others."""
    kind, arguments = (Numbers, ()) if request.param == "numbers" else (ImageFolder, (str(root), TRANSFORM))
    return lambda *bases: (type(kind.__name__, (*bases, kind), {}) if bases else kind)(*arguments)


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Permutation(Sampler[Any]):
    """Draws when ``iter()`` is called, not at the first ``next()``; indices, or batches of them."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        drawn = torch.randperm(SAMPLES).tolist()
        return iter(drawn if self.size is None else [drawn[k : k + self.size] for k in range(0, SAMPLES, self.size)])

    def __len__(self) -> int:
        return SAMPLES if self.size is None else -(-SAMPLES // self.size)


class Endless:
    def __iter__(self) -> Iterator[int]:
        yield from (3, 1, 4, 1, 5)


class RandomSizes(Sampler[Any]):
    """Batches of random sizes, drawn one at a time from torch's global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(9):
            yield torch.randint(SAMPLES, (int(torch.randint(1, 5, ())),)).tolist()

    def __len__(self) -> int:
        return 9


class Failing:
    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        raise LookupError("no more")


def distributed(dataset: Any, **arguments: Any) -> DistributedSampler[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=1, **arguments)
    sampler.set_epoch(5)
    return sampler


def refuse(worker_id: int) -> None:
    raise LookupError(f"not worker {worker_id}")


ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "torch's defaults": lambda d: {},
    "a batch larger than the dataset": lambda d: dict(batch_size=50),
    "no batches": lambda d: dict(batch_size=None),
    "no batches, shuffled": lambda d: dict(batch_size=None, shuffle=True),
    "drop_last": lambda d: dict(batch_size=5, drop_last=True),
    "drop_last of the only batch": lambda d: dict(batch_size=50, drop_last=True),
    "shuffle": lambda d: dict(batch_size=4, shuffle=True),
    "shuffle by a generator": lambda d: dict(batch_size=4, shuffle=True, generator=seeded()),
    "a generator without shuffle": lambda d: dict(batch_size=4, generator=seeded()),
    "random sampler with replacement": lambda d: dict(sampler=RandomSampler(d, True, 20), batch_size=6),
    "random sampler of a part": lambda d: dict(
        sampler=RandomSampler(d, num_samples=5, generator=seeded()), batch_size=2
    ),
    "subset random sampler": lambda d: dict(sampler=SubsetRandomSampler([7, 2, 9, 4]), batch_size=3),
    "weighted sampler": lambda d: dict(sampler=WeightedRandomSampler(list(range(1, 14)), 17), batch_size=4),
    "distributed sampler": lambda d: dict(sampler=distributed(d), batch_size=3),
    "distributed sampler that drops": lambda d: dict(sampler=distributed(d, drop_last=True), batch_size=3),
    "a list as sampler": lambda d: dict(sampler=[5, 5, 0, 12, 5], batch_size=2),
    "a range as sampler": lambda d: dict(sampler=range(SAMPLES - 1, -1, -1), batch_size=4, drop_last=True),
    "a sampler that draws at once": lambda d: dict(sampler=Permutation(), batch_size=4),
    "a sampler that draws at once, no batches": lambda d: dict(sampler=Permutation(), batch_size=None),
    "a sampler without length": lambda d: dict(sampler=Endless(), batch_size=2),
    "a sampler that raises": lambda d: dict(sampler=Failing(), batch_size=2),
    "an index out of range": lambda d: dict(sampler=[1, 2, 99, 3], batch_size=2),
    "batch sampler": lambda d: dict(batch_sampler=BatchSampler(RandomSampler(d), 5, True)),
    # Over images it is asked a few batches earlier than by torch, so a loop that draws from the same generator sees
    # other numbers; the README says so. Alone, the sampler draws what it draws under torch.
    "batch sampler of random sizes": lambda d: dict(batch_sampler=RandomSizes()),
    "batch sampler that draws at once": lambda d: dict(batch_sampler=Permutation(3)),
    "a list of lists": lambda d: dict(batch_sampler=[[1], [2, 3, 4], list(range(SAMPLES)), [0]]),
    "repeated indices": lambda d: dict(batch_sampler=[[6, 6, 6], [6, 1, 6], [6]]),
    "batches as tuples, arrays, ranges": lambda d: dict(batch_sampler=[(1, 2), np.array([3, 4]), range(7, 9)]),
    "an empty batch": lambda d: dict(batch_sampler=[[1], [], [2]]),
    "no batch at all": lambda d: dict(batch_sampler=[]),
    "pinned memory": lambda d: dict(batch_size=4, pin_memory=True),
    "prefetch_factor 5": lambda d: dict(batch_size=2, prefetch_factor=5, shuffle=True),
    "persistent workers": lambda d: dict(batch_size=3, persistent_workers=True, shuffle=True),
    "persistent workers, a generator": lambda d: dict(batch_size=3, persistent_workers=True, generator=seeded()),
    "a context": lambda d: dict(batch_size=5, multiprocessing_context=multiprocessing.get_context("fork")),
    "workers of a forkserver": lambda d: dict(batch_size=4, multiprocessing_context="forkserver", shuffle=True),
    "a worker_init_fn that raises": lambda d: dict(batch_size=5, worker_init_fn=refuse),
    "a timeout that does not pass": lambda d: dict(batch_size=5, timeout=60),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_mean_what_they_mean_to_torch(make: Make, arguments: Any, workers: int, device: str) -> None:
    def build(loader_class: Any) -> Any:
        dataset = make()
        return loader_class(dataset, num_workers=workers, **arguments(dataset))

    assert_as_torch(build, device=device)


@pytest.mark.parametrize("arguments", [dict(sampler=torch.arange(9)), dict(batch_sampler=torch.arange(8).view(4, 2))])
def test_tensors_are_indices_as_for_torch(make: Make, arguments: Any) -> None:
    # Without workers: on its way to one a tensor is shared memory, and torch keeps a thread for that.
    assert_as_torch(lambda loader: loader(make(), **arguments))


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_out_of_order_the_same_batches_come(make: Make, persistent: bool) -> None:
    def numbers(loader: Any) -> Any:
        return [sorted(batch[1].tolist() for batch in loader) for _ in range(2)]

    arguments: dict[str, Any] = dict(num_workers=2, in_order=False, persistent_workers=persistent)
    assert_as_torch(lambda loader: loader(make(), 3, shuffle=True, **arguments), numbers)


class Several(ImageFolder):
    """Photographs, and a number from each of the generators that a worker seeds, and from its own."""

    own = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(2), random.random(), float(np.random.rand()), torch.rand(1, generator=self.own)
        return *super().__getitem__(index), *drawn


class StreamsSeveral(IterableDataset[Any]):
    """The same as a stream, with the number of samples that the worker has made."""

    def __init__(self, root: str, transform: Any) -> None:
        self.dataset, self.made = Several(root, transform), 0

    def __iter__(self) -> Any:
        for index in range(SAMPLES):
            self.made += 1
            yield *self.dataset[index], self.made


def left_early(loader: Any, taken: list[int]) -> Any:
    """So many batches of each epoch, and where the generator of the order is behind them."""
    seen = []
    for steps in taken:
        for batch in itertools.islice(loader, steps):
            seen.append(batch)
            time.sleep(0.02)  # the workers are ahead of the loop
        seen.append((getattr(loader.sampler, "generator", None) or torch.default_generator).get_state())
    return seen


@pytest.mark.parametrize("taken", [[1], [3, 0, 2], [11], [9, 13, 1]], ids=str)
@pytest.mark.parametrize("kind", [ImageFolder, Several, StreamsSeveral])
@pytest.mark.parametrize(
    "arguments",
    [dict(num_workers=1, prefetch_factor=1), dict(num_workers=2), dict(num_workers=3, prefetch_factor=1)],
    ids=str,
)
def test_persistent_workers_draw_on_behind_a_loop_that_is_left_as_torchs_do(
    root: Path, kind: Any, arguments: dict[str, Any], taken: list[int], device: str
) -> None:
    def build(loader_class: Any) -> Any:
        shuffle = None if kind is StreamsSeveral else True
        return loader_class(kind(str(root), TRANSFORM), shuffle=shuffle, persistent_workers=True, **arguments)

    assert_as_torch(build, functools.partial(left_early, taken=[*taken, SAMPLES, SAMPLES]), device=device)


# --- construction, attributes ----------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "workers below 0": dict(num_workers=-1),
    "timeout below 0": dict(timeout=-1),
    "prefetch_factor without workers": dict(prefetch_factor=2),
    "prefetch_factor below 0": dict(prefetch_factor=-2, num_workers=2),
    "persistent without workers": dict(persistent_workers=True),
    "sampler and shuffle": dict(sampler=[1], shuffle=True),
    "batch_sampler and batch_size": dict(batch_sampler=[[1]], batch_size=2),
    "batch_sampler and shuffle": dict(batch_sampler=[[1]], shuffle=True),
    "batch_sampler and sampler": dict(batch_sampler=[[1]], sampler=[1]),
    "batch_sampler and drop_last": dict(batch_sampler=[[1]], drop_last=True),
    "drop_last without batches": dict(batch_size=None, drop_last=True),
    "batch_size 0": dict(batch_size=0),
    "batch_size True": dict(batch_size=True),
    "batch_size a float": dict(batch_size=2.5),
    "batch_size a str": dict(batch_size="4"),
    "drop_last no bool": dict(drop_last=1),
    "workers a str": dict(num_workers="2"),
    "workers None": dict(num_workers=None),
    "timeout None": dict(timeout=None),
    "a context without workers": dict(multiprocessing_context="fork"),
    "no such context": dict(multiprocessing_context="thread", num_workers=1),
    "a context that is none": dict(multiprocessing_context=3, num_workers=1),
    "an argument that does not exist": dict(batchsize=3),
    # These when iteration begins.
    "timeout without workers": dict(batch_size=None, timeout=1),
    "prefetch_factor 0": dict(batch_size=None, prefetch_factor=0, num_workers=1),
    "sampler 5": dict(batch_size=None, sampler=5),
    "sampler 5 with a worker": dict(batch_size=None, sampler=5, num_workers=1),
}


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused_with_torchs_words_when_torch_does(make: Make, arguments: Any) -> None:
    refused = assert_as_torch(lambda loader: loader(make(), **arguments), walked)
    assert isinstance(refused, Failed) or isinstance(refused[0], Failed)


ATTRIBUTES = [
    *("batch_size", "num_workers", "pin_memory", "drop_last", "timeout", "generator", "collate_fn", "worker_init_fn"),
    *("prefetch_factor", "persistent_workers", "in_order", "pin_memory_device", "multiprocessing_context"),
]


def attributes(loader: Any) -> Any:
    kinds = [type(loader.sampler), type(loader.batch_sampler), type(loader.dataset), isinstance(loader, StockLoader)]
    context = type(loader.multiprocessing_context)
    return kinds, [context if name == ATTRIBUTES[-1] else getattr(loader, name) for name in ATTRIBUTES]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        dict(batch_size=None),
        dict(batch_sampler=[[1]]),
        dict(num_workers=2, persistent_workers=True, timeout=3, in_order=False, worker_init_fn=print),
        dict(num_workers=1, multiprocessing_context="spawn", prefetch_factor=7, collate_fn=list, shuffle=True),
    ],
    ids=["torch's defaults", "no batches", "batch sampler", "persistent", "spawn"],
)
def test_attributes_have_torchs_values(make: Make, arguments: Any) -> None:
    assert_as_torch(lambda loader: loader(make(), **arguments), attributes)


def sum_of(samples: list[Any]) -> Any:
    return len(samples), sum(float(sample[0].sum()) > 0 for sample in samples)


CHANGES: dict[str, dict[str, Any]] = {
    "fewer workers": dict(num_workers=0),
    "more workers": dict(num_workers=3),
    "a collate_fn": dict(collate_fn=sum_of),
    "a generator": dict(generator=seeded(8)),
    "a prefetch_factor": dict(prefetch_factor=4),
    "a context": dict(multiprocessing_context="fork"),
    "no such context": dict(multiprocessing_context="thread"),
    "a timeout": dict(timeout=30),
    "a timeout below 0": dict(timeout=-3),
    "pin_memory": dict(pin_memory=True),
    # These are refused.
    "batch_size": dict(batch_size=3),
    "batch_sampler": dict(batch_sampler=[[1]]),
    "sampler": dict(sampler=[1]),
    "drop_last": dict(drop_last=True),
    "dataset": dict(dataset=[1]),
    "persistent_workers": dict(persistent_workers=True),
    "a context without workers": dict(num_workers=0, multiprocessing_context="fork"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_attributes_can_be_set_as_torchs_and_count_from_the_next_epoch(make: Make, change: dict[str, Any]) -> None:
    def use(loader: Any) -> Any:
        first = epochs(loader, 1)
        set_so = [tried(setattr, loader, name, value) for name, value in copy.deepcopy(change).items()]
        return first, set_so, epochs(loader, 1)

    assert_as_torch(lambda loader: loader(make(), 4, shuffle=True, num_workers=1), use)


# --- ways of use -----------------------------------------------------------------------------------------------------


def two_iterators_at_once(loader: Any) -> Any:
    first, second = iter(loader), iter(loader)
    return [next(first), next(second), next(first), next(first), list(second), list(first), torch.get_rng_state()]


def deletion_in_mid_epoch(loader: Any) -> Any:
    batches = iter(loader)
    first = next(batches)
    del batches
    return first, walked(loader), torch.get_rng_state()


def next_after_the_end(loader: Any) -> Any:
    batches = iter(loader)
    lengths = [len(loader), len(batches)]
    seen = [next(batches), len(batches), *batches]
    ends = [next(batches, "the end") for _ in range(3)]
    return lengths, seen, ends, len(batches), iter(batches) is batches, walked(loader)


USES: dict[str, Callable[[Any], Any]] = {
    "two iterators at once": two_iterators_at_once,
    "zip with itself": lambda loader: (list(zip(loader, loader)), torch.get_rng_state()),
    "one epoch inside another": lambda loader: [[outer, [inner[1] for inner in loader]] for outer in loader],
    "breaks and a whole epoch": lambda loader: (
        [next(itertools.islice(loader, k, None)) for k in range(3)],
        epochs(loader),
    ),
    "deletion in mid-epoch": deletion_in_mid_epoch,
    "next() after the end": next_after_the_end,
    "a pickled iterator": lambda loader: tried(pickle.dumps, iter(loader)).kind,
    "a copy": lambda loader: [next(iter(loader)), *map(walked, (copy.copy(loader), copy.deepcopy(loader), loader))],
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_loader_is_used_as_torchs_is(make: Make, use: Any, workers: int) -> None:
    for persistent in {False, workers > 0}:
        how: dict[str, Any] = dict(shuffle=True, num_workers=workers, persistent_workers=persistent)
        assert_as_torch(lambda loader: loader(make(), 3, **how), use)  # noqa: B023


class DrawnOneByOne:
    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(SAMPLES, ())) for _ in range(40))


@pytest.mark.parametrize("kind", ["shuffled", "with replacement", "from the default generator"])
@pytest.mark.parametrize("persistent", [False, True])
def test_after_a_break_a_generator_is_where_torch_leaves_it(root: Path, kind: str, persistent: bool) -> None:
    """Also that of a sampler that draws as it goes, or once more at its end."""

    def build(loader: Any) -> Any:
        dataset, generator = ImageFolder(str(root), TRANSFORM), torch.Generator().manual_seed(3)
        count = 40 if kind == "with replacement" else None
        sampler: Any = RandomSampler(dataset, bool(count), count, generator)
        if kind == "from the default generator":
            sampler = DrawnOneByOne()
        return loader(dataset, 2, sampler=sampler, num_workers=2, prefetch_factor=1, persistent_workers=persistent)

    assert_as_torch(build, functools.partial(left_early, taken=[1, 5, 14, 2]))


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


class Asking:
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return *super().__getitem__(index), told_by_workers(), info is None or info.dataset is self  # type: ignore[misc]


def note(worker_id: int) -> None:
    os.environ["CONTRACT_INIT"] = f"{worker_id}{torch.initial_seed()}{told_by_workers()}"


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_workers_are_told_and_seeded_as_by_torch(make: Make, workers: int, persistent: bool) -> None:
    arguments: dict[str, Any] = dict(num_workers=workers, worker_init_fn=note, persistent_workers=persistent)
    assert_as_torch(lambda loader: loader(make(Asking), 2, shuffle=True, **arguments))


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
