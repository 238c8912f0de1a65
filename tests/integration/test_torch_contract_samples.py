"""torch's contract, samples: what they may hold and how they may fail, on torch's DataLoader and on ours, for a
dataset whose images DALI decodes, and for one without images.
"""

from __future__ import annotations

import decimal
import fractions
import multiprocessing
import os
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torchvision import transforms, tv_tensors
from torchvision.datasets import ImageFolder

import proxyloader

from ..limits import LONG_S
from ..numbered import spell_dataset
from ..side_by_side import Failed, assert_as_torch, epochs, one_epoch

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


MakeOf = Callable[[Hold], Any]


@pytest.fixture(params=["pictures", "numbers"])
def make_of(request: pytest.FixtureRequest, root: Path) -> MakeOf:
    """Makes a dataset of such samples, with images or without."""
    return Numbers if request.param == "numbers" else lambda hold: Pictures(str(root), hold)


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


def a_structured_array(number: int) -> Any:
    return np.array([(number, 0.5)], dtype=[("n", "i4"), ("x", "f8")])


HOLDS: dict[str, Hold] = {
    "the image alone": lambda image, k: image,
    "a tuple": lambda image, k: (image, k),
    "a list": lambda image, k: [image, k],
    "a tuple of one": lambda image, k: (image,),
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
    "numpy strings": lambda image, k: (image, np.str_(k)),
    "arrays": lambda image, k: (image, np.full((2, 3), k, np.uint8), np.array(k), np.arange(4.0)[::-2].copy()),
    "arrays of objects": lambda image, k: (image, np.array([k, None])),
    "structured arrays": lambda image, k: (image, a_structured_array(k)),
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
    "tuples of several lengths": lambda image, k: (image, [k] * (1 + k % 2)),
    "dicts of several keys": lambda image, k: {"image": image, str(k): k},
    "a set": lambda image, k: (image, {k}),
    "a decimal and a fraction": lambda image, k: (image, decimal.Decimal(k), fractions.Fraction(k, 3)),
    "a range": lambda image, k: (image, range(k, k + 2)),
    "a type": lambda image, k: (image, int),
}


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def iter_once(samples: Any) -> Any:
    return list(iter(samples))


def columns(samples: list[Any]) -> Any:
    return tuple(zip(*samples))


COLLATES: dict[str, dict[str, Any]] = {
    "torch's": dict(batch_size=3),
    "a list": dict(batch_size=3, collate_fn=as_list),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_samples_hold_what_they_hold_under_torch(make_of: MakeOf, hold: Hold, workers: int) -> None:
    for arguments in COLLATES.values():

        def build(loader: Any, arguments: dict[str, Any] = arguments) -> Any:
            return loader(make_of(hold), num_workers=workers, **arguments)

        assert_as_torch(build, one_epoch)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["the image alone", "a tuple", "nested", "arrays", "large tensors", "None"])
def test_samples_without_batches_are_converted_as_by_torch(make_of: MakeOf, name: str, workers: int) -> None:
    assert_as_torch(lambda loader: loader(make_of(HOLDS[name]), None, num_workers=workers), one_epoch)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "arguments", [dict(batch_size=4, drop_last=True), dict(batch_size=None)], ids=["batches", "none"]
)
@pytest.mark.parametrize("collate_fn", [columns, deque, iter_once], ids=["columns", "a deque", "an iterator's list"])
def test_a_collate_fn_of_ones_own_gets_what_torchs_gets(
    make_of: MakeOf, collate_fn: Any, arguments: Any, workers: int
) -> None:
    def build(loader: Any) -> Any:
        return loader(
            make_of(lambda image, k: [(image, k), (k, k)]), num_workers=workers, **arguments, collate_fn=collate_fn
        )

    assert_as_torch(build, one_epoch)


@pytest.mark.parametrize("workers", [0, 1])
def test_images_in_samples_are_on_the_device_and_the_rest_is_not(root: Path, workers: int, device: str) -> None:
    def build(loader: Any) -> Any:
        return loader(Pictures(str(root), HOLDS["nested"]), 3, num_workers=workers)

    assert_as_torch(build, device=device)
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_a_datasets_error_is_torchs_error_and_the_next_batches_come(make_of: MakeOf, error: Any, workers: int) -> None:
    seen = assert_as_torch(lambda loader: loader(make_of(raising_at(4, error)), 2, num_workers=workers), one_epoch)
    assert len(seen["epochs"][0]["batches"]) == 4


def on_after_each_end(loader: Any) -> Any:
    batches = iter(loader)
    return [list(batches) for _ in range(4)], epochs(loader)


@pytest.mark.parametrize("where", ["__getitem__", "collate_fn", "without batches"])
@pytest.mark.parametrize(
    "arguments", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=["0", "2", "persistent"]
)
def test_stop_iteration_ends_a_loop_where_it_ends_torchs(make_of: MakeOf, where: str, arguments: Any) -> None:
    def build(loader: Any) -> Any:
        generator = torch.Generator().manual_seed(2)
        if where == "collate_fn":
            return loader(make_of(a_pair), 2, collate_fn=collate_until_4, generator=generator, **arguments)
        dataset = make_of(raising_at(4, lambda: StopIteration("early")))
        return loader(dataset, None if where == "without batches" else 2, generator=generator, **arguments)

    first, *_ = assert_as_torch(build, on_after_each_end)[0]
    assert len(first) == (4 if where == "without batches" else 2)


@pytest.mark.parametrize("error", ["KeyError", "an odd constructor"])
def test_persistent_workers_outlive_a_datasets_errors_as_torchs_do(make_of: MakeOf, error: str) -> None:
    hold = raising_at(4, ERRORS[error])

    def build(loader: Any) -> Any:
        generator = torch.Generator().manual_seed(2)
        return loader(make_of(hold), 2, num_workers=2, persistent_workers=True, generator=generator)

    assert_as_torch(build, lambda loader: epochs(loader, 3))


def a_pair(image: Any, k: int) -> Any:
    return image, k


def collate_but_4(samples: list[Any]) -> Any:
    if any(number == 4 for _, number in samples):
        raise LookupError("not 4")
    return torch.stack([image for image, _ in samples]), [number for _, number in samples]


def collate_until_4(samples: list[Any]) -> Any:
    if any(number == 4 for _, number in samples):
        raise StopIteration
    return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_fn_that_raises_costs_its_batch_alone(make_of: MakeOf, workers: int) -> None:
    seen = assert_as_torch(lambda loader: loader(make_of(a_pair), 2, num_workers=workers, collate_fn=collate_but_4))
    assert [epoch["batches"][2].kind for epoch in seen["epochs"]] == [LookupError] * 2


def process_and_type(samples: list[Any]) -> Any:
    return os.getpid(), isinstance(samples[0][0], torch.Tensor), [number for _, number in samples]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_gets_tensors_in_the_worker(root: Path, workers: int) -> None:
    for dataset in (Numbers(a_pair), Pictures(str(root), a_pair)):
        loader = proxyloader.DataLoader(dataset, 2, num_workers=workers, collate_fn=process_and_type, device="cpu")
        found = list(loader)
        assert {(process == os.getpid(), is_tensor) for process, is_tensor, _ in found} == {(workers == 0, True)}
        assert [number for *_, numbers in found for number in numbers] == list(range(SAMPLES))


class Waiting:
    """Holds up sample 4 until it is let go."""

    def __init__(self) -> None:
        self.event = multiprocessing.Event()

    def __call__(self, image: Any, k: int) -> Any:
        if k == 4:
            self.event.wait(LONG_S)
        return image, k


@pytest.mark.parametrize("workers", [1, 2])
def test_a_timeout_is_torchs_error(make_of: MakeOf, workers: int) -> None:
    waiting = Waiting()

    def use(loader: Any) -> Any:
        waiting.event.clear()
        batches = iter(loader)
        seen: list[Any] = []
        try:
            seen.extend(batches)
        except RuntimeError as error:
            seen.append(Failed.by(error))
        finally:
            waiting.event.set()
        return seen[-1], len(seen) <= 3

    def build(loader: Any) -> Any:
        return loader(make_of(waiting), 2, num_workers=workers, timeout=0.7, multiprocessing_context="fork")

    failed, _ = assert_as_torch(build, use)
    assert failed == Failed(RuntimeError, ("DataLoader timed out after 0.7 seconds",))
