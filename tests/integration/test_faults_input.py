"""Inputs that DALI cannot decode or take: an error of the batch that holds them, and of no other, now or later.

Rows 3 and 4 of the table of faults.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset, get_worker_info
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, ImageError, InputError, PipelineError

from ..limits import LONG_S, WAIT_S
from ..outcomes import outcomes
from ..side_by_side import Failed, assert_as_torch, one_epoch
from .roads import BATCH, PICTURES, Road, assert_batches_match, assert_pictures_match, next_error, picture_folder

BATCHES = PICTURES // BATCH


def random_bytes(data: bytes) -> bytes:
    return np.random.default_rng(3).bytes(len(data))


def empty(data: bytes) -> bytes:
    return b""


def cut_in_the_header(data: bytes) -> bytes:
    return data[:100]


def cut_in_the_scan(data: bytes) -> bytes:
    return data[: data.rindex(b"\xff\xda") + 40]


WAYS = [random_bytes, empty, cut_in_the_header, cut_in_the_scan]


def hurt(dataset: ImageFolder, number: int, how: Callable[[bytes], bytes] = random_bytes) -> None:
    path = Path(dataset.samples[number][0])
    path.write_bytes(how(path.read_bytes()))


@pytest.fixture
def root(spelled_root: Path, tmp_path: Path) -> Path:
    """Pictures that may be hurt."""
    return Path(shutil.copytree(spelled_root, tmp_path / "set"))


def assert_only_these_fail(found: list[Any], failed: set[int], kinds: tuple[type[Exception], ...]) -> None:
    """Of the outcomes of an epoch the batches ``failed`` are errors, and all others hold their own pictures."""
    assert len(found) == BATCHES
    for at, batch in enumerate(found):
        if at in failed:
            assert isinstance(batch, kinds), f"batch {at} is {batch!r}"
        else:
            assert not isinstance(batch, Exception), f"batch {at} is {batch!r}"
            assert_pictures_match(*batch)
            assert batch[1].tolist() == list(range(BATCH * at, BATCH * (at + 1)))


def error_kind(road: Road) -> tuple[type[Exception], ...]:
    return (ImageError,) if road.name == "compiled" else (PipelineError,)


def test_a_corrupt_picture_is_an_error_that_names_its_batch(road: Road, root: Path, start_method: str) -> None:
    dataset = road.dataset(root=root)
    # What a GPU's engine makes of the missing part of a scan is its own affair, unless Pillow is asked first.
    ways = WAYS if road.name == "compiled" or road.device == "cpu" else WAYS[:3]
    bad = {2 * k + 1: BATCH * (2 * k + 1) + k % BATCH for k in range(len(ways))}
    for number, how in zip(bad.values(), ways):
        hurt(dataset, number, how)
    loader = road.loader(dataset, num_workers=1, persistent_workers=True, multiprocessing_context=start_method)
    for _ in range(2):
        found = outcomes(loader)
        assert_only_these_fail(found, set(bad), error_kind(road))
        for at, number in bad.items():
            if road.name == "compiled":
                assert f"dataset[{number}]" in str(found[at]) and dataset.samples[number][0] in str(found[at])
            elif road.name == "server":
                assert f"dataset indices {list(range(BATCH * at, BATCH * (at + 1)))}" in str(found[at])


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_corrupt_pictures_can_be_left_out_or_replaced(
    on_error: str, root: Path, device: str, start_method: str
) -> None:
    dataset = Road("compiled", root).dataset()
    bad = [5, 6, 23]
    for number, how in zip(bad, WAYS):
        hurt(dataset, number, how)
    loader: Any = DataLoader(
        dataset, BATCH, num_workers=1, device=device, on_error=on_error, multiprocessing_context=start_method
    )
    numbers = [number for number in range(PICTURES) if number not in bad]
    if on_error == "replace":
        numbers = [{5: 7, 6: 7, 23: 24}.get(number, number) for number in range(PICTURES)]
    assert_batches_match(loader, numbers)
    assert len(loader.errors) == 3


@pytest.mark.parametrize("exec_dynamic", [False, True], ids=["old executor", "dynamic executor"])
@pytest.mark.parametrize("name", ["server", "produced"])
def test_a_corrupt_picture_fails_its_own_batch_under_either_executor(
    name: str, exec_dynamic: bool, root: Path, device: str
) -> None:
    with Road(name, root, device, exec_dynamic=exec_dynamic) as road:
        dataset = road.dataset(root=root)
        hurt(dataset, BATCH * 6)
        for _ in range(2):
            assert_only_these_fail(outcomes(road.loader(dataset, num_workers=1)), {6}, (PipelineError,))


class LateFirstBatch(ImageFolder):
    """The first worker holds its first batch back until the other has sent its own and begun the next."""

    overtaken: Any

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if index == 3 * BATCH:
            self.overtaken.set()
        elif info is not None and info.id == 0 and not self.overtaken.wait(WAIT_S):
            raise TimeoutError("the other worker sent nothing")
        return super().__getitem__(index)


def overtaking(road: Road, root: Path, start_method: str) -> Any:
    dataset = road.dataset(LateFirstBatch, root)
    dataset.overtaken = multiprocessing.get_context(start_method).Event()
    return dataset


def test_a_corrupt_picture_that_overtakes_a_good_batch_does_not_fail_that_one(
    road: Road, root: Path, start_method: str
) -> None:
    dataset = overtaking(road, root, start_method)
    hurt(dataset, BATCH + 2)
    loader = road.loader(dataset, num_workers=2, multiprocessing_context=start_method)
    assert_only_these_fail(outcomes(loader), {1}, error_kind(road))


def test_a_corrupt_picture_in_an_abandoned_batch_is_an_error_of_no_other(
    road: Road, root: Path, spelled_root: Path, start_method: str
) -> None:
    dataset = overtaking(road, root, start_method)
    whole = Path(dataset.samples[BATCH + 2][0]).read_bytes()
    hurt(dataset, BATCH + 2)
    loader = road.loader(
        dataset, num_workers=2, prefetch_factor=4, persistent_workers=True, multiprocessing_context=start_method
    )
    for images, numbers in loader:
        assert_pictures_match(images, numbers)
        break
    Path(dataset.samples[BATCH + 2][0]).write_bytes(whole)
    for _ in range(2):
        assert_batches_match(loader)
    del loader
    assert_batches_match(road.loader())


class GivesOthers(ImageFolder):
    """Gives its transform something else than a picture at some places."""

    others: dict[int, Any]

    def __getitem__(self, index: int) -> Any:
        if index in self.others:
            return self.transform(self.others[index]), index
        return super().__getitem__(index)


OTHERS = {
    "another dtype": np.float64([1, 2]),
    "a smaller dtype of another kind": np.int8([1, 2]),
    "one more dimension": np.uint8([[1, 2]]),
    "three more": np.zeros((2, 3, 4, 1), np.float32),
    "text": "text",
    "nothing": None,
    "objects": np.array([object()]),
    "a number": 7,
    "a boolean": np.array(True),
    "a dict": {"a": 1},
    "a tensor": torch.zeros(3),
}


def strict(road: Road) -> dict[str, Any]:
    """Arguments with which what DALI does not take is refused on each road."""
    return {"translate": "all"} if road.name == "compiled" else {}


@pytest.mark.parametrize("place", [0, 2], ids=["first in its batch", "within its batch"])
def test_an_input_that_differs_within_its_batch_is_an_input_error_of_that_batch(
    road: Road, start_method: str, place: int
) -> None:
    dataset = road.dataset(GivesOthers)
    dataset.others = {BATCH * at + place: other for at, other in enumerate(OTHERS.values(), start=1)}
    arguments = {"persistent_workers": True, "multiprocessing_context": start_method} | strict(road)
    loader = road.loader(dataset, num_workers=1, **arguments)
    for _ in range(2):
        assert_only_these_fail(outcomes(loader), set(range(1, 1 + len(OTHERS))), (InputError,))
    assert_batches_match(road.loader())


@pytest.mark.parametrize("workers", [0, 2])
def test_what_dali_does_not_take_is_given_to_torchvision_with_its_errors(spelled_root: Path, workers: int) -> None:
    def build(kind: Any) -> Any:
        dataset = picture_folder(spelled_root, kind=GivesOthers)
        dataset.others = {BATCH * at: other for at, other in enumerate(OTHERS.values(), start=1)}
        dataset.others[3] = Image.new("L", (50, 40), 99).convert("RGB")  # and what it takes, but not as a file
        return kind(dataset, BATCH, num_workers=workers)

    seen = assert_as_torch(build, one_epoch)["epochs"][0]["batches"]
    assert [isinstance(batch, Failed) for batch in seen] == [0 < at <= len(OTHERS) for at in range(BATCHES)]


@pytest.mark.parametrize("road", ["server", "produced"], indirect=True)
def test_an_encoded_picture_may_be_bytes(road: Road) -> None:
    dataset = road.dataset(GivesOthers)
    dataset.others = {number: Path(dataset.samples[number][0]).read_bytes() for number in range(1, PICTURES, 3)}
    assert_batches_match(road.loader(dataset, num_workers=1))


@pytest.mark.parametrize("road", ["server", "produced"], indirect=True)
def test_a_server_that_refused_an_input_can_be_stopped_and_started_again(road: Road) -> None:
    assert road.server is not None
    dataset = road.dataset(GivesOthers)
    dataset.others = {BATCH + 1: OTHERS["another dtype"], 2 * BATCH + 3: None}
    loader = road.loader(dataset, num_workers=1, prefetch_factor=4, persistent_workers=True)
    for _ in range(3):
        batches = iter(loader)
        assert_pictures_match(*next(batches))
        assert isinstance(next_error(batches), InputError)
        road.server.stop_thread()
        road.server.start_thread()
        del batches
        assert_only_these_fail(outcomes(loader), {1, 2}, (InputError,))
        assert_batches_match(road.loader())


@pytest.mark.parametrize(
    ("at", "exec_dynamic"),
    [(0, True), (1, True), (1, False)],  # an old executor has no way back from a first batch that it takes for encoded
    ids=["the first batch", "the second batch", "the second batch, old executor"],
)
@pytest.mark.parametrize("other", ["another dtype", "one more dimension"])
@pytest.mark.parametrize("name", ["server", "produced"])
def test_a_whole_batch_of_another_kind_fails_alone(
    name: str, at: int, other: str, exec_dynamic: bool, spelled_root: Path
) -> None:
    with Road(name, spelled_root, exec_dynamic=exec_dynamic) as road:
        assert road.server is not None
        dataset = road.dataset(GivesOthers)
        dataset.others = {BATCH * at + k: OTHERS[other] for k in range(BATCH)}
        for _ in range(2):
            kinds = (InputError,) if at else (InputError, PipelineError)  # nobody can know what the first should be
            assert_only_these_fail(outcomes(road.loader(dataset)), {at}, kinds)
            road.server.stop_thread()
            road.server.start_thread()
            assert_batches_match(road.loader())


class TwoInputs(Dataset[Any]):
    """Sample k gives k to both inputs of a server, or, at some places, something else to the second."""

    def __init__(self, proxy: Any, others: dict[int, Any]) -> None:
        self.proxy, self.others = proxy, others

    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, index: int) -> Any:
        return self.proxy(first=np.int32([index]), second=self.others.get(index, np.int32([index]))), index


def pairing_pipeline() -> Any:
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, exec_dynamic=True)
    def graph() -> Any:
        return fn.cat(fn.external_source(name="first"), fn.external_source(name="second"))

    return graph()


@pytest.mark.parametrize("produced", [False, True], ids=["server", "produced"])
def test_a_second_input_that_is_refused_does_not_shift_the_first(produced: bool) -> None:
    from proxyloader import ProxyServer

    with ProxyServer(pairing_pipeline()) as server:
        dataset = TwoInputs(server.proxy, {BATCH + 1: np.float32([0]), 3 * BATCH: np.int32([[0]])})
        if produced:
            loader: Any = map(server.produce_data, StockLoader(dataset, BATCH, num_workers=1))
        else:
            loader = DataLoader(dataset, BATCH, num_workers=1, server=server)
        for at, batch in enumerate(outcomes(loader)):
            if at in (1, 3):
                assert isinstance(batch, InputError), f"batch {at} is {batch!r}"
            else:
                pairs, numbers = batch
                assert pairs.tolist() == [[number, number] for number in numbers.tolist()]


class Stuck(ImageFolder):
    """Never gives the samples from the sixth batch on."""

    let_go: Any

    def __getitem__(self, index: int) -> Any:
        if index == 5 * BATCH:
            self.let_go.wait(LONG_S)
        return super().__getitem__(index)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)  # a spawned one starts for longer
def test_a_timeout_ends_the_wait_for_a_worker(road: Road, start_method: str) -> None:
    dataset = road.dataset(Stuck)
    dataset.let_go = multiprocessing.get_context(start_method).Event()
    batches = iter(road.loader(dataset, num_workers=1, timeout=2, multiprocessing_context=start_method))
    start_s = time.perf_counter()
    with pytest.raises(RuntimeError, match="timed out after 2 seconds"):
        for images, numbers in batches:
            assert_pictures_match(images, numbers)
    assert 2 <= time.perf_counter() - start_s < WAIT_S
    dataset.let_go.set()


def test_a_refused_input_needs_no_timeout(road: Road) -> None:
    dataset = road.dataset(GivesOthers)
    dataset.others = {BATCH + 1: np.float64([1, 2])}
    found = outcomes(road.loader(dataset, num_workers=1, timeout=WAIT_S, **strict(road)))
    assert_only_these_fail(found, {1}, (InputError,))
