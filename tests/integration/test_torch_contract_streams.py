"""torch's contract, streams and indices: the same on torch's DataLoader and on ours, for datasets that are no list of
samples with images in them, and for such without images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Subset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torchvision.datasets import ImageFolder

import proxyloader

from ..numbered import spell_dataset
from ..side_by_side import Failed, assert_as_torch, epochs, one_epoch, walked
from ..tiers import by_default
from .test_torch_contract_samples import SAMPLES, TRANSFORM, Numbers, Pictures, a_pair, as_list


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spell_dataset(tmp_path_factory.mktemp("spelled") / "set", SAMPLES, classes=2, side_px=32)


# --- samplers of other indices, batches in the dataset ---------------------------------------------------------------


class ByName(Pictures):
    def __getitem__(self, name: Any) -> Any:
        assert isinstance(name, (str, tuple, type(None)))
        number = 0 if name is None else int(name[-1])
        return *super().__getitem__(number), str(name)


class NumbersByName(Numbers):
    def __getitem__(self, name: Any) -> Any:
        number = 0 if name is None else int(name[-1])
        return *super().__getitem__(number), str(name)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("names", [["n3", "n1", "n6"], [("a", 2), ("b", 5)], ["n1", None, ("c", 4)]], ids=str)
@pytest.mark.parametrize("kind", ["pictures", "numbers"])
def test_an_index_may_be_whatever_the_dataset_takes(kind: str, names: list[Any], workers: int, root: Path) -> None:
    def build(loader: Any, **batches: Any) -> Any:
        dataset = ByName(str(root), a_pair) if kind == "pictures" else NumbersByName(a_pair)
        return loader(dataset, num_workers=workers, **batches)

    for batches in (
        dict(sampler=names, batch_size=2),
        dict(sampler=names, batch_size=None),
        dict(batch_sampler=[names]),
    ):
        assert_as_torch(lambda loader: build(loader, **batches), one_epoch)  # noqa: B023


class BatchedNumbers(Numbers):
    """Makes a batch at a time, and says of what it was asked to."""

    def __getitems__(self, indices: Any) -> list[Any]:
        drawn = torch.rand(()).item()
        return [(*self[k], drawn, type(indices).__name__, position) for position, k in enumerate(indices)]


class BatchedPictures(Pictures):
    def __getitems__(self, indices: Any) -> list[Any]:
        drawn = torch.rand(()).item()
        return [(*self[k], drawn, type(indices).__name__, position) for position, k in enumerate(indices)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["pictures", "numbers"])
@pytest.mark.parametrize(
    "arguments",
    [dict(batch_size=3), dict(batch_size=None), dict(batch_sampler=[(1, 2), range(3, 6)])],
    ids=["batches", "no batches", "batch sampler"],
)
@pytest.mark.parametrize("subset", [False, True], ids=["", "subset"])
def test_a_dataset_that_makes_batches_is_asked_for_batches(
    kind: str, arguments: dict[str, Any], subset: bool, workers: int, root: Path
) -> None:
    def build(loader: Any) -> Any:
        dataset = BatchedPictures(str(root), a_pair) if kind == "pictures" else BatchedNumbers(a_pair)
        return loader(Subset(dataset, range(6, -1, -1)) if subset else dataset, num_workers=workers, **arguments)

    assert_as_torch(build)


class WrongBatches(Numbers):
    def __getitems__(self, indices: Any) -> Any:
        return {1: None, 2: (), 3: [self[0]]}[len(indices)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3], ids=["None", "an empty tuple", "too few"])
def test_a_wrong_answer_to_a_batch_of_indices_fails_as_under_torch(size: int, workers: int) -> None:
    assert_as_torch(lambda loader: loader(WrongBatches(a_pair), size, num_workers=workers), one_epoch)


class Stream(IterableDataset[Any]):
    """Samples without images; ``shards`` says how workers part them.

    Attributes:
        start, stop: of the numbers; a worker_init_fn may change them.
    """

    def __init__(self, *, shards: str = "even", count: int = 10, fail_at: int | None = None) -> None:
        self.start, self.stop, self.shards, self.fail_at = 0, count, shards, fail_at

    def __repr__(self) -> str:
        return "Stream()"

    def sample(self, number: int) -> Any:
        return torch.rand(2), number

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        numbers = range(self.start, self.stop)
        if info is not None and self.shards == "even":
            numbers = numbers[info.id :: info.num_workers]
        elif info is not None and self.shards == "uneven":
            numbers = numbers[:1] if info.id == 0 else numbers[info.id :: info.num_workers - 1]
        elif info is not None and self.shards == "first only":
            numbers = numbers if info.id == 0 else range(0)
        for number in numbers:
            if number == self.fail_at:
                raise LookupError("the stream broke")
            yield *self.sample(number), -1 if info is None else info.id, info is None or info.dataset is self


class Sized(Stream):
    """Says that it is as long as ``said``, or as it is."""

    said: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start if self.said is None else self.said


class PictureStream(Stream):
    """Hands encoded images to the transform, so that DALI decodes them, or with ``by_pillow`` decoded ones."""

    def __init__(self, root: Any, *, by_pillow: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.folder, self.transform, self.by_pillow = ImageFolder(root), TRANSFORM, by_pillow

    def sample(self, number: int) -> Any:
        path, target = self.folder.samples[number % SAMPLES]
        encoded = type(self.transform) is not type(TRANSFORM) and not self.by_pillow
        image = proxyloader.EncodedImage.open(path) if encoded else self.folder.loader(path)
        return self.transform(image), (number, target)


class SizedPictureStream(PictureStream, Sized):
    pass


Streams = Callable[..., Any]


@pytest.fixture(params=["pictures", "numbers"])
def stream(request: pytest.FixtureRequest, root: Path) -> Streams:
    def make(sized: bool = False, **arguments: Any) -> Any:
        if request.param == "numbers":
            return (Sized if sized else Stream)(**arguments)
        return (SizedPictureStream if sized else PictureStream)(str(root), **arguments)

    return make


def part(worker_id: int) -> None:
    """As torch's documentation parts a stream."""
    info = get_worker_info()
    assert info is not None and info.id == worker_id
    dataset: Any = info.dataset
    each = -(-(dataset.stop - dataset.start) // info.num_workers)
    dataset.start = worker_id * each
    dataset.stop = min(dataset.start + each, dataset.stop)


STREAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torch's defaults": ({}, {}),
    "batches": ({}, dict(batch_size=3)),
    "drop_last": ({}, dict(batch_size=3, drop_last=True)),
    "no batches": ({}, dict(batch_size=None)),
    "larger than the stream": ({}, dict(batch_size=50)),
    "with a length": (dict(sized=True), dict(batch_size=3)),
    "with a length, drop_last": (dict(sized=True), dict(batch_size=3, drop_last=True)),
    "with a length, no batches": (dict(sized=True), dict(batch_size=None)),
    "not parted": (dict(shards="none"), dict(batch_size=4)),
    "uneven shards": (dict(shards="uneven"), dict(batch_size=2)),
    "uneven shards, drop_last": (dict(shards="uneven"), dict(batch_size=2, drop_last=True)),
    "all in the first worker": (dict(shards="first only"), dict(batch_size=2)),
    "parted by worker_init_fn": (dict(shards="none"), dict(batch_size=2, worker_init_fn=part)),
    "empty": (dict(count=0), dict(batch_size=2)),
    "a generator": ({}, dict(batch_size=3, generator=torch.Generator())),
    "a list": ({}, dict(batch_size=3, collate_fn=as_list)),
    "pinned memory": ({}, dict(batch_size=3, pin_memory=True)),
    "persistent": ({}, dict(batch_size=2, persistent_workers=True)),
    "persistent, uneven shards": (dict(shards="uneven"), dict(batch_size=2, persistent_workers=True)),
    "one that breaks": (dict(fail_at=5), dict(batch_size=2)),
    "one that breaks, no batches": (dict(fail_at=5), dict(batch_size=None)),
    "persistent, one that breaks": (dict(fail_at=5), dict(batch_size=2, persistent_workers=True)),
    "shuffle": ({}, dict(shuffle=True)),
    "not shuffle": ({}, dict(shuffle=False)),
    "sampler": ({}, dict(sampler=[1])),
    "batch_sampler": ({}, dict(batch_sampler=[[1]])),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("made", "arguments"), STREAMED.values(), ids=STREAMED)
def test_a_stream_is_loaded_as_by_torch(stream: Streams, made: Any, arguments: Any, workers: int) -> None:
    def build(loader: Any) -> Any:
        mine = arguments | ({"generator": torch.Generator().manual_seed(4)} if "generator" in arguments else {})
        return loader(stream(**made), num_workers=workers, **mine)

    assert_as_torch(build, epochs if "persistent_workers" in arguments else one_epoch)


@pytest.mark.parametrize("by_pillow", [False, True], ids=["", "decoded by Pillow"])
def test_pictures_of_a_stream_arrive_where_they_should(root: Path, by_pillow: bool, device: str) -> None:
    def build(loader: Any) -> Any:
        return loader(PictureStream(str(root), by_pillow=by_pillow), 3, num_workers=2)

    assert_as_torch(build, device=device)


class SlowInTheFirstWorker(PictureStream):
    """Each worker gives one batch, with tensors too large to be sent by value; the second one has ended by then."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and info.id == 0:
            time.sleep(0.7)
        for number, sample in zip(range(2), super().__iter__()):
            yield sample, torch.full((100_000,), number)


def test_a_batch_is_there_though_its_worker_has_ended(root: Path) -> None:
    assert_as_torch(lambda loader: loader(SlowInTheFirstWorker(str(root)), 2, num_workers=2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 2], ids=["no batches", "batches"])
def test_a_stream_that_is_longer_than_it_says_is_warned_of(
    stream: Streams, batch_size: int | None, workers: int
) -> None:
    def build(loader: Any) -> Any:
        dataset = stream(sized=True, shards="none")
        dataset.said = 3
        return loader(dataset, batch_size, num_workers=workers)

    seen = assert_as_torch(build, lambda loader: (len(loader), len(walked(loader))))
    assert seen[1] > seen[0]


@pytest.mark.parametrize("sized", [False, True], ids=["without a length", "with a length"])
def test_the_iterator_of_a_stream_has_torchs_length(stream: Streams, sized: bool) -> None:
    def use(loader: Any) -> Any:
        batches = iter(loader)
        try:
            return len(batches)
        except TypeError as error:
            return Failed.by(error)

    assert_as_torch(lambda loader: loader(stream(sized=sized), 3), use)


# --- torch's data pipes ----------------------------------------------------------------------------------------------

PIPED: dict[str, dict[str, Any]] = {
    "torch's defaults": {},
    "batches": dict(batch_size=3),
    "no batches": dict(batch_size=None),
    "shuffle": dict(batch_size=3, shuffle=True),
    "not shuffle": dict(batch_size=3, shuffle=False),
    "persistent": dict(batch_size=3, persistent_workers=True),
    "pinned memory": dict(batch_size=3, pin_memory=True),
    "spawned": dict(batch_size=3, multiprocessing_context="spawn"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("arguments", by_default(PIPED, *PIPED.keys() - {"spawned"}))
def test_a_data_pipe_is_loaded_as_by_torch(stream: Streams, arguments: Any, workers: int) -> None:
    def build(loader: Any) -> Any:
        numbers = IterableWrapper(range(10)).shuffle(buffer_size=4).sharding_filter()
        mine = {name: value for name, value in arguments.items() if workers or name == "batch_size"}
        return loader(numbers.map(stream().sample), num_workers=workers, **mine)

    assert_as_torch(build, epochs if "persistent_workers" in arguments else one_epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_pipe_of_a_map_is_loaded_as_by_torch(stream: Streams, workers: int) -> None:
    def build(loader: Any) -> Any:
        return loader(SequenceWrapper(range(10)).map(stream().sample), 3, shuffle=True, num_workers=workers)

    assert_as_torch(build, epochs)
