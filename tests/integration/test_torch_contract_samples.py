"""torch's contract, samples and streams: what samples may hold and how they may fail, and datasets that are no list of
them, on torch's DataLoader and on ours, with images that DALI decodes, and without images.
"""

from __future__ import annotations

import decimal
import fractions
import functools
import time
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torchvision import transforms, tv_tensors
from torchvision.datasets import ImageFolder

import proxyloader

from ..numbered import spell_dataset
from ..side_by_side import assert_as_torch, epochs, one_epoch, tried, walked
from ..tiers import by_default

SAMPLES = 7
TRANSFORM = transforms.Compose([transforms.RandomCrop(28), transforms.ToTensor()])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spell_dataset(tmp_path_factory.mktemp("spelled") / "set", SAMPLES, classes=2, side_px=32)


Hold = Callable[[Any, int], Any]
"""Makes a sample of an image, or of what stands for one, and its number."""


class Pictures(ImageFolder):
    def __init__(self, root: Any, hold: Hold) -> None:
        super().__init__(root, TRANSFORM)
        self.hold = hold

    def __getitem__(self, index: int) -> Any:
        return self.hold(self.transform(self.loader(self.samples[index][0])), range(SAMPLES)[index])


class Numbers(Dataset[Any]):
    def __init__(self, hold: Hold) -> None:
        self.hold = hold

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.hold(torch.rand(2), range(SAMPLES)[index])


MakeOf = Callable[..., Any]


@pytest.fixture(params=["pictures", "numbers"])
def make_of(request: pytest.FixtureRequest, root: Path) -> MakeOf:
    """Makes a dataset of such samples, with images or without, of a class that also derives from others."""
    kind, arguments = (Numbers, ()) if request.param == "numbers" else (Pictures, (str(root),))
    return lambda hold, *bases: type(kind.__name__, (*bases, kind), {})(*arguments, hold)


class Pair(NamedTuple):
    image: Any
    number: Any


@dataclass
class Record:
    image: Any
    number: int


@dataclass(frozen=True)
class Frozen:
    image: Any
    number: int


class Slotted:
    __slots__ = ("image", "number")

    def __init__(self, image: Any, number: int) -> None:
        self.image, self.number = image, number


HOLDS: dict[str, Hold] = {
    "the image alone": lambda image, k: image,
    "a tuple": lambda image, k: (image, k),
    "a list": lambda image, k: [image, k],
    "a dict": lambda image, k: {"image": image, "number": k},
    "nested": lambda image, k: {"a": [image, (k, {"deep": (image, f"name {k}")})], "b": {}},
    "a named tuple": lambda image, k: Pair(image, Pair(k, str(k))),
    "an ordered dict": lambda image, k: OrderedDict(z=image, a=k),
    "a defaultdict": lambda image, k: defaultdict(list, image=image, number=k),
    "a mapping of one's own": lambda image, k: UserDict(image=image, number=k),
    "a dataclass": Record,
    "a frozen dataclass": Frozen,
    "an object with slots": Slotted,
    "a deque": lambda image, k: deque([image, k]),
    "the image twice": lambda image, k: (image, image, k),
    "strings and bytes": lambda image, k: (image, "é" * k, b"\0" * k, ""),
    "numbers": lambda image, k: (image, k, k / 3, k > 2, 2**40 + k),
    "numbers of mixed types": lambda image, k: (image, k if k % 2 else k / 2),
    "an int beyond 64 bits": lambda image, k: (image, 2**70 + k),
    "a complex number": lambda image, k: (image, complex(k, 1)),
    "numpy scalars": lambda image, k: (image, np.float32(k), np.int16(k), np.bool_(k > 2), np.float64(k / 3)),
    "arrays": lambda image, k: (image, np.full((2, 3), k, np.uint8), np.array(k), np.arange(4.0)[::-2].copy()),
    "arrays of objects": lambda image, k: (image, np.array([k, None])),
    "tensors of every kind": lambda image, k: (
        image,
        torch.tensor(k),
        torch.tensor([k > 2]),
        torch.full((2,), k, dtype=torch.bfloat16),
        torch.full((2, 1), complex(0, k)),
        torch.full((2,), k, dtype=torch.float16),
        torch.full((2,), k, dtype=torch.uint8),
    ),
    "empty tensors": lambda image, k: (image, torch.empty(0), torch.empty(3, 0, dtype=torch.int64)),
    "large tensors": lambda image, k: (image, torch.full((300, 300), float(k)), np.full(200_000, k)),
    "tensors not contiguous": lambda image, k: (image, (torch.arange(12).view(3, 4) + k).t(), torch.arange(9)[::3] * k),
    "expanded tensors": lambda image, k: (image, torch.tensor([float(k)]).expand(5)),
    "boxes of torchvision's": lambda image, k: (
        image,
        tv_tensors.BoundingBoxes([[k, k, 5, 5]], format="XYXY", canvas_size=(32, 32)),
    ),
    "tensors of several shapes": lambda image, k: (image, torch.zeros(1 + k % 2)),
    "tensors of several dtypes": lambda image, k: (image, torch.zeros(2, dtype=[torch.int64, torch.float32][k % 2])),
    "None": lambda image, k: (image, None),
    "None instead of a sample": lambda image, k: None,
    "None instead of one sample": lambda image, k: None if k == 4 else (image, k),
    "a str instead of one sample": lambda image, k: "a string" if k == 4 else (image, k),
    "a number instead of one sample": lambda image, k: k if k == 4 else (image, k),
    "one sample a part too short": lambda image, k: (image,) if k == 4 else (image, k),
    "a tensor instead of one image": lambda image, k: (torch.full((3, 28, 28), 0.3) if k == 4 else image, k),
    "None instead of one image": lambda image, k: (None if k == 4 else image, k),
    "a str instead of one number": lambda image, k: (image, "label" if k == 4 else k),
    "tuples of several lengths": lambda image, k: (image, [k] * (1 + k % 2)),
    "dicts of several keys": lambda image, k: {"image": image, str(k): k},
    "a set": lambda image, k: (image, {k}),
    "a decimal and a fraction": lambda image, k: (image, decimal.Decimal(k), fractions.Fraction(k, 3)),
    "a range": lambda image, k: (image, range(k, k + 2)),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_samples_hold_what_they_hold_under_torch(make_of: MakeOf, hold: Hold, workers: int) -> None:
    for size, collate_fn in ((3, None), (3, list), (None, None)):
        how: dict[str, Any] = dict(batch_size=size, num_workers=workers, collate_fn=collate_fn)
        assert_as_torch(lambda loader: loader(make_of(hold), **how), one_epoch)  # noqa: B023


@pytest.mark.parametrize("workers", [0, 1])
def test_images_in_samples_are_on_the_device_and_the_rest_is_not(root: Path, workers: int, device: str) -> None:
    dataset = Pictures(str(root), HOLDS["nested"])
    assert_as_torch(lambda loader: loader(dataset, 3, num_workers=workers), device=device)
    loader = proxyloader.DataLoader(Pictures(str(root), HOLDS["a tuple"]), 3, num_workers=workers, device=device)
    assert {(images.device.type, numbers.device.type) for images, numbers in loader} == {(device, "cpu")}


# --- errors ----------------------------------------------------------------------------------------------------------


class OddError(Exception):
    """Its constructor cannot be called with a message."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class MessageError(Exception):
    """Of the kind that torch calls with ``message=``."""

    message = "none"

    def __init__(self, message: str = "of its own") -> None:
        super().__init__(message)


ERRORS: dict[str, Callable[[], BaseException]] = {
    "KeyError": lambda: KeyError("no such key"),
    "KeyError of a tuple": lambda: KeyError(("a", 1)),
    "IndexError": lambda: IndexError("beyond"),
    "an error without words": lambda: ValueError(),
    "an error of several lines": lambda: ValueError("one\ntwo"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "/nowhere"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    "NotImplementedError": lambda: NotImplementedError(),
    "AssertionError": lambda: AssertionError("not so"),
    "an odd constructor": lambda: OddError(3, reason="odd"),
    "an error with .message": lambda: MessageError(),
}


def raising_at(number: int, error: Callable[[], BaseException]) -> Hold:
    def hold(image: Any, k: int) -> Any:
        if k == number:
            raise error()
        return image, k

    return hold


WORKERS = pytest.mark.parametrize(
    "arguments", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=["0", "2", "persistent"]
)


@WORKERS
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_a_datasets_error_is_torchs_error_and_the_next_batches_come(
    make_of: MakeOf, error: Any, arguments: Any
) -> None:
    def build(loader: Any) -> Any:
        return loader(make_of(raising_at(4, error)), 2, generator=torch.Generator().manual_seed(2), **arguments)

    seen = assert_as_torch(build)
    assert [len(epoch["batches"]) for epoch in seen["epochs"]] == [4, 4]


def on_after_each_end(loader: Any) -> Any:
    batches = iter(loader)
    return [list(batches) for _ in range(4)], epochs(loader)


@pytest.mark.parametrize("where", ["__getitem__", "collate_fn", "without batches"])
@WORKERS
def test_stop_iteration_ends_a_loop_where_it_ends_torchs(make_of: MakeOf, where: str, arguments: Any) -> None:
    def build(loader: Any) -> Any:
        generator = torch.Generator().manual_seed(2)
        if where == "collate_fn":
            collate_fn = functools.partial(collate_but_4, error=StopIteration)
            return loader(make_of(a_pair), 2, collate_fn=collate_fn, generator=generator, **arguments)
        dataset = make_of(raising_at(4, lambda: StopIteration("early")))
        return loader(dataset, None if where == "without batches" else 2, generator=generator, **arguments)

    first, *_ = assert_as_torch(build, on_after_each_end)[0]
    assert len(first) == (4 if where == "without batches" else 2)


def a_pair(image: Any, k: int) -> Any:
    return image, k


def collate_but_4(samples: list[Any], error: type[Exception] = LookupError) -> Any:
    if any(number == 4 for _, number in samples):
        raise error("not 4")
    return default_collate(samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_fn_that_raises_costs_its_batch_alone(make_of: MakeOf, workers: int) -> None:
    seen = assert_as_torch(lambda loader: loader(make_of(a_pair), 2, num_workers=workers, collate_fn=collate_but_4))
    assert [epoch["batches"][2].kind for epoch in seen["epochs"]] == [LookupError] * 2


# --- samplers of other indices, batches in the dataset ---------------------------------------------------------------


class ByName:
    def __getitem__(self, name: Any) -> Any:
        assert isinstance(name, (str, tuple, type(None)))
        return *super().__getitem__(0 if name is None else int(name[-1])), str(name)  # type: ignore[misc]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("names", [["n3", "n1", "n6"], [("a", 2), ("b", 5)], ["n1", None, ("c", 4)]], ids=str)
def test_an_index_may_be_whatever_the_dataset_takes(make_of: MakeOf, names: list[Any], workers: int) -> None:
    for how in (dict(sampler=names, batch_size=2), dict(sampler=names, batch_size=None), dict(batch_sampler=[names])):
        build = functools.partial(lambda how, loader: loader(make_of(a_pair, ByName), num_workers=workers, **how), how)
        assert_as_torch(build, one_epoch)


class Batched:
    """Makes a batch at a time, and says of what it was asked to."""

    def __getitems__(self, indices: Any) -> list[Any]:
        drawn = torch.rand(()).item()
        return [(*self[k], drawn, type(indices).__name__, at) for at, k in enumerate(indices)]  # type: ignore[index]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "arguments", [dict(batch_size=3), dict(batch_size=None), dict(batch_sampler=[(1, 2), range(3, 6)])], ids=str
)
@pytest.mark.parametrize("subset", [False, True], ids=["", "subset"])
def test_a_dataset_that_makes_batches(make_of: MakeOf, arguments: dict[str, Any], subset: bool, workers: int) -> None:
    def build(loader: Any) -> Any:
        dataset = make_of(a_pair, Batched)
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
    """Samples without images; ``shards`` says how workers part them."""

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


class Sized:
    """A stream that says that it is as long as ``said``, or as it is."""

    said: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start if self.said is None else self.said  # type: ignore[attr-defined, no-any-return]


class PictureStream(Stream):
    def __init__(self, root: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.folder, self.transform = ImageFolder(root), TRANSFORM

    def sample(self, number: int) -> Any:
        path, target = self.folder.samples[number % SAMPLES]
        return self.transform(self.folder.loader(path)), (number, target)


Streams = Callable[..., Any]


@pytest.fixture(params=["pictures", "numbers"])
def stream(request: pytest.FixtureRequest, root: Path) -> Streams:
    kind, given = (Stream, ()) if request.param == "numbers" else (PictureStream, (str(root),))
    sized_kind = type(kind.__name__, (Sized, kind), {})
    return lambda sized=False, **arguments: (sized_kind if sized else kind)(*given, **arguments)


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
    "a list": ({}, dict(batch_size=3, collate_fn=list)),
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
def test_a_stream_longer_than_it_says_is_warned_of(stream: Streams, batch_size: int | None, workers: int) -> None:
    def build(loader: Any) -> Any:
        dataset = stream(sized=True, shards="none")
        dataset.said = 3
        return loader(dataset, batch_size, num_workers=workers)

    seen = assert_as_torch(build, lambda loader: (len(loader), len(walked(loader))))
    assert seen[1] > seen[0]


@pytest.mark.parametrize("sized", [False, True], ids=["without a length", "with a length"])
def test_the_iterator_of_a_stream_has_torchs_length(stream: Streams, sized: bool) -> None:
    assert_as_torch(lambda loader: loader(stream(sized=sized), 3), lambda loader: tried(len, iter(loader)))


# --- torch's data pipes ----------------------------------------------------------------------------------------------

PIPED: dict[str, dict[str, Any]] = {
    "torch's defaults": {},
    "batches": dict(batch_size=3),
    "no batches": dict(batch_size=None),
    "shuffle": dict(batch_size=3, shuffle=True),
    "persistent": dict(batch_size=3, persistent_workers=True),
    "pinned memory": dict(batch_size=3, pin_memory=True),
    "spawned": dict(batch_size=3, multiprocessing_context="spawn"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("arguments", by_default(PIPED, *PIPED.keys() - {"spawned"}))
@pytest.mark.parametrize(
    "pipe",
    [lambda: IterableWrapper(range(10)).shuffle(buffer_size=4).sharding_filter(), lambda: SequenceWrapper(range(10))],
    ids=["of a stream", "of a map"],
)
def test_a_data_pipe_is_loaded_as_by_torch(stream: Streams, pipe: Any, arguments: Any, workers: int) -> None:
    def build(loader: Any) -> Any:
        mine = {name: value for name, value in arguments.items() if workers or name in ("batch_size", "shuffle")}
        return loader(pipe().map(stream().sample), num_workers=workers, **mine)

    assert_as_torch(build, epochs if "persistent_workers" in arguments else one_epoch)
